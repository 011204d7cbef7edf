"""Passes of a fixed shape as CUDA graphs: denoising steps of canvases, and encoding of new tokens.

Everything that changes between replays is in device memory. A graph is captured when its pass is first
run, for one number of sequences and, where the sampler is part of it, its settings. Requests choose the
settings freely, so `Steps` bounds what is captured for them.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from fused_dequant import CanvasState, Draw, accept, sample
from fused_dequant.canvas import uniforms
from torch import Tensor
from torch.profiler import record_function as part

from quantize.runtime.fused.text_stack import FusedModel
from quantize.runtime.given import FREE, put
from quantize.runtime.sampler import Sampler, holding

CAPTURED = 8  # (rows, settings) whose graphs are kept, beside those of the warm-up
WORTH = 8  # canvases after which further settings are worth a capture

CANVASES_A_PIECE = 8  # canvases whose logits are held at once: 1.1 GB of the real vocabulary
Pool = Any  # torch's handle of CUDA graphs' memory; None where nothing is captured


def captured(work: Callable[[], None], pool: Pool) -> torch.cuda.CUDAGraph:
    """Run `work` once, so that every kernel is compiled, then capture it and return the graph.

    Graphs share a pool of memory: they never run at once, and leave nothing in it that is read later.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


class Commit:
    """The encoder's pass over `length` tokens of `rows` sequences."""

    def __init__(self, model: FusedModel, rows: int, length: int, pool: Pool) -> None:
        device = model.weights.device
        self._pool = pool
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.slots, self.start = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._model = model
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, graphs: bool) -> None:
        """Encode the tokens that are set; a capture's own run encodes them too, to no harm."""
        if not graphs:
            self._encode()
            return
        if self._graph is None:
            self._graph = captured(self._encode, self._pool)
        self._graph.replay()

    def _encode(self) -> None:
        self._model.encode(self.tokens, self.slots, self.start)


