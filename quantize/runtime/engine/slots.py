"""The sequences that an engine's slots hold, and the rows of a step in which their canvases stand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quantize.runtime.engine.step import Step
from quantize.runtime.sampler.known_tokens import NOTHING, Given
from quantize.runtime.sampler.sampler import Sampler

Run = tuple[int, int, list[int]]  # slot, number of encoded positions, tokens after these


@dataclass
class SlotSequence:
    """What a slot holds. Its canvas is in a row of a step, or saved while other slots are denoised."""

    seed: int
    sampler: Sampler
    context: int = 0  # encoded positions
    canvases: int = 0
    unencoded: list[int] = field(default_factory=list)  # a short prompt, or the canvas before
    given: Given = NOTHING
    # tokens with which the guide lets the canvas begin; None before the guide is asked
    begun: list[int] | None = None
    spent: int = 0  # steps of earlier tries of a canvas that the guide has denoised again
    step: Step | None = None
    row: int = 0
    saved: list[Tensor] | None = None
    taken: int = 0  # steps of the canvas

    @property
    def under_way(self) -> bool:
        """Whether the sequence's canvas has begun."""
        return self.step is not None or self.saved is not None

    def to_encode(self, slot: int) -> list[Run]:
        """Return the run of tokens that waits to be encoded, if any, and count it as encoded."""
        if not self.unencoded:
            return []
        run = slot, self.context, self.unencoded
        self.context += len(self.unencoded)
        self.unencoded = []
        return [run]

    def save(self) -> None:
        """Keep a copy of the canvas, whose row of a step others need."""
        assert self.step is not None
        self.saved, self.step = [view.clone() for view in self.step.row(self.row)], None

    def enter(self, step: Step, row: int) -> None:
        """Put the canvas into a row of `step`."""
        if self.saved is not None:
            for view, saved in zip(step.row(row), self.saved, strict=True):
                view.copy_(saved)
        self.step, self.row, self.saved = step, row, None

    def end_canvas(self) -> None:
        """Give up the canvas' row, and count the next canvas' steps from 0."""
        self.step, self.saved, self.taken = None, None, 0


class Slots(dict[int, SlotSequence]):
    """Slot -> sequence, for the slots that are taken of `lanes` lanes of `capacity` slots each."""

    def __init__(self, capacity: int, lanes: int) -> None:
        super().__init__()
        self.capacity, self.lanes = capacity, lanes

    @property
    def count(self) -> int:
        """The number of all slots."""
        return self.capacity * self.lanes

    def lane(self, slot: int) -> int:
        """Return the lane of a slot."""
        return slot // self.capacity

    def place(self, slot: int) -> int:
        """Return the number of a slot within its lane, by which passes know it."""
        return slot % self.capacity

    def seat(self, step: Step, slots: Sequence[int]) -> list[int]:
        """Give each of `slots` a row of a step, and return the slot of each row.

        A sequence keeps its row of this step, or gets a free row. Sequences of other slots are saved.
        Rows that stay free hold copies of the first slot's row.
        """
        for slot, sequence in self.items():
            if sequence.step is not None and (sequence.step is step) != (slot in slots):
                sequence.save()
        rows = {self[s].row: s for s in slots if self[s].step is step}
        free = [row for row in range(step.rows) if row not in rows]
        for slot in slots:
            if self[slot].step is not step:
                rows[free[0]] = slot
                self[slot].enter(step, free.pop(0))
        for row in free:
            rows[row] = slots[0]
            for view, first in zip(step.row(row), step.row(self[slots[0]].row), strict=True):
                view.copy_(first)
        return [rows[row] for row in range(step.rows)]
