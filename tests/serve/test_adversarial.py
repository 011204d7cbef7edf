"""Malformed and adversarial requests for tools, forms and log-probabilities: each ends in 4xx."""

import json
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.serving import Running, ScriptedEngine, running, text_with_tools

USER: Any = {"role": "user", "content": "x"}
HOSTILE: list[Any] = [
    None,
    0,
    -1,
    1.5,
    "",
    "x",
    "\ud800",
    True,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    2**70,
]


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | function}]}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def schema(found: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": found}}
    }


def calls(*made: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": list(made)}]}


def called(**function: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}


def result(**fields: Any) -> dict[str, Any]:
    asked = {"role": "assistant", "tool_calls": [called()]}
    return {
        "messages": [USER, asked, {"role": "tool", "tool_call_id": "c", "content": "x"} | fields]
    }


WRONG: list[dict[str, Any]] = [
    *({"tools": value} for value in HOSTILE if value not in (None, [])),
    *({"tools": [value]} for value in HOSTILE),
    *(tool(name=value) for value in HOSTILE if value != "x"),
    *(tool(parameters=value) for value in (0, "x", [], {"type": 3}, {"properties": []})),
    *(tool(parameters={"properties": {"a": value}}) for value in (0, "x", [], None)),
    *(tool(parameters={"required": value}) for value in (0, "x", {}, [1])),
    tool(parameters=deep(40)), tool(description=3), tool(description="\ud800"), tool(parameter=1),
    tool() | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
    *(tool() | {"tool_choice": value} for value in HOSTILE if value is not None),
    tool() | {"parallel_tool_calls": 3},
    {"tool_choice": "required"},
    *(calls(value) for value in HOSTILE), calls(),
    *(calls(called(arguments=value)) for value in (2.5, 3, "[1]", "{", "nul", '"x"', [])),
    calls(called(arguments='{"a":' * 99)),
    calls(called(arguments='{"a": "\\ud800"}')), calls(called(name="a b")), calls(called(argument=1)),
    result(tool_call_id="d"), result(tool_call_id=3), result(content=None), result(content=[3]),
    result(content=[{"type": "image_url", "image_url": {"url": "x"}}]), result(reasoning_content="y"),
    *({"response_format": value} for value in HOSTILE if value is not None),
    *(schema(value) for value in HOSTILE if not isinstance(value, dict)),
    schema({"type": "frog"}), schema({"$ref": "#/nowhere"}), schema({"pattern": "("}),
    schema({"type": "string", "pattern": "(?=a)b"}), schema({"uniqueItems": True}), schema(deep(40)),
    schema({"enum": []}), schema({"type": "integer", "minimum": 3, "maximum": 2}), schema({"not": {}}),
    schema({"type": "string", "minLength": 10**9}),
    schema({"allOf": [{"type": "string"}, {"type": "null"}]}),
    *({"guided_regex": value} for value in ("", "(", "[", "a{2,1}", "(?<=a)b", "\\", "/\\")),
    {"guided_regex": "a{9999999}"},
    {"guided_regex": 3}, {"guided_regex": ["a"]},
    {"guided_regex": "a" * 10_001}, {"guided_regex": "(a|b)" * 400}, {"guided_regex": "x\ud800"},
    *({"guided_json": value} for value in (0, "x", [], {"type": "frog"}, {"$ref": "http://x.org/"})),
    *({"top_logprobs": value, "logprobs": True} for value in (-1, 21, "3", 1.5, [])),
    {"logprobs": 3}, {"logprobs": "yes"}, {"top_logprobs": 2}, {"logprobs": True, "stop": "x"},
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    engine = ScriptedEngine(4)
    engine.free = True
    with running(engine, text_with_tools()) as found:
        yield found
        found.settle()
        assert engine.said == {}


def test_each_is_refused_with_a_message(server: Running) -> None:
    assert len(WRONG) >= 100
    asked = {"model": "bundled", "messages": [USER], "max_tokens": 64}
    passed: list[Any] = []
    for wrong in WRONG:
        reply = server.http.post(
            "/v1/chat/completions",
            content=json.dumps(asked | wrong),
            headers={"Content-Type": "application/json"},
        )
        if not 400 <= reply.status_code < 500 or not reply.json()["error"]["message"]:
            passed.append((str(wrong)[:200], reply.status_code, reply.text[:200]))
    assert passed == []
    good = server.http.post("/v1/chat/completions", json=asked)
    assert good.status_code == 200