class Step:
    """The denoising steps of `rows` sequences under one sampler.

    With `keep` the logits of each sequence's last step can be asked for: what they are made of is kept,
    1.4 MB a canvas at the real size, because finished sequences are decoded on beside the others.
    """

    def __init__(
        self,
        model: FusedModel,
        rows: int,
        sampler: Sampler,
        logits: Tensor,
        pool: Pool,
        keep: bool = False,
    ) -> None:
        device, length = model.weights.device, model.weights.config.canvas_length
        self._model, self._sampler, self._pool = model, sampler, pool
        self._logits = logits
        config = model.weights.config.text_config
        self._signal = torch.zeros(
            rows * length, config.hidden_size, dtype=torch.bfloat16, device=device
        )
        self._last = torch.zeros_like(self._signal).view(rows, length, -1) if keep else None
        # slot, context, seed and canvas index of each sequence
        self._given = torch.zeros(4, rows, dtype=torch.int64, device=device)
        slots, context = self._given[:2].int()
        self._rows = model.behind(slots, context, length)
        steps = range(1, sampler.max_denoising_steps + 1)
        self._schedule = torch.stack([sampler.temperature(step) for step in steps]).to(device)
        # initial and pinned tokens of each sequence
        self._known = torch.full((2, rows, length), FREE, dtype=torch.int64, device=device)
        canvas = torch.zeros(rows, length, dtype=torch.int64, device=device)
        seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.state = CanvasState.begin(canvas, seeds, sampler.stability_threshold)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._start: torch.cuda.CUDAGraph | None = None
        pinned = device.type == "cuda"
        self._flags = [torch.zeros(rows, dtype=torch.bool, pin_memory=pinned) for _ in range(2)]

    def begin(
        self,
        sequences: list[tuple[int, int, int, int]],
        known: tuple[list[list[int]], list[list[int]]],
        graphs: bool,
    ) -> None:
        """Set the state before the first step; a sequence is its slot, context, seed, canvas index.

        `known` holds the initial and the pinned tokens of each.
        """
        self._known.copy_(torch.tensor(known))
        self._given.copy_(torch.tensor(sequences, dtype=torch.int64).T.contiguous())
        if not graphs:
            self._set_state()
            return
        if self._start is None:  # kernel by kernel it takes some two hundred launches
            self._start = captured(self._set_state, self._pool)
        self._start.replay()

    def _set_state(self) -> None:
        """Fill the canvases with noise, addressed by seed and canvas index."""
        slots, context = self._given[:2].int()
        seeds, canvases = self._given[2:]
        length = self.state.canvas.shape[1]
        noise = uniforms(seeds, canvases, 0, length)[..., 1]
        vocabulary = self._logits.shape[1]
        fresh = CanvasState.begin(
            put(self._known[0], (noise * vocabulary).long()),
            seeds,
            self._sampler.stability_threshold,
        )
        for name, tensor in vars(fresh).items():
            getattr(self.state, name).copy_(tensor)
        self.state.canvas_index.copy_(canvases)
        self._rows.copy_(self._model.behind(slots, context, length))

    def run(self, graphs: bool, show: Callable[[int], None] | None) -> None:
        """Take steps until all sequences have stopped, or the last step is taken."""
        arrived: torch.cuda.Event | None = None
        for step in range(1, self._sampler.max_denoising_steps + 1):
            self._take(step == 1, graphs)
            if show is not None:
                show(step)
            if not self._flags[0].is_pinned():
                if bool(self.state.finished.all()):
                    return
                continue
            if arrived is not None:  # did the step before this one stop all?
                arrived.synchronize()
                if bool(self._flags[(step - 1) % 2].all()):
                    return
            self._flags[step % 2].copy_(self.state.finished, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()

    def _take(self, first: bool, graphs: bool) -> None:
        if not graphs:
            self.compute(first)
            return
        if first not in self._graphs:
            before = {name: tensor.clone() for name, tensor in vars(self.state).items()}
            signal = self._signal.clone()
            self._graphs[first] = captured(lambda: self.compute(first), self._pool)
            for name, tensor in before.items():
                getattr(self.state, name).copy_(tensor)
            self._signal.copy_(signal)
        self._graphs[first].replay()

    def compute(self, first: bool) -> None:
        """Take one step, kernel by kernel."""
        state, sampler = self.state, self._sampler
        h = self._model.decode(state.canvas, self._rows, None if first else self._signal)
        if self._last is not None:
            live = ~state.finished & (state.step <= len(self._schedule))
            self._last.copy_(torch.where(live[:, None, None], h.view_as(self._last), self._last))
        draws = [self._look(h, start) for start in range(0, len(state.canvas), CANVASES_A_PIECE)]
        with part("sampler"):
            draw = holding(Draw.join(draws), self._known[1])
            accept(
                draw, state, self._schedule,
                entropy_bound=sampler.entropy_bound,
                confidence_threshold=sampler.confidence_threshold,
            )  # fmt: skip

    def last_logits(self, row: int) -> Tensor:
        """Return the logits bf16 [L, V] of a sequence's last step, until the next call or step."""
        if self._last is None:
            raise ValueError("these steps keep nothing")
        return self._model.logits(self._last[row], self._logits[: self._last.shape[1]])

    def _look(self, h: Tensor, start: int) -> Draw:
        """Draw from the logits of some canvases, and store their soft embedding for the next step."""
        canvases = slice(start, start + CANVASES_A_PIECE)
        state = _part_of(self.state, canvases)
        count, length = state.canvas.shape
        rows = slice(start * length, (start + count) * length)
        logits = self._model.logits(h[rows], self._logits[: count * length])
        with part("sampler"):
            draw = sample(logits.view(count, length, -1), state, self._schedule)
        taken = state.step.long().clamp(max=len(self._schedule)) - 1
        inverse = (1 / self._schedule)[taken].repeat_interleave(length)
        self._signal[rows] = self._model.soft_embedding(logits, inverse)
        return draw


def _part_of(state: CanvasState, canvases: slice) -> CanvasState:
    """Return the state of some of the canvases, in the same memory."""
    own = {name: tensor[canvases] for name, tensor in vars(state).items() if name != "history"}
    return CanvasState(history=state.history[:, canvases], **own)


class Steps:
    """The steps of the settings in use; it decides which of them are captured.

    Whatever requests ask for, there are at most CAPTURED + canvases / WORTH captures, and graphs of the
    warm-up's settings and of CAPTURED others: the first CAPTURED settings are captured at once, others
    when they have denoised WORTH canvases kernel by kernel. Graphs of the warm-up are never dropped.

    Args:
        make: returns the step of so many rows under a sampler.
    """

    def __init__(self, make: Callable[[int, Sampler], Step]) -> None:
        self._make = make
        self._lasting: dict[tuple[int, Sampler], Step] = {}
        self._captured: OrderedDict[tuple[int, Sampler], Step] = OrderedDict()
        self._tried: OrderedDict[tuple[int, Sampler], tuple[Step, int]] = OrderedDict()

    def get(self, rows: int, sampler: Sampler) -> tuple[Step, bool]:
        """Return the step for the next canvas of `rows` sequences, and whether graphs are worth it."""
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
            self._tried[key] = step, canvases + 1
        for kept in (self._captured, self._tried):
            if len(kept) > CAPTURED:
                kept.popitem(last=False)
        return step, worth

    def hold(self) -> None:
        """Keep all graphs captured so far for good; they do not count as the CAPTURED others."""
        self._lasting |= self._captured
        self._captured.clear()
