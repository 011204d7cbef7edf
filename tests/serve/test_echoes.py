"""What other servers sent and clients send back: it is ignored by name, or read, or refused."""

import json
import time
from collections.abc import Generator
from typing import Any

import pytest

from quantize.serve import unsupported
from tests.support.serving import Running, TellingEngine, running, text_with_tools, tokenizer

USER: Any = {"role": "user", "content": "Tom has 9 pens."}
FUNCTION: Any = {"name": "f", "arguments": '{"a": [1, {"b": "x"}]}'}
CALL: Any = {"id": "c", "type": "function", "function": FUNCTION}
CALLS: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Any = {"role": "tool", "tool_call_id": "c", "content": "1"}
TEXT: Any = {"type": "text", "text": "5"}
THINKING: Any = {"type": "thinking", "thinking": "I look", "signature": "x"}
HEADER = "X-Ignored-Parameters"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# Fields that other servers and clients are known to write, and one that nobody has heard of.
ECHOED = (
    "id", "index", "object", "status", "created", "created_at", "timestamp", "model", "usage",
    "metadata", "annotations", "cache_control", "provider_specific_fields", "extra_content",
    "additional_kwargs", "response_metadata", "thoughtSignature", "is_error", "artifact",
    "providerMetadata", "createdAt", "ts", "duration_ms", "weight", "_meta", "title", "outputSchema",
    "cachePoint", "confidence", "zyx_made_up",
)  # fmt: skip
ECHOED_ANSWER = (
    "reasoning_text", "reasoning_details", "thinking_blocks", "finish_reason", "images", "logprobs",
    "token_ids", "citations", "refusal", "parsed", "phase", "timings", "search_results", "messageId",
    "isCreatedByUser", "cost", "channel", "end_turn", "author", "type", "attachments", "parts",
)  # fmt: skip


class Repeating(TellingEngine):
    """Answers every prompt with one text."""

    def admit(self, *args: Any, **kwargs: Any) -> None:
        self.texts.append("hello")
        super().admit(*args, **kwargs)


@pytest.fixture(scope="module")
def strict() -> Generator[Running]:
    with running(Repeating(), text_with_tools(), strict=True) as found:
        yield found


@pytest.fixture(scope="module")
def telling() -> Generator[tuple[Running, TellingEngine]]:
    engine = Repeating()
    with running(engine, text_with_tools()) as found:
        yield found, engine


def post(server: Running, body: dict[str, Any], path: str = CHAT) -> Any:
    given = {} if path == RESPONSES else {"max_tokens": 64}
    return server.http.post(path, json={"model": "bundled"} | given | body)


def said(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": content} | fields, USER]}


def called(call: Any = CALL, **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, CALLS | {"tool_calls": [call]} | fields, RESULT]}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def tool(of_function: Any = (), **fields: Any) -> dict[str, Any]:
    function = {"name": "f"} | dict(of_function)
    return {"messages": [USER], "tools": [{"type": "function", "function": function} | fields]}


