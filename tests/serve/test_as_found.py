"""Requests as clients really send them: echoed fields, values that change nothing, odd texts."""

import json
import re
from collections.abc import Generator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from quantize.bundled import CHECKPOINT
from quantize.cli import cli
from quantize.errors import InputError
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.serve.app import STATIC
from quantize.serve.calls import read_call
from quantize.serve.server import KNOWS, say_what_it_knows, with_template
from quantize.serve.text import NO_TOOLS
from tests.support.serving import FEW, Running, TellingEngine, running, text_with_tools, tokenizer

DATA = Path(__file__).parents[1] / "data"
QUESTION = "Tom has 9 pens. Tom loses 4. How many pens are left?"
USER: Any = {"role": "user", "content": QUESTION}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT: Any = {"role": "tool", "tool_call_id": "c", "content": "1"}
OTHER = RESULT | {"tool_call_id": "d", "content": "2"}
CALLS: Any = {"role": "assistant", "tool_calls": [CALL, CALL | {"id": "d"}]}
FLAT = {"name": "f", "description": "", "input_schema": {"type": "object"}}  # a tool in another API
HEADER = "X-Ignored-Parameters"


@cache
def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def strict() -> Generator[Running]:
    engine = TellingEngine(*["hello"] * 100)
    with running(engine, text_with_tools(), strict=True) as found:
        yield found


@pytest.fixture(scope="module")
def telling() -> Generator[tuple[Running, TellingEngine]]:
    engine = TellingEngine(*["hello"] * 200)
    with running(engine, text_with_tools()) as found:
        yield found, engine


def post(server: Running, path: str = "/v1/chat/completions", **body: Any) -> Any:
    asked = {"model": "bundled", "max_tokens": 64} | body
    if path.endswith("completions") and "prompt" not in asked:
        asked = {"messages": [USER]} | asked
    return server.http.post(path, json=asked)


# ------------------------------------------------------------------ what was recorded


@pytest.mark.parametrize(
    "found", recorded("requests_as_found.jsonl"), ids=lambda found: found["what"]
)
def test_requests_as_they_were_found(server: Running, found: dict[str, Any]) -> None:
    tools = any(turn["role"] == "tool" for turn in found["body"]["messages"])
    with running(TellingEngine("5"), text_with_tools()) if tools else nullcontext(server) as asked:
        reply = post(asked, **found["body"], **({} if tools else FEW))
    if not found["right"].startswith("400"):
        assert reply.status_code == 200, reply.text
    else:
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == found["right"].split("'")[1]


@pytest.mark.parametrize("found", recorded("calls_as_found.jsonl"), ids=lambda found: found["text"])
def test_arguments_as_they_were_found(found: dict[str, Any]) -> None:
    call = read_call(f"call:f{{x:{found['text']}}}", ["f"])
    assert call is not None
    assert json.loads(call.arguments) == {"x": found["value"]}


# ------------------------------------------------------------------ echoes, and what asks for nothing

ECHOES: list[tuple[str, Any, str]] = [
    *(
        (name, [USER, {"role": "assistant", "content": "5", name: value}, USER], f"messages[1].{name}")
        for name, value in {
            "reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
            "thinking_blocks": [{"type": "thinking", "thinking": "hm"}], "id": "msg_1",
            "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": [1]},
            "finish_reason": "stop", "stop_reason": 106, "extra_content": {"x": {"y": "z"}},
            "images": [],
        }.items()
    ),
    ("cache_control", [USER | {"cache_control": {}}], "messages[0].cache_control"),
    ("cache_control", [USER | {"content": [{"type": "text", "text": "x", "cache_control": {}}]}],
     "messages[0].content[0].cache_control"),
    *(
        (name, [USER, {"role": "assistant", "tool_calls": [CALL | {name: 0}]}, RESULT],
         f"messages[1].tool_calls[0].{name}")
        for name in ("index", "cache_control", "provider_specific_fields", "extra_content")
    ),
    ("id", [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT | {"id": "x"}], "messages[2].id"),
]  # fmt: skip


