"""Checks host, key and size of every request before it is read, and adds headers to responses.

It is plain ASGI, so streams flow through it and a client that hangs up is noticed.
"""

import asyncio
import hashlib
import hmac
import logging
import time
import traceback
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantize.serve.failures import RequestError
from quantize.serve.metrics import Metrics
from quantize.serve.options import Options

BODY_SECONDS = 30.0
DRAINED = 8  # an oversized body is read up to so many times the limit, so the client hears why
PUBLIC = ("/health", "/", "/page.js", "/page.css", "/icon.svg", "/docs")
OUT = {
    "X-DiffusionGemma-Commit-Pass": "plain",  # finished canvases are encoded as transformers does it
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
}

log = logging.getLogger(__name__)


class Guard:
    """Wraps an application with checks of host, key and size.

    A server without a key answers only to its own names: a web page that points a name of its own at
    127.0.0.1 (DNS rebinding) gets nothing. The key is compared in constant time and never logged.
    """

    def __init__(self, app: ASGIApp, options: Options, metrics: Metrics) -> None:
        self.app = app
        self.options = options
        self.metrics = metrics
        self.key = _digest(options.api_key.encode()) if options.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started = 0, time.monotonic()

        async def out(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(OUT)
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, await self._limited(scope, receive), out)
        except RequestError as refusal:
            await refusal.response(scope, receive, out)
        except Exception as error:  # already answered; the message may quote a prompt
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("unexpected %s\n%s", type(error).__name__, where)
        finally:
            self._count(scope, status, time.monotonic() - started)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self.key is None:
            name = headers.get("host", "").rsplit(":", 1)[0].strip("[]")
            if name not in ("127.0.0.1", "localhost", "::1", self.options.host):
                raise RequestError(403, f"host {name[:100]!r} is not a name of this server")
        elif scope["path"] not in PUBLIC:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(_digest(token.encode()), self.key)
            if scheme.lower() != "bearer" or not same:
                refusal = RequestError(401, "no API key, or a wrong one", code="invalid_api_key")
                refusal.headers["WWW-Authenticate"] = "Bearer"
                raise refusal

    async def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body within limits of size and time; return a `receive` that replays it."""
        limit, size, parts = self.options.max_body_bytes, 0, list[bytes]()
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more and size <= DRAINED * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return _replay(message, receive)
                    more = message.get("more_body", False)
                    size += len(message.get("body", b""))
                    if size <= limit:
                        parts.append(message.get("body", b""))
        except TimeoutError:
            raise RequestError(408, f"no whole body within {BODY_SECONDS:g} s") from None
        if size > limit:
            raise RequestError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        return _replay({"type": "http.request", "body": b"".join(parts)}, receive)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route: Any = scope.get("route")
        path = route.path if route is not None else "other"  # else anyone could add label values
        self.metrics.requests.labels(path, str(status or "none")).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        log.info("%s %s %s %.3f s", scope["method"], path, status or "gone", seconds)


def _replay(first: Message, receive: Receive) -> Receive:
    messages = [first]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(
        value
    ).digest()  # equal lengths, so that the comparison does not reveal the key's
