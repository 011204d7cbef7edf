"""The server's HTTP routes, and the refusal that answers each kind of error."""

import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, select_autoescape
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from quantize import __version__
from quantize.errors import InputError
from quantize.serve import schemas
from quantize.serve.failures import NO_PATH, RequestError, from_validation, invalid, written
from quantize.serve.guard import guarded
from quantize.serve.protocol import ChatRequest, CompletionRequest
from quantize.serve.response_events import GrowingResponse
from quantize.serve.responses import ResponsesRequest
from quantize.serve.service import Service

STATIC = Path(__file__).parent / "static"
SAID = {  # HTTP status -> (message, code), in place of Starlette's own words
    400: ("the body cannot be read as JSON", "invalid_body"),
    404: (NO_PATH, "not_found"),
}


def page(schema: dict[str, Any]) -> str:
    """Return an OpenAPI schema as one HTML page, which loads nothing from other servers."""
    environment = Environment(autoescape=select_autoescape(default=True), trim_blocks=True)
    template = environment.from_string((STATIC / "docs.html.jinja").read_text("utf-8"))

    def refs(kind: dict[str, Any]) -> list[str]:  # names of objects that a field refers to
        return sorted(set(re.findall(r"#/components/schemas/(\w+)", json.dumps(kind))))

    def brief(kind: dict[str, Any]) -> str:
        return json.dumps({k: v for k, v in kind.items() if k not in ("title", "description")})

    return template.render(schema, refs=refs, brief=brief)


class _Body(Request):
    async def json(self) -> Any:
        """Return the body as Python reads it; RequestError 400: an object of it has a key twice."""
        doubled = list[tuple[dict[str, Any], str]]()

        def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            value = dict(pairs)
            if len(value) < len(pairs):
                names = [name for name, _ in pairs]
                doubled.append((value, next(n for n in names if names.count(n) > 1)))
            return value

        value = json.loads(await self.body(), object_pairs_hook=made)
        if doubled:  # the last one is in no other that lost it
            place = written((*_path_to(doubled[-1][0], value), doubled[-1][1]))
            raise invalid(place, "this key stands twice in one object; leave one out")
        return value


def _path_to(target: Any, value: Any) -> tuple[str | int, ...]:
    """Return the path to an object within a value of JSON, the empty one if it is not there."""
    todo = [(value, ())]
    for inner, path in todo:
        if inner is target:
            return path
        parts = inner.items() if isinstance(inner, dict) else enumerate(inner)
        todo += [(part, (*path, step)) for step, part in parts if isinstance(part, (dict, list))]
    return ()


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handle(_Body(request.scope, request.receive))

        return handled


def create_app(service: Service) -> ASGIApp:
    """Return the ASGI app, all routes in the guard; its lifespan starts and stops the scheduler."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.forms.warm_up()
        service.scheduler.start()
        yield
        service.scheduler.stop()
        service.close()

    pages: Any = {"docs_url": None, "redoc_url": None}  # FastAPI's load scripts from a CDN
    app = FastAPI(title="quantize serve", version=__version__, lifespan=lifespan, **pages)
    app.router.route_class = _Route
    _add_answers(app, service)
    _add_pages(app, service)
    _add_failures(app)
    return guarded(app, service.options, service.scheduler.metrics)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        response_model=schemas.ChatCompletion,
        responses=schemas.streamed("a chat.completion.chunk per canvas, then [DONE]"),
    )
    async def chat(body: ChatRequest) -> Response:
        """Answer a chat; with `stream`, send server-sent events: one delta per finished canvas."""
        return (await service.answer(body)).response

    @app.post(
        "/v1/completions",
        response_model=schemas.TextCompletion,
        responses=schemas.streamed("a chunk shaped as the answer per canvas, then [DONE]"),
    )
    async def complete(body: CompletionRequest) -> Response:
        """Continue a prompt of text or token ids; no chat template is applied."""
        return (await service.answer(body)).response

    @app.post("/v1/responses", responses=schemas.streamed("events of OpenAI's Responses API"))
    async def respond(body: ResponsesRequest) -> Response:
        """Answer a chat in the format of OpenAI's Responses API; nothing is stored."""
        try:
            return GrowingResponse(body).of(await service.answer(body.chat, body.echoes))
        except RequestError as refusal:
            raise body.as_written(refusal) from refusal

    @app.get("/v1/models", response_model=schemas.Models, responses=schemas.ASKED)
    async def models() -> Response:
        """List the models that this server serves: there is one."""
        return JSONResponse({"object": "list", "data": [service.model]})

    @app.get(
        "/v1/models/{name:path}",
        response_model=schemas.Model,
        responses=schemas.ASKED | {404: schemas.REFUSED[404]},
    )
    async def model(name: str) -> Response:
        """Describe the served model; any other name ends with 404."""
        service.check_model(name)
        return JSONResponse(service.model)


def _add_pages(app: FastAPI, service: Service) -> None:
    @app.get("/version", response_model=schemas.Version, responses=schemas.ASKED)
    async def version() -> Response:
        """Return the version of this server."""
        return JSONResponse({"version": __version__})

    @app.get(
        "/health",
        response_model=schemas.Health,
        responses={403: schemas.REFUSED[403], 503: {"model": schemas.Health}},
    )
    async def health() -> Response:
        """Return the server's health, how many samples run and wait, and whether it needs a key."""
        running, waiting = service.scheduler.load
        healthy, needs_key = service.scheduler.healthy, service.options.api_key is not None
        state = {"status": "ok" if healthy else "unavailable"}
        return JSONResponse(
            state | {"running": running, "waiting": waiting, "key_required": needs_key},
            200 if healthy else 503,
        )

    @app.get("/metrics", response_class=PlainTextResponse, responses=schemas.ASKED)
    async def metrics_page() -> Response:
        """Return the server's metrics in Prometheus' text format."""
        page = generate_latest(service.scheduler.metrics.registry)
        return Response(page, media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return Response(page(app.openapi()), media_type="text/html")

    for path in ("/", "/page.js", "/page.css", "/icon.svg"):
        file = STATIC / (path[1:] or "index.html")
        app.add_api_route(path, lambda file=file: FileResponse(file), include_in_schema=False)


def _add_failures(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        match error:
            case RequestError():
                refusal = error
            case RequestValidationError():
                refusal = from_validation(error.errors(), error.body)
            case InputError():
                refusal = RequestError(400, str(error), code="invalid_value")
            case HTTPException(__cause__=RequestError() as cause):  # of a body that was read
                refusal = cause
            case HTTPException():
                headers = dict(error.headers or {})
                use = f"{request.method} is not answered at this path; use {headers.get('Allow')}"
                said = SAID | {405: (use, "method_not_allowed")}
                message, code = said.get(error.status_code, (error.detail, None))
                refusal = RequestError(error.status_code, message, code=code)
                refusal.headers |= headers
            case _:
                message = "an error of the server; see its log"
                refusal = RequestError(500, message, code="internal_error")
        return refusal.response

    for kind in (RequestError, RequestValidationError, InputError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