def bare(messages: list[Any]) -> list[Any]:
    """The same chat, as a client sends it that echoes nothing."""
    known = {"role", "content", "tool_calls", "tool_call_id", "type", "text", "function", "name"}

    def kept(value: Any, top: bool = False) -> Any:
        if isinstance(value, list):
            return [kept(each) for each in value]
        if not isinstance(value, dict):
            return value
        extra = {"id"} if "function" in value else set()
        return {
            k: v if k == "function" else kept(v) for k, v in value.items() if k in known | extra
        }

    return kept(messages)


@pytest.mark.parametrize(("name", "messages", "path"), ECHOES)
def test_echoes_change_nothing_and_are_named(
    telling: tuple[Running, TellingEngine], strict: Running, name: str, messages: Any, path: str
) -> None:
    server, engine = telling
    prompts: list[list[int]] = []
    for chat in (messages, bare(messages)):
        reply = post(server, messages=chat)
        assert reply.status_code == 200, reply.text
        assert reply.headers.get(HEADER, "") == (name if chat is messages else "")
        prompts.append(engine.prompts[-1])
    assert prompts[0] == prompts[1]
    refused = post(strict, messages=messages)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == path


def test_echoes_are_counted_and_tools_have_them_too(telling: tuple[Running, TellingEngine]) -> None:
    server, _ = telling

    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(server.http.get("/metrics").text)
        (family,) = (each for each in families if each.name == "quantize_ignored_parameters")
        return {each.labels["name"]: each.value for each in family.samples if "total" in each.name}

    before = counted().get("cache_control", 0)
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}
    reply = post(server, tools=[tool], ignore_eos=False, temperature=0.3)
    assert reply.headers[HEADER] == "temperature, ignore_eos, cache_control"
    assert counted()["cache_control"] == before + 1


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_that_led_to_a_call_are_read_from_either_field(
    telling: tuple[Running, TellingEngine], field: str
) -> None:
    server, engine = telling
    turn = {"role": "assistant", "tool_calls": [CALL], field: "I look it up"}
    reply = post(server, messages=[USER, turn, RESULT])
    assert reply.status_code == 200
    assert HEADER not in reply.headers  # it was used
    assert "I look it up" in tokenizer().decode(engine.prompts[-1])


