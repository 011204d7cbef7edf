"""Function calling through the official client, on an engine that says what a model might."""

import json
from typing import Any

import openai
import pytest

from tests.support.serving import TellingEngine, running, text_with_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "time"}},
]
ASKED: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
PARIS = '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
TIME = "<|tool_call>call:time{}<tool_call|>"
LIMIT = 400


def asked(said: str, messages: list[Any] = ASKED, **options: Any) -> tuple[Any, TellingEngine]:
    engine = TellingEngine(said)
    with running(engine, text_with_tools()) as server:
        settings = {"tools": TOOLS, "max_tokens": LIMIT} | options
        reply = server.openai.chat.completions.create(
            model="bundled", messages=messages, **settings
        )
        return (list(reply) if settings.get("stream") else reply.choices[0]), engine


def prompt_of(engine: TellingEngine) -> str:
    return text_with_tools().tokenizer.decode(engine.prompts[-1])


def test_a_call_is_told_apart_from_text_and_thoughts() -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    said = f"<|channel>thought\nthey want {PARIS}<channel|>I look.{PARIS}"
    choice, engine = asked(said, extra_body=thinking)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content.startswith("they want")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )
    assert 'declaration:weather{description:<|"|>Weather of a city.<|"|>' in prompt_of(engine)


def test_stop_strings_end_text_and_no_call() -> None:
    """smolagents sends them beside a call that must be made."""
    choice, _ = asked(PARIS, tool_choice="required", stop=["Observation:", "Paris"])
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    with pytest.raises(openai.BadRequestError, match="stop: not with response_format"):
        asked("{}", response_format={"type": "json_object"}, stop="x")


def test_several_calls_at_once_and_no_text() -> None:
    choice, _ = asked(PARIS + TIME + PARIS)
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "time", "weather"]
    assert len({call.id for call in calls}) == 3
    assert choice.message.content is None
    one, _ = asked(PARIS + TIME, parallel_tool_calls=False)
    assert [call.function.name for call in one.message.tool_calls] == ["weather"]


def test_a_stream_sends_each_call_with_the_canvas_that_ends_it() -> None:
    chunks, _ = asked(f"I look.{PARIS}{TIME}", stream=True)
    whole, _ = asked(f"I look.{PARIS}{TIME}")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    told = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert [(call.function.name, call.function.arguments) for call in calls] == told
    assert len([delta for delta in deltas if delta.tool_calls]) == 2  # in canvases of 16 tokens
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said",
    ["<|tool_call>call:nobody{}<tool_call|>", "a<|tool_call>call:weather{city:", "<|tool_cal"],
)
def test_a_malformed_call_is_text(said: str, stream: bool) -> None:
    found, _ = asked(said, stream=stream)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in found) == said
        assert found[-1].choices[0].finish_reason == "stop"
    else:
        assert (found.message.content, found.finish_reason) == (said, "stop")
        assert found.message.tool_calls is None


def test_a_call_that_the_limit_cuts_is_text() -> None:
    choice, _ = asked(PARIS, max_tokens=5)
    assert choice.finish_reason == "length"
    assert PARIS.startswith(choice.message.content)


def test_without_a_choice_calls_are_text() -> None:
    choice, engine = asked(PARIS, tool_choice="none")
    assert choice.message.content == "call:weather{city:Paris}"  # without special tokens, as ever
    assert choice.message.tool_calls is None
    assert "declaration:weather" in prompt_of(engine)


def test_results_come_back_and_the_answer_follows() -> None:
    """One round of an agent: the model's message is sent back as it is, with what the tool said."""
    engine = TellingEngine(f"<|channel>thought\nhm<channel|>{PARIS}", "It rains.")
    with running(engine, text_with_tools()) as server:
        create = server.openai.chat.completions.create
        messages = list(ASKED)
        options: Any = {"model": "bundled", "tools": TOOLS, "max_tokens": LIMIT}
        first = create(messages=messages, **options).choices[0].message
        (call,) = first.tool_calls
        messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        assert create(messages=messages, **options).choices[0].message.content == "It rains."
    prompt = prompt_of(engine)
    assert prompt.index("hm\n<channel|>" + PARIS) < prompt.index('{value:<|"|>rain<|"|>}')
    assert "response:weather{" in prompt  # the call's name, which the result need not repeat


def test_every_run_of_an_agents_loop_ends() -> None:
    """The official client's own loop over tools, with functions that are run."""
    engine = TellingEngine(PARIS + TIME, "Rain at noon.")
    results = {"weather": lambda city: f"rain in {city}", "time": lambda: "noon"}
    with running(engine, text_with_tools()) as server:
        messages = list(ASKED)
        while True:
            reply = server.openai.chat.completions.create(
                model="bundled", messages=messages, tools=TOOLS, max_tokens=LIMIT
            ).choices[0]
            messages.append(reply.message)
            if reply.finish_reason != "tool_calls":
                break
            for call in reply.message.tool_calls or []:
                function: Any = call.function  # type: ignore[union-attr]
                said = results[function.name](**json.loads(function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    assert reply.message.content == "Rain at noon."
    assert "rain in Paris" in prompt_of(engine)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": []}, None),
        ({"tools": [], "tool_choice": "required"}, "the request has no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool .* named 'x'"),
        ({"tool_choice": "perhaps"}, "'auto', 'none' or 'required'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two have the same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "match pattern"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
         "schema of an object"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"required": 3}}}]},
         "list of names"),
    ],
)  # fmt: skip
def test_tools_that_are_refused(options: dict[str, Any], says: str | None) -> None:
    if says is None:
        assert asked("hello", **options)[0].message.content == "hello"
        return
    with pytest.raises(openai.BadRequestError, match=says):
        asked("hello", **options)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], "has no such call"),
        ([{"role": "tool", "content": "x"}], "tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [{"id": "c", "function": {"name": "f",
          "arguments": "{}"}}]}], "tool_calls: this server knows no such"),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f",
          "arguments": "[1]"}}]}], "arguments: Input should be a valid dictionary"),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f",
          "arguments": "{" * 9999}}]}], "arguments: Invalid JSON"),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f",
          "arguments": '{"a": [' + "[]," * 70_000 + "[]]}"}}]}], "70003 brackets; at most 65536 are"),
        ([{"role": "assistant"}], "content: missing"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(messages: list[Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        asked("hello", messages)
