"""One port in front of several servers, one on each GPU: `quantize serve --data-parallel N`.

    client -> front (this process, no model) -> workers 0 to N - 1: `quantize serve`, one GPU each

A request goes to the worker with the fewest open requests. With a prefix cache, a chat stays with
the worker that encoded its beginning. It moves to the least busy worker if its own is not ready, or
has over `max_num_seqs` more open requests than it. A worker that ends is restarted. Its requests
end with 503, or with an error in their stream; other workers go on. No general proxy does all this:
load balancers cannot read a chat's beginning, and routers that read it start no servers.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quantize.errors import ResourceError
from quantize.host.progress import say
from quantize.runtime import Placement
from quantize.serve.failures import RequestError
from quantize.serve.guard import guarded
from quantize.serve.metrics import Metrics
from quantize.serve.options import Options
from quantize.serve.server import Server, listening_socket, run, say_what_it_knows
from quantize.serve.workers import Worker, visible_gpus

CHATS = 10_000  # chats whose workers are remembered


class Fleet:
    """Chooses workers and relays requests to them."""

    def __init__(self, workers: Sequence[Worker], options: Options) -> None:
        self.workers, self.options = workers, options
        self.homes: dict[str, Worker] = {}  # beginning of a chat -> its worker, the latest last

    def choose(self, body: bytes) -> Worker:
        """Return the worker for a request with this body; RequestError 503: no worker is ready."""
        if not (ready := [worker for worker in self.workers if worker.ready]):
            raise RequestError(503, "no worker is ready", code="unavailable", retry_after=5)
        chosen = min(ready, key=lambda worker: (worker.open, worker.taken))
        if self.options.prefix_bytes and (chat := beginning(body)):
            home = self.homes.pop(chat, chosen)
            if home.ready and home.open <= chosen.open + self.options.max_num_seqs:
                chosen = home
            self.homes[chat] = chosen
            if len(self.homes) > CHATS:
                del self.homes[next(iter(self.homes))]
        chosen.taken += 1
        return chosen

    def leave(self) -> None:
        """Ask all workers to end after their running requests."""
        for worker in self.workers:
            worker.stop()

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay a request and its answer; RequestError 503: the worker ended, or none is ready."""
        request = Request(scope, receive)
        await self.choose(await request.body()).relay(request, send)

    async def _pages(self, path: str, headers: dict[str, str]) -> dict[int, httpx.Response]:
        ready = {worker.index: worker.client for worker in self.workers if worker.ready}
        asked = (client.get(path, headers=headers) for client in ready.values())
        pages = zip(ready, await asyncio.gather(*asked, return_exceptions=True), strict=True)
        return {index: page for index, page in pages if isinstance(page, httpx.Response)}

    async def health(self, _: Request) -> Response:
        """Report running and waiting samples of all workers, and how many workers are healthy."""
        reports = [page.json() for page in (await self._pages("/health", {})).values()]
        healthy = sum(state["status"] == "ok" for state in reports)
        counts = {name: sum(state[name] for state in reports) for name in ("running", "waiting")}
        state = {"status": "ok" if healthy else "unavailable"} | counts
        state |= {"key_required": self.options.api_key is not None, "workers": healthy}
        return JSONResponse(state, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all workers, each with the worker's index as its label `worker`."""
        key = request.headers.get("authorization")
        pages = await self._pages("/metrics", {"authorization": key} if key else {})
        families: dict[str, Metric] = {}
        for index, page in pages.items():
            for metric_family in text_string_to_metric_families(page.text):
                empty = Metric(metric_family.name, metric_family.documentation, metric_family.type)
                family = families.setdefault(metric_family.name, empty)
                for sample in metric_family.samples:
                    labels = sample.labels | {"worker": str(index)}
                    family.add_sample(sample.name, labels, sample.value)
        together: Any = SimpleNamespace(collect=families.values)
        return Response(generate_latest(together), media_type="text/plain; version=0.0.4")


def beginning(body: bytes) -> str | None:
    """Return, as JSON, a chat's tools and its messages up to and including the user's first.

    Return None if the body holds no list of messages, or no message of the user.
    """
    try:
        asked = json.loads(body)
        messages = asked.get("messages") or asked.get("input")
        ends = next(i for i, message in enumerate(messages) if message["role"] == "user")
    except (ValueError, AttributeError, TypeError, KeyError, StopIteration, RecursionError):
        return None
    return json.dumps([asked.get("tools"), messages[: ends + 1]])


def application(fleet: Fleet) -> ASGIApp:
    """Return the guarded front: it answers /health and /metrics, and relays the rest to workers."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(worker.keep_alive()) for worker in fleet.workers]
        yield
        for task in tasks:
            task.cancel()

    async def refused(_: Request, error: Any) -> Response:
        return error.response

    routes = [Route("/health", fleet.health), Route("/metrics", fleet.metrics)]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={RequestError: refused})
    app.mount("/", fleet.relay)
    return guarded(app, fleet.options, Metrics())


def serve(checkpoint: Path, options: Options, place: Placement, count: int) -> None:
    """Serve a checkpoint with `count` workers until SIGINT or SIGTERM.

    ResourceError: there are too few GPUs, the port is in use, or a worker ended while it loaded.
    """
    gpus = visible_gpus(place, count)
    say_what_it_knows(checkpoint)
    sock = listening_socket(options.host, options.port)
    with TemporaryDirectory(prefix="quantize-") as folder:
        given = (Path(folder), checkpoint, options, place, gpus)
        fleet = Fleet([Worker(i, *given) for i in range(count)], options)
        try:
            for worker in fleet.workers:
                if not worker.wait():
                    how = f"ended with exit code {worker.process.exitcode} while it loaded"
                    raise ResourceError(f"worker {worker.index} {how}; its message stands above")
            say(f"{count} workers are ready")
            run(Server(application(fleet), options, fleet.leave, grace=10), sock)
        finally:
            fleet.leave()
            for worker in fleet.workers:
                worker.process.join(options.shutdown_grace + 10)
                worker.process.kill()
