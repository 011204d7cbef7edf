"""Tokens of an answer that are known before it is denoised: pinned ones (infilling), initial ones.

At a pinned position the decoder reads the token at every step, the entropy counts as 0 (which takes
nothing from what a step may accept), and the token is committed. An initial token replaces the canvas'
noise before the first step, and is then denoised like any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantize.errors import InputError

FREE = -1  # stands in place of a token where none is known


@dataclass(frozen=True)
class Given:
    """Known token ids by position in the answer, whose first canvas begins at position 0.

    Attributes:
        pinned: tokens that are committed as they are.
        initial: tokens that stand there before the first step.
    """

    pinned: Mapping[int, int] = field(default_factory=dict[int, int])
    initial: Mapping[int, int] = field(default_factory=dict[int, int])

    def check(self, vocabulary: int) -> None:
        """Refuse positions before the answer and tokens outside the vocabulary.

        Raises:
            InputError: it names the first of them.
        """
        for position, token in (*self.pinned.items(), *self.initial.items()):
            if position < 0 or not 0 <= token < vocabulary:
                raise InputError(
                    f"canvas: token {token} at position {position}; positions begin at 0, tokens are "
                    f"below {vocabulary}"
                )


def pinned(given: Given | None, canvas: int, length: int) -> list[int]:
    """Return the pinned tokens of a canvas, FREE elsewhere."""
    return _row({} if given is None else given.pinned, canvas, length)


def initial(given: Given | None, canvas: int, length: int) -> list[int]:
    """Return the tokens that a canvas begins with, FREE where it begins with noise."""
    return _row({} if given is None else {**given.initial, **given.pinned}, canvas, length)


def _row(tokens: Mapping[int, int], canvas: int, length: int) -> list[int]:
    return [tokens.get(canvas * length + position, FREE) for position in range(length)]


def put(known: Tensor, tokens: Tensor) -> Tensor:
    """Return `tokens` with the known ones put in; both are int64 of one shape."""
    return torch.where(known == FREE, tokens, known)


def certain(known: Tensor, entropy: Tensor) -> Tensor:
    """Return `entropy` with 0 where a token is known; both have one shape."""
    return torch.where(known == FREE, entropy, 0.0)
