"""Puts finished choices and pieces of them into the shapes of OpenAI's protocol.

Extra fields: `reasoning_content` beside `content`; in `usage` the decoder forwards of all canvases
(`denoising_steps`) and `tokens_per_forward`; `seed` of each choice, so that it can be made again;
and, for streams that ask for drafts, chunks without choices that hold a `draft`.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quantize.serve.calls import Call
from quantize.serve.logprobs import SHAPES
from quantize.serve.scheduler import Draft, Job
from quantize.serve.text import Delta, Text

Kind = Literal["chat", "text"]
NAMES = {"chat": "chat.completion", "text": "text_completion"}
PREFIXES = {"chat": "chatcmpl", "text": "cmpl"}


@dataclass
class Shape:
    """Makes the answers of one request.

    Attributes:
        kind: chat, or plain completion.
        model: name of the model.
        text: the tokenizer.
        include_usage: whether a stream ends with the usage.
    """

    kind: Kind
    model: str
    text: Text
    include_usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, jobs: Sequence[Job], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        choices = [self._choice(index, job) for index, job in enumerate(jobs)]
        return self._frame(NAMES[self.kind]) | {"choices": choices, "usage": usage}

    def _choice(self, index: int, job: Job) -> dict[str, Any]:
        answer = job.answer
        text: dict[str, Any] = {"text": answer.content}
        if self.kind == "chat":
            calls = [_call(call) for call in answer.calls]
            said = None if calls and not answer.content else answer.content
            message = {"role": "assistant", "content": said, "refusal": None}
            message |= {"reasoning_content": answer.reasoning or None, "tool_calls": calls or None}
            text = {"message": message}
        chances = self._chances(job, (0, answer.told))
        return self._ending(index, _reason(job)) | chances | text | {"seed": job.seed}

    def opening(self, index: int) -> dict[str, Any]:
        """Return the chunk that opens a choice of a chat."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def chunk(self, index: int, delta: Delta, job: Job) -> dict[str, Any]:
        """Return the chunk with what a canvas added."""
        text: dict[str, Any] = {"text": delta.content}
        if self.kind == "chat":
            pieces = {"reasoning_content": delta.reasoning, "content": delta.content}
            calls = [{"index": n} | _call(call) for n, call in enumerate(delta.calls, delta.called)]
            found = pieces | {"tool_calls": calls}
            text = {"delta": {name: piece for name, piece in found.items() if piece}}
        if delta.finish:
            text["seed"] = job.seed
        text |= self._chances(job, delta.span)
        return self._chunk(index, text, _reason(job) if delta.finish else None)

    def _chances(self, job: Job, span: tuple[int, int]) -> dict[str, Any]:
        """Return the log-probabilities of the answer's tokens in `span`, if they were asked for."""
        if job.guide is None or not job.guide.records:
            return {}
        return {"logprobs": SHAPES[self.kind](job.guide.scored[: span[1]], span[0], self.text)}

    def draft(self, index: int, draft: Draft) -> dict[str, Any]:
        """Return the chunk of a canvas in the middle of denoising; clients may ignore it."""
        shown = {
            "index": index,
            "canvas": draft.canvas,
            "step": draft.step,
            "tokens": [self.text.piece(token) for token in draft.tokens],
            "accepted": draft.accepted,
        }
        return self._stream([]) | {"draft": shown}

    def ending(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk of a stream that includes usage."""
        return self._stream([]) | {"usage": usage}

    def _chunk(self, index: int, text: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return self._stream([self._ending(index, finish) | text])

    def _stream(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else NAMES["text"]
        usage = {"usage": None} if self.include_usage else {}
        return self._frame(name) | {"choices": choices} | usage

    def _ending(self, index: int, finish: str | None) -> dict[str, Any]:
        return {"index": index, "finish_reason": finish, "logprobs": None}

    def _frame(self, name: str) -> dict[str, Any]:
        frame = {"id": f"{PREFIXES[self.kind]}-{self.id}", "object": name}
        return frame | {"created": self.created, "model": self.model}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(job: Job) -> str | None:
    called = job.answer.calls and job.answer.finish == "stop"
    return "tool_calls" if called else job.answer.finish


def usage(prompt_tokens: int, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the tokens and steps of a request; a prompt counts once for all its choices."""
    tokens = sum(job.answer.tokens for job in jobs)
    steps = sum(job.answer.sample.denoising_steps for job in jobs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "canvases": sum(job.answer.sample.canvases for job in jobs),
        "denoising_steps": steps,
        "tokens_per_forward": round(tokens / steps, 3),
    }
