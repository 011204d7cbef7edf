"""What a request knows of its answer, as tokens: pinned pieces, text to begin with, a suffix.

initial_text    stands at the answer's beginning before the first step, and is denoised like the rest
pinned          [{position, text}]: tokens from that position on are committed as they are
suffix          text behind the answer: its tokens are pinned behind max_tokens positions, in the same
canvas, so that the decoder sees it from the first step; it is not part of the answer
"""

from collections.abc import Callable, Sequence

from quantize.runtime.given import Given
from quantize.serve.failures import RequestError
from quantize.serve.protocol import ChatRequest, CompletionRequest

Encode = Callable[[str], list[int]]  # without what a tokenizer puts before a text


def known(
    body: ChatRequest | CompletionRequest, encode: Encode, length: int
) -> tuple[Given | None, int | None]:
    """Return what is known of each answer of a request, and the answer's limit before a suffix.

    None stands for nothing known, and for the limit that the request has anyway.

    Args:
        body: the request.
        encode: text to token ids.
        length: tokens of a canvas.

    Raises:
        RequestError: 400, pieces that overlap, or a suffix for which there is no room.
    """
    initial = dict(enumerate(encode(body.initial_text or "")))
    pieces = [(f"pinned.{n}", p.position, encode(p.text)) for n, p in enumerate(body.pinned)]
    limit = None
    if isinstance(body, CompletionRequest) and body.suffix:
        tokens = encode(body.suffix)
        limit = _middle(body, len(tokens), length)
        pieces.append(("suffix", limit, tokens))
    pinned: dict[int, int] = {}
    for param, position, tokens in pieces:
        _add(pinned, param, position, tokens)
    return (Given(pinned, initial) if pinned or initial else None), limit


def _middle(body: CompletionRequest, suffix: int, length: int) -> int:
    """Return the tokens of an answer before a suffix of so many.

    Raises:
        RequestError: 400, both do not fit into a canvas.
    """
    room = length - suffix
    tokens = body.token_limit or room
    if not 0 < tokens <= room:
        raise RequestError(
            400,
            f"suffix: has {suffix} tokens, which leaves room for {max(room, 0)} before it in a canvas "
            f"of {length}; set max_tokens to 1 up to that",
            param="suffix",
            code="invalid_value",
        )
    return tokens


def _add(pinned: dict[int, int], param: str, position: int, tokens: Sequence[int]) -> None:
    for at, token in enumerate(tokens, position):
        if pinned.setdefault(at, token) != token:
            message = f"{param}: position {at} is pinned twice, to different tokens"
            raise RequestError(400, message, param=param, code="invalid_value")


def check_room(given: Given | None, positions: int) -> None:
    """Refuse what lies behind an answer's last canvas.

    Raises:
        RequestError: 400.
    """
    last = max((*given.pinned, *given.initial), default=-1) if given else -1
    if last >= positions:
        raise RequestError(
            400,
            f"pinned: position {last}, and the answer has {positions}; raise max_tokens",
            param="pinned",
            code="invalid_value",
        )
