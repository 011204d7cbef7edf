"""transformers' own random numbers for our runtime, so that both must give the same tokens.

transformers draws from torch's global generator, for all rows of a batch until the last has stopped.
`heard` notes the generator's state before each of its draws; `Heard` draws again from there, for as
many rows, and gives those that still take part. A row's seed is its index.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fused_dequant import CanvasState, Draw
from fused_dequant.sampler.canvas import token_entropy
from torch import Tensor


class Heard:
    """States of the generator: of each canvas before its noise, and before each of its steps."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._canvases: list[list[Tensor]] = []
        self._drew = False

    def randint(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note the beginning of a canvas; behind a draw it makes replacements."""
        if not self._drew:
            self._canvases.append([torch.get_rng_state()])
        self._drew = False
        return _RANDINT(*args, **kwargs)

    def multinomial(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note a step."""
        self._canvases[-1].append(torch.get_rng_state())
        self._drew = True
        return _MULTINOMIAL(*args, **kwargs)

    def begin(self, seeds: Tensor, canvas: int, length: int, vocabulary: int) -> Tensor:
        """Return the tokens [B, L] that a canvas begins with, in place of `random_tokens`."""
        torch.set_rng_state(self._canvases[canvas][0])
        return _RANDINT(0, vocabulary, (self._rows, length))[seeds]

    def draw(self, scaled: Tensor, state: CanvasState) -> Draw:
        """Draw from scaled = logits / T [B, L, V], in place of `canvas.sample`."""
        _, L, V = scaled.shape
        probabilities = scaled.new_ones(self._rows, L, V)
        probabilities[state.seeds] = scaled.softmax(-1)
        torch.set_rng_state(self._canvases[int(state.canvas_index[0])][int(state.step[0])])
        sampled = _MULTINOMIAL(probabilities.view(-1, V), 1).view(-1, L)
        replacement = _RANDINT(0, V, (self._rows, L))
        argmax, entropy = scaled.argmax(-1), token_entropy(scaled)
        return Draw(sampled[state.seeds], replacement[state.seeds], argmax, entropy)


_RANDINT, _MULTINOMIAL = torch.randint, torch.multinomial


@contextmanager
def heard(rows: int) -> Generator[Heard]:
    """Note what is drawn from the global generator while the block runs."""
    own = Heard(rows)
    with (
        mock.patch.object(torch, "randint", own.randint),
        mock.patch.object(torch, "multinomial", own.multinomial),
    ):
        yield own
