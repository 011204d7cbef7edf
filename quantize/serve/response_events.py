"""What a chat answers, as items and events of the Responses API (`responses`)."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from quantize.serve.responses import ResponsesRequest

Event = dict[str, Any]


def translated(body: ResponsesRequest, reply: Response) -> Response:
    """Return the answer to a chat, whole or a stream, as one of the Responses API."""
    ignored = {k: v for k, v in reply.headers.items() if k == "x-ignored-parameters"}
    answer = Answer(body)
    if isinstance(reply, StreamingResponse):
        lines = _lines(answer, reply)
        return StreamingResponse(lines, headers=ignored, media_type="text/event-stream")
    chat = json.loads(bytes(reply.body))
    (choice,) = chat["choices"]
    message = choice["message"]
    delta = message | {"tool_calls": message["tool_calls"] or []}
    for _ in (*answer.add(delta), *answer.end(choice["finish_reason"], chat["usage"])):
        continue
    return JSONResponse(answer.response, headers=ignored)


async def _lines(answer: "Answer", reply: StreamingResponse) -> AsyncIterator[str]:
    """Yield server-sent events; closing this closes the chat, which frees its slot."""
    number, finish = 0, None

    def sent(events: Iterator[Event]) -> Iterator[str]:
        nonlocal number
        for event in events:
            yield f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': number})}\n\n"
            number += 1

    chunks: Any = reply.body_iterator
    async with aclosing(chunks):
        for line in sent(answer.begin()):
            yield line
        async for text in chunks:
            data = text.removeprefix("data: ").strip()
            chunk = {} if data == "[DONE]" else json.loads(data)
            if "error" in chunk:
                events = iter([{"type": "error"} | chunk["error"]])
            elif chunk.get("choices"):
                (choice,) = chunk["choices"]
                finish = choice["finish_reason"] or finish
                events = answer.add(choice["delta"])
            else:
                events = answer.end(finish, chunk["usage"]) if chunk.get("usage") else iter(())
            for line in sent(events):
                yield line


class Answer:
    """Grows by the deltas of a chat and says each change as an event.

    `response` is the whole answer as it stands; its last item is open until another begins.
    """

    def __init__(self, body: ResponsesRequest) -> None:
        told = body.model_dump(
            include={"model", "instructions", "metadata", "parallel_tool_calls", "temperature"},
            by_alias=True,
        )
        told |= body.model_dump(include={"tools", "tool_choice", "top_p", "text"}, by_alias=True)
        self.items: list[dict[str, Any]] = []
        self.response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "output": self.items,
            "usage": None,
            "error": None,
            "incomplete_details": None,
            **told,
            "metadata": body.metadata or {},
        }

    def begin(self) -> Iterator[Event]:
        """Yield the events before any text."""
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self.response}

    def add(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of what a canvas added."""
        if delta.get("reasoning_content"):
            yield from self._text("reasoning", "reasoning_text", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._text("message", "output_text", delta["content"])
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)

    def end(self, finish: str | None, usage: dict[str, Any]) -> Iterator[Event]:
        """Yield the events behind the last text."""
        yield from self._close()
        cut = finish == "length"
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield {"type": f"response.{self.response['status']}", "response": self.response}

    def _text(self, kind: str, part: str, text: str) -> Iterator[Event]:
        if not self.items or (self.items[-1]["type"], self.items[-1]["status"]) != (
            kind,
            "in_progress",
        ):
            yield from self._open(kind, part)
        item = self.items[-1]
        item["content"][0]["text"] += text
        yield self._of_part(f"response.{part}.delta", delta=text, logprobs=[])

    def _open(self, kind: str, part: str) -> Iterator[Event]:
        yield from self._close()
        prefix, more = (
            ("msg", {"role": "assistant"}) if kind == "message" else ("rs", {"summary": []})
        )
        empty = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self.items.append(empty | more | {"content": []})
        yield self._of_item("response.output_item.added")
        extra = {"annotations": [], "logprobs": []} if kind == "message" else {}
        self.items[-1]["content"].append({"type": part, "text": ""} | extra)
        yield self._of_part("response.content_part.added", part=self.items[-1]["content"][0])

    def _close(self) -> Iterator[Event]:
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item = self.items[-1]
        (part,) = item["content"]
        yield self._of_part(f"response.{part['type']}.done", text=part["text"], logprobs=[])
        yield self._of_part("response.content_part.done", part=part)
        item["status"] = "completed"
        yield self._of_item("response.output_item.done")

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a call, which comes whole with the canvas that ends it."""
        yield from self._close()
        function = call["function"]
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "arguments": ""}
        item |= {"call_id": call["id"], "name": function["name"], "status": "in_progress"}
        self.items.append(item)
        yield self._of_item("response.output_item.added")
        self.items[-1] = item | {"arguments": function["arguments"], "status": "completed"}
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        kind, said = "response.function_call_arguments", function["arguments"]
        yield {"type": f"{kind}.delta", "delta": said} | where
        yield {"type": f"{kind}.done", "arguments": said, "name": function["name"]} | where
        yield self._of_item("response.output_item.done")

    def _of_item(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": self.items[-1]}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, "content_index": 0} | where | fields