NOTHING = {
    "ignore_eos": False, "min_tokens": 0, "bad_words": [], "stop_token_ids": [],
    "skip_special_tokens": True, "use_beam_search": False, "add_generation_prompt": True,
    "typical_p": 1.0, "repeat_penalty": 1.0, "detokenize": True, "functions": [], "guided_choice": [],
    "structured_outputs": {}, "truncate_prompt_tokens": -1, "usage": {"include": True},
    "include_reasoning": True, "priority": 0, "documents": [], "mm_processor_kwargs": {},
}  # fmt: skip
SOMETHING = {
    "ignore_eos": True, "min_tokens": 5, "bad_words": ["x"], "stop_token_ids": [7],
    "skip_special_tokens": False, "use_beam_search": True, "add_generation_prompt": False,
    "typical_p": 0.9, "repeat_penalty": 1.1, "detokenize": False, "functions": [{}],
    "guided_choice": ["x"], "structured_outputs": {"regex": "x"}, "truncate_prompt_tokens": 5,
    "usage": {"include": False},
    "include_reasoning": False, "priority": 1, "documents": [{}], "mm_processor_kwargs": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_values_that_ask_for_nothing_are_ignored_and_others_refused(
    telling: tuple[Running, TellingEngine], strict: Running, name: str, path: str
) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {}
    reply = post(telling[0], path, **prompt, **{name: NOTHING[name]})
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER] == name
    for asked, value in ((telling[0], SOMETHING[name]), (strict, NOTHING[name])):
        refused = post(asked, path, **prompt, **{name: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == name
        assert refused.json()["error"]["message"].startswith(f"{name}: not supported")
    off = post(telling[0], path, **prompt, **{name: 0 if NOTHING[name] is False else False})
    assert off.status_code == 400  # false is no 0, and no empty list


# ------------------------------------------------------------------ forms with one way out


def test_a_form_whose_texts_may_meet_a_dead_end_is_answered(server: Running) -> None:
    """After the one field a comma is allowed by the library, and then nothing."""
    schema = {
        "type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"],
        "additionalProperties": False, "patternProperties": {"^score$": {"type": "integer"}},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(3):
        reply = post(server, response_format=form, seed=seed, **FEW)
        assert reply.status_code == 200, reply.text
        said = json.loads(reply.json()["choices"][0]["message"]["content"])
        assert jsonschema_rs.is_valid(schema, said)


# ------------------------------------------------------------------ raw completions, places in errors


def test_a_raw_completion_keeps_what_marks_thoughts_and_calls() -> None:
    said = '<|channel>thought\nhm<channel|>I ask.<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
    for stream in (False, True):
        with running(TellingEngine(f"<|turn>{said}<turn|>")) as server:
            made = server.openai.completions.create(
                model="bundled", prompt="x", max_tokens=200, stream=stream
            )
            texts = [part.choices[0].text for part in (made if stream else [made])]  # type: ignore[union-attr]
        assert "".join(texts) == said


def tool(**schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}}
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER | {"content": [{"type": "text", "text": "hi", "x": 1}]}]},
         "messages[0].content[0].x"),
        ({"messages": [USER | {"content": [{"type": "text", "text": 5}]}]},
         "messages[0].content[0].text"),
        ({"messages": [USER | {"content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].image_url.url"),
        ({"messages": [USER | {"content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"id": 5}]}]},
         "messages[1].tool_calls[0].id"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"function": {}}]}]},
         "messages[1].tool_calls[0].function.name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name"),
        ({"stop": ["a", 5]}, "stop[1]"), ({"pinned": [{"position": 0}]}, "pinned[0].text"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        (tool(enum=5), "tools[0].function.parameters.properties.a.enum"),
        *(
            (tool(**schema) | {"tool_choice": "required"},
             f"tools[0].function.parameters.properties.a{place}")
            for schema, place in [
                ({"type": "integer", "minimum": 5, "maximum": 3}, ".minimum"),
                ({"minimum": "1"}, ".minimum"),
                ({"type": "number", "multipleOf": 0}, ""), ({"minLength": 1.5}, ".minLength"),
                ({"type": "number", "minimum": 1e30}, ".minimum"),
                ({"anyOf": [{}, {"items": {"maximum": []}}]}, ".anyOf[1].items.maximum"),
            ]
        ),
        *(({"tools": [FLAT | {"type": kind}]}, "tools[0]") for kind in (None, "function", "custom")),
        ({"tools": [{"type": "function", "function": FLAT}]}, "tools[0].function.input_schema"),
        (tool() | {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        *(({name: {"type": "object"}}, name) for name in ("format", "json_schema")),
        *(({name: "a"}, name) for name in ("regex", "grammar", "ebnf")),
        ({"messages": [USER, CALLS, RESULT]}, "messages[1].tool_calls[1].id"),
        ({"messages": [USER, CALLS, OTHER, USER, RESULT]}, "messages[1].tool_calls[0].id"),
        ({"messages": [USER, CALLS]}, "messages[1].tool_calls[0].id"),
        ({"messages": [USER, CALLS, RESULT, OTHER, RESULT]}, "messages[4].tool_call_id"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 2}, RESULT]},
         "messages[1].tool_calls[1].id"),
    ],
)  # fmt: skip
def test_param_is_the_path_as_the_client_wrote_it(
    telling: tuple[Running, TellingEngine], body: dict[str, Any], param: str
) -> None:
    reply = post(telling[0], **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["message"].startswith(f"{param}: ")


def test_a_message_has_one_line_whatever_a_field_is_called(
    telling: tuple[Running, TellingEngine],
) -> None:
    error = post(telling[0], **{"first\r\nsecond": [1]}).json()["error"]
    assert error["message"].startswith("first second: this server knows no such parameter")
    assert len(error["message"].splitlines()) == 1


def test_results_are_read_in_the_order_of_their_calls(
    telling: tuple[Running, TellingEngine],
) -> None:
    """A template may show no ids: then only the order tells which result is of which call."""
    server, engine = telling
    named = [RESULT | {"name": "another"}, OTHER]  # the call says what was called
    for results in ([RESULT, OTHER], [OTHER, RESULT], named):
        assert (
            post(server, messages=[USER, CALLS, *results, USER, CALLS, *results]).status_code == 200
        )
    assert engine.prompts[-1] == engine.prompts[-2] == engine.prompts[-3]


def test_a_template_that_refuses_a_tools_property_names_it() -> None:
    text = text_with_tools.__wrapped__()
    text.tokenizer.chat_template += (
        "{% for tool in tools or [] %}{% for name, schema in tool.function"
    )
    text.tokenizer.chat_template += ".parameters.properties.items() %}{{ schema.type.upper() }}"
    text.tokenizer.chat_template += "{% endfor %}{% endfor %}{% if messages[-1].content == 'odd' %}"
    text.tokenizer.chat_template += "{{ raise_exception('not this') }}{% endif %}"
    with running(TellingEngine("hello"), text) as server:
        good = tool(type="string")
        assert post(server, **good).status_code == 200
        (odd,) = tool(description="any")["tools"]
        odd["function"]["name"] = "g"
        odd["function"]["parameters"]["properties"] |= {"b": {"type": "string"}}
        error = post(server, tools=[*good["tools"], odd]).json()["error"]
        assert error["param"] == "tools[1].function.parameters.properties.a"
        chat = [USER, {"role": "assistant", "content": "5"}, USER | {"content": "odd"}]
        error = post(server, messages=chat, **good).json()["error"]
        assert error["param"] == "messages[2]"
        assert "not this" in error["message"]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("x " * 5000, "at most"),
        ([5, -1], "token 1 of the prompt, -1, is outside the vocabulary"),
        ([1023], "image"),
    ],
)
def test_errors_of_plain_completions_name_the_prompt(
    server: Running, prompt: Any, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        server.openai.completions.create(model="bundled", prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"model": "m",\n "messages": oops}', "line 2, column 14: Expecting value"),
        ('{"a": [{"a": 1}, {"b": {}, "c": 0, "b": {}}]}', "a[1].b: this key stands twice"),
        ("", "JSON"), ('{"a": 1', "line 1, column 8"), ("{'a': 1}", "line 1, column 2"),
    ],
)  # fmt: skip
def test_broken_json_is_refused_with_its_place(server: Running, text: str, place: str) -> None:
    headers = {"Content-Type": "application/json"}
    reply = server.http.post("/v1/chat/completions", content=text, headers=headers)
    assert reply.status_code == 400
    assert place in reply.json()["error"]["message"]


