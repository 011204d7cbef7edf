"""One port in front of one server a GPU: `quantize serve --data-parallel N`.

    client -> front (this process, without a model) -> worker 0 ... N - 1: `quantize serve`, a GPU each

A request goes to the worker with the fewest open requests. Where beginnings of prompts are kept, a chat
stays with the worker that has its beginning, unless that one has a whole batch more to do than another.
A worker that ends is started again; its requests end with 503, or with an error in their streams, and
the others notice nothing. Proxies that balance by load cannot read a chat's beginning, and a router
that can expects other servers' protocols and does not start any; hence this front.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from quantize.errors import ResourceError
from quantize.host.progress import say
from quantize.runtime import Placement
from quantize.serve.failures import RequestError
from quantize.serve.guard import Guard
from quantize.serve.metrics import Metrics
from quantize.serve.options import Options
from quantize.serve.server import announce, listening_socket, serve_at

CHATS = 10_000  # whose workers are remembered
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"te",
    b"upgrade",
    b"expect",
    b"date",
}
LONGEST_PAUSE = 60.0  # seconds before a worker that ended again and again is started once more
ENDED = "the worker that had this request ended and is started again: send the request once more"

log = logging.getLogger(__name__)
spawning = multiprocessing.get_context("spawn")  # a fork would copy a parent's threads and locks


@dataclass(frozen=True)
class Work:
    """What every worker is started with; `gpus` are names for CUDA_VISIBLE_DEVICES, none on a CPU."""

    checkpoint: Path
    options: Options
    place: Placement
    gpus: Sequence[str]


class Worker:
    """One server in a process of its own, at a Unix socket in `folder`."""

    def __init__(self, index: int, work: Work, folder: Path) -> None:
        self.index, self.work = index, work
        self.socket = folder / f"{index}.sock"
        # As many at once as come: the worker itself refuses what it has no room for.
        most = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket), limits=most)
        limits = work.options.request_timeout + 60  # the worker itself ends what takes longer
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=limits
        )
        self.open = self.taken = 0
        self.ready = self.stopping = False
        self.process = self._start()

    def _start(self) -> Any:
        self.socket.unlink(missing_ok=True)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.work.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.work.gpus[self.index]
        try:
            work = self.work
            given = (work.checkpoint, work.options, work.place, self.socket)
            process = spawning.Process(target=serve_at, args=given, name=f"worker {self.index}")
            process.start()
        finally:
            if before is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        return process

    def listens(self) -> bool:
        """Whether it answers; its model is loaded by then."""
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket))) as client:
                return client.get("http://localhost/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Ask the process to end, once its requests are answered; it is not started again."""
        self.stopping = True
        self.process.terminate()

    async def keep_alive(self) -> None:
        """Start the process again whenever it ends before `stop`, each time after a longer pause."""
        pause = 1.0
        while True:
            begun = time.monotonic()
            await asyncio.to_thread(self.process.join)
            self.ready = False
            if self.stopping:
                return
            pause = 1.0 if time.monotonic() - begun > 600 else min(2 * pause, LONGEST_PAUSE)
            log.error("worker %d ended with exit code %s", self.index, self.process.exitcode)
            await asyncio.sleep(pause)
            if self.stopping:
                return
            self.process = self._start()
            while self.process.is_alive() and not await asyncio.to_thread(self.listens):
                await asyncio.sleep(0.2)
            self.ready = self.process.is_alive()
            if self.ready:
                log.info("worker %d serves again", self.index)


class Fleet:
    """Chooses workers and relays requests to them."""

    def __init__(self, workers: Sequence[Worker], options: Options) -> None:
        self.workers, self.options = workers, options
        self.homes: dict[str, Worker] = {}  # of chats, by their beginnings, the latest last

    def choose(self, body: bytes) -> Worker:
        """Return the worker for a request.

        Raises:
            RequestError: 503, none is ready.
        """
        ready = [worker for worker in self.workers if worker.ready]
        if not ready:
            raise RequestError(503, "no worker is ready", code="unavailable", retry_after=5)
        found = min(ready, key=lambda worker: (worker.open, worker.taken))
        if self.options.prefix_bytes and (chat := beginning(body)):
            home = self.homes.pop(chat, found)
            if home.ready and home.open <= found.open + self.options.max_num_seqs:
                found = home
            self.homes[chat] = found
            if len(self.homes) > CHATS:
                del self.homes[next(iter(self.homes))]
        found.taken += 1
        return found

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and its answer back; a client that hangs up ends it at the worker too."""
        request = Request(scope, receive)
        body = await request.body()
        worker = self.choose(body)
        worker.open += 1
        answer = asyncio.create_task(_relayed(worker, request, body, send))
        gone = asyncio.create_task(_hung_up(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            worker.open -= 1
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _pages(self, path: str, headers: dict[str, str]) -> dict[int, httpx.Response]:
        ready = [worker for worker in self.workers if worker.ready]
        asked = (worker.client.get(path, headers=headers) for worker in ready)
        found = await asyncio.gather(*asked, return_exceptions=True)
        pages = zip(ready, found, strict=True)
        return {w.index: page for w, page in pages if isinstance(page, httpx.Response)}

    async def health(self, _: Request) -> Response:
        """Add up what the workers say."""
        told = [page.json() for page in (await self._pages("/health", {})).values()]
        healthy = sum(state["status"] == "ok" for state in told)
        counts = {name: sum(state[name] for state in told) for name in ("running", "waiting")}
        state = {"status": "ok" if healthy else "unavailable"} | counts
        state |= {"key_required": self.options.api_key is not None}
        return JSONResponse(state | {"workers": healthy}, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """Show the workers' counters side by side, each with the label `worker`."""
        key = request.headers.get("authorization")
        pages = await self._pages("/metrics", {"authorization": key} if key else {})
        families: dict[str, Metric] = {}
        for index, page in pages.items():
            for family in text_string_to_metric_families(page.text):
                empty = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    labels = sample.labels | {"worker": str(index)}
                    families.setdefault(family.name, empty).add_sample(
                        sample.name, labels, sample.value
                    )
        registry = CollectorRegistry()
        registry.register(_Collected(list(families.values())))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _Collected:
    def __init__(self, families: Sequence[Metric]) -> None:
        self.families = families

    def collect(self) -> Sequence[Metric]:
        return self.families


