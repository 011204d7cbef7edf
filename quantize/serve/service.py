"""Turns a validated request into jobs, and the jobs' events into an answer or a stream."""

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from quantize.errors import InputError
from quantize.runtime import Sampler
from quantize.runtime.engine.interface import Engine
from quantize.runtime.prompt.chat import CLOSE
from quantize.runtime.prompt.images import Images
from quantize.runtime.sampler.known_tokens import Given
from quantize.serve import infill, pictures, unsupported
from quantize.serve.answers import Said, Shape
from quantize.serve.constraint import Constraint, Matcher
from quantize.serve.exchange import Exchange
from quantize.serve.failures import RequestError, invalid
from quantize.serve.forms import Forms
from quantize.serve.guides import AnswerGuide
from quantize.serve.messages import hints
from quantize.serve.metrics import Metrics
from quantize.serve.options import Options
from quantize.serve.protocol import INT64, ChatRequest, CompletionRequest
from quantize.serve.scheduler import Draft, Job, Scheduler
from quantize.serve.text import Answer, Text

Body = ChatRequest | CompletionRequest

log = logging.getLogger(__name__)


class Service:
    """Answers requests with one model; `sampler` has the defaults for settings that a request omits.

    `config` is transformers' configuration of the model.
    """

    def __init__(
        self, engine: Engine, text: Text, config: Any, sampler: Sampler, options: Options
    ) -> None:
        metrics = Metrics()
        metrics.watch(engine.prefixes, engine.device)
        self.scheduler = Scheduler(engine, max_queue=options.max_queue, metrics=metrics)
        self.text, self.config, self.sampler, self.options = text, config, sampler, options
        self.forms = Forms(text.tokenizer, sampler.eos_token_ids)
        limits = (engine.max_length, sampler.max_length, options.max_context)
        self.max_length = min(limit for limit in limits if limit is not None)
        self.max_prompt = self.max_length - engine.canvas_length
        # Prompts and forms must not stall the event loop; one thread keeps the tokenizer to itself.
        self.encoder = ThreadPoolExecutor(1, "encoder")
        self._named: set[str] = set()  # ignored parameters that were logged

    def leave(self) -> None:
        """Refuse waiting jobs; after `shutdown_grace` s, running jobs end with their canvas."""
        # This thread may hold the very lock that draining takes, so another drains.
        threading.Thread(target=self.scheduler.drain).start()
        timer = threading.Timer(self.options.shutdown_grace, self.scheduler.stop)
        timer.daemon = True
        timer.start()

    def _prompts(self, body: Body) -> tuple[list[list[int]], Images | None]:
        """Return a request's prompts as token ids, and a chat's pictures or None."""
        if isinstance(body, CompletionRequest):
            asked: Any = body.prompt
            return [self.text.encode(p) if isinstance(p, str) else p for p in asked], None
        turns = [message.turn for message in body.messages]
        tools = [tool.model_dump(exclude={"function": {"strict"}}) for tool in body.tools]
        prompt = self.text.encode_chat(turns, thinking=body.thinking, tools=tools)
        prompt, images = pictures.put(self.config, prompt, body.pictures, body.image_tokens)
        return [prompt], images

    async def answer(self, body: Body) -> Said:
        """Return the answer; RequestError or InputError: refused, or failed and no stream began."""
        prompts = 1 if isinstance(body, ChatRequest) else len(body.prompt)
        self.check_model(body.model)
        ignored = self._ignored(body)
        exchange = Exchange(self.scheduler, self.options.request_timeout, prompts * body.n)
        async with exchange.in_time():
            loop = asyncio.get_running_loop()
            jobs = await loop.run_in_executor(self.encoder, self._jobs, body, exchange)
        exchange.submit(jobs)
        chats = isinstance(body, ChatRequest)
        prompt_tokens = sum(len(job.prompt) for job in jobs[:: body.n])
        shape = Shape(chats, self.options.model_name, self.text, jobs, prompt_tokens)
        headers = {"X-Ignored-Parameters": ", ".join(ignored)} if ignored else {}
        if body.stream:
            options = body.stream_options
            shape.include_usage = options is not None and options.include_usage
            events = exchange.events()
            first = await anext(events)  # a refusal before it has a status of its own
            return Said(self._chunks(shape, first, events), headers)
        async for _ in exchange.events():
            pass
        return Said(shape.whole, headers)

    async def _chunks(
        self, shape: Shape, first: Any, events: AsyncIterator[Any]
    ) -> AsyncIterator[dict[str, Any]]:
        for index in range(len(shape.jobs)) if shape.chats else ():
            yield shape.opening(index)
        try:
            while first is not None:
                make = shape.draft if isinstance(first[1], Draft) else shape.chunk
                yield make(*first)
                first = await anext(events, None)
            if shape.include_usage:
                yield shape.ending()
        except RequestError as refusal:
            yield refusal.body

    def _ignored(self, body: Body) -> list[str]:
        """Count, log and return the parameters that are ignored; RequestError 400: one is refused."""
        ignored: list[str] = []
        given = body.model_dump(include={*unsupported.NEUTRAL_ONLY, *unsupported.IGNORABLE})
        given |= hints(body.messages) if isinstance(body, ChatRequest) else {}
        for name, message, refused in unsupported.asked(given, strict=self.options.strict):
            if refused:
                raise RequestError(400, message, param=name, code="unsupported_parameter")
            if name not in self._named:
                log.warning("ignored: %s", message)
            ignored.append(name)
            self.scheduler.metrics.ignored.labels(name).inc()
        self._named.update(ignored)
        return ignored

    @property
    def model(self) -> dict[str, Any]:
        """The served model, as GET /v1/models lists it."""
        model = {"id": self.options.model_name, "object": "model", "created": 0}
        told = {"fingerprint": self.options.fingerprint, "activations": self.options.activations}
        return model | {"owned_by": "quantize", "max_model_len": self.max_length} | told

    def check_model(self, name: str) -> None:
        """Raise RequestError 404 unless `name` is that of the served model."""
        if name != (known := self.options.model_name):
            message = f"model {name[:100]!r} is not served here; there is {known!r}"
            raise RequestError(404, message, param="model", code="model_not_found")

    def _jobs(self, body: Body, exchange: Exchange) -> list[Job]:
        prompts, images = self._prompts(body)
        length = self.scheduler.engine.canvas_length
        given, before_suffix = infill.known(body, self.text.encode_piece, length)
        form = self.forms.matcher(body)
        if (longest := max(map(len, prompts))) > self.max_prompt:
            message = f"the prompt has {longest} tokens; at most {self.max_prompt} are taken"
            param = "messages" if isinstance(body, ChatRequest) else "prompt"
            raise RequestError(400, message, param=param, code="context_length_exceeded")
        sampler = body.sampler(self.sampler)
        seed = secrets.randbits(62) if body.fixed_seed is None else body.fixed_seed
        drafts = body.stream_options is not None and body.stream_options.include_drafts
        empty = partial(Answer, self.text.whole)
        if isinstance(body, ChatRequest):
            split = partial(self.text.split, calls=bool(body.callable))
            once = not body.parallel_tool_calls
            empty = partial(Answer, split, tools=body.callable, one_call=once)
        stops = [] if any(kind == "calls" for _, kind, _ in body.forms) else list(body.stop)
        jobs: list[Job] = []  # choice j of a request with a seed has the noise of seed + j
        limit = before_suffix or body.token_limit or sampler.max_new_tokens
        for prompt in prompts:
            canvases = min(-(-limit // length), (self.max_length - len(prompt)) // length)
            last = max((*given.pinned, *given.initial), default=-1) if given else -1
            room = canvases * length
            if last >= room:
                reason = f"position {last}, and the answer has {room}; raise max_tokens"
                raise invalid("pinned", reason)
            for choice in range(body.n):
                answer = empty(sampler, limit, canvases, stops)
                noise = (seed + choice + INT64) % (2 * INT64) - INT64
                emit = partial(exchange.post, len(jobs))
                guide = self._guide(body, form, min(limit, room))
                known = given if guide is None else replace(given or Given(), guide=guide)
                jobs.append(Job(prompt, noise, sampler, answer, emit, drafts, images, known, guide))
        return jobs

    def _guide(self, body: Body, form: Matcher | None, room: int) -> AnswerGuide | None:
        if form is None and body.top is None:
            return None
        constraint = None
        if form is not None:
            thinks = isinstance(body, ChatRequest) and body.thinking
            closes = self.text.tokenizer.convert_tokens_to_ids(CLOSE) if thinks else None
            try:
                constraint = Constraint(self.forms.grammars, form, room, closes)
            except InputError as error:
                raise invalid("max_tokens", error) from error
        return AnswerGuide(self.scheduler.engine.canvas_length, constraint, body.top)