def test_every_echoed_name_is_taken_wherever_servers_put_it(
    telling: tuple[Running, TellingEngine], strict: Running
) -> None:
    """One request holds them all, at all places; it changes no token of the prompt."""
    echo = {name: {"x": [1]} for name in ECHOED}
    kept = {name: value for name, value in echo.items() if name not in ("id", "annotations")}
    of_answer = {name: {"x": [1]} for name in ECHOED_ANSWER} | {"id": "m"}
    function = echo | FUNCTION | {"parsed_arguments": {"a": 1}}
    chat = [
        echo | {"role": "system", "content": "s"},
        echo | {"role": "user", "content": [echo | TEXT]},
        of_answer | CALLS | {"tool_calls": [kept | CALL | {"function": function}]},
        echo | RESULT,
    ]
    tools = tool(echo, **echo)["tools"]
    bare = [{"role": "system", "content": "s"}, USER | {"content": [TEXT]}, CALLS, RESULT]
    server, engine = telling
    for messages, used in ((chat, tools), (bare, tool()["tools"])):
        reply = post(server, {"messages": messages, "tools": used})
        assert reply.status_code == 200, reply.text
    assert engine.prompts[-1] == engine.prompts[-2]
    reply = post(server, {"messages": chat, "tools": tools})
    named = set(reply.headers[HEADER].split(", "))
    assert named == {*ECHOED, *ECHOED_ANSWER, "parsed_arguments"}
    assert reply.json()["usage"]["ignored_parameters"] == reply.headers[HEADER].split(", ")
    refused = post(strict, {"messages": chat[1:2]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("messages[0].")
    status = FUNCTION | {"status": 1}
    for place, body in {
        "messages[1].tool_calls[0].function.status": called(CALL | {"function": status}),
        "messages[1].content[0].id": said([TEXT | {"id": "x"}]),
        "tools[0].function.status": tool({"status": 1}),
        "messages[1].refusal": said("5", refusal="no"),
    }.items():  # fmt: skip
        assert post(strict, body).json()["error"]["param"] == place
        assert post(server, body).headers[HEADER] == place.rpartition(".")[2]


@pytest.mark.parametrize(
    ("body", "bare", "named"),
    [
        (said([THINKING, TEXT]), said("5"), "thinking"),
        (said([{"type": "thinking", "thinking": [TEXT], "closed": True}, TEXT]),
         said("5"), "thinking"),
        (said([{"type": "redacted_thinking", "data": "x"}, TEXT]), said("5"), "redacted_thinking"),
        (said([{"type": "reasoning", "text": "x", "metadata": {}}, TEXT]), said("5"), "reasoning"),
        (said([THINKING]), said(""), "thinking"),
        (said([{"type": "refusal", "refusal": "I will not"}]), said("I will not"), ""),
        (said(None, refusal="I will not"), said("I will not"), ""),
        (said([{"type": "output_text", "text": "5", "annotations": []}]), said("5"), "annotations"),
        (said("5", refusal=None, audio=None, function_call=None, annotations=[]), said("5"), ""),
        (said("5", prefix=False, thinking="hm"), said("5"), "prefix, thinking"),
        (called(content=[THINKING]), called(reasoning_content="I look"), ""),
        (called(content=[THINKING, TEXT]), called(reasoning_content="I look", content="5"), ""),
        (called(thinking="I look"), called(reasoning_content="I look"), ""),
        (called(content=[THINKING], reasoning_content="I"), called(reasoning_content="I"), "thinking"),
        *((called(CALL | {"function": {"name": "f", "arguments": given}}),
           called(CALL | {"function": {"name": "f", "arguments": same}}), "")
          for given, same in (({"a": [1, {"b": "x"}]}, FUNCTION["arguments"]), (None, "{}"),
                              ("null", "{}"), ({}, "{}"), ({"text": '<|"|>'}, '{"text": "<|\\"|>"}'))),
        (called(CALL | {"function": {"name": "f"}}),
         called(CALL | {"function": FUNCTION | {"arguments": ""}}), ""),
        (called(is_error=True), called(), "is_error"),
        (tool({"strict": True, "cache_control": {}}), tool(), "cache_control"),
        ({"messages": [USER | {"contents": USER["content"]}]}, {"messages": [USER]}, "contents"),
        ({"messages": [USER, CALLS, RESULT | {"toolCallId": "c"}]}, called(), "toolCallId"),
        (tool(strict=False), tool(), "strict"),
    ],
)  # fmt: skip
def test_what_was_said_is_read_and_the_rest_is_ignored(
    telling: tuple[Running, TellingEngine], strict: Running,
    body: dict[str, Any], bare: dict[str, Any], named: str,
) -> None:  # fmt: skip
    server, engine = telling
    replies = [post(server, chat) for chat in (body, bare)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    assert engine.prompts[-1] == engine.prompts[-2]
    assert replies[0].headers.get(HEADER, "") == named
    assert post(strict, body).status_code == (400 if named else 200)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (said([{"type": "tool_use", "id": "c", "name": "f", "input": {}}]), "messages[1].content[0]"),
        (said("5", prefix=True), "messages[1].prefix"),
        (said("5", audio={"id": "a"}), "messages[1].audio"),
        (said("5", function_call={"name": "f", "arguments": "{}"}), "messages[1].function_call"),
        ({"messages": [USER | {"images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [USER | {"content": [THINKING]}]}, "messages[0].content[0]"),
        *((said("5") | {"messages": [message]}, f"messages[0].{name}")
          for name in ("images", "documents", "attachments", "parts", "tool_results", "text", "x")
          for message in (USER | {name: [{"text": "5"}]},)),
        *((called(CALL | {name: {"a": 1}}), f"messages[1].tool_calls[0].{name}")
          for name in ("args", "input", "arguments", "parameters")),
        *((tool(**{name: {"a": 1}}), f"tools[0].{name}") for name in ("parameters", "input_schema")),
        *((tool({name: {"a": 1}}), f"tools[0].function.{name}")
          for name in ("response", "properties", "inputSchema", "x")),
        ({"messages": [USER | {"content": [TEXT | {"file_id": "f"}]}]},
         "messages[0].content[0].file_id"),
        (called(CALL | {"function": {"name": "f", "arguments": [1]}}),
         "messages[1].tool_calls[0].function.arguments"),
        (called(CALL | {"function": {"name": "f", "arguments": deep(70)}}),
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_at_its_place(
    telling: tuple[Running, TellingEngine], body: dict[str, Any], param: str
) -> None:
    reply = post(telling[0], body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param", "meant"),
    [
        ({"messages": [USER | {"contents": "y"}]}, "messages[0].contents", "content"),
        ({"messages": [USER | {"roles": "system"}]}, "messages[0].roles", "role"),
        (said("5", tool_call=[CALL]), "messages[1].tool_call", "tool_calls"),
        (said("5", reasoningContent="x"), "messages[1].reasoningContent", "reasoning_content"),
        (called(CALL | {"functions": FUNCTION}), "messages[1].tool_calls[0].functions", "function"),
        (called(CALL | {"function": FUNCTION | {"argumnets": {}, "argument": {"a": 1}}}),
         "messages[1].tool_calls[0].function.argument", "arguments"),
        (tool({"paramters": {"type": "object"}}), "tools[0].function.paramters", "parameters"),
        ({"messages": [USER], "max_token": 5}, "max_token", "max_tokens"),
        ({"messages": [USER], "maxTokens": 5}, "maxTokens", "max_tokens"),
    ],
)  # fmt: skip
def test_a_slip_in_a_known_name_is_refused_with_the_name(
    telling: tuple[Running, TellingEngine], body: dict[str, Any], param: str, meant: str
) -> None:
    error = post(telling[0], body).json()["error"]
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert error["message"].endswith(f"did you mean {meant}?")


def test_no_request_makes_the_server_compare_names_for_long() -> None:
    """Names are a client's to make up, as many and as long as a body may hold."""
    known = frozenset({"content", "role", "tool_calls"})
    begun = time.process_time()
    many = {f"made_up_{n}": 1 for n in range(100_000)}
    assert len(unsupported.unread(many, known, ())) == 32
    assert unsupported.near_miss("content" * 1_000_000, known) is None
    assert time.process_time() - begun < 1


IDLE: dict[str, Any] = {
    "keep_alive": "5m", "request_id": "r", "rid": "r", "cache_salt": "s", "session_id": "x",
    "trace": {"a": 1}, "timings_per_token": True, "thinking": {"type": "disabled"}, "think": False,
    "enable_thinking": False, "reasoning_format": "auto", "options": {}, "extra_body": {},
    "function_call": "none", "timeout": 600,
    "safe_prompt": False, "do_sample": True, "max_tool_calls": 3, "top_n_sigma": -1,
    "use_cache": True, "cache": {"no-cache": True}, "prompt_cache_options": {"mode": "implicit"},
    "rep_pen": 1.0, "return_prompt_token_ids": False, "web_search": False, "image_generation": False,
    "generation_name": "g", "disable_fallbacks": True, "t_max_predict_ms": 0, "temperature_last": False,
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES])
def test_idle_parameters_are_ignored_on_every_path(
    telling: tuple[Running, TellingEngine], strict: Running, name: str, path: str
) -> None:
    fields = {CHAT: {"messages": [USER]}, RESPONSES: {"input": "x"}}.get(path, {"prompt": "x"})
    reply = post(telling[0], fields | {name: IDLE[name]}, path)
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, name), reply.text
    refused = post(strict, fields | {name: IDLE[name]}, path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "neutral"), [(CHAT, False), (RESPONSES, False), ("/v1/completions", True)]
)
def test_special_tokens_are_the_templates_or_the_tokenizers(
    telling: tuple[Running, TellingEngine], strict: Running, path: str, neutral: bool
) -> None:
    fields = {CHAT: {"messages": [USER]}, RESPONSES: {"input": "x"}}.get(path, {"prompt": "x"})
    name = "add_special_tokens"
    reply = post(telling[0], fields | {name: neutral}, path)
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, name), reply.text
    for server, value in ((telling[0], not neutral), (telling[0], 0), (strict, neutral)):
        refused = post(server, fields | {name: value}, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("value", [{}, {"enabled": False}, {"effort": "none"}, {"exclude": False}])
def test_a_switch_of_thoughts_that_is_off_is_ignored(
    telling: tuple[Running, TellingEngine], strict: Running, value: dict[str, Any]
) -> None:
    """As a router of other servers takes it; one that is on would change the answer."""
    reply = post(telling[0], {"messages": [USER], "reasoning": value})
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, "reasoning"), reply.text
    for server, asked in ((strict, value), (telling[0], {"enabled": True}), (telling[0], [])):
        refused = post(server, {"messages": [USER], "reasoning": asked})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning")
        assert "set reasoning_effort" in refused.json()["error"]["message"]
    ours = post(telling[0], {"input": "x", "reasoning": {"effort": "none"}}, RESPONSES)
    assert (ours.status_code, ours.headers.get(HEADER)) == (200, None)


def test_items_of_responses_hold_what_servers_sent(
    telling: tuple[Running, TellingEngine], strict: Running
) -> None:
    part = {"type": "output_text", "text": "5", "annotations": [], "logprobs": []}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "x", "cache_control": {}}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x", "status": None},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [part],
        },
        {"role": "user", "content": "y", "metadata": {"a": 1}},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}],
        },
        {"role": "user", "content": "z"},
    ]
    server, engine = telling
    reply = post(server, {"input": items}, RESPONSES)
    assert reply.headers.get(HEADER) == "cache_control, encrypted_content, metadata", reply.text
    assert "No." in tokenizer().decode(engine.prompts[-1])
    refused = post(strict, {"input": items}, RESPONSES).json()["error"]
    assert refused["param"] == "input[0].content[0].cache_control"


