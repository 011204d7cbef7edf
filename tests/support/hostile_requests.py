"""Requests that try to stop a server: each must end in one line of refusal, or in an answer."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

CHATS, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER: dict[str, Any] = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"model": "bundled", "messages": [USER], "max_tokens": 64}
NAN, INF = float("nan"), float("inf")
OPENS = "<|channel>"
Body = tuple[str, str, bytes]


def nested(wide: int, deep: int) -> dict[str, Any]:
    """A schema of optional properties, of which the last holds such a schema again."""
    inner = nested(wide, deep - 1) if deep else {"type": "integer"}
    kinds = {f"k{n}": {"type": "integer"} for n in range(wide - 1)} | {"z": inner}
    return {"type": "object", "properties": kinds}


def tower(key: str, levels: int, wide: int = 2) -> dict[str, Any]:
    """A schema whose alternatives are built from the same ones below: wide ** levels of them."""
    names = {f"d{n}": {key: [{"$ref": f"#/$defs/d{n + 1}"}] * wide} for n in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": names | {f"d{levels}": {"type": "integer"}}}


def _deep(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = {"a": [inner]}
    return inner


def tool(**function: Any) -> dict[str, Any]:
    """The fields of a request that must call its one tool."""
    function = {"name": "f"} | function
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _schemas() -> Iterator[dict[str, Any]]:
    yield {"$ref": "#"}
    yield {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    yield {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    yield from (tower(key, 20) for key in ("allOf", "anyOf", "oneOf"))
    yield tower("anyOf", 2, 200)
    yield {"anyOf": [{"const": n} for n in range(4000)]}
    yield {"enum": ["x" * 60_000]}
    yield {"enum": [NAN, INF, 10**400]}
    yield {"type": "number", "minimum": NAN, "maximum": -INF}
    yield {"type": "string", "minLength": 10**18}
    yield {"type": "string", "pattern": "(" * 3000 + "a" + ")" * 3000}
    yield {"type": "string", "pattern": r"(\p{L}{0,99}){99}"}
    yield {"type": "object", "patternProperties": {f"^(a|b){{0,{n}}}$": {} for n in range(200)}}
    yield {"type": "array", "minItems": 10**9}
    yield {"type": "array", "prefixItems": [{"enum": ["a", "b"]}] * 2000}
    yield {"type": "object", "required": [f"k{n}" for n in range(5000)]}
    yield {"type": "object", "properties": {"\ud800": {}}}
    yield {"type": "integer", "multipleOf": 1e-300}
    yield _deep(40)
    yield {f"k{n}": n for n in range(5000)}


def _chats() -> Iterator[dict[str, Any]]:
    yield {"n": 10**30}
    yield {"max_tokens": -1}
    yield {"max_tokens": 2**63 - 1, "n": 16}
    yield {"max_tokens": NAN}
    yield {"temperature": NAN}
    yield {"seed": -INF}
    yield {"stop": ["x" * 60_000] + ["y"] * 15}
    yield {"metadata": {"\ud800": "x"}}
    yield {"\ud800": 1}
    yield {"user": "\udfff"}
    yield {"messages": [USER | {"content": "<start_of_turn>" * 4000}]}
    yield {"messages": [USER, {"role": "assistant", "content": OPENS * 6000}, USER]}
    yield {
        "messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    }
    yield tool(parameters=nested(12, 8))
    yield tool(parameters={"properties": {"a": {"default": NAN}}})
    yield tool(parameters=_deep(30))
    yield {"guided_regex": "(ab{0,9}){400}"}
    yield {"guided_regex": "(x+x+)+y"}
    yield {"guided_regex": "((a?){99}){99}"}
    yield {"pinned": [{"position": 2**62, "text": "x"}]}
    yield {"stream": True, "stream_options": {"include_drafts": True}, "n": 16, "max_tokens": 8}
    yield from ({"guided_json": schema} for schema in _schemas())


def _large_chats() -> Iterator[dict[str, Any]]:
    yield {"stop": ["a" * (1 << 20)]}
    yield {"stop": ["x"] * 100_000}
    yield {"logit_bias": {str(n): 100 for n in range(200_000)}}
    yield {"logit_bias": {str(n): "x" for n in range(200_000)}}
    yield {"metadata": {f"k{n}": 1 for n in range(200_000)}}
    yield {f"k{n}": 1 for n in range(200_000)}
    yield {"model": "x" * (1 << 20)}
    yield {"messages": [1] * 2_000_000}
    yield {"messages": [USER] * 10_000}
    yield {"messages": [USER] * 30_000}
    yield {"messages": [USER | {"content": [{"type": "text", "text": "x"}] * 30_000}]}
    yield {"messages": [USER | {"content": [1] * 1_000_000}]}
    yield {"messages": [USER | {"content": "a" * (4 << 20)}]}
    yield {"messages": [USER, {"role": "assistant", "content": OPENS * 200_000}, USER]}
    yield {"messages": [USER | {"name": "x" * (1 << 20)}]}
    yield {"messages": [{"role": "tool", "tool_call_id": "c" * (1 << 20), "content": "x"}]}
    yield {
        "messages": [
            USER,
            {"role": "assistant", "content": "x", "reasoning_details": [[]] * 50_000},
        ]
    }
    yield tool(name="f" * (1 << 20))
    yield tool(description="d" * (1 << 20))
    yield tool(parameters={"properties": {f"k{n}": {} for n in range(20_000)}})
    yield tool(parameters={"properties": {"k" * (1 << 20): {}}})
    yield tool(parameters={"properties": {"a": {"enum": ["x" * 9] * 100_000, "type": "string"}}})
    yield {"tools": tool()["tools"] * 100_000}
    yield {"pinned": [{"position": 0, "text": "x" * (1 << 20)}]}
    yield {"initial_text": "x" * (1 << 20)}
    yield {"guided_json": {"enum": [f"{n}" * 10 for n in range(5000)]}}


def _encoded(fields: dict[str, Any]) -> Body:
    return json.dumps(fields)[:60], CHATS, json.dumps(CHAT | fields).encode()


def _of_texts(prompts: Iterable[Any], inputs: Iterable[Any]) -> Iterator[Body]:
    for prompt in prompts:
        body = {"model": "bundled", "prompt": prompt, "max_tokens": 8}
        yield f"prompt {str(prompt)[:20]}", TEXTS, json.dumps(body).encode()
    for asked in inputs:
        body = {"model": "bundled", "input": asked, "max_output_tokens": 8}
        yield f"input {str(asked)[:20]}", RESPONSES, json.dumps(body).encode()


def bodies() -> Iterator[Body]:
    """(What, path, body) of each hostile request of at most 128 KiB whose fault is in its body."""
    yield from map(_encoded, _chats())
    yield from _of_texts(([-1], [2**70], [1e300]), ())
    raw = {
        "lists": b"[" * 50_000 + b"]" * 50_000, "digits": b'{"seed":' + b"9" * 60_000 + b"}",
        "an exponent": b'{"model":"bundled","seed":1e999999}',
        "no text": b"\xff\xfe\x00", "nothing": b"",
        "half a string": b'{"model":"' + b"\\" * 60_001, "null": b"null",
        "UTF-16": json.dumps(CHAT | {"max_tokens": 8}).encode("utf-16"),
    }  # fmt: skip
    yield from ((name, CHATS, body) for name, body in raw.items())


def large_bodies() -> Iterator[Body]:
    """The same of the larger ones, up to 6 MB."""
    yield from map(_encoded, _large_chats())
    yield from _of_texts(
        ([1] * 60_000, [[1] * 9] * 6000, ["x"] * 60_000, "x" * (1 << 20)),
        ([1] * 100_000, [USER] * 10_001, [{"type": "reasoning", "summary": [3] * 99_999}]),
    )
    raw = {
        "more lists": b"[" + b"[]," * 2_000_000 + b"[]]", "zeros": bytes(1 << 20),
        "an object in an object": b'{"a":' * 50_000,
        "the same key": b'{"model":"x",' + b'"model":"bundled",' * 50_000 + b'"messages":3}',
    }  # fmt: skip
    yield from ((name, CHATS, body) for name, body in raw.items())