def beginning(body: bytes) -> str | None:
    """Return what tells one chat from another: all up to its first user message, or None."""
    try:
        asked = json.loads(body)
        messages = asked.get("messages") or asked.get("input")
        ends = next(i for i, message in enumerate(messages) if message["role"] == "user")
    except (ValueError, AttributeError, TypeError, KeyError, StopIteration):
        return None
    return json.dumps([asked.get("tools"), messages[: ends + 1]])


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relayed(worker: Worker, request: Request, body: bytes, send: Send) -> None:
    """Relay one answer.

    Raises:
        RequestError: 503, the worker ended before its answer began.
    """
    url = httpx.URL(path=request.url.path, query=request.scope["query_string"])
    streams = began = False
    try:
        headers = _end_to_end(request.headers.raw)
        asked = worker.client.build_request(request.method, url, headers=headers, content=body)
        reply = await worker.client.send(asked, stream=True)
        try:
            streams = reply.headers.get("content-type", "").startswith("text/event-stream")
            headers = [*_end_to_end(reply.headers.raw), (b"x-worker", str(worker.index).encode())]
            start = {"type": "http.response.start", "status": reply.status_code}
            await send(start | {"headers": headers})
            began = True
            async for part in reply.aiter_raw():
                await send(_part(part, more=True))
        finally:
            await reply.aclose()
    except httpx.TransportError as error:
        refusal = RequestError(503, ENDED, code="worker_ended", retry_after=1)
        if not began:
            raise refusal from error
        if not streams:  # a body cut short is no answer: the connection breaks
            raise
        await send(_part(f"data: {json.dumps(refusal.body)}\n\n".encode(), more=True))
    await send(_part(b"", more=False))


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not of one connection alone, nor written by each server itself."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


def _part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class _Front(uvicorn.Server):
    """uvicorn's server, whose shutdown shuts the workers down first."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet) -> None:
        super().__init__(config)
        self.fleet = fleet

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        for worker in self.fleet.workers:
            worker.stop()
        super().handle_exit(sig, frame)


def application(fleet: Fleet) -> Guard:
    """Return the front: its own health and metrics, all else relayed, behind the servers' guard."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(worker.keep_alive()) for worker in fleet.workers]
        yield
        for task in tasks:
            task.cancel()

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error.response

    routes = [Route("/health", fleet.health), Route("/metrics", fleet.metrics)]
    app = Starlette(
        routes=[*routes, Mount("/", fleet.relay)],
        lifespan=lifespan,
        exception_handlers={RequestError: refused},
    )
    return Guard(app, fleet.options, Metrics())


def serve(checkpoint: Path, options: Options, place: Placement, count: int) -> None:
    """Serve a checkpoint by `count` workers until SIGINT or SIGTERM.

    Raises:
        ResourceError: there are fewer GPUs; the port is taken; a worker ended while it loaded.
    """
    gpus = visible_gpus(place, count)
    sock = listening_socket(options.host, options.port)
    with TemporaryDirectory(prefix="quantize-") as folder:
        work = Work(checkpoint, options, place, gpus)
        fleet = Fleet([Worker(i, work, Path(folder)) for i in range(count)], options)
        try:
            wait_for(fleet.workers)
            say(f"{count} workers are ready")
            announce(options, sock)
            config = uvicorn.Config(
                application(fleet), access_log=False, log_config=None, server_header=False,
                timeout_graceful_shutdown=int(options.shutdown_grace) + 10,
            )  # fmt: skip
            _Front(config, fleet).run([sock])
        finally:
            for worker in fleet.workers:
                worker.stop()
            for worker in fleet.workers:
                worker.process.join(options.shutdown_grace + 10)
                worker.process.kill()


def wait_for(workers: Sequence[Worker]) -> None:
    """Return once all workers answer.

    Raises:
        ResourceError: one ended.
    """
    while not all(worker.ready for worker in workers):
        for worker in workers:
            if not worker.process.is_alive():
                raise ResourceError(
                    f"worker {worker.index} ended with exit code {worker.process.exitcode} while it "
                    "loaded; its message stands above"
                )
            worker.ready = worker.ready or worker.listens()
        time.sleep(0.2)


def visible_gpus(place: Placement, count: int) -> list[str]:
    """Return the names of `count` GPUs as CUDA_VISIBLE_DEVICES has them, none for a CPU.

    Raises:
        ResourceError: there are fewer.
    """
    import torch

    if torch.device(place.device).type == "cpu":
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    if len(names) < count:
        raise ResourceError(
            f"--data-parallel {count} needs as many GPUs; this machine shows {len(names)}"
        )
    return names[:count]
