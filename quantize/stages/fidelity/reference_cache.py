"""Keeps a model's results for trajectories on the host, so that its weights can leave the GPU.

The last hidden states (1.4 MB for the 26B model), the chosen experts and their weights (0.25 MB each)
of each step of a canvas are kept. One lm_head, kept for all steps, turns the hidden states into
logits. `Remembered` then takes the model's place in a replay, with the same logits, bit for bit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import torch
from torch import Tensor

from quantize.runtime.engine.interface import Decoded, Passes
from quantize.runtime.prompt.images import Images


@dataclass
class Noted:
    """`Passes` of one batch that compute nothing: `decode` returns the next result in `noted`."""

    device: torch.device
    canvas_length: int
    vocabulary: int
    noted: deque[Decoded] = field(default_factory=deque)

    def encode(self, rows: list[int], tokens: Tensor) -> None:
        """Do nothing: the results of the next steps are in `noted` already."""

    def decode(self, rows: list[int], canvas: Tensor, conditioning: Tensor | None) -> Decoded:
        """Take the next result from `noted` and return it on `device`; no argument is read."""
        return self.noted.popleft().to(self.device)

    def condition(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return an empty tensor [b, 0]: recorded results need no conditioning."""
        return logits.new_empty(len(logits), 0)


class Remembered:
    """Takes a model's place in replays; each call of `passes` returns the next batch, in a cycle.

    `decoded` has the choices of the model's routers in all steps, in order.
    """

    def __init__(self, batches: Sequence[Noted]) -> None:
        self._noted, self._batches = batches, cycle(batches)
        self.decoded = [step.choices for batch in batches for step in batch.noted]

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> Passes:
        """Return the passes of the next batch; the arguments are not read."""
        batch = next(self._batches)
        return replace(batch, noted=batch.noted.copy())

    def forget_heads(self) -> None:
        """Free the vocabulary; afterwards a compared model must lend its head (`replay.Compared`)."""
        for batch in self._noted:
            batch.noted = deque(replace(step, head=_forgotten) for step in batch.noted)


def _forgotten(rows: Tensor) -> Tensor:
    raise RuntimeError(
        f"no head for {len(rows)} canvases: the recorded model's vocabulary is freed"
    )
