"""A server without a model at a Unix socket, for tests of what stands in front of servers."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

registry = CollectorRegistry()
asked = Counter("asked", "Requests.", registry=registry)
left = Counter("left", "Clients that hung up.", registry=registry)


async def health(_: Request) -> Response:
    return JSONResponse({"status": "ok", "running": 0, "waiting": 0})


async def metrics(_: Request) -> Response:
    return Response(generate_latest(registry))


async def answer(_: Request) -> Response:
    asked.inc()
    return JSONResponse({"pid": os.getpid(), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")})


async def dies(_: Request) -> Response:
    os.kill(os.getpid(), signal.SIGKILL)
    return Response()


async def streams(_: Request) -> Response:
    async def parts() -> AsyncGenerator[str]:
        yield "data: begun\n\n"
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    return StreamingResponse(parts(), media_type="text/event-stream")


async def waits(_: Request) -> Response:
    async def parts() -> AsyncGenerator[str]:
        try:
            while True:
                yield "data: begun\n\n"
                await asyncio.sleep(0.05)
        finally:
            left.inc()

    return StreamingResponse(parts(), media_type="text/event-stream")


def serve_at(environment: Mapping[str, str], *given: Any) -> None:
    """Serve at the last argument's path, in the environment that a new process would have got."""
    os.environ.update(environment)
    path: Path = given[-1]
    routes = [Route("/health", health), Route("/metrics", metrics)]
    posts = {"/v1/x": answer, "/dies": dies, "/streams": streams, "/waits": waits}
    routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    uvicorn.run(Starlette(routes=routes), uds=str(path), log_level="error")
