"""Captures passes of a fixed shape as CUDA graphs: denoising steps, and encoding of new tokens.

Everything that changes between replays is in device memory. A graph is captured when its pass first
runs. A graph serves one number of sequences; a denoising step's graph also serves only one sampler's
settings. Requests choose these settings freely, so `Steps` limits how many graphs are captured.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fused_dequant import CanvasState, Draw, Probabilities, look, sample
from fused_dequant.launch.timing import capturing
from fused_dequant.sampler.canvas import random_tokens
from torch import Tensor
from torch.profiler import record_function as part

from quantize.runtime.gpu.memory import CANVASES_A_PIECE  # 1.1 GB of the real vocabulary's logits
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.sampler.known_tokens import FREE, put
from quantize.runtime.sampler.sampler import Sampler

CAPTURED = 8  # pairs (rows, settings) whose graphs are kept, besides those of the warm-up
WORTH = 8  # canvases after which further settings are worth a capture
BETWEEN = (3, 6, 12)  # numbers of rows that steps have besides the powers of two

# Key of a step's graph: a name, or (canvases encoded with the step, whether any token is known).
Name = str | tuple[int, bool]
Pool = Any  # torch's handle of CUDA graphs' memory; None where nothing is captured
Told = tuple[list[int], int, bool]  # a row's tokens, steps taken, whether its canvas is finished


def bucket(rows: int) -> int:
    """Return the smallest number of rows >= `rows` for which steps are captured."""
    return min(count for count in (*BETWEEN, _power(rows)) if count >= rows)


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


class Replayed:
    """A function of tensors of fixed shapes that replays a CUDA graph from its second call on.

    The first call runs kernel by kernel, which compiles the kernels, and then captures the graph. Every
    replay returns the same tensors, with new values. Graphs share the memory `pool`, since no two run
    at once and none leaves data there for another graph.
    """

    def __init__(self, work: Callable[..., Any], pool: Pool) -> None:
        self._work, self._pool = work, pool
        self._given: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: Any = None

    def __call__(self, *given: Tensor) -> Any:
        """Return what `work` returns for the tensors `given`."""
        if self._graph is None:
            self._given = [own.clone() for own in given]
            found, self._graph = self._work(*given), torch.cuda.CUDAGraph()
            # another thread may copy rows to the host meanwhile
            with capturing(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._found = self._work(*self._given)
            return found
        for own, new in zip(self._given, given, strict=True):
            own.copy_(new)
        self._graph.replay()
        return self._found


class Step:
    """The denoising steps of `rows` sequences under one sampler; each sequence is at its own step.

    A step is two graphs. The first graph decodes, draws and accepts; its pass may also encode canvases
    that were just committed. The graph ends with a report, from which the host learns which canvases
    are finished. Meanwhile the second graph, `condition`, makes the next step's soft embedding.
    With `keep`, the rows of each sequence's last step are kept, from which `last_logits` makes logits;
    in the 26B model these rows take 1.4 MB per canvas.
    """

    def __init__(
        self, model: FusedModel, rows: int, sampler: Sampler, logits: Tensor, pool: Pool,
        keep: bool = False, probabilities: Probabilities | None = None, lane: int = 0,
    ) -> None:  # fmt: skip
        self._lane, self.limit = lane, sampler.max_denoising_steps  # steps of a canvas, at most
        device, length = model.weights.device, model.weights.config.canvas_length
        self._model, self._sampler, self._pool = model, sampler, pool
        self._logits, self.rows, self._length = logits, rows, length
        self._probabilities = probabilities
        config = model.weights.config.text_config
        self._signal = torch.zeros(
            rows * length, config.hidden_size, dtype=torch.bfloat16, device=device
        )
        self._last = torch.zeros_like(self._signal).view(rows, length, -1) if keep else None
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        # slot, context, seed and canvas index of each sequence, and whether its canvas begins
        self._given = zeros(5, rows)
        slots, context = self._given[:2].int()
        self._rows = model.behind(slots, context, length)
        # canvases whose logits are computed at once; on a CPU, one
        self._at_once = 1 if model.cores else CANVASES_A_PIECE
        self._schedule = sampler.schedule(device)
        # initial and pinned tokens of each sequence
        self._known = torch.full((2, rows, length), FREE, dtype=torch.int64, device=device)
        self._knows = False
        # what is encoded with a step: tokens, and their slots and positions
        self._committed = zeros(rows, length)
        self._places = zeros(2, rows).int()
        self.state = CanvasState.begin(
            zeros(rows, length), zeros(rows), sampler.stability_threshold
        )
        self._graphs: dict[Name, Replayed] = {}
        # of each row: argmax, number of the step that comes next, whether it has stopped by itself
        self._report = zeros(rows, length + 2)
        pinned = device.type == "cuda"
        self.told = torch.zeros(rows, length + 2, dtype=torch.int64, pin_memory=pinned)

    def row(self, row: int) -> list[Tensor]:
        """Return views of a row's state, which a sequence takes along when it moves to another row."""
        state = vars(self.state).items()
        own = [tensor[:, row] if name == "history" else tensor[row] for name, tensor in state]
        return [*own, self._signal.unflatten(0, self.state.canvas.shape)[row]]

    def commit(self, runs: list[tuple[int, int, list[int]]]) -> int:
        """Let the next step encode canvases (slot, first position, tokens); return how many it encodes.

        That number is 0, a power of two, or `rows`; copies of the first canvas are added to reach it.
        """
        if not runs:
            return 0
        count = min(_power(len(runs)), self.rows)
        runs = runs + runs[:1] * (count - len(runs))
        slots, starts, tokens = zip(*runs, strict=True)
        self._committed[:count].copy_(torch.tensor(tokens), non_blocking=True)
        places = torch.tensor([slots, starts], dtype=torch.int32)
        self._places[:, :count].copy_(places, non_blocking=True)
        return count

    def begin(
        self,
        sequences: list[tuple[int, int, int, int, bool]],
        known: list[list[list[int]]] | None,
        graphs: bool,
    ) -> None:
        """Set the sequence of each row, and fill new canvases with noise and known tokens.

        A sequence is (slot, context, seed, canvas index, whether the canvas begins). `known` has the
        `Given.rows` of each sequence, or is None if no token is known.
        """
        if known is not None:
            self._known.copy_(torch.tensor(known).transpose(0, 1))
        elif self._knows:
            self._known.fill_(FREE)
        self._knows = known is not None
        given = torch.tensor(sequences, dtype=torch.int64).T.contiguous()
        self._given.copy_(given, non_blocking=True)
        self._launch("begin", self._set_state, graphs)  # else some two hundred launches

    def _set_state(self) -> None:
        """Fill the canvases that begin with noise, addressed by seed and canvas index."""
        slots, context = self._given[:2].int()
        seeds, canvases = self._given[2:4]
        fresh = self._given[4] != 0
        noise = random_tokens(seeds, canvases, self._length, self._logits.shape[1])
        begun = put(self._known[0], noise)
        first = CanvasState.begin(begun, seeds, self._sampler.stability_threshold)
        for name, new in vars(first).items():
            old: Tensor = getattr(self.state, name)
            chosen = fresh[:, None] if new.dim() > 1 else fresh
            old.copy_(torch.where(chosen, new, old))
        self.state.canvas_index.copy_(canvases)
        self._signal.unflatten(0, self.state.canvas.shape).masked_fill_(fresh[:, None, None], 0)
        self._rows.copy_(self._model.behind(slots, context, self._length))

    def take(self, graphs: bool) -> None:
        """Take one step that encodes nothing and sends no report, then condition the next step."""
        self.take_on(None, 0, graphs)
        self._launch("condition", self.condition, graphs)

    def take_on(self, h: Tensor | None, committed: int, graphs: bool) -> None:
        """Take a step up to its report; `h` is the output of the layers, or None to run them here."""
        self._launch((committed, self._knows), partial(self._leave, h, committed), graphs)

    def send_report(self, going_on: bool, graphs: bool) -> Any:
        """Copy the report to the host's tensor `told`; then, if `going_on`, condition the next step.

        Return the CUDA event that records the copy's end, or None if the copy has ended already.
        """
        self.told.copy_(self._report, non_blocking=True)
        arrived = None
        if self.told.is_pinned():
            arrived = torch.cuda.Event()
            arrived.record()
        if going_on:
            self._launch("condition", self.condition, graphs)
        return arrived

    def _launch(self, name: Name, work: Callable[[], None], graphs: bool) -> None:
        if graphs:
            work = self._graphs.setdefault(name, Replayed(work, self._pool))
        work()

    def capture_commits(self) -> None:
        """Capture the steps that also encode 1, 2, 4, ... `rows` canvases, by taking each once."""
        for count in sorted({min(_power(n), self.rows) for n in range(1, self.rows + 1)}):
            self.take_on(None, count, graphs=True)

    def enter(self, committed: int) -> Pass:
        """Return a step's pass before the first layer; it also encodes `committed` canvases."""
        more = None
        if committed:
            slots, starts = self._places[:, :committed]
            more = self._committed[:committed], slots, starts
        own = self._model.decoding(self.state.canvas, self._rows, self._signal, more)
        own.lane = self._lane
        return own

    def _leave(self, h: Tensor | None, committed: int) -> None:
        """Decide the next canvases from a pass' rows `h` after the last layer, and make the report."""
        if h is None:
            h = self._model.run([self.enter(committed)])[0]
        state = self.state
        if self._last is not None:
            live = ~state.finished & (state.step <= len(self._schedule))
            self._last.copy_(torch.where(live[:, None, None], h.view_as(self._last), self._last))
        if self._model.cores:
            self._model.cores.each(partial(self._look, h), range(self.rows))
        else:
            for start in range(0, self.rows, CANVASES_A_PIECE):
                if start:
                    self._condition(start - CANVASES_A_PIECE)  # before its logits are overwritten
                self._look(h, start)
        with part("sampler"):
            self._report[:, :-2].copy_(state.argmax)
            self._report[:, -2].copy_(state.step)
            self._report[:, -1].copy_(state.finished)

    def condition(self) -> None:
        """Make the next step's soft embedding for the canvases whose logits are still in memory."""
        if self._model.cores:
            self._model.cores.each(self._condition, range(self.rows))
        else:
            self._condition((self.rows - 1) // CANVASES_A_PIECE * CANVASES_A_PIECE)

    def last_logits(self, row: int) -> Tensor:
        """Return a row's logits bf16 [L, V] of its last step; the next call or step overwrites them."""
        assert self._last is not None  # a guided sequence's steps `keep` them
        return self._model.logits(self._last[row], self._logits[: self._length])

    def _look(self, h: Tensor, start: int) -> None:
        """Draw from the logits of some canvases, and decide their next ones."""
        state, rows, logits = self._piece(start)
        draw = self._draw(h[rows], state, logits)
        with part("sampler"):
            # without known tokens, putting them in would be six launches for nothing
            pinned = self._known[1][start : start + self._at_once] if self._knows else None
            self._sampler.decide(draw, state, self._schedule, pinned)

    def _draw(self, h: Tensor, state: CanvasState, logits: Tensor) -> Draw:
        if (left := self._left(len(h))) is not None:
            embedding, softcap = self._model.weights.embedding, self._model.softcap
            with part("vocabulary"):  # logits and sample in one
                return look(h, embedding, softcap, state, self._schedule, logits, left)
        self._model.logits(h, logits)
        with part("sampler"):
            return sample(logits.view(*state.canvas.shape, -1), state, self._schedule)

    def _left(self, rows: int) -> Probabilities | None:
        """Return where `look` stores the probabilities of `rows` rows; None if it cannot run."""
        return None if self._probabilities is None else self._probabilities.first(rows)

    def _condition(self, start: int) -> None:
        state, rows, logits = self._piece(start)
        inverse, left = state.inverse_temperature.flatten(), self._left(len(logits))
        self._model.soft_embedding(logits, inverse, self._signal[rows], left)

    def _piece(self, start: int) -> tuple[CanvasState, slice, Tensor]:
        """Return the state of canvases from `start` on, their rows of a pass, and their logits."""
        state = self.state.part(slice(start, start + self._at_once))
        count, first = state.canvas.numel(), start * self._length
        own = first if self._model.cores else 0  # sequences that run side by side share no logits
        return state, slice(first, first + count), self._logits[own : own + count]


@dataclass
class Running:
    """The canvases of one batch while they are denoised."""

    step: Step  # takes the canvases' steps
    taken: list[int]  # steps that the canvas of each row has taken
    most: list[int]  # the most steps that each canvas may take: the sampler's limit, or fewer
    committed: int  # what `Step.commit` returned
    graphs: bool  # replay graphs

    def launch(self, h: Tensor | None, count: int) -> Any:
        """Take step `count` and send its report; return the event of the report's arrival, or None."""
        self.step.take_on(h, self.committed, self.graphs)
        self.committed = 0
        rows = zip(self.taken, self.most, strict=True)
        return self.step.send_report(any(n + count < most for n, most in rows), self.graphs)

    def told(self) -> list[Told]:
        """Return each row's tokens, steps taken and whether its canvas is done, as last reported."""
        rows = zip(self.step.told.tolist(), self.most, strict=True)
        return [(r[:-2], r[-2] - 1, r[-1] != 0 or r[-2] > most) for r, most in rows]


def until_finished(
    model: FusedModel,
    batches: Sequence[Running],
    entering: Sequence[Pass],
    launched: Callable[[], None],
    show: Callable[[], None],
) -> list[list[Told]]:
    """Take steps of all batches until a canvas is finished; return the last report of each batch.

    In a step, all batches that do not use graphs go through the layers together; in the first step, the
    passes `entering` do too. `launched` is called after the first launch, `show` after every launch.
    """
    count = 0
    while True:
        count += 1
        passes = [*entering, *(own.step.enter(own.committed) for own in batches if not own.graphs)]
        ends = iter(model.run(passes)[len(entering) :])
        arrived = [own.launch(None if own.graphs else next(ends), count) for own in batches]
        entering = []
        if count == 1:
            launched()
        show()
        for event in arrived:
            if event is not None:
                event.synchronize()
        told = [own.told() for own in batches]
        if any(finished for rows in told for *_, finished in rows):
            return told


class Steps:
    """Keeps a `Step` for each (rows, sampler) in use, and decides which of them are captured.

    The first CAPTURED pairs are captured at once. Each further pair first begins WORTH canvases without
    a graph, so n canvases cause at most CAPTURED + n / WORTH captures. The CAPTURED pairs used most
    recently keep graphs; so do all pairs of the warm-up (`hold`). `make(rows, sampler)` returns a step.
    Steps without graphs are kept for as many pairs as there are `slots`, or CAPTURED if that is more.
    """

    def __init__(self, make: Callable[[int, Sampler], Step], slots: int = CAPTURED) -> None:
        self._make, self._slots = make, slots
        self._lasting: dict[tuple[int, Sampler], Step] = {}
        self._captured: OrderedDict[tuple[int, Sampler], Step] = OrderedDict()
        self._tried: OrderedDict[tuple[int, Sampler], tuple[Step, int]] = OrderedDict()

    def get(self, rows: int, sampler: Sampler, begun: int) -> tuple[Step, bool]:
        """Return the step of `rows` sequences, and whether to use CUDA graphs.

        `begun` of their canvases begin now: a canvas counts once, however often others end before it.
        """
        key = (rows, sampler)
        if key in self._lasting:
            return self._lasting[key], True
        if key in self._captured:
            self._captured.move_to_end(key)
            return self._captured[key], True
        step, canvases = self._tried.pop(key, None) or (self._make(rows, sampler), 0)
        if worth := len(self._captured) < CAPTURED or canvases >= WORTH:
            self._captured[key] = step
        else:
            self._tried[key] = step, canvases + begun
        if len(self._captured) > CAPTURED:
            self._captured.popitem(last=False)
        if len(self._tried) > max(CAPTURED, self._slots):
            self._tried.popitem(last=False)
        return step, worth

    def hold(self) -> None:
        """Never drop the graphs captured so far; they do not count towards CAPTURED."""
        self._lasting |= self._captured
        self._captured.clear()
