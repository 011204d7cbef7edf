"""Keeps on the host what a model decoded along trajectories, so that its weights can leave the GPU.

A canvas' step leaves the rows that logits are made of, 1.4 MB for the 26B model, and the chosen
experts, 0.25 MB; the model leaves its vocabulary. `Remembered` stands for the model in a replay, with
the same logits, bit for bit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import torch
from torch import Tensor

from quantize.runtime.engine import Decoded, Passes
from quantize.runtime.images import Images


@dataclass
class Noted:
    """`Passes` of one batch that return the steps noted before, each once and in order."""

    device: torch.device
    canvas_length: int
    vocabulary: int
    noted: deque[Decoded] = field(default_factory=deque)

    def encode(self, rows: list[int], tokens: Tensor) -> None:
        """Do nothing: the results of the next steps are noted already."""

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Return the next step."""
        return self.noted.popleft().to(self.device)

    def condition(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return an empty tensor: replay needs no conditioning."""
        return logits.new_empty(len(logits), 0)


class Remembered:
    """Stands for a model in replays of the batches that were noted, one replay after the other."""

    def __init__(self, batches: Sequence[Noted]) -> None:
        self._batches = cycle(batches)

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> Passes:
        """Return the passes of the next batch."""
        batch = next(self._batches)
        return replace(batch, noted=batch.noted.copy())
