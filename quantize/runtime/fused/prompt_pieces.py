"""Cuts a prompt into pieces that the encoder takes at once, and finds the pictures in it.

A picture is a run of placeholders. Its soft tokens see each other in both directions, so a piece ends
before a picture rather than inside it; text is cut anywhere.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.fused.passes import SoftTokens

Span = tuple[int, int]  # first position, and the one behind the last


def pictures(prompt: Sequence[int], placeholder: int | None) -> list[Span]:
    """Return where the runs of `placeholder` begin and end; none if the model has no placeholder."""
    runs = groupby(range(len(prompt)), lambda position: prompt[position] == placeholder)
    found = [list(run) for in_picture, run in runs if in_picture]
    return [(run[0], run[-1] + 1) for run in found]


def pieces(length: int, chunk: int, seen: Sequence[Span]) -> list[Span]:
    """Cut a prompt into pieces of at most `chunk` tokens, none of which ends inside a picture.

    Raise InputError for a picture of more than `chunk` tokens.
    """
    found: list[Span] = []
    start = 0
    while start < length:
        end = min(start + chunk, length)
        end = next((first for first, behind in seen if first < end < behind), end)
        if end == start:
            raise InputError(f"a picture of more than {chunk} tokens: prepare it with fewer")
        found.append((start, end))
        start = end
    return found


def soft_tokens(piece: Span, seen: Sequence[Span], embeddings: Tensor) -> SoftTokens | None:
    """Return the soft tokens of the pictures in a piece of a prompt, or None if it has no picture.

    The piece cuts no picture. `seen` has the spans of all pictures in the prompt, `embeddings`
    [tokens, H] their soft tokens.
    """
    inside = [span for span in seen if piece[0] <= span[0] < piece[1]]
    places = [(at, first, behind - 1) for first, behind in inside for at in range(first, behind)]
    if not places:
        return None
    before = sum(behind - first for first, behind in seen if behind <= piece[0])
    at, first, last = torch.tensor(places, device=embeddings.device).T.contiguous()
    own = embeddings[before : before + len(places)]
    return SoftTokens(at - piece[0], own, first.int(), last.int())
