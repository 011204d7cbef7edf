"""A denoising step, from top to bottom: noise, pass, draw, decision, report, conditioning.

    begin -> enter -> the layers (`FusedModel.run`) -> leave: logits, draw, accept, report -> condition

On a GPU, what comes before and after the layers runs with them in one CUDA graph, and `condition` in
another: while it makes the soft embedding, the host learns which canvases are finished.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fused_dequant import CanvasState, Draw, Probabilities, look, sample
from fused_dequant.sampler.canvas import random_tokens
from torch import Tensor
from torch.profiler import record_function as part

from quantize.runtime.engine.graphs import Pool, Replayed, power_of_two
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.sampler.known_tokens import FREE, put
from quantize.runtime.sampler.sampler import Sampler

# Key of a step's graph: a name, or (canvases encoded with the step, whether any token is known).
Name = str | tuple[int, bool]


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
        self._starts = range(0, rows, model.compute.canvases_at_once)
        # whether the logits of all canvases have memory, so that none overwrites another's
        self._roomy = len(logits) >= rows * length
        self._schedule = sampler.schedule(device)
        # initial and pinned tokens of each sequence
        self._known = torch.full((2, rows, length), FREE, dtype=torch.int64, device=device)
        self._knows = False
        # what is encoded with a step: tokens, and their slots and positions
        self._committed = zeros(rows, length)
        self._places = zeros(2, rows).int()
        self.state = sampler.begin(zeros(rows, length), zeros(rows))
        self._graphs: dict[Name, Replayed] = {}
        # of each row: argmax, number of the step that comes next, whether it has stopped by itself
        self._device_report = zeros(rows, length + 2)
        pinned = device.type == "cuda"
        self.report = torch.zeros(rows, length + 2, dtype=torch.int64, pin_memory=pinned)

    def row(self, row: int) -> list[Tensor]:
        """Return views of a row's state, which a sequence takes along when it moves to another row."""
        state = vars(self.state).items()
        views = [tensor[:, row] if name == "history" else tensor[row] for name, tensor in state]
        return [*views, self._signal.unflatten(0, self.state.canvas.shape)[row]]

    def commit(self, runs: list[tuple[int, int, list[int]]]) -> int:
        """Let the next step encode canvases (slot, first position, tokens); return how many it encodes.

        That number is 0, a power of two, or `rows`; copies of the first canvas are added to reach it.
        """
        if not runs:
            return 0
        count = min(power_of_two(len(runs)), self.rows)
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
        first = self._sampler.begin(begun, seeds)
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
        """Copy the report to the host's tensor `report`; then, if `going_on`, condition the next step.

        Return the CUDA event that records the copy's end, or None if the copy has ended already.
        """
        self.report.copy_(self._device_report, non_blocking=True)
        arrived = None
        if self.report.is_pinned():
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
        for count in sorted({min(power_of_two(n), self.rows) for n in range(1, self.rows + 1)}):
            self.take_on(None, count, graphs=True)

    def enter(self, committed: int) -> Pass:
        """Return a step's pass before the first layer; it also encodes `committed` canvases."""
        more = None
        if committed:
            slots, starts = self._places[:, :committed]
            more = self._committed[:committed], slots, starts
        entered = self._model.decoding(self.state.canvas, self._rows, self._signal, more)
        entered.lane = self._lane
        return entered

    def _leave(self, h: Tensor | None, committed: int) -> None:
        """Decide the next canvases from a pass' rows `h` after the last layer, and make the report."""
        if h is None:
            h = self._model.run([self.enter(committed)])[0]
        state = self.state
        if self._last is not None:
            live = ~state.finished & (state.step <= len(self._schedule))
            self._last.copy_(torch.where(live[:, None, None], h.view_as(self._last), self._last))
        if self._roomy:
            self._model.compute.each(partial(self._look, h), self._starts)
        else:
            for start, before in zip(self._starts, (None, *self._starts), strict=False):
                if before is not None:
                    self._condition(before)  # before its logits are overwritten
                self._look(h, start)
        with part("sampler"):
            self._device_report[:, :-2].copy_(state.argmax)
            self._device_report[:, -2].copy_(state.step)
            self._device_report[:, -1].copy_(state.finished)

    def condition(self) -> None:
        """Make the next step's soft embedding for the canvases whose logits are still in memory."""
        starts = self._starts if self._roomy else self._starts[-1:]
        self._model.compute.each(self._condition, starts)

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
            pinned = self._known[1][start : start + self._starts.step] if self._knows else None
            self._sampler.decide(draw, state, self._schedule, pinned)

    def _draw(self, h: Tensor, state: CanvasState, logits: Tensor) -> Draw:
        if (kept := self._room(len(h))) is not None:
            embedding, softcap = self._model.weights.embedding, self._model.softcap
            with part("vocabulary"):  # logits and sample in one
                return look(h, embedding, softcap, state, self._schedule, logits, kept)
        self._model.logits(h, logits)
        with part("sampler"):
            return sample(logits.view(*state.canvas.shape, -1), state, self._schedule)

    def _room(self, rows: int) -> Probabilities | None:
        """Return where `look` stores the probabilities of `rows` rows; None if it cannot run."""
        return None if self._probabilities is None else self._probabilities.first(rows)

    def _condition(self, start: int) -> None:
        state, rows, logits = self._piece(start)
        inverse, kept = state.inverse_temperature.flatten(), self._room(len(logits))
        self._model.soft_embedding(logits, inverse, self._signal[rows], kept)

    def _piece(self, start: int) -> tuple[CanvasState, slice, Tensor]:
        """Return the state of canvases from `start` on, their rows of a pass, and their logits."""
        state = self.state.part(slice(start, start + self._starts.step))
        count, first = state.canvas.numel(), start * self._length
        place = first if self._roomy else 0
        return state, slice(first, first + count), self._logits[place : place + count]
