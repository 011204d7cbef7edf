"""Puts recorded log-probabilities into the shapes of OpenAI's chats and completions."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from quantize.runtime.chat import HALF_CHARACTER
from quantize.serve.guides import Scored
from quantize.serve.text import Text


def of_chat(scored: Sequence[Scored], start: int, text: Text) -> dict[str, Any]:
    """Return the entries of the tokens from `start` on that are no thoughts."""
    own = text.answers([entry.token for entry in scored])
    entries = [entry for entry, yes in zip(scored[start:], own[start:], strict=True) if yes]
    content = [
        _token(text, entry.token, entry.logprob)
        | {"top_logprobs": [_token(text, token, chance) for token, chance in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(text: Text, token: int, logprob: float) -> dict[str, Any]:
    piece = text.piece(token)
    whole = HALF_CHARACTER not in piece
    return {
        "token": piece,
        "logprob": logprob,
        "bytes": list(piece.encode()) if whole else None,
    }


def of_text(scored: Sequence[Scored], start: int, text: Text) -> dict[str, Any]:
    """Return the columns of the tokens from `start` on; offsets count characters of the pieces."""
    pieces = [text.piece(entry.token) for entry in scored]
    offsets = list(accumulate(map(len, pieces), initial=0))
    return {
        "tokens": pieces[start:],
        "token_logprobs": [entry.logprob for entry in scored[start:]],
        "top_logprobs": [
            {text.piece(token): chance for token, chance in entry.top} for entry in scored[start:]
        ],
        "text_offset": offsets[start:-1],
    }


SHAPES: Mapping[str, Callable[[Sequence[Scored], int, Text], dict[str, Any]]] = {
    "chat": of_chat,
    "text": of_text,
}
