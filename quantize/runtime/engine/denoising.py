"""Denoises the canvases of slots, step by step, until one of them is finished.

    what waits is encoded -> canvases begin in the rows of a step -> steps, until a canvas has stopped

Slots with equal settings share a batch, whose step all of them take. A canvas' first step also encodes
the canvas before it, if that is possible: one pass reads the weights once for both. The other slots'
canvases stay where they are, and go on in the next call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from fused_dequant import Probabilities
from torch import Tensor

from quantize.runtime.engine.encoding import Encoder
from quantize.runtime.engine.graphs import Pool, Steps, bucket
from quantize.runtime.engine.interface import Canvas, Meanwhile, OnDraft
from quantize.runtime.engine.slots import Slots, SlotSequence
from quantize.runtime.engine.step import Step
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.sampler.known_tokens import NOTHING, GuideVerdict
from quantize.runtime.sampler.sampler import Sampler

Kind = tuple[int, bool, Sampler]  # of a batch: its lane, whether guides decide, its settings
Report = tuple[list[int], int, bool]  # a row's tokens, steps taken, whether its canvas is finished


class Denoiser:
    """Takes the denoising steps of the slots' canvases.

    Args:
        model: the text stack.
        slots: the engine's slots and their sequences.
        encoder: encodes what waits before a step.
        graphs: whether to replay CUDA graphs, in memory `pool`.
        joins: whether a canvas' first step encodes the canvas before it.
        smallest: the fewest rows of a step.

    Attributes:
        steps: by (lane, whether guides decide on its canvases), the steps in use.
        stops: None, or a function of (seed, canvas index): the most steps that the canvas may take,
            since canvases of random weights never stop by themselves.
    """

    def __init__(
        self, model: FusedModel, slots: Slots, encoder: Encoder, *, graphs: bool, pool: Pool,
        joins: bool, smallest: int,
    ) -> None:  # fmt: skip
        self._model, self._slots, self._encoder = model, slots, encoder
        self.graphs, self._pool, self.joins, self._smallest = graphs, pool, joins, smallest
        self.steps = {
            (lane, guided): Steps(partial(self._step, lane=lane, keep=guided), slots.capacity)
            for lane in range(slots.lanes)
            for guided in (False, True)
        }
        self.stops: Callable[[int, int], int] | None = None

    def denoise(
        self, slots: Sequence[int], on_draft: OnDraft | None, meanwhile: Meanwhile
    ) -> list[Canvas | None]:
        """Denoise until a canvas is finished or is to be denoised again; return the finished, or None.

        Raise InputError if a slot has no room for a canvas.
        """
        length = self._encoder.canvas_length
        # A first step also encodes what fills a canvas: less would lie where the next canvas writes.
        first = {slot for slot in slots if len(self._slots[slot].unencoded) == length}
        entering = self._encoder.waiting_passes(
            [slot for slot in slots if not (self.joins and slot in first)]
        )
        done = self._until_one_is_done(self._kinds(slots), entering, meanwhile, on_draft)
        return [done.get(slot) for slot in slots]

    def _kinds(self, slots: Sequence[int]) -> dict[Kind, list[int]]:
        """Return the slots that share steps, by what they have in common."""
        kinds: dict[Kind, list[int]] = {}
        for slot in slots:
            sequence = self._slots[slot]
            guided = sequence.given.guide is not None
            kinds.setdefault((self._slots.lane(slot), guided, sequence.sampler), []).append(slot)
        return kinds

    def _until_one_is_done(
        self,
        kinds: Mapping[Kind, list[int]],
        entering: list[Pass],
        launched: Callable[[], None],
        on_draft: OnDraft | None,
    ) -> dict[int, Canvas]:
        """Take steps until a canvas is finished; return the finished ones by slot."""
        batches = [self._batch(kind, slots) for kind, slots in kinds.items()]

        def show() -> None:
            if on_draft is None:
                return
            for batch in batches:
                state = batch.step.state
                for slot, row in batch.rows.items():
                    step, accepted = int(state.step[row]) - 1, state.accepted[row].tolist()
                    on_draft(slot, step, state.argmax[row].tolist(), accepted)

        reports = until_finished(self._model, batches, entering, launched, show)
        done: dict[int, Canvas] = {}
        for batch, report in zip(batches, reports, strict=True):
            done |= self._ended(batch, report)
        return done

    def _batch(self, kind: Kind, slots: list[int]) -> "RunningBatch":
        """Begin canvases in slots of one kind, and return their batch."""
        step, graphs = self._step_of(kind, slots)
        sequences, committed = self.begin(step, slots, graphs)
        taken, most = [s.taken for s in sequences], [step.limit] * len(sequences)
        if self.stops is not None:
            most = [min(step.limit, self.stops(s.seed, s.canvases)) for s in sequences]
        rows = {slot: self._slots[slot].row for slot in slots}
        return RunningBatch(step, rows, taken, most, committed, graphs)

    def _step_of(self, kind: Kind, slots: Sequence[int]) -> tuple[Step, bool]:
        """Return the step of slots of one kind, and whether it uses CUDA graphs."""
        lane, guided, sampler = kind
        rows = len(slots)
        if self._model.compute.whole:
            rows = max(self._smallest, bucket(rows))
        begun = sum(not self._slots[slot].under_way for slot in slots)
        step, worth = self.steps[lane, guided].get(rows, sampler, begun)
        return step, self.graphs and worth

    def begin(
        self, step: Step, slots: Sequence[int], graphs: bool
    ) -> tuple[list[SlotSequence], int]:
        """Begin canvases in a step's rows; return their sequences, and how many runs it encodes."""
        new = {slot for slot in slots if not self._slots[slot].under_way}
        rows = self._slots.seat(step, slots)
        runs = [run for slot in slots for run in self._slots[slot].to_encode(slot)]
        for slot in slots:
            sequence = self._slots[slot]
            if sequence.begun is None:
                guide = sequence.given.guide
                sequence.begun = [] if guide is None else list(guide.lead())
        place = self._slots.place
        seated = [(slot, self._slots[slot]) for slot in rows]
        given = [(place(t), s.context, s.seed, s.canvases, t in new) for t, s in seated]
        known = None
        if any(s.given is not NOTHING for _, s in seated):
            length = self._encoder.canvas_length
            known = [s.given.rows(s.canvases, length, s.begun or []) for _, s in seated]
        committed = step.commit([(place(slot), at, tokens) for slot, at, tokens in runs])
        step.begin(given, known, graphs)
        return [sequence for _, sequence in seated], committed

    def begin_waiting(self, slots: Sequence[int]) -> tuple[Step, bool]:
        """Encode what waits in slots of equal settings, and begin their canvases.

        Return their `Step`, and whether to use graphs.
        """
        self._encoder.encode_waiting(slots)
        (kind,) = self._kinds(slots)
        step, graphs = self._step_of(kind, slots)
        self.begin(step, slots, graphs)
        return step, graphs

    def _ended(self, batch: "RunningBatch", report: list[Report]) -> dict[int, Canvas]:
        """Note the steps that a batch has taken; return its finished canvases by slot."""
        done: dict[int, Canvas] = {}
        for slot, row in batch.rows.items():
            sequence = self._slots[slot]
            tokens, sequence.taken, finished = report[row]
            if not finished:
                continue
            verdict = GuideVerdict(tokens)
            if (guide := sequence.given.guide) is not None:
                verdict = guide.settle(batch.step.last_logits(sequence.row), tokens)
            sequence.spent += sequence.taken
            sequence.end_canvas()
            if verdict.keep is not None:
                sequence.begun = verdict.tokens[: verdict.keep]
                continue
            done[slot] = Canvas(verdict.tokens, sequence.spent)
            sequence.spent, sequence.begun = 0, None
            sequence.canvases += 1
            sequence.unencoded = verdict.tokens
        return done

    def _step(self, rows: int, sampler: Sampler, *, lane: int, keep: bool) -> Step:
        coldest = min(sampler.t_min, sampler.t_max)
        probabilities = self._probabilities if self._model.look_runs(coldest) else None
        return Step(self._model, rows, sampler, self.logits, self._pool, keep, probabilities, lane)

    @cached_property
    def logits(self) -> Tensor:
        """The buffer that a step writes the logits of its pieces into, bf16 [rows, V]."""
        rows, model = self._slots.capacity, self._model
        if model.compute.whole:
            rows = min(bucket(rows), model.compute.canvases_at_once)
        shape = rows * self._encoder.canvas_length, self._encoder.vocabulary
        return torch.empty(*shape, dtype=torch.bfloat16, device=model.weights.device)

    @cached_property
    def _probabilities(self) -> Probabilities:
        """Buffers of lm_head's probabilities, as many rows as `logits`, for the soft embedding."""
        return Probabilities.room(self.logits)


