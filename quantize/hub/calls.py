"""Calls the Hub, and retries while it is busy; a failure is one clear line without the token.

`HfApi` retries uploads, but neither commits nor most small requests. `patiently` repeats a call on
408, 429, 500, 502, 503, 504 and broken connections. It waits as long as Retry-After says, if that is
at most LONGEST_WAIT, else 1, 2, 4 and 8 seconds. A call that still fails raises a QuantizeError with
the exit code that fits. No message holds the token, or the query part of a URL, where storage services
put signatures.
"""

import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub import get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from quantize.errors import InputError, QuantizeError, ResourceError
from quantize.host.progress import say

T = TypeVar("T")

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds between tries, unless the Hub names a time
LONGEST_WAIT = 600  # seconds; the Hub counts requests over windows of 300
TRANSIENT = {408, 429, 500, 502, 503, 504}
STALE_PARENT = 412
SAID: dict[int | None, tuple[type[QuantizeError], str]] = {  # by HTTP status
    401: (ResourceError, "the Hub does not accept the token (401); set HF_TOKEN to a valid one"),
    403: (ResourceError, "this token may not do that (403); it needs write access"),
    404: (InputError, "not found (404); check organisation and name, and the token's access"),
    STALE_PARENT: (
        ResourceError,
        "somebody else committed there in the meantime; nothing of theirs was overwritten and no "
        "model card was written; look at their commit, then push again",
    ),
}
QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
LONGEST = 300  # characters of the Hub's own text in a message


def patiently(where: str, call: Callable[[], T]) -> T:
    """Return the result of `call()`, retried while the Hub is busy; messages begin with `where`."""
    for wait in WAITS:
        try:
            with explained(where, except_transient=True):
                return call()
        except (HfHubHTTPError, httpx.TransportError) as error:
            pause = _asked(error) or wait
            if pause > LONGEST_WAIT:
                raise ResourceError(
                    f"{where}: {_short(error)}; the Hub asks to wait {pause:,.0f} s, and at most "
                    f"{LONGEST_WAIT} s are waited; try again then"
                ) from None
            say(f"{where} now: {_short(error)}; again in {pause:.0f} s")
            time.sleep(pause)
    with explained(where):
        return call()


def _asked(error: Exception) -> int | None:
    """Return the seconds that the Hub's Retry-After asks for; None for a date, or if there is none."""
    response = getattr(error, "response", None)
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    return int(asked[:9]) if re.fullmatch("[0-9]+", asked) else None


@contextmanager
def explained(where: str, *, except_transient: bool = False) -> Generator[None]:
    """Turn the block's errors into QuantizeErrors, whose messages begin with `where`.

    Causes are dropped: they may hold secrets. If `except_transient`, transient errors pass as is.
    """
    try:
        yield
    except QuantizeError:
        raise
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        if except_transient and is_transient(error):
            raise
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__  # an upload's worker wraps the error that stopped it
        raise _explain(where, cause) from None


def _explain(where: str, error: BaseException) -> QuantizeError:
    status = status_of(error)
    if isinstance(error, OfflineModeIsEnabled):
        return ResourceError(f"{where}: HF_HUB_OFFLINE is set; unset it to reach the Hub")
    if isinstance(error, LocalTokenNotFoundError):
        return ResourceError(f"{where}: no token; set HF_TOKEN or run `hf auth login`")
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{where}: no such revision (404)")
    if status in SAID:
        kind, text = SAID[status]
        return kind(f"{where}: {text}")
    if status in (None, 400) and isinstance(error, ValueError):
        return InputError(f"{where}: {_short(error)}")
    return ResourceError(f"{where}: {_short(error)}; what is uploaded stays; push again to go on")


def _short(error: BaseException) -> str:
    text = QUERY.sub(r"\1", " ".join(str(error).split()))
    if token := get_token():
        text = text.replace(token, "(token)")
    return text[:LONGEST] or type(error).__name__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the response that an error carries; None if it carries no response."""
    response = getattr(error, "response", None)
    return response.status_code if isinstance(response, httpx.Response) else None


def is_transient(error: BaseException) -> bool:
    """Return whether the call that raised this error may succeed a little later."""
    return isinstance(error, httpx.TransportError) or status_of(error) in TRANSIENT
