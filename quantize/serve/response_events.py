"""Turns a chat's answer into items and events of the Responses API (`responses`)."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

from starlette.responses import JSONResponse, Response

from quantize.serve.answers import Json, Said, stream
from quantize.serve.responses import ResponsesRequest

# a chat's field -> an item's type, the prefix of its id, what it begins with, and its part
ITEMS: dict[str, tuple[str, str, Json, Json]] = {
    "reasoning_content": (
        "reasoning", "rs", {"summary": []}, {"type": "reasoning_text", "text": ""},
    ),
    "content": (
        "message", "msg", {"role": "assistant"},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
}  # fmt: skip


class GrowingResponse:
    """A response that grows with each chunk of a chat's answer; every change becomes an event."""

    def __init__(self, body: ResponsesRequest) -> None:
        echoed = {"model", "instructions", "parallel_tool_calls", "temperature"}
        echoed |= {"tools", "tool_choice", "top_p", "text"}
        self.items: list[Json] = []  # the last one is open until another begins
        self.response: Json = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "output": self.items,
            "usage": None,
            "error": None,
            "incomplete_details": None,
            **body.model_dump(include=echoed, by_alias=True),
            "metadata": body.metadata or {},
        }
        self._finish: str | None = None
        self._numbers = count()

    def of(self, chat: Said) -> Response:
        """Return a chat's answer, whole or streamed, as an HTTP response of the Responses API."""
        if not isinstance(chat.body, dict):
            return stream(self._lines(chat.body), chat.headers)
        list(self._add(chat.body))
        return JSONResponse(self.response, headers=chat.headers)

    async def _lines(self, chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
        for kind in ("created", "in_progress"):
            yield self._line({"type": f"response.{kind}", "response": self.response})
        async for chunk in chunks:
            for event in self._add(chunk):
                yield self._line(event)

    def _line(self, event: Json) -> str:
        data = json.dumps(event | {"sequence_number": next(self._numbers)})
        return f"event: {event['type']}\ndata: {data}\n\n"

    def _add(self, chunk: Json) -> Iterator[Json]:
        """Yield the events of a chunk, or of a whole answer."""
        if "error" in chunk:
            yield {"type": "error"} | chunk["error"]
            return
        for choice in chunk["choices"]:
            self._finish = choice["finish_reason"] or self._finish
            delta = choice["delta"] if "delta" in choice else choice["message"]
            for field in ITEMS:
                if delta.get(field):
                    yield from self._text(field, delta[field])
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)
        if usage := chunk.get("usage"):
            yield from self._end(usage)

    def _end(self, usage: Json) -> Iterator[Json]:
        yield from self._close()
        cut = self._finish == "length"
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }
        yield {"type": f"response.{self.response['status']}", "response": self.response}

    def _text(self, field: str, text: str) -> Iterator[Json]:
        kind, prefix, begun, empty = ITEMS[field]
        last = self.items[-1] if self.items else {}
        if (last.get("type"), last.get("status")) != (kind, "in_progress"):
            yield from self._open(kind, prefix, begun | {"content": []})
            self.items[-1]["content"].append(empty.copy())
            yield self._of_part("content_part.added", part=self.items[-1]["content"][0])
        (part,) = self.items[-1]["content"]
        part["text"] += text
        yield self._of_part(f"{part['type']}.delta", delta=text, logprobs=[])

    def _call(self, call: Json) -> Iterator[Json]:
        called = call["function"]  # whole: it comes with the canvas that ends it
        yield from self._open(
            "function_call", "fc", {"call_id": call["id"], **called, "arguments": ""}
        )
        self.items[-1] |= called
        yield self._event("function_call_arguments.delta", delta=called["arguments"])
        yield self._event("function_call_arguments.done", **called)
        yield from self._close()

    def _open(self, kind: str, prefix: str, more: Json) -> Iterator[Json]:
        yield from self._close()
        empty = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self.items.append(empty | more)
        yield self._of_item("added")

    def _close(self) -> Iterator[Json]:
        item = self.items[-1] if self.items else {}
        if item.get("status") != "in_progress":
            return
        for part in item.get("content", ()):
            yield self._of_part(f"{part['type']}.done", text=part["text"], logprobs=[])
            yield self._of_part("content_part.done", part=part)
        item["status"] = "completed"
        yield self._of_item("done")

    def _of_item(self, what: str) -> Json:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": len(self.items) - 1, "item": self.items[-1]}

    def _of_part(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}"} | where | fields
