"""The servers behind one port: each is a process with a GPU, and is restarted when it ends."""

import asyncio
import json
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import torch
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Scope, Send

from quantize.errors import ResourceError
from quantize.runtime import Placement
from quantize.serve.failures import NO_PATH, RequestError
from quantize.serve.options import Options
from quantize.serve.server import serve_at

URL = "http://localhost"  # httpx needs a URL beside the socket
HOP_BY_HOP = b"connection keep-alive transfer-encoding te upgrade expect date".split()
LONGEST_PAUSE = 60.0  # seconds before a worker that ended again and again is started once more
ENDED = "the worker that had this request ended and is started again: send the request once more"

log = logging.getLogger(__name__)
spawning = multiprocessing.get_context("spawn")  # a fork would copy a parent's threads and locks


class Worker:
    """One server process on a Unix socket in `folder`, on GPU `gpus[index]`; `gpus` []: no GPU."""

    def __init__(
        self, index: int, folder: Path, checkpoint: Path, options: Options, place: Placement,
        gpus: Sequence[str],
    ) -> None:  # fmt: skip
        self.index, self.gpus, self.socket = index, gpus, folder / f"{index}.sock"
        self.given = (checkpoint, options, place, self.socket)
        # No limit here: the worker itself refuses requests that it has no room for.
        most = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket), limits=most)
        seconds = options.request_timeout + 60  # the worker itself ends requests that take longer
        self.client = httpx.AsyncClient(transport=transport, base_url=URL, timeout=seconds)
        self.open = self.taken = 0
        self.ready = self.stopping = False
        self.process = self._start()

    def _start(self) -> Any:
        self.socket.unlink(missing_ok=True)
        if self.gpus:  # the front itself uses none
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus[self.index]
        process = spawning.Process(target=serve_at, args=self.given, name=f"worker {self.index}")
        process.start()
        return process

    def _listens(self) -> bool:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket))) as client:
                return client.get(f"{URL}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait(self) -> bool:
        """Wait until the server answers or its process has ended; return whether it answers."""
        while self.process.is_alive() and not self._listens():
            time.sleep(0.2)
        self.ready = self.process.is_alive()
        return self.ready

    def stop(self) -> None:
        """Ask the process to end after its running requests; it will not be restarted."""
        self.stopping = True
        self.process.terminate()

    async def keep_alive(self) -> None:
        """Until `stop`, restart the process when it ends, after a pause that grows up to 60 s."""
        pause = 1.0
        while True:
            begun = time.monotonic()
            await asyncio.to_thread(self.process.join)
            self.ready = False
            if not self.stopping:
                pause = 1.0 if time.monotonic() - begun > 600 else min(2 * pause, LONGEST_PAUSE)
                log.error("worker %d ended with exit code %s", self.index, self.process.exitcode)
                await asyncio.sleep(pause)
            if self.stopping:
                return
            self.process = self._start()
            if await asyncio.to_thread(self.wait):
                log.info("worker %d serves again", self.index)

    async def relay(self, request: Request, send: Send) -> None:
        """Relay a request and its answer; RequestError 503: the process ended, 404: an odd path."""
        url = target(request.scope)
        headers, body = _end_to_end(request.headers.raw), await request.body()
        asked = self.client.build_request(request.method, url, headers=headers, content=body)
        self.open += 1
        try:
            try:
                reply = await self.client.send(asked, stream=True)
            except httpx.TransportError as error:
                raise _ended() from error
            async with aclosing(reply):
                answer = StreamingResponse(_parts(reply), reply.status_code)
                worker = (b"x-worker", str(self.index).encode())
                answer.raw_headers = [*_end_to_end(reply.headers.raw), worker]
                await answer(request.scope, request.receive, send)
        finally:
            self.open -= 1


def target(scope: Scope) -> httpx.URL:
    """Return the URL of a request at a worker, as it was sent; RequestError 404: no worker has such."""
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope["query_string"]
    try:
        return httpx.URL(URL).copy_with(raw_path=path + b"?" * bool(query) + query)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise RequestError(404, NO_PATH, code="not_found") from error


async def _parts(reply: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in reply.aiter_raw():
            yield part
    except httpx.TransportError:
        if not reply.headers.get("content-type", "").startswith("text/event-stream"):
            raise  # a body cut short is no answer: the connection breaks
        yield f"data: {json.dumps(_ended().body)}\n\n".encode()


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to pass on, without those of one connection or that each server writes."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


def _ended() -> RequestError:
    return RequestError(503, ENDED, code="worker_ended", retry_after=1)


def visible_gpus(place: Placement, count: int) -> list[str]:
    """Return `count` names for CUDA_VISIBLE_DEVICES, [] on a CPU; ResourceError: too few GPUs."""
    if torch.device(place.device).type == "cpu":
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    if len(names) < count:
        raise ResourceError(
            f"--data-parallel {count} needs as many GPUs; this machine shows {len(names)}"
        )
    return names[:count]
