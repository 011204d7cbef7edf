"""Checks each request's size, and its host or key, before the app sees it; adds response headers.

The guard is plain ASGI middleware, so streams pass through it as they come. When a client hangs up,
the task that answers its request is cancelled, whatever that task waits for.
"""

import asyncio
import hmac
import logging
import time
import traceback
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantize.serve.failures import RequestError
from quantize.serve.fields import MAX_BRACKETS
from quantize.serve.metrics import Metrics
from quantize.serve.options import Options

BODY_SECONDS = 30.0
DRAINED = 8  # a too large body is read up to this many times the limit, so the client hears why
PUBLIC = ("/health", "/", "/page.js", "/page.css", "/icon.svg", "/docs")
OUT = {
    "X-DiffusionGemma-Commit-Pass": "plain",  # finished canvases are encoded as transformers does it
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
}

NO_KEY = (
    "no API key, or a wrong one: send the server's QUANTIZE_API_KEY in the header "
    "Authorization: Bearer KEY; OpenAI's clients take it as api_key"
)

log = logging.getLogger(__name__)


def guarded(app: ASGIApp, options: Options, metrics: Metrics) -> ASGIApp:
    """Return `app`, guarded; if origins are set, CORS middleware around it answers preflights."""
    guard = _Guard(app, options, metrics)
    if not options.origins:
        return guard
    exposed = ["X-Ignored-Parameters", "X-Worker", "Retry-After"]
    return CORSMiddleware(
        guard, options.origins, ["GET", "POST"], allow_headers=["*"], expose_headers=exposed
    )


class _Guard:
    """Wraps an application in checks of host, key and size.

    A server without a key answers only to its own names: a web page that points a name of its own at
    127.0.0.1 (DNS rebinding) gets nothing. The key is compared in constant time and never logged.
    """

    def __init__(self, app: ASGIApp, options: Options, metrics: Metrics) -> None:
        self.app, self.options, self.metrics = app, options, metrics
        self.out = OUT if options.worker is None else OUT | {"X-Worker": str(options.worker)}
        # Digests are compared: they have one length, which does not reveal the key's.
        self.key = sha256(options.api_key.encode()).digest() if options.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        status, ended, started = 0, False, time.monotonic()

        async def out(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(self.out)
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")

        body, tasks = asyncio.Queue[Message](), list[asyncio.Future[None]]()
        try:
            self._check(scope)
            body.put_nowait({"type": "http.request", "body": await self._body(receive)})
            work = asyncio.ensure_future(self.app(scope, body.get, out))
            tasks += work, asyncio.ensure_future(_hung_up(receive))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ended or work.done():
                await work
            elif not status:
                raise ClientDisconnect
        except ClientDisconnect:
            status = 499
        except RequestError as refusal:
            await refusal.response(scope, receive, out)
        except Exception as error:  # already answered; the message may quote a prompt
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("unexpected %s\n%s", type(error).__name__, where)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._count(scope, status, time.monotonic() - started)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self.key is None:
            name = headers.get("host", "").rsplit(":", 1)[0].strip("[]").lower()
            if name not in ("127.0.0.1", "localhost", "::1", self.options.host):
                raise RequestError(403, f"host {name[:100]!r} is not a name of this server")
        elif scope["path"] not in PUBLIC:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(sha256(token.encode()).digest(), self.key)
            if scheme.lower() != "bearer" or not same:
                refusal = RequestError(401, NO_KEY, code="invalid_api_key")
                refusal.headers["WWW-Authenticate"] = "Bearer"
                raise refusal

    async def _body(self, receive: Receive) -> bytes:
        limit, size, parts, more = self.options.max_body_bytes, 0, list[bytes](), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and size <= DRAINED * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    more = message.get("more_body", False)
                    size += len(message.get("body", b""))
                    if size <= limit:
                        parts.append(message.get("body", b""))
        except TimeoutError:
            raise RequestError(408, f"no whole body within {BODY_SECONDS:g} s") from None
        if size > limit:
            raise RequestError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        body = b"".join(parts)
        if (brackets := _brackets(body)) > MAX_BRACKETS:
            message = f"the body has {brackets} brackets; at most {MAX_BRACKETS} are read"
            raise RequestError(413, message, code="body_too_large")
        return body

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route: Any = scope.get("route")
        path = route.path if route is not None else "other"  # else anyone could add label values
        self.metrics.requests.labels(path, str(status or "none")).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        log.info("%s %s %s %.3f s", scope["method"], path, status or "gone", seconds)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _brackets(body: bytes) -> int:
    """Return how many lists and objects a JSON text opens; what stands in strings opens none.

    Strings are looked at only where it matters, since a long one takes milliseconds.
    """
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MAX_BRACKETS:
        unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
        outside = b"".join(unescaped.split(b'"')[::2])
        brackets = outside.count(b"[") + outside.count(b"{")
    return brackets
