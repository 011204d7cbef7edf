"""The routes: a validated request becomes jobs, and their events an answer or a stream."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)

from quantize import __version__
from quantize.errors import InputError
from quantize.runtime import Sampler
from quantize.runtime.chat import CLOSE
from quantize.runtime.images import Images
from quantize.runtime.known_tokens import Given
from quantize.serve import docs, infill, unsupported
from quantize.serve.answers import Shape, usage
from quantize.serve.constraint import Constraint, Matcher
from quantize.serve.exchange import Exchange
from quantize.serve.failures import RequestError, from_validation
from quantize.serve.forms import Forms
from quantize.serve.guard import Guard
from quantize.serve.guides import AnswerGuide
from quantize.serve.metrics import Metrics
from quantize.serve.options import Options
from quantize.serve.pictures import Pictures
from quantize.serve.protocol import ChatRequest, CompletionRequest
from quantize.serve.response_events import translated
from quantize.serve.responses import ResponsesRequest
from quantize.serve.scheduler import Draft, Job, Scheduler
from quantize.serve.schemas import (
    ASKED,
    REFUSED,
    ChatCompletion,
    Health,
    Model,
    Models,
    TextCompletion,
    Version,
    streamed,
)
from quantize.serve.text import Answer, Text

STATIC = Path(__file__).parent / "static"
INT64 = 2**63

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A request, turned into tokens.

    Attributes:
        prompts: token ids.
        images: images of its only prompt.
        given: the known tokens of each answer.
        limit: tokens of an answer before its suffix; None where there is none.
        form: matcher that holds each answer to its form; None for any text.
    """

    prompts: list[list[int]]
    images: Images | None
    given: Given | None
    limit: int | None
    form: Matcher | None


Encode = Callable[[], Prepared]