def test_an_answer_in_the_background_is_refused_and_none_is_asked_by_false(
    telling: tuple[Running, TellingEngine], strict: Running
) -> None:
    for path, fields, named in (
        (CHAT, {"messages": [USER]}, "background"),
        (RESPONSES, {"input": "x"}, None),
    ):
        reply = post(telling[0], fields | {"background": False}, path)
        assert (reply.status_code, reply.headers.get(HEADER)) == (200, named), reply.text
        assert post(strict, fields | {"background": False}, path).status_code == (
            400 if named else 200
        )
        refused = post(telling[0], fields | {"background": True}, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")


@pytest.mark.parametrize("name", ["logit_bias", "metadata"])
def test_an_empty_list_is_an_empty_object(strict: Running, name: str) -> None:
    assert post(strict, {"messages": [USER], name: []}).status_code == 200
    assert post(strict, {"messages": [USER], name: [1]}).status_code == 400


def test_no_log_probabilities_may_be_asked_of_responses(
    telling: tuple[Running, TellingEngine],
) -> None:
    replies = [post(telling[0], {"input": "x", "top_logprobs": n}, RESPONSES) for n in (0, 1)]
    assert [reply.status_code for reply in replies] == [200, 400]


NEUTRAL: dict[str, Any] = {
    "chat_id": "c", "tags": ["a"], "num_retries": 2, "cache_control": {"type": "ephemeral"},
    "xtc_threshold": 0.1, "dry_sequence_breakers": ["\n"], "dynatemp_exponent": 1, "raw": False,
    "features": {"web_search": False, "image_generation": False}, "parse_tool_calls": True,
    "structured_outputs": {"json": None, "regex": None}, "provider": {"order": [], "only": None},
    "thinking": {"type": "disabled", "budget_tokens": 0}, "function_call": "auto",
    "reasoning": {"effort": "none", "exclude": True}, "guided_decoding_backend": "xgrammar",
    "search_parameters": {"mode": "off"}, "reasoning_format": "parsed", "n_predict": -1,
    "anything": {}, "fallbacks": [], "system": "", "extra_headers": {"a": None, "b": {"c": []}},
}  # fmt: skip
ASKING: dict[str, Any] = {
    "features": {"web_search": True}, "raw": True, "parse_tool_calls": False, "random_seed": 5,
    "structured_outputs": {"regex": "x", "json": None}, "provider": {"order": ["x"]}, "n_predict": 5,
    "thinking": {"type": "enabled", "budget_tokens": 0}, "search_parameters": {"mode": "on"},
    "reasoning": {"effort": "low", "exclude": True}, "web_search_options": {}, "anything": 0,
    "anything_": False, "extra_headers": {"a": "b"}, "ä": "", "a b": [], "x\n": "", "z" * 65: "",
    "rep_pen": 1.1, "web_search": True, "background": True, "t_max_predict_ms": 9,
    "deep": deep(9), "thinking_config": {"thinking_budget": 1}, "enable_search": {"a": True},
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_ask_for_nothing_are_ignored_by_name(
    telling: tuple[Running, TellingEngine], strict: Running, name: str
) -> None:
    for path, fields in ((CHAT, {"messages": [USER]}), (RESPONSES, {"input": "x"})):
        if (path, name) == (RESPONSES, "reasoning"):
            continue  # a field of this API's own
        reply = post(telling[0], fields | {name: NEUTRAL[name]}, path)
        assert (reply.status_code, reply.headers.get(HEADER)) == (200, name), reply.text
        refused = post(strict, fields | {name: NEUTRAL[name]}, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", ASKING)
def test_fields_that_ask_for_something_are_refused_by_name(
    telling: tuple[Running, TellingEngine], name: str
) -> None:
    reply = post(telling[0], {"messages": [USER], name: ASKING[name]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": [USER | {"files": [], "ts": None}]}, "messages[0].files"),
        ({"messages": [USER | {"images": []}]}, "messages[0].images"),
        ({"messages": [USER | {"content": [TEXT | {"providerMetadata": {"x": 1}}]}]},
         "messages[0].content[0].providerMetadata"),
        ({"messages": [USER | {"content": [TEXT | {"odd": {}}]}]}, "messages[0].content[0].odd"),
        (said("5", blocks=[{"text": "5"}]), "messages[1].blocks"),
        (said("5", weight=0), "messages[1].weight"),
        (called(CALL | {"function": FUNCTION | {"odd": ""}}), "messages[1].tool_calls[0].function.odd"),
        (tool(odd=[]), "tools[0].odd"),
        ({"messages": [USER], "chat_template_kwargs": {"thinking": False}},
         "chat_template_kwargs.thinking"),
        ({"messages": [USER], "stream": True, "stream_options": {"continuous_usage_stats": False}},
         "stream_options.continuous_usage_stats"),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_inside_a_request_changes_nothing(
    telling: tuple[Running, TellingEngine], strict: Running, body: dict[str, Any], place: str
) -> None:
    server, engine = telling
    refused = post(strict, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, place)
    reply = post(server, body)
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, place.rpartition(".")[2])
    prompt = engine.prompts[-1]
    bare: Any = json.loads(json.dumps(body), object_hook=lambda fields: {
        name: value for name, value in fields.items() if name != place.rpartition(".")[2]
    })  # fmt: skip
    assert post(server, bare).status_code == 200
    assert engine.prompts[-1] == prompt


def test_made_up_names_are_counted_together(telling: tuple[Running, TellingEngine]) -> None:
    """Clients may make up names: each would stay in the metrics for as long as the server runs."""
    server, _ = telling
    many = {f"made_up_{n}": [] for n in range(20)}
    reply = post(server, {"messages": [USER]} | many)
    assert reply.headers[HEADER] == ", ".join(many)
    assert "made_up" not in server.http.get("/metrics").text
    assert 'name="other"' in server.http.get("/metrics").text
    reply = post(server, {"messages": [USER]} | {f"made_up_{n}": [] for n in range(40)})
    assert reply.json()["error"]["param"] == "made_up_32"
    chat = [USER | {f"made_up_{m}_{n}": n for n in range(30)} for m in range(4)]
    reply = post(server, {"messages": chat})
    assert len(reply.headers[HEADER].split(", ")) == 120
    reply = post(server, {"messages": [*chat, chat[0], USER | {f"other_{n}": n for n in range(9)}]})
    assert reply.json()["error"]["param"] == "messages[5].other_8"


def test_a_responses_stream_options_and_reasoning_that_is_off(
    telling: tuple[Running, TellingEngine], strict: Running
) -> None:
    body = {"input": "x", "stream_options": {"include_obfuscation": False}}
    assert post(strict, body, RESPONSES).status_code == 200
    off = {"input": "x", "reasoning": {"enabled": False}}
    assert post(telling[0], off, RESPONSES).headers[HEADER] == "enabled"
    assert post(strict, off, RESPONSES).json()["error"]["param"] == "reasoning.enabled"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"messages": [{"role": "USER", "content": "x"}]}, "messages[0].role", "'USER' is not"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "needs a role"),
        (CHAT, {"messages": [USER | {"content": [{"type": "frob"}]}]}, "messages[0].content[0]",
         "type 'frob' is not one of 'text'"),
        (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input[0]", "not one of 'message'"),
        (CHAT, {"messages": [USER], "guided_json": {
            "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False,
            "minProperties": 2}}, "guided_json.minProperties", "2 here, and `properties` allows 1"),
        (CHAT, {"messages": [USER], "response_format": {"type": "json_object", "schema": {"a": 1}}},
         "response_format.schema", "of the type json_schema, as json_schema.schema"),
        (CHAT, {"messages": [USER], "guided_json": {"contains": {}}}, "guided_json",
         'no answer can be held to "contains"; leave it out'),
        (CHAT, {"messages": [USER], "guided_json": {"properties": {"a": {"anyOf": [
            {"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[0-9]*$"}]}}}},
         "guided_json.properties.a.anyOf[1]", "can be held to look-around: (?=a), (?!a)"),
    ],
)  # fmt: skip
def test_messages_say_nothing_of_the_inside(
    telling: tuple[Running, TellingEngine], path: str, body: dict[str, Any], param: str, says: str
) -> None:
    error = post(telling[0], body, path).json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def test_whole_numbers_of_a_prompt_are_tokens(telling: tuple[Running, TellingEngine]) -> None:
    for prompt in ([2.0, 300.0], [2, 300]):
        assert post(telling[0], {"prompt": prompt}, "/v1/completions").status_code == 200
    assert telling[1].prompts[-1] == telling[1].prompts[-2] == [2, 300]
