"""The Responses API through the official client: text, thoughts, calls, whole and streamed."""

import json
import re
from collections.abc import Generator
from typing import Any

import openai
import pytest

from tests.support.serving import Running, TellingEngine, running, text_with_tools

PARIS = '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
THOUGHTS = "<|channel>thought\nhm, where<channel|>"
SAID = f"{THOUGHTS}I look at it now.{PARIS}"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]


class Spoken(TellingEngine):
    """Answers every prompt alike."""

    def admit(self, *args: Any, **kwargs: Any) -> None:
        self.texts.append(SAID)
        super().admit(*args, **kwargs)


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running(Spoken(), text_with_tools()) as found:
        yield found
        found.settle()


def prompt(server: Running) -> str:
    engine: Any = server.service.scheduler.engine
    return text_with_tools().tokenizer.decode(engine.prompts[-1])


def shown(items: Any) -> list[Any]:
    """Items without their ids."""
    return [
        (item.type, item.name, json.loads(item.arguments))
        if item.type == "function_call"
        else (item.type, item.content[0].text)
        for item in items
    ]


ANSWER = [
    ("reasoning", "hm, where"),
    ("message", "I look at it now."),
    ("function_call", "weather", {"city": "Paris"}),
]


def test_an_answer_is_items_and_its_stream_the_same_items(server: Running) -> None:
    asked: Any = {
        "model": "bundled",
        "instructions": "Be brief.",
        "input": "Weather?",
        "tools": TOOLS,
    }
    whole = server.openai.responses.create(**asked)
    assert shown(whole.output) == ANSWER
    assert (whole.status, whole.output_text) == ("completed", "I look at it now.")
    assert whole.usage is not None
    thoughts = text_with_tools().tokenizer.encode(THOUGHTS, add_special_tokens=False)
    assert whole.usage.output_tokens_details.reasoning_tokens == len(thoughts)
    assert whole.usage.output_tokens > len(thoughts) > 4
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(server.openai.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "I look at it now."
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert shown(done) == ANSWER == shown(events[-1].response.output)
    assert events[-1].response.usage == whole.usage


def test_the_items_go_back_with_what_the_call_returned(server: Running) -> None:
    asked: Any = {"model": "bundled", "tools": TOOLS}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    first = server.openai.responses.create(**asked, input=items)
    items += [item.model_dump() for item in first.output]
    items.append(
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
    )
    server.openai.responses.create(**asked, input=items)
    by_responses = prompt(server)
    (call,) = [item for item in first.output if item.type == "function_call"]
    function = {"name": call.name, "arguments": call.arguments}
    made = {"id": call.call_id, "type": "function", "function": function}
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look at it now.", "reasoning_content": "hm, where",
         "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]  # fmt: skip
    chat_tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    server.openai.chat.completions.create(model="bundled", messages=messages, tools=chat_tools)  # type: ignore[arg-type]
    assert by_responses == prompt(server)


def test_an_answer_that_is_cut_is_incomplete(server: Running) -> None:
    asked: Any = {"model": "bundled", "input": "x", "max_output_tokens": 3}
    whole = server.openai.responses.create(**asked)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (
        list(server.openai.responses.create(**asked, stream=True))[-1].type == "response.incomplete"
    )


LONG = {"type": "json_schema", "name": "x", "schema": {"type": "string", "minLength": 90}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": 2, "text": {"format": LONG}}, "max_output_tokens"),
        ({"text": {"format": LONG | {"schema": {"type": "frog"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "c",
          "output": "x"}], "instructions": "y"}, "input[1].call_id"),
        ({"input": "word " * 9000}, "input"), ({"verbosity": 3}, "verbosity"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"required": 5}}]},
         "tools[0].parameters.required"),
        ({"tool_choice": {"type": "function", "name": 5}}, "tool_choice.name"), ({"seed": 1}, "seed"),
    ],
)  # fmt: skip
def test_param_is_the_path_as_the_client_wrote_it(
    server: Running, body: dict[str, Any], param: str
) -> None:
    asked = {"model": "bundled", "input": "x"} | body
    error = server.http.post("/v1/responses", json=asked).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ") or param in ("input", "max_output_tokens")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is stored here"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "nothing is stored here"),
        ({"input": [{"type": "computer_call"}]}, "'function_call'"),
        ({"input": [{"role": "robot", "content": "x"}]}, re.escape("input[0].role")),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "no such call"),
        ({"input": []}, "at least 1"),
        ({"input": 3}, "input: must be a string or a list"),
        ({"input": [{"role": "user", "content": 3}]}, r"content: must be a string or a list"),
        ({"extra_body": {"seed": 1}}, "seed: .*no such field; /v1/chat/completions has it"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens: .*no such field; set max_output_tokens"),
        ({"extra_body": {"messages": [{"role": "user"}]}}, "messages: .*no such field; set input"),
        ({"tools": [{"type": "web_search"}]}, re.escape("tools[0].type: Input should be 'function'")),
        ({"tools": TOOLS * 2}, "same name"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "no tool of the request"),
        ({"text": {"format": {"type": "json_schema"}}}, r"text\.format\.name: Field required"),
        ({"text": {"format": {"type": "xml"}}}, "json_object"),
        ({"reasoning": {"effort": "much"}}, r"reasoning\.effort: "),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 9}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"frob": 1}}, "frob: this server knows no such"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"model": "gpt-9"}, "not served here"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Running, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=says):
        server.openai.responses.create(**{"model": "bundled", "input": "x"} | wrong)
