"""Keeps on the host what a model decoded along trajectories, so that its weights can leave the GPU.

Of a canvas' step stay the rows that logits are made of, 1.4 MB of the real model, and the chosen
experts, 0.25 MB; of the model its vocabulary. `Remembered` stands for it in a replay: its logits are
the same, bit for bit, since the same rows meet the same vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from quantize.host.progress import Meter
from quantize.runtime.engine import Decoded, Passes
from quantize.runtime.images import Images


class Replayed(Protocol):
    """What a replay asks of a model: an engine, or `Remembered` in its place."""

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> Passes:
        """Encode `prompts` as a batch whose passes the caller orders."""
        ...


@dataclass
class _Steps:
    """`Passes` of one batch that give away what was noted, once and in order."""

    device: torch.device
    canvas_length: int
    vocabulary: int
    noted: deque[Decoded] = field(default_factory=deque)

    def encode(self, rows: list[int], tokens: Tensor) -> None:
        """Do nothing: what follows is known."""

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Return the next step."""
        return self.noted.popleft().to(self.device)

    def condition(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return no number a row: what follows is known."""
        return logits.new_empty(len(logits), 0)


class Remembered:
    """Stands for a model in replays of the batches that were noted, one replay after the other."""

    def __init__(self, batches: Sequence[_Steps]) -> None:
        self._batches = cycle(batches)

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> Passes:
        """Return the passes of the next batch."""
        batch = next(self._batches)
        return replace(batch, noted=batch.noted.copy())


class Noting:
    """A model whose passes note what they decode, and count the steps of rows.

    Attributes:
        batches: what was noted, batch by batch.
    """

    def __init__(self, engine: Replayed, meter: Meter) -> None:
        self._engine, self._meter = engine, meter
        self.batches: list[_Steps] = []

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> Passes:
        """Encode `prompts` as the engine does."""
        passes = self._engine.passes(prompts, images)
        steps = _Steps(passes.device, passes.canvas_length, passes.vocabulary)
        self.batches.append(steps)
        return _Noted(passes, steps, self._meter)


class _Noted:
    """`Passes` that note what they decode."""

    def __init__(self, passes: Passes, steps: _Steps, meter: Meter) -> None:
        self._passes, self._steps, self._meter = passes, steps, meter
        self.device, self.vocabulary = passes.device, passes.vocabulary
        self.canvas_length = passes.canvas_length
        self.encode, self.condition = passes.encode, passes.condition

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Decode, and note what was found."""
        decoded = self._passes.decode(rows, canvas, conditioning)
        self._steps.noted.append(decoded.to("cpu"))
        self._meter.add(len(rows))
        return decoded
