"""Cuts a prompt into pieces that the encoder takes at once, and finds the pictures in it.

A picture is a run of placeholders. Its soft tokens see each other in both directions, so a piece ends
before a picture rather than inside it; text is cut anywhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.fused.passes import SoftTokens

Span = tuple[int, int]  # first position, and the one behind the last


def pictures(prompt: Sequence[int], placeholder: int | None) -> list[Span]:
    """Return where the runs of placeholders are."""
    spans: list[Span] = []
    for position, token in enumerate(prompt):
        if token != placeholder:
            continue
        if spans and spans[-1][1] == position:
            spans[-1] = (spans[-1][0], position + 1)
        else:
            spans.append((position, position + 1))
    return spans


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

    The piece cuts no picture; `seen` are all of the prompt's, `embeddings` [tokens of them all, H].
    """
    rows: list[int] = []
    firsts: list[int] = []
    lasts: list[int] = []
    before = 0
    for first, behind in seen:
        if behind <= piece[0]:
            before += behind - first
        elif first < piece[1]:
            rows += range(first - piece[0], behind - piece[0])
            firsts += [first] * (behind - first)
            lasts += [behind - 1] * (behind - first)
    if not rows:
        return None
    device = embeddings.device
    visible = torch.tensor([firsts, lasts], dtype=torch.int32, device=device)
    own = embeddings[before : before + len(rows)]
    return SoftTokens(torch.tensor(rows, device=device), own, visible[0], visible[1])