class Service:
    """Answers requests with one model.

    Args:
        scheduler: runs jobs.
        text: the model's tokenizer.
        pictures: turns pictures into the vision tower's input.
        sampler: the model's settings, which a request may change for itself.
        options: the server's limits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        text: Text,
        pictures: Pictures,
        sampler: Sampler,
        options: Options,
    ) -> None:
        self.scheduler = scheduler
        self.text = text
        self.pictures = pictures
        self.sampler = sampler
        self.options = options
        self.forms = Forms(text.tokenizer, sampler.eos_token_ids)
        engine = scheduler.engine
        limits = (engine.max_length, sampler.max_length, options.max_context)
        self.max_length = min(limit for limit in limits if limit is not None)
        room = self.max_length - engine.canvas_length
        self.max_prompt = min(options.max_prompt_tokens or room, room)
        # Long prompts must not stall the event loop, and one thread keeps the tokenizer to itself.
        # Requests wait for it here, not in the pool's queue, so that they may give up.
        self.encoder = ThreadPoolExecutor(1, "encoder")
        self._turn = asyncio.Lock()
        self._named: set[str] = set()  # ignored parameters that were logged

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        turns = [message.turn for message in body.messages]
        tools = [tool.declaration for tool in body.tools]
        thinking = body.thinking

        def encode() -> Prepared:
            prompt = self.text.encode_chat(turns, thinking=thinking, tools=tools)
            prompt, images = self.pictures.put(prompt, body.pictures, body.image_tokens)
            return Prepared([prompt], images, *self._known(body), self.forms.matcher(body))

        return await self._answer(body, encode, 1, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer a plain completion."""

        def encode() -> Prepared:
            asked: Any = body.prompt
            prompts = [self.text.encode(p) if isinstance(p, str) else p for p in asked]
            return Prepared(prompts, None, *self._known(body), self.forms.matcher(body))

        return await self._answer(body, encode, len(body.prompt), request)

    def _known(self, body: ChatRequest | CompletionRequest) -> tuple[Given | None, int | None]:
        return infill.known(body, self.text.encode_piece, self.scheduler.engine.canvas_length)

    async def _encode(self, encode: Encode) -> Prepared:
        """Prepare a request when its turn comes; a request that gives up delays no other."""
        await self._turn.acquire()
        work = asyncio.get_running_loop().run_in_executor(self.encoder, encode)
        work.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(work)  # a thread cannot be stopped: its turn lasts with it

    async def _answer(
        self, body: ChatRequest | CompletionRequest, encode: Encode, prompts: int, request: Request
    ) -> Response:
        self.check_model(body.model)
        ignored = self._ignored(body)
        count = prompts * body.n
        exchange = Exchange(self.scheduler, request, self.options.request_timeout, count)
        try:
            prepared = await exchange.prepare(self._encode(encode))
            self._check_length(body, prepared.prompts)
            exchange.submit(self._jobs(body, prepared, exchange))
        except BaseException:
            exchange.close()
            raise
        reply = await self._reply(body, exchange, prepared.prompts)
        if ignored:
            reply.headers["X-Ignored-Parameters"] = ", ".join(ignored)
        return reply

    def _ignored(self, body: ChatRequest | CompletionRequest) -> list[str]:
        """Return the parameters of a request that are ignored; each is counted, and logged once.

        Raises:
            RequestError: 400, this server does not ignore a parameter.
        """
        names = unsupported.NEUTRAL_ONLY | unsupported.IGNORABLE
        ignored = unsupported.asked(body.model_dump(include=set(names)))
        for name in ignored:
            message, refused = unsupported.why_not(name, strict=self.options.strict)
            if refused:
                raise RequestError(400, message, param=name, code="unsupported_parameter")
            if name not in self._named:
                log.warning("ignored: %s", message)
        self._named.update(ignored)
        self.scheduler.metrics.ignore(ignored)
        return ignored

    async def _reply(
        self,
        body: ChatRequest | CompletionRequest,
        exchange: Exchange,
        prompts: Sequence[Sequence[int]],
    ) -> Response:
        kind = "chat" if isinstance(body, ChatRequest) else "text"
        shape = Shape(kind, self.options.model_name, self.text)
        prompt_tokens = sum(map(len, prompts))
        if body.stream:
            return await self._stream(body, exchange, shape, prompt_tokens)
        async for _ in exchange.events():
            pass
        self._log(prompts, exchange.jobs)
        return JSONResponse(shape.whole(exchange.jobs, usage(prompt_tokens, exchange.jobs)))

    @property
    def model(self) -> dict[str, Any]:
        """Return the one model, as the protocol lists it."""
        model = {"id": self.options.model_name, "object": "model", "created": 0}
        told = {"fingerprint": self.options.fingerprint, "activations": self.options.activations}
        return model | {"owned_by": "quantize", "max_model_len": self.max_length} | told

    def check_model(self, name: str) -> None:
        """Refuse, with a 404, any name but the model's."""
        if name != (known := self.options.model_name):
            message = f"model {name[:100]!r} is not served here; there is {known!r}"
            raise RequestError(404, message, param="model", code="model_not_found")

    def _check_length(
        self, body: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]]
    ) -> None:
        for prompt in prompts:
            if len(prompt) > self.max_prompt:
                raise RequestError(
                    400,
                    f"the prompt has {len(prompt)} tokens; at most {self.max_prompt} are taken",
                    param="messages" if isinstance(body, ChatRequest) else "prompt",
                    code="context_length_exceeded",
                )

    def _jobs(
        self,
        body: ChatRequest | CompletionRequest,
        prepared: Prepared,
        exchange: Exchange,
    ) -> list[Job]:
        """Return one job a choice: choice j of a request with a seed has the noise of seed + j."""
        sampler = body.sampler(self.sampler)
        seed = secrets.randbits(62) if body.fixed_seed is None else body.fixed_seed
        drafts = body.stream_options is not None and body.stream_options.include_drafts
        jobs: list[Job] = []
        length, given = self.scheduler.engine.canvas_length, prepared.given
        limit = prepared.limit or body.token_limit or sampler.max_new_tokens
        for prompt in prepared.prompts:
            canvases = min(-(-limit // length), (self.max_length - len(prompt)) // length)
            infill.check_room(given, canvases * length)
            for choice in range(body.n):
                answer = self._empty(body, sampler, limit, canvases)
                noise = (seed + choice + INT64) % (2 * INT64) - INT64
                emit = _emitter(exchange, len(jobs))
                images = prepared.images
                guide = self._guide(body, prepared, min(limit, canvases * length))
                known = given if guide is None else replace(given or Given(), guide=guide)
                jobs.append(Job(prompt, noise, sampler, answer, emit, drafts, images, known, guide))
        return jobs

    def _guide(
        self, body: ChatRequest | CompletionRequest, prepared: Prepared, room: int
    ) -> AnswerGuide | None:
        """Return the guide of an answer of `room` tokens, None without a form and log-probabilities.

        Raises:
            RequestError: 400, no text of the form fits into `room`.
        """
        if prepared.form is None and body.top is None:
            return None
        constraint = None
        if prepared.form is not None:
            thinks = isinstance(body, ChatRequest) and body.thinking
            closes = self.text.tokenizer.convert_tokens_to_ids(CLOSE) if thinks else None
            try:
                constraint = Constraint(self.forms.grammars, prepared.form, room, closes)
            except InputError as error:
                message = f"max_tokens: {error}"
                raise RequestError(
                    400, message, param="max_tokens", code="invalid_value"
                ) from error
        return AnswerGuide(self.scheduler.engine.canvas_length, constraint, body.top)

    def _empty(
        self, body: ChatRequest | CompletionRequest, sampler: Sampler, limit: int, canvases: int
    ) -> Answer:
        """Return an empty answer, which its canvases will fill."""
        limits = (sampler, limit, canvases, list(body.stop))
        if isinstance(body, CompletionRequest):
            return Answer(self.text.whole, *limits)
        split = self.text.split_calls if body.callable else self.text.split
        return Answer(split, *limits, body.callable, not body.parallel_tool_calls)

    async def _stream(
        self,
        body: ChatRequest | CompletionRequest,
        exchange: Exchange,
        shape: Shape,
        prompt_tokens: int,
    ) -> Response:
        """Return a stream once its first event has come; a refusal before that has its own status."""
        shape.include_usage = body.stream_options is not None and body.stream_options.include_usage
        events = exchange.events()
        first = await anext(events)

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            if shape.kind == "chat":
                for index in range(len(exchange.jobs)):
                    yield shape.opening(index)
            async for index, event in _chain(first, events):
                if isinstance(event, Draft):
                    yield shape.draft(index, event)
                else:
                    yield shape.chunk(index, event, exchange.jobs[index])
            if shape.include_usage:
                yield shape.ending(usage(prompt_tokens, exchange.jobs))

        async def lines() -> AsyncIterator[str]:
            try:
                async for chunk in chunks():
                    yield _line(chunk)
                yield "data: [DONE]\n\n"
                self._log([job.prompt for job in exchange.jobs], exchange.jobs)
            except RequestError as refusal:
                yield _line(refusal.body)
            finally:
                exchange.close()

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(lines(), headers=headers, media_type="text/event-stream")

    def _log(self, prompts: Sequence[Sequence[int]], jobs: Sequence[Job]) -> None:
        if self.options.log_prompts:
            asked = [self.text.tokenizer.decode(list(prompt)) for prompt in prompts]
            log.info("%s", json.dumps([asked, [job.answer.content for job in jobs]]))


def _emitter(exchange: Exchange, index: int) -> Any:
    return lambda event: exchange.post(index, event)


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for event in rest:
        yield event


def _line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def create_app(service: Service, metrics: Metrics) -> Guard:
    """Return the application: routes behind their guard."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.scheduler.start()
        yield
        service.scheduler.stop()
        service.encoder.shutdown()

    app = FastAPI(
        title="quantize serve",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    _add_answers(app, service)
    _add_pages(app, service, metrics)
    _add_failures(app)
    return Guard(app, service.options, metrics)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=streamed("chunks of OpenAI's chat.completion.chunk"),
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat; with `stream` as server-sent events, one delta for each finished canvas."""
        return await service.chat(body, request)

    @app.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses=streamed("chunks in the shape of the answer"),
    )
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue text or tokens, without a chat template."""
        return await service.complete(body, request)

    @app.post("/v1/responses", responses=streamed("events of OpenAI's Responses API"))
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Answer a chat in the shape of the Responses API; nothing is stored."""
        return translated(body, await service.chat(body.chat, request))

    @app.get("/v1/models", response_model=Models, responses=ASKED)
    async def models() -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [service.model]})

    @app.get("/v1/models/{name:path}", response_model=Model, responses=ASKED | {404: REFUSED[404]})
    async def model(name: str) -> Response:
        """Describe the one model."""
        service.check_model(name)
        return JSONResponse(service.model)


