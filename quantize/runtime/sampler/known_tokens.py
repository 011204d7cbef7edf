"""Known tokens of an answer, pinned (infilling) or initial, and a guide that decides on its canvases.

The decoder reads a pinned token in every step, and the token is committed. Its entropy counts as 0, so
it uses up nothing of the entropy bound. An initial token replaces noise before the first step, and is
then denoised like any other token. A guide sees every finished canvas and the logits of its last step.
It may commit other tokens, or keep the beginning of the canvas and have the rest denoised again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from fused_dequant import Draw
from torch import Tensor

from quantize.errors import InputError

FREE = -1  # marks a position without a known token


@dataclass(frozen=True)
class GuideVerdict:
    """A guide's decision on a finished canvas."""

    tokens: list[int]  # to commit if `keep` is None
    keep: int | None = None  # N: denoise the canvas again, with the first N `tokens` pinned


class Guide(Protocol):
    """Decides on one answer's canvases, in order. The engine's threads call it; it must not raise."""

    def lead(self) -> Sequence[int]:
        """Return the tokens with which the next canvas must begin, at most a whole canvas."""

    def settle(self, logits: Tensor, tokens: list[int]) -> GuideVerdict:
        """Return the verdict on a finished canvas, whose `tokens` [L] would be committed.

        `logits` [L, V] of the canvas' last step are soft-capped, and not divided by the temperature.
        """


@dataclass(frozen=True)
class Given:
    """Known token ids by position in the answer; the answer's first canvas begins at position 0."""

    pinned: Mapping[int, int] = field(default_factory=dict[int, int])
    initial: Mapping[int, int] = field(default_factory=dict[int, int])
    guide: Guide | None = None  # decides the canvases; None commits them as they were denoised

    def check(self, vocabulary: int) -> None:
        """Raise InputError for a negative position, or a token that is not in 0..`vocabulary` - 1."""
        for position, token in (*self.pinned.items(), *self.initial.items()):
            if position < 0 or not 0 <= token < vocabulary:
                raise InputError(
                    f"canvas: token {token} at position {position}; positions begin at 0, tokens are "
                    f"below {vocabulary}"
                )

    def rows(self, canvas: int, length: int, begun: Sequence[int]) -> list[list[int]]:
        """Return two rows of a canvas' tokens, [2][length]: all known tokens, and only pinned tokens.

        Both rows begin with `begun`, which a guide fixed, and have FREE at all other positions.
        """
        places = range(canvas * length + len(begun), (canvas + 1) * length)
        known = {**self.initial, **self.pinned}, self.pinned
        return [[*begun, *(tokens.get(place, FREE) for place in places)] for tokens in known]


NOTHING = Given()


def put(known: Tensor, tokens: Tensor) -> Tensor:
    """Return `tokens` where `known` is FREE, and `known` elsewhere; both are int64 of one shape."""
    return torch.where(known == FREE, tokens, known)


def holding(draw: Draw, pinned: Tensor) -> Draw:
    """Return `draw` with the tokens of `pinned` [B, L] and entropy 0 wherever `pinned` is not FREE."""
    entropy = torch.where(pinned == FREE, draw.entropy, 0.0)
    tokens = {name: put(pinned, getattr(draw, name)) for name in ("sampled", "argmax")}
    return draw._replace(**tokens, entropy=entropy)
