"""Cuts a prompt into pieces, one per encoder pass, and finds the pictures in the prompt.

A picture is a run of placeholders. Its soft tokens see each other in both directions. So a piece that
would end inside a picture ends before the picture. Text is cut anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quantize.errors import InputError

Span = tuple[int, int]  # first position, and last position + 1


@dataclass(frozen=True)
class SoftTokens:
    """The vision tower's output for pictures, for one encoder pass over one sequence."""

    rows: Tensor  # int64 [k], indices of the soft tokens' rows in the pass
    embeddings: Tensor  # bf16 [k, H]
    first: Tensor  # int32 [k], position of the first token of each soft token's picture
    last: Tensor  # int32 [k], position of the last token; the whole picture is within the pass


def pictures(prompt: Sequence[int], placeholder: int | None) -> list[Span]:
    """Return the spans of all runs of `placeholder` in a prompt; none if `placeholder` is None."""
    runs = groupby(range(len(prompt)), lambda position: prompt[position] == placeholder)
    placeholders = [list(run) for in_picture, run in runs if in_picture]
    return [(run[0], run[-1] + 1) for run in placeholders]


def pieces(length: int, chunk: int, seen: Sequence[Span]) -> list[Span]:
    """Return the spans of a prompt's pieces of up to `chunk` tokens; no piece cuts a picture.

    `seen` are the pictures' spans. Raise InputError for a picture of more than `chunk` tokens.
    """
    spans: list[Span] = []
    start = 0
    while start < length:
        end = min(start + chunk, length)
        end = next((first for first, behind in seen if first < end < behind), end)
        if end == start:
            raise InputError(f"a picture of more than {chunk} tokens: prepare it with fewer")
        spans.append((start, end))
        start = end
    return spans


def soft_tokens(piece: Span, seen: Sequence[Span], embeddings: Tensor) -> SoftTokens | None:
    """Return the soft tokens of the pictures in a prompt's piece; None if the piece has no picture.

    The piece cuts no picture. `seen` has the spans of all pictures in the prompt. `embeddings`
    [tokens, H] has the soft tokens of all pictures, one picture after the other.
    """
    inside = [span for span in seen if piece[0] <= span[0] < piece[1]]
    places = [(at, first, behind - 1) for first, behind in inside for at in range(first, behind)]
    if not places:
        return None
    before = sum(behind - first for first, behind in seen if behind <= piece[0])
    at, first, last = torch.tensor(places, device=embeddings.device).T.contiguous()
    inside_embeddings = embeddings[before : before + len(places)]
    return SoftTokens(at - piece[0], inside_embeddings, first.int(), last.int())