# ------------------------------------------------------------------ a developer's first hour


def test_usage_and_the_header_name_what_was_ignored(server: Running) -> None:
    reply = post(server, temperature=0.2, top_p=0.9, **FEW)
    assert reply.headers[HEADER] == "temperature, top_p"
    assert reply.json()["usage"]["ignored_parameters"] == ["temperature", "top_p"]
    assert post(server, **FEW).json()["usage"]["ignored_parameters"] == []


def test_more_tokens_than_there_is_room_for_are_told(server: Running) -> None:
    assert "X-Max-Tokens" not in post(server, **FEW).headers
    told = post(server, max_tokens=100_000, guided_regex="yes", **FEW)
    assert int(told.headers["X-Max-Tokens"]) == server.service.max_length // 64 * 64 - 64


TOKEN_LIMITS = {
    "ChatRequest": ["max_tokens", "max_completion_tokens"],
    "CompletionRequest": ["max_tokens"],
    "ResponsesRequest": ["max_output_tokens"],
}


def test_the_default_of_max_tokens_is_listed_and_described(server: Running) -> None:
    model = server.openai.models.list().data[0]
    stated = json.loads((CHECKPOINT / "generation_config.json").read_text())["max_new_tokens"]
    assert model.default_max_tokens == stated  # type: ignore[attr-defined]
    shapes = server.http.get("/openapi.json").json()["components"]["schemas"]
    for shape, fields in TOKEN_LIMITS.items():
        for field in fields:
            assert "default_max_tokens" in shapes[shape]["properties"][field]["description"]


