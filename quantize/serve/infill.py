"""Turns the texts that a request gives for its answer into tokens: pinned, initial, suffix.

initial_text    fills the answer's beginning before the first step, and is denoised like noise
pinned          [{position, text}]: the text's tokens are committed unchanged from that position on
suffix          text that follows the answer and is not part of it: pinned before the first step,
                in the first canvas, after max_tokens positions (by default at that canvas' end)
"""

from collections.abc import Callable

from quantize.runtime.sampler.known_tokens import Given
from quantize.serve.failures import invalid
from quantize.serve.protocol import ChatRequest, CompletionRequest

Encode = Callable[[str], list[int]]  # text to token ids, without special tokens such as BOS


def known(
    body: ChatRequest | CompletionRequest, encode: Encode, length: int
) -> tuple[Given | None, int | None]:
    """Return a request's known tokens, and the token limit that its suffix sets; each None if absent.

    A canvas has `length` tokens. RequestError 400: pinned texts clash, or a suffix does not fit.
    """
    initial = dict(enumerate(encode(body.initial_text or "")))
    pieces = [(f"pinned[{n}]", p.position, encode(p.text)) for n, p in enumerate(body.pinned)]
    limit = None
    if isinstance(body, CompletionRequest) and body.suffix:
        tokens = encode(body.suffix)
        room = length - len(tokens)
        limit = body.token_limit or room
        if not 0 < limit <= room:
            raise invalid(
                "suffix",
                f"has {len(tokens)} tokens, which leaves room for {max(room, 0)} before it in a "
                f"canvas of {length}; set max_tokens to 1 up to that",
            )
        pieces.append(("suffix", limit, tokens))
    pinned: dict[int, int] = {}
    for param, position, tokens in pieces:
        for at, token in enumerate(tokens, position):
            if pinned.setdefault(at, token) != token:
                raise invalid(param, f"position {at} is pinned twice, to different tokens")
    return (Given(pinned, initial) if pinned or initial else None), limit