@dataclass
class RunningBatch:
    """The canvases of one kind while they are denoised."""

    step: Step  # takes the canvases' steps
    rows: dict[int, int]  # slot -> row of the step
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

    def report(self) -> list[Report]:
        """Return each row's tokens, steps taken and whether its canvas is done, as last reported."""
        rows = zip(self.step.report.tolist(), self.most, strict=True)
        return [(r[:-2], r[-2] - 1, r[-1] != 0 or r[-2] > most) for r, most in rows]


def until_finished(
    model: FusedModel,
    batches: Sequence[RunningBatch],
    entering: Sequence[Pass],
    launched: Callable[[], None],
    show: Callable[[], None],
) -> list[list[Report]]:
    """Take steps of all batches until a canvas is finished; return the last report of each batch.

    In a step, all batches that do not use graphs go through the layers together; in the first step, the
    passes `entering` do too. `launched` is called after the first launch, `show` after every launch.
    """
    count = 0
    while True:
        count += 1
        passes = [*entering, *(b.step.enter(b.committed) for b in batches if not b.graphs)]
        ends = iter(model.run(passes)[len(entering) :])
        arrived = [b.launch(None if b.graphs else next(ends), count) for b in batches]
        entering = []
        if count == 1:
            launched()
        show()
        for event in arrived:
            if event is not None:
                event.synchronize()
        reports = [batch.report() for batch in batches]
        if any(finished for rows in reports for *_, finished in rows):
            return reports


def nothing(*_: object) -> None:
    """Do nothing."""