def test_a_prompt_that_is_too_long_is_refused_with_a_way_out(server: Running) -> None:
    message = post(server, messages=[USER | {"content": "x " * 5000}]).json()["error"]["message"]
    assert "at most 4032 are taken, because prompt and answer share 4096: shorten it" in message
    assert "--max-context" in message


def test_a_missing_key_is_told_how_to_send_it() -> None:
    with running(TellingEngine("hello"), api_key="k3y") as server:
        reply = server.http.get("/v1/models", headers={"Authorization": "Bearer no"})
    assert reply.status_code == 401
    assert "Authorization: Bearer KEY" in reply.json()["error"]["message"]
    assert "QUANTIZE_API_KEY" in reply.json()["error"]["message"]
    assert "k3y" not in reply.text


def test_the_bundled_model_says_what_it_knows(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    say_what_it_knows(CHECKPOINT)
    said = " ".join(capsys.readouterr().err.split())
    assert "it knows small word problems alone" in said
    assert '"guided_regex": "#### [0-9]{1,6}"' in said
    tool = {"type": "function", "function": {"name": "f"}}
    assert post(server, tools=[tool]).status_code == 400  # so the pages say what takes them
    tutorial = (Path(__file__).parents[2] / "docs/tutorials/serve-a-canvas.md").read_text("utf-8")
    helped = CliRunner().invoke(cli, ["serve", "--help"]).output
    for page in (said, helped, tutorial.replace("`", "")):
        assert "with --chat-template tools, tools are taken" in " ".join(page.split())
    help_text = CliRunner().invoke(cli, ["serve", "--help"]).output
    assert "The bundled model knows such word problems alone" in " ".join(help_text.split())
    assert "knows small word problems alone" in (STATIC / "index.html").read_text("utf-8")
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 2816}}')
    say_what_it_knows(tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("page", ["serve.md", "tutorials/serve-a-canvas.md"])
def test_the_plain_completion_that_pages_show_is_answered_as_they_say(
    server: Running, page: str
) -> None:
    said = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
    (shown,) = re.findall(r"/v1/completions .* -d '(.*)'", said)
    (answer,) = post(server, "/v1/completions", **json.loads(shown)).json()["choices"]
    assert answer["text"] == "132+94=226\n#### 226"
    assert "`132+94=226" in said
    asked = re.findall("user\n(.*)<turn", json.loads(shown)["prompt"])
    (raw,) = post(server, "/v1/completions", prompt=asked[0], seed=1).json()["choices"]
    assert raw["text"] == ""  # why they show a prompt with markup


def test_the_form_that_is_named_can_be_filled(server: Running) -> None:
    form = json.loads("{" + KNOWS[KNOWS.index('"guided_regex"') :] + "}")
    (answer,) = post(server, seed=1, max_tokens=128, **form).json()["choices"]
    assert answer["message"]["content"] == "#### 5"


def test_tools_can_be_tried_with_the_template_that_ships(tmp_path: Path) -> None:
    loaded = load_tokenizer(CHECKPOINT)
    assert "tools" not in loaded.chat_template
    assert "tools" in with_template(loaded, "tools").chat_template
    for thinking in (False, True):  # without tools a prompt is that of the model's own template
        prompts = [
            encode_chat(with_template(load_tokenizer(CHECKPOINT), name), [USER], thinking=thinking)
            for name in (None, "tools")
        ]
        assert prompts[0] == prompts[1]
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert with_template(loaded, str(own)).chat_template == own.read_text()
    own.write_text("{% for %}")
    for wrong in (str(own), str(tmp_path / "none.jinja")):
        with pytest.raises(
            InputError, match=r"--chat-template .*; name a Jinja file, or `tools`, which"
        ):
            with_template(loaded, wrong)
    own.write_text("<|im_start|>{{ messages[0].content }}")
    with pytest.raises(InputError, match=r"writes <\|im_start\|>, which is no token of"):
        with_template(loaded, str(own))
    assert "--chat-template tools" in NO_TOOLS
