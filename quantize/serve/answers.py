"""Writes choices as JSON objects of OpenAI's protocol: whole, or as one chunk per canvas.

OpenAI's protocol lacks these fields: `reasoning_content`, beside `content`; the `seed` that reproduces
a choice (streamed, in its last chunk); and of `usage` the counts `canvases`, `denoising_steps` (decoder
forwards of all choices) and `tokens_per_forward`, and the names in `ignored_parameters`. A chunk with a
`draft` has empty `choices`.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from quantize.runtime.prompt.chat import in_thoughts
from quantize.serve.calls import Call
from quantize.serve.guides import Scored
from quantize.serve.scheduler import Draft, Job
from quantize.serve.text import Delta, Text

Json = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """An answer: one JSON object, or the chunks of a stream, whose last chunk may be an error."""

    body: Json | AsyncIterator[Json]
    headers: Mapping[str, str]

    @property
    def response(self) -> Response:
        """Return the HTTP response of a chat or a plain completion: JSON, or server-sent events."""
        if isinstance(self.body, dict):
            return JSONResponse(self.body, headers=self.headers)
        return stream(_lines(self.body), self.headers)


def stream(lines: AsyncIterator[str], headers: Mapping[str, str]) -> Response:
    """Return a response that streams `lines`, the text of server-sent events."""
    fresh = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines, headers={**headers, **fresh}, media_type="text/event-stream")


async def _lines(chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
    chunk: Json = {}
    async for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    if "error" not in chunk:
        yield "data: [DONE]\n\n"


@dataclass
class Shape:
    """Makes the JSON that answers one request: one object, or the chunks of a stream.

    Each of `jobs` makes one choice; `chats` is False for a plain completion. `prompt_tokens` counts
    each prompt once, whatever its number of choices. `include_usage` adds a last chunk with usage.
    """

    chats: bool
    model: str
    text: Text
    jobs: Sequence[Job]
    prompt_tokens: int
    include_usage: bool = False
    ignored: Sequence[str] = ()  # the request's parameters that have no effect
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def whole(self) -> Json:
        """The answer to a request that does not stream."""
        choices = [self._choice(index, job) for index, job in enumerate(self.jobs)]
        return self._frame() | {"choices": choices, "usage": self.usage}

    def _choice(self, index: int, job: Job) -> Json:
        answer = job.answer
        text: Json = {"text": answer.content}
        if self.chats:
            calls = [_call(call) for call in answer.calls]
            said = None if calls and not answer.content else answer.content
            message = {"role": "assistant", "content": said, "refusal": None}
            message |= {"reasoning_content": answer.reasoning or None, "tool_calls": calls or None}
            text = {"message": message}
        return self._about(index, (0, answer.covered)) | text | {"seed": job.seed}

    def opening(self, index: int) -> Json:
        """Return the chunk that opens choice `index` of a chat."""
        choice = {"index": index, "finish_reason": None, "logprobs": None}
        return self._chunk(choice | {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, index: int, delta: Delta) -> Json:
        """Return the chunk with what a canvas added to choice `index`."""
        text: Json = {"text": delta.content}
        if self.chats:
            calls = [{"index": n} | _call(call) for n, call in enumerate(delta.calls, delta.called)]
            fields = {"reasoning_content": delta.reasoning, "content": delta.content}
            fields |= {"tool_calls": calls}
            text = {"delta": {name: piece for name, piece in fields.items() if piece}}
        about = self._about(index, delta.span)
        if delta.finish is None:
            return self._chunk(about | text | {"finish_reason": None})
        return self._chunk(about | text | {"seed": self.jobs[index].seed})

    def draft(self, index: int, draft: Draft) -> Json:
        """Return the chunk that shows a canvas after a denoising step; clients may ignore it."""
        tokens = [self.text.piece(token) for token in draft.tokens]
        shown = {"index": index, "canvas": draft.canvas, "step": draft.step}
        return self._chunk() | {"draft": shown | {"tokens": tokens, "accepted": draft.accepted}}

    def ending(self) -> Json:
        """Return the last chunk of a stream with `include_usage`: usage, and no choices."""
        return self._chunk() | {"usage": self.usage}

    @property
    def usage(self) -> Json:
        """The request's numbers of tokens, canvases and denoising steps, over all its choices."""
        answers = [job.answer for job in self.jobs]
        tokens = sum(answer.tokens for answer in answers)
        steps = sum(answer.sample.denoising_steps for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "completion_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": self.prompt_tokens + tokens,
            "canvases": sum(answer.sample.canvases for answer in answers),
            "denoising_steps": steps,
            "tokens_per_forward": round(tokens / steps, 3),
            "ignored_parameters": list(self.ignored),
        }

    @property
    def _thought_tokens(self) -> int:
        """Tokens of the thinking channel and its markers; a plain completion's are its text."""
        answers = [job.answer for job in self.jobs if self.chats]
        kept = (answer.sample.tokens[: answer.max_tokens] for answer in answers)
        return sum(sum(in_thoughts(self.text.tokenizer, tokens)) for tokens in kept)

    def _chunk(self, *choices: Json) -> Json:
        usage = {"usage": None} if self.include_usage else {}
        return self._frame(".chunk") | {"choices": choices} | usage

    def _frame(self, part: str = "") -> Json:
        prefix = "chatcmpl" if self.chats else "cmpl"
        name = f"chat.completion{part}" if self.chats else "text_completion"
        frame = {"id": f"{prefix}-{self.id}", "object": name}
        return frame | {"created": self.created, "model": self.model}

    def _about(self, index: int, span: tuple[int, int]) -> Json:
        job = self.jobs[index]
        chances = None
        if job.guide is not None and job.guide.top is not None:
            of = _of_chat if self.chats else _of_text
            chances = of(job.guide.scored[: span[1]], span[0], self.text)
        called = job.answer.calls and job.answer.finish == "stop"
        reason = "tool_calls" if called else job.answer.finish
        return {"index": index, "finish_reason": reason, "logprobs": chances}


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _of_chat(scored: Sequence[Scored], start: int, text: Text) -> Json:
    thought = in_thoughts(text.tokenizer, [entry.token for entry in scored])
    content = [
        _token(text, entry.token, entry.logprob)
        | {"top_logprobs": [_token(text, token, chance) for token, chance in entry.top]}
        for entry, inside in zip(scored[start:], thought[start:], strict=True)
        if not inside
    ]
    return {"content": content, "refusal": None}


def _token(text: Text, token: int, logprob: float) -> Json:
    piece, data = text.spelled(token)
    return {"token": piece, "logprob": logprob, "bytes": data}


def _of_text(scored: Sequence[Scored], start: int, text: Text) -> Json:
    pieces = [text.piece(entry.token) for entry in scored]
    entries = scored[start:]
    return {
        "tokens": pieces[start:],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{text.piece(t): chance for t, chance in entry.top} for entry in entries],
        "text_offset": list(accumulate(map(len, pieces), initial=0))[start:-1],
    }