def _add_pages(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/version", response_model=Version, responses=ASKED)
    async def version() -> Response:
        """Name the version of this server."""
        return JSONResponse({"version": __version__})

    @app.get(
        "/health", response_model=Health, responses={403: REFUSED[403], 503: {"model": Health}}
    )
    async def health() -> Response:
        """Return whether new requests are taken, and how many run and wait."""
        running, waiting = service.scheduler.load
        healthy, needs_key = service.scheduler.healthy, service.options.api_key is not None
        state = {"status": "ok" if healthy else "unavailable"}
        return JSONResponse(
            state | {"running": running, "waiting": waiting, "key_required": needs_key},
            200 if healthy else 503,
        )

    @app.get("/metrics", response_class=PlainTextResponse, responses=ASKED)
    async def metrics_page() -> Response:
        """Return the counters in Prometheus' text format."""
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> HTMLResponse:
        return HTMLResponse(docs.page(app.openapi()))

    for path, name in (
        ("/", "index.html"),
        ("/page.js", "page.js"),
        ("/page.css", "page.css"),
        ("/icon.svg", "icon.svg"),
    ):
        app.add_api_route(
            path, lambda name=name: FileResponse(STATIC / name), include_in_schema=False
        )


def _add_failures(app: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        match error:
            case RequestError():
                refusal = error
            case RequestValidationError():
                refusal = from_validation(error.errors())
            case InputError():
                refusal = RequestError(400, str(error), code="invalid_value")
            case HTTPException():
                refusal = RequestError(error.status_code, str(error.detail))
                refusal.headers |= dict(error.headers or {})
            case _:
                message = "an error of the server; see its log"
                refusal = RequestError(500, message, code="internal_error")
        return refusal.response

    for kind in (RequestError, RequestValidationError, InputError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
