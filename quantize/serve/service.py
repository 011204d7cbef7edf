"""Turns a validated request into jobs, and the jobs' events into an answer or a stream."""

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quantize.errors import InputError
from quantize.runtime import Sampler
from quantize.runtime.engine.interface import Engine
from quantize.runtime.prompt.chat import CLOSE
from quantize.runtime.prompt.images import Images, place
from quantize.runtime.sampler.known_tokens import Given
from quantize.serve import infill, pictures, unsupported
from quantize.serve.answers import Said, Shape
from quantize.serve.budget import Allowance
from quantize.serve.constraint import Constraint
from quantize.serve.exchange import Exchange
from quantize.serve.failures import RequestError, invalid
from quantize.serve.forms import Forms
from quantize.serve.guides import AnswerGuide
from quantize.serve.json_forms import FormError
from quantize.serve.messages import hints, in_order
from quantize.serve.metrics import Metrics
from quantize.serve.options import Options
from quantize.serve.protocol import INT64, ChatRequest, CompletionRequest
from quantize.serve.scheduler import Draft, Job, Scheduler
from quantize.serve.text import Answer, Text

Body = ChatRequest | CompletionRequest

MAX_ENTRIES = 1 << 17  # log-probabilities of a request: all are written at once

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
        # Prompts must not stall the event loop; one thread keeps the tokenizer to itself. A form may
        # take seconds, and so may pictures: only others of the kind wait for them.
        self.encoder = ThreadPoolExecutor(1, "encoder")
        self.picturer = ThreadPoolExecutor(1, "pictures")
        self.former = ThreadPoolExecutor(1, "former")
        self._named: set[str] = set()  # ignored parameters that were logged

    def close(self) -> None:
        """End the threads and the process that prepare requests."""
        self.encoder.shutdown()
        self.picturer.shutdown()
        self.former.shutdown()
        self.forms.close()

    def leave(self) -> None:
        """Refuse waiting jobs; after `shutdown_grace` s, running jobs end with their canvas."""
        # This thread may hold the very lock that draining takes, so another drains.
        threading.Thread(target=self.scheduler.drain).start()
        timer = threading.Timer(self.options.shutdown_grace, self.scheduler.stop)
        timer.daemon = True
        timer.start()

    def _prompts(self, body: Body, counts: Sequence[int]) -> list[list[int]]:
        """Return a request's prompts as token ids; `counts` has the tokens of each picture."""
        if isinstance(body, CompletionRequest):
            asked: Any = body.prompt
            return [self.text.encode(p) if isinstance(p, str) else p for p in asked]
        turns = [message.turn for message in in_order(body.messages)]
        tools = [tool.model_dump(exclude={"function": {"strict"}}) for tool in body.tools]
        prompt = self.text.encode_chat(turns, thinking=body.thinks, tools=tools)
        try:
            return [place(prompt, counts, self.config) if body.pictures else prompt]
        except InputError as error:
            raise invalid(body.pictures[0][0], error, "unsupported_content") from error

    async def answer(self, body: Body, echoes: Mapping[str, str] | None = None) -> Said:
        """Return the answer; RequestError or InputError: refused, or failed and no stream began.

        `echoes` are those of the request (name -> path) if `body` was made from another one.
        """
        prompts = 1 if isinstance(body, ChatRequest) else len(body.prompt)
        self.check_model(body.model)
        ignored = self._ignored(body, body.echoes if echoes is None else echoes)
        exchange = Exchange(self.scheduler, self.options.request_timeout, prompts * body.n)
        async with exchange.in_time():
            loop = asyncio.get_running_loop()
            images = None, ()
            if isinstance(body, ChatRequest) and body.pictures:
                limits = body.image_tokens, self.max_prompt
                images = await pictures.prepared(self.config, body.pictures, *limits, self.picturer)
            asked = await loop.run_in_executor(self.encoder, self._asked, body, *images)
            thread = self.former if body.forms else self.encoder
            length = self.scheduler.engine.canvas_length
            guides = await loop.run_in_executor(thread, self._guides, body, asked)
            jobs = self._jobs(body, asked, guides, exchange)
        exchange.submit(jobs)
        chats = isinstance(body, ChatRequest)
        prompt_tokens = sum(len(job.prompt) for job in jobs[:: body.n])
        shape = Shape(chats, self.options.model_name, self.text, jobs, prompt_tokens)
        shape.ignored = ignored
        headers = {"X-Ignored-Parameters": ", ".join(ignored)} if ignored else {}
        if body.token_limit is not None and (most := asked.room(length)) < body.token_limit:
            headers["X-Max-Tokens"] = str(most)
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

    def _ignored(self, body: Body, echoes: Mapping[str, str]) -> list[str]:
        """Count, log and return the parameters that are ignored; RequestError 400: one is refused."""
        ignored: list[str] = []
        tables = unsupported.NEUTRAL_ONLY, unsupported.IGNORABLE, unsupported.FOREIGN
        given = body.model_dump(include={name for table in tables for name in table})
        if isinstance(body, ChatRequest):
            given |= hints(body.messages)
        elif isinstance(added := given["add_special_tokens"], bool):
            given["add_special_tokens"] = not added
        for name, message, refused in unsupported.asked(given, echoes, strict=self.options.strict):
            if refused:
                param = name if given.get(name) is not None else echoes.get(name, name)
                raise RequestError(400, message, param=param, code="unsupported_parameter")
            if name in ignored:
                continue
            ignored.append(name)
            counted = unsupported.counted(name)
            if counted not in self._named:
                log.warning("ignored: %s", message)
                self._named.add(counted)
            self.scheduler.metrics.ignored.labels(counted).inc()
        return ignored

    @property
    def model(self) -> dict[str, Any]:
        """The served model, as GET /v1/models lists it."""
        model = {"id": self.options.model_name, "object": "model", "created": 0}
        facts = {"fingerprint": self.options.fingerprint, "activations": self.options.activations}
        facts |= {"judged_activations": self.options.judged_activations}
        facts |= {"default_max_tokens": self.sampler.max_new_tokens}
        return model | {"owned_by": "quantize", "max_model_len": self.max_length} | facts

    def check_model(self, name: str) -> None:
        """Raise RequestError 404 unless `name` is that of the served model."""
        if name != (known := self.options.model_name):
            message = f"model {name[:100]!r} is not served here; there is {known!r}"
            raise RequestError(404, message, param="model", code="model_not_found")

    def _asked(self, body: Body, images: Images | None, counts: Sequence[int]) -> "_Prompts":
        """Return what a request asks for, in tokens; RequestError 400: it is too long, or wrong."""
        if sum(counts) > self.max_prompt:
            raise self._too_long(sum(counts), "messages")
        prompts = self._prompts(body, counts)
        length = self.scheduler.engine.canvas_length
        given, before_suffix = infill.known(body, self.text.encode_piece, length)
        if (longest := max(map(len, prompts))) > self.max_prompt:
            raise self._too_long(longest, "messages" if isinstance(body, ChatRequest) else "prompt")
        sampler = body.sampler(self.sampler)
        limit = before_suffix or body.token_limit or sampler.max_new_tokens
        canvases = [min(-(-limit // length), (self.max_length - len(p)) // length) for p in prompts]
        last = max((*given.pinned, *given.initial), default=-1) if given else -1
        if last >= (room := min(canvases) * length):
            reason = f"position {last}, and the answer has {room}; raise max_tokens"
            raise invalid("pinned", reason)
        entries = body.n * sum(min(limit, count * length) for count in canvases)
        if body.top is not None and (entries := entries * (1 + body.top)) > MAX_ENTRIES:
            reason = f"{entries} of all tokens and choices; at most {MAX_ENTRIES} are given"
            raise invalid("logprobs", f"{reason}: lower max_tokens, n, or the number at a token")
        return _Prompts(prompts, canvases, limit, sampler, images, given)

    def _too_long(self, tokens: int, param: str) -> RequestError:
        message = (
            f"the prompt has {tokens} tokens; at most {self.max_prompt} are taken, because prompt and "
            f"answer share {self.max_length}: shorten it, or start the server with more --max-context "
            f"if the model has more"
        )
        return RequestError(400, message, param=param, code="context_length_exceeded")

    def _guides(self, body: Body, asked: "_Prompts") -> list[AnswerGuide | None]:
        """Return the guide of each answer; RequestError 400: no text of the form fits."""
        form, length = self.forms.matcher(body), self.scheduler.engine.canvas_length
        if form is None and body.top is None:
            return [None for _ in range(len(asked.prompts) * body.n)]
        thinks = isinstance(body, ChatRequest) and body.thinks
        closes = self.text.tokenizer.convert_tokens_to_ids(CLOSE) if thinks else None
        guides: list[AnswerGuide | None] = []
        allowance, texts = Allowance(), self.forms.texts(body) if form is not None else []
        for canvases in asked.canvases:
            room = min(asked.limit, canvases * length)
            for _ in range(body.n):
                held = None
                if form is not None:
                    try:
                        held = Constraint(self.forms.grammars, form, room, closes, allowance, texts)
                    except FormError as error:
                        raise invalid(body.forms[0][0], error) from error
                    except InputError as error:
                        raise invalid("max_tokens", error) from error
                guides.append(AnswerGuide(length, held, body.top))
        return guides

    def _jobs(
        self,
        body: Body,
        asked: "_Prompts",
        guides: Sequence[AnswerGuide | None],
        exchange: Exchange,
    ) -> list[Job]:
        seed = secrets.randbits(62) if body.fixed_seed is None else body.fixed_seed
        drafts = body.stream_options is not None and body.stream_options.include_drafts
        empty, param = partial(Answer, self.text.whole), "prompt"
        if isinstance(body, ChatRequest):
            split = partial(self.text.split, calls=bool(body.callable))
            once = not body.parallel_tool_calls
            empty, param = partial(Answer, split, tools=body.callable, one_call=once), "messages"
        stops = [] if any(kind == "calls" for _, kind, _ in body.forms) else list(body.stop)
        jobs: list[Job] = []  # choice j of a request with a seed has the noise of seed + j
        for index, guide in enumerate(guides):
            prompt, canvases = asked.prompts[index // body.n], asked.canvases[index // body.n]
            answer = empty(asked.sampler, asked.limit, canvases, stops)
            noise = (seed + index % body.n + INT64) % (2 * INT64) - INT64
            emit, known = partial(exchange.post, index), asked.given
            if guide is not None:
                known = replace(known or Given(), guide=guide)
            job = Job(
                prompt, noise, asked.sampler, answer, emit, drafts, asked.images, known, guide
            )
            jobs.append(replace(job, param=param))
        return jobs


@dataclass(frozen=True)
class _Prompts:
    """A request in tokens: its prompts, with the most canvases of an answer to each."""

    prompts: list[list[int]]
    canvases: list[int]
    limit: int  # most tokens of an answer
    sampler: Sampler
    images: Images | None
    given: Given | None

    def room(self, length: int) -> int:
        """Return the most tokens that each answer has room for, in canvases of `length` tokens."""
        return min(self.limit, min(self.canvases) * length)
