"""Stands before Serve's proxy: the guard, and what all replicas answer together.

Serve imports `middlewares` by its name. Its proxy alone would answer 500 for a replica that is lost.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric, generate_latest
from ray import serve
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantize.serve.failures import NO_PATH, RequestError
from quantize.serve.guard import guarded
from quantize.serve.metrics import Metrics
from quantize.serve.routing import beginning

APP = "quantize"  # of Serve, and Ray's namespace
WAIT = 3.0  # seconds for the answers of all replicas; one that hangs is soon replaced
LOST = "the worker that had this request ended and is started again: send the request once more"


def _no_replica() -> RequestError:
    return RequestError(503, "no worker is ready", code="unavailable", retry_after=5)


def middlewares() -> list[Middleware]:
    """Return what stands before Serve's proxy."""
    return [Middleware(Relay)]


class Relay:
    """Answers /health and /metrics for all replicas, and guards and relays other requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.proxy = app
        self.guard: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and self.guard is None:
            with suppress(Exception):  # of many kinds, until a replica is ready
                self.handle: Any = await asyncio.to_thread(serve.get_app_handle, APP)
                options, *_ = await self.handle.state.remote()
                self.options = replace(options, worker=None)
                self.guard = guarded(self._answer, self.options, Metrics())
        app = self.proxy if scope["type"] != "http" else self.guard or _no_replica().response
        await app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        pages = {"/health": self._health, "/metrics": self._metrics}
        if scope["method"] == "GET" and (page := pages.get(scope["path"])):
            await (await page())(scope, receive, send)
            return
        if scope["path"].startswith("/-/"):  # pages of Serve's proxy
            raise RequestError(404, NO_PATH, code="not_found")
        bodies = [await receive()]  # the guard has read the body whole
        if self.options.prefix_bytes and (chat := beginning(bodies[0]["body"])):
            scope = {**scope, "headers": [*scope["headers"], (b"x-session-id", chat)]}

        gone = asyncio.Event()

        async def again() -> Message:
            return bodies.pop() if bodies or not await gone.wait() else {"type": "http.disconnect"}

        start, ended = Headers(), False

        async def out(message: Message) -> None:
            nonlocal start, ended
            if message["type"] == "http.response.start":
                start = Headers(scope=message)
                if "x-worker" not in start:  # a page of Serve's own: it has no replica for us
                    raise _no_replica()
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")

        work = asyncio.ensure_future(self.proxy(scope, again, out))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:  # Serve ends a request itself when it hears of the client
            gone.set()
            await work
            raise
        lost = RequestError(503, LOST, code="worker_ended", retry_after=1)
        if not start:
            raise lost
        if not ended and start.get("content-type", "").startswith("text/event-stream"):
            event = f"data: {json.dumps(lost.body)}\n\n".encode()
            await send({"type": "http.response.body", "body": event})

    async def _states(self) -> list[Any]:
        """Return the states of all replicas; TimeoutError: one hangs."""
        asked = self.handle.broadcast("state")
        answers = await asked.results_async(timeout_s=WAIT, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, Exception)]

    async def _health(self) -> Response:
        """Report how many replicas run, and running and waiting samples of all, unless one hangs."""
        workers, sums = 0, {}
        with suppress(TimeoutError, KeyError):  # Serve's controller is itself lost, or begins again
            status = await asyncio.wait_for(asyncio.to_thread(serve.status), WAIT)
            (deployment,) = status.applications[APP].deployments.values()
            workers = deployment.replica_states.get("RUNNING", 0)
        with suppress(TimeoutError):
            loads = [load for _, load, _ in await self._states()]
            workers = max(workers, len(loads))
            sums = {"running": sum(run for run, _ in loads), "waiting": sum(w for _, w in loads)}
        health = {"status": "ok" if workers else "unavailable", "workers": workers}
        health |= {"key_required": self.options.api_key is not None, **sums}
        return JSONResponse(health, 200 if workers else 503)

    async def _metrics(self) -> Response:
        """Return the metrics of all replicas, each with the replica's index as its label `worker`."""
        families: dict[str, Metric] = {}
        for options, _, metrics in await self._states():
            for metric in metrics:
                empty = Metric(metric.name, metric.documentation, metric.type)
                family = families.setdefault(metric.name, empty)
                for name, labels, value, *_ in metric.samples:
                    family.add_sample(name, labels | {"worker": str(options.worker)}, value)
        together: Any = SimpleNamespace(collect=families.values)
        return Response(generate_latest(together), media_type="text/plain; version=0.0.4")
