"""Answers held to a form: whatever a model's logits are, the text fits, or the request is refused."""

import json
import re
import time
from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jsonschema_rs
import openai
import pytest
import torch

from quantize.errors import InputError
from quantize.serve import constraint
from quantize.serve.budget import WorkMeter
from quantize.serve.calls import read_calls
from quantize.serve.constraint import Constraint, _Line
from quantize.serve.failures import RequestError
from quantize.serve.forms import Forms
from quantize.serve.grammars import Grammars
from quantize.serve.json_forms import endless
from quantize.serve.patterns import least_text
from quantize.serve.protocol import ChatRequest
from tests.support.serving import (
    CLOSES,
    EOS,
    FEW,
    QUESTION,
    L,
    Running,
    TellingEngine,
    V,
    chances_after_one_step,
    running,
    text_with_tools,
    tokenizer,
    written,
)

ASKED: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "time"}}]
CHANNEL = 100
ANSWER = {
    "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
    "additionalProperties": False,
}  # fmt: skip
NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 1},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "tags"],
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer(), EOS)


def said(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


@pytest.mark.parametrize("schema", [ANSWER, NESTED, {"type": "object"}, {"enum": [1, "two"]}, {}])
@pytest.mark.parametrize("room", [28, 61])
def test_json_fits_its_schema(grammars: Grammars, schema: dict[str, Any], room: int) -> None:
    valid = jsonschema_rs.validator_for(schema)
    for seed in range(2):
        text = said(written(grammars, grammars.matcher("json", schema), room, seed))
        assert valid.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9+=]+\n#### -?[0-9]+", "[a-y]{3,}z", "(yes|no)", r"\w+@x\.de",
        r"([^\n]{1,200}\n){0,6}#### [0-9]+",
    ],
)  # fmt: skip
def test_a_regular_expression_matches_the_whole_text(grammars: Grammars, pattern: str) -> None:
    for seed in range(2):
        text = said(written(grammars, grammars.matcher("regex", pattern), 40, seed))
        assert re.fullmatch(pattern, text), text


def test_thoughts_are_free_and_end_in_time(grammars: Grammars) -> None:
    for seed in range(4):
        tokens = written(grammars, grammars.matcher("json", ANSWER), 40, seed, thinking=True)
        answer = said(tokens[tokens.index(CLOSES) + 1 :])
        assert jsonschema_rs.is_valid(ANSWER, json.loads(answer))
    assert tokens.index(CLOSES) > 16


def test_thoughts_that_end_with_a_canvas_are_over(grammars: Grammars) -> None:
    matcher = grammars.matcher("json", ANSWER)
    held = Constraint(grammars, matcher, 60, CLOSES)
    thoughts = [7] * (L - 1)
    assert held.settle(torch.zeros(L, V), [*thoughts, CLOSES]).tokens == [*thoughts, CLOSES]
    assert held.lead(L) == matcher.compute_ff_tokens() != []
    going_on = Constraint(grammars, matcher, 60, CLOSES)
    assert going_on.settle(torch.zeros(L, V), [7] * L).tokens == [7] * L
    assert going_on.lead(L) == []
    assert not going_on.complete


def test_thoughts_that_the_model_closes_cost_no_round(grammars: Grammars) -> None:
    yes = tokenizer().encode("yes", add_special_tokens=False)
    closed = [7, 7, CLOSES, *yes, EOS[0]]
    canvas = [*closed, *[7] * (L - len(closed))]
    held = Constraint(grammars, grammars.matcher("regex", "(yes|no)"), 60, CLOSES)
    verdict = held.settle(torch.zeros(L, V), canvas)
    assert (verdict.keep, verdict.tokens[: len(closed)]) == (None, closed)


@pytest.mark.parametrize("pattern", ["[0-9]{3}", r"\d+$", "[a-z]+", "[A-Z]{2}"])
def test_a_pattern_that_begins_with_free_text_has_a_way_out(
    grammars: Grammars, pattern: str
) -> None:
    text = {"type": "string", "pattern": pattern}
    form = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    meter = WorkMeter(10_000, lambda: 60.0, "it")
    assert grammars.way_out(grammars.matcher("json", form), 24, meter) is not None
    free = grammars.matcher("regex", ".*[0-9]+.*")
    assert grammars.way_out(free, 24, meter) is not None


ENDS_WITH_FOO = {"type": "string", "pattern": ".*foo$"}


@pytest.mark.parametrize(
    ("kind", "form", "least"),
    [
        ("regex", ".*#### [0-9]+", "#### 0"),
        ("regex", r"[\s\S]*#### [0-9]{1,6}", "#### 0"),
        ("regex", r"(.*\n)*#### [0-9]{1,6}", "#### 0"),
        ("regex", r"(.*\n){2}x.*y", "\n\nxy"),
        ("regex", "[a-z]*(a[^0]b|c[0-9]d+e?z)z", "cde"),
        ("regex", ".*foo.*", "foo"),
        ("json", {"properties": {"a": ENDS_WITH_FOO}, "required": ["a"], "type": "object"}, "foo"),
    ],
)  # fmt: skip
def test_a_form_that_wants_certain_letters_is_kept(
    grammars: Grammars, kind: str, form: Any, least: str
) -> None:
    """Free text before them is the model's own, and the answer ends with what the form wants."""
    texts = grammars.texts(kind, form)
    matcher = grammars.matcher(kind, form)
    known = said(Constraint(grammars, matcher, 40, texts=texts)._way)
    for seed in range(2):
        text = said(written(grammars, matcher, 40, seed, texts=texts))
        for answer in (text, known):
            if kind == "json":
                assert json.loads(answer)["a"].endswith(least)
            else:
                assert re.fullmatch(form, answer), answer
        assert len(text) > len(known)


@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        ("(?:abc|de|f{3})+x?", "de"), (r"[^0]\d\D\w\S", "a0a00"), ("[€-₿]y{2,}?", "€yy"),
        (r"a|[^\w\W]", "a"), (r"\p{L}", ""), ("(a{999}){999}", ""), ("[^\x00-\uffff]", ""),
    ],
)  # fmt: skip
def test_least_texts_of_patterns(pattern: str, least: str) -> None:
    assert least_text(pattern) == least


def line(grammars: Grammars, tokens: list[int], units: int) -> _Line:
    return _Line(grammars, (), torch.zeros(L, V), tokens, 0, L, WorkMeter(units, lambda: 9, "it"))


@pytest.mark.parametrize("units", [10**6, 0])
def test_what_stands_behind_a_replaced_token_is_kept_while_units_are_left(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    vocabulary, room = tokenizer().get_vocab(), 12
    matcher, letters = grammars.matcher("regex", "[a-z]*[0-9]{3}"), [vocabulary["q"]] * 10
    way = Constraint(grammars, matcher, room)._way
    digits = [vocabulary[digit] for digit in "4567" if vocabulary[digit] not in way][:2]
    reading = replace(line(grammars, [*letters, *digits], units), room=room)
    read = Mock(wraps=reading._wished)
    monkeypatch.setattr(reading, "_wished", read)
    written, _, _ = reading.write(matcher, way, hasty=False)
    if units:  # one letter too many becomes a digit, and both digits behind it fit
        assert (written[:9], written[10:]) == (letters[:9], digits)
        assert said(written[9:10]).isdigit()
    else:  # the known way at once, and nothing of the canvas is read again
        assert written == [*way, *EOS[:1] * (room - len(way))]
        assert read.call_count == 1


def test_a_dead_end_offers_no_token(grammars: Grammars) -> None:
    matcher: Any = SimpleNamespace(
        validate_tokens=lambda tokens: 0,
        compute_bitmask=lambda: bytes(V // 8),
        is_error=lambda: False,
    )
    assert line(grammars, [7] * L, 100)._wished(matcher, 0, L, hasty=False) == []


def test_thoughts_need_room_for_their_end(grammars: Grammars) -> None:
    matcher = grammars.matcher("json", ANSWER)
    least = len(Constraint(grammars, matcher, 60)._way)
    assert Constraint(grammars, matcher, least).lead(L)
    with pytest.raises(InputError, match=f"fits into {least} tokens"):
        Constraint(grammars, matcher, least, CLOSES)
    held = Constraint(grammars, matcher, least + 1, CLOSES)
    verdict = held.settle(torch.zeros(L, V), [7] * L)
    assert verdict.tokens[0] == CLOSES  # at once


def test_a_form_that_does_not_fit_is_refused(grammars: Grammars) -> None:
    matcher = grammars.matcher("json", NESTED)
    with pytest.raises(InputError, match="that fits into 5 tokens"):
        Constraint(grammars, matcher, 5)


def test_an_answer_in_its_form_already_is_left_alone(grammars: Grammars) -> None:
    ids = tokenizer().encode('{"answer":12}', add_special_tokens=False)
    canvas = [*ids, 106, *[7] * (L - len(ids) - 1)]
    constraint = Constraint(grammars, grammars.matcher("json", ANSWER), 60)
    verdict = constraint.settle(torch.zeros(L, V), canvas)
    assert (verdict.keep, verdict.tokens[: len(ids) + 1]) == (None, canvas[: len(ids) + 1])


def test_calls_that_must_be_made_are_made(grammars: Grammars) -> None:
    deep = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    properties = {
        "unit": {"type": "string", "enum": ["C", "F"]}, "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}}, "deep": deep, "else": {},
    }  # fmt: skip
    schema = {"type": "object", "properties": properties, "required": ["unit", "deep"]}
    functions = [{"name": "f", "parameters": schema}, {"name": "g"}]
    asked = {"model": "m", "messages": ASKED, "tool_choice": "required"}
    tools = [{"type": "function", "function": function} for function in functions]
    body = ChatRequest.model_validate(asked | {"tools": tools})
    matcher = Forms(tokenizer(), EOS).matcher(body)
    names = set[str]()
    for seed in range(8):
        tokens = written(grammars, matcher, 80, seed)
        text, calls = read_calls(tokenizer().decode(tokens), ["f", "g"], whole=True)
        assert calls
        assert text == ""
        for call in calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            expected = schema if call.name == "f" else {"maxProperties": 0}
            assert jsonschema_rs.is_valid(expected, arguments), arguments
    assert names == {"f", "g"}


# ------------------------------------------------------------------ through the server


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    with running() as found:
        yield found


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


SCHEMA = "response_format.json_schema.schema"
BOUNDED = ANSWER | {"properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}}}


@pytest.mark.parametrize("thinking", [False, True])
def test_a_schema_through_the_official_client(server: Running, thinking: bool) -> None:
    extra = FEW | {"chat_template_kwargs": {"enable_thinking": thinking}}
    options: Any = {"seed": 1, "max_tokens": 128, "extra_body": extra}
    whole = server.ask(response_format=schema_format(BOUNDED), **options)
    (choice,) = whole.choices
    assert jsonschema_rs.is_valid(BOUNDED, json.loads(choice.message.content))
    assert bool(choice.message.reasoning_content) == thinking
    stream = server.ask(response_format=schema_format(BOUNDED), **options, stream=True)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(deltas) == choice.message.content


@pytest.mark.parametrize("max_tokens", [64, 128])
def test_a_complete_answer_stops_even_where_its_end_has_no_room(
    server: Running, max_tokens: int
) -> None:
    """The model would write on; the form is closed with the last token, and clients parse that."""
    long = {"type": "object", "properties": {"text": {"type": "string", "minLength": 40}}}
    long |= {"required": ["text"], "additionalProperties": False}
    options: Any = {"seed": 1, "max_tokens": max_tokens, "response_format": schema_format(long)}
    options["extra_body"] = FEW
    whole = server.ask("Tell me a story.", **options)
    (choice,) = whole.choices
    assert whole.usage.completion_tokens >= max_tokens - 1
    assert jsonschema_rs.is_valid(long, json.loads(choice.message.content))
    assert choice.finish_reason == "stop"
    free = server.ask("Tell me a story.", seed=1, max_tokens=16, extra_body=FEW)
    assert free.choices[0].finish_reason == "length"


def test_other_forms_and_plain_completions(server: Running) -> None:
    everything = {"guided_regex": r"(.|\n)*"}
    free, same = (server.ask(seed=3, extra_body=FEW | more).choices[0] for more in ({}, everything))
    assert same.message.content == free.message.content  # such a form changes nothing
    number = server.openai.completions.create(
        model="bundled",
        prompt=QUESTION,
        seed=3,
        n=2,
        max_tokens=8,
        extra_body={"guided_regex": "[0-9]{1,3}"} | FEW,
    )
    assert all(re.fullmatch("[0-9]{1,3}", choice.text) for choice in number.choices)
    any_object = server.ask(
        response_format={"type": "json_object"}, seed=1, max_tokens=64, extra_body=FEW
    )
    assert isinstance(json.loads(any_object.choices[0].message.content), dict)
    parsed = server.openai.chat.completions.create(
        model="bundled", messages=ASKED, max_tokens=8,
        extra_body={"guided_json": {"enum": [7]}} | FEW,
    )  # fmt: skip
    assert parsed.choices[0].message.content == "7"
    as_text = ChatRequest.model_validate(
        {"model": "m", "messages": ASKED, "guided_json": '{"enum": [7]}'}
    )
    assert as_text.forms == [("guided_json", "json", {"enum": [7]})]  # as vLLM takes it


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"response_format": schema_format({"type": "frog"})}, SCHEMA, "cannot be compiled"),
        ({"response_format": schema_format({"uniqueItems": True})}, SCHEMA, 'held to "uniqueItems"'),
        ({"extra_body": {"guided_regex": "<eos>"}}, "guided_regex", "the text '<eos>', which ends"),
        ({"response_format": schema_format(NESTED), "max_tokens": 4}, "max_tokens", "into 4 tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "required"),
        ({"extra_body": {"guided_regex": "[0-9"}}, "guided_regex", "cannot be compiled"),
        ({"extra_body": {"guided_json": "{type: object}"}}, "guided_json", "Invalid JSON"),
        ({"extra_body": {"guided_json": "[7]"}}, "guided_json", "a valid dictionary"),
        ({"extra_body": {"guided_json": 7}}, "guided_json", "a valid dictionary"),
        ({"extra_body": {"guided_json": '{"const": NaN}'}}, "guided_json.const", "no number of JSON"),
        ({"extra_body": {"guided_json": '{"enum": [' + "[]," * 70_000}}, "guided_json", "are read"),
        ({"extra_body": {"guided_regex": "a{999}b{999}"}}, "max_tokens", "fits into 128 tokens"),
        ({"extra_body": {"guided_regex": r".*\p{Lu}\p{Ll}{3}q"}}, "guided_regex", "no text of the"),
        ({"extra_body": {"guided_regex": r"a[^\s\S]"}}, "guided_regex", "matches no text at all"),
        ({"extra_body": {"guided_json": {"x": {}}, "guided_regex": "a"}}, "guided_regex", "one form"),
        ({"extra_body": {"guided_regex": "a"}, "stop": ["b"]}, "stop", "not with guided_regex"),
        ({"logprobs": True, "stop": ["b"]}, "stop", "not with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"extra_body": {"guided_choice": ["a"]}}, "guided_choice", "set guided_regex"),
    ],
)  # fmt: skip
def test_forms_that_are_refused(
    server: Running, options: dict[str, Any], param: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint, "PREPARING", 30.0)  # a slow machine needs more than the limit
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        server.ask(**options)
    assert caught.value.param == param
    server.settle()


def test_a_call_with_a_free_string_fits_into_few_tokens(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    asked = {"model": "m", "messages": ASKED, "tool_choice": "required", "tools": tools}
    matcher = Forms(tokenizer(), EOS).matcher(ChatRequest.model_validate(asked))
    for seed in range(3):
        text = tokenizer().decode(written(grammars, matcher, 48, seed))
        (call,) = read_calls(text, ["weather"], whole=True)[1][:1]
        assert list(json.loads(call.arguments)) == ["city"]


def test_a_required_call_through_the_server() -> None:
    """The engine says anything; what it must say is checked above, here that the request is right."""
    engine = TellingEngine("hello")
    with running(engine, text_with_tools()) as server:
        server.openai.chat.completions.create(
            model="bundled", messages=ASKED, tools=TOOLS, tool_choice="required", max_tokens=64
        )
    assert engine.givens[0].guide.lead()[0] == 48  # <|tool_call>


# ------------------------------------------------------------------ log-probabilities


def test_log_probabilities_are_those_of_the_committed_tokens(server: Running) -> None:
    asked: Any = {"seed": 3, "extra_body": FEW}
    options = asked | {"logprobs": True, "top_logprobs": 5}
    choice = server.ask(**options).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert choice.message.content == server.ask(**asked).choices[0].message.content
    for entry in entries:
        best = [candidate.logprob for candidate in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 5
        assert bytes(entry.bytes).decode() == entry.token
    streamed = [
        entry
        for chunk in server.ask(**options, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == entries


def test_log_probabilities_are_those_of_the_models_own_logits(server: Running) -> None:
    """One step over noise leaves a model unsure, so that a factor of its logits would show."""
    question = "Tell me a story."
    options: Any = {"seed": 1, "logprobs": True, "top_logprobs": 5}
    choice = server.ask(question, **options, extra_body={"num_inference_steps": 1}).choices[0]
    expected = chances_after_one_step(question, 1).topk(5)
    entries = choice.logprobs.content
    assert min(entry.logprob for entry in entries) < -1
    for entry, token, best in zip(entries, expected.indices, expected.values, strict=False):
        assert entry.token == tokenizer().decode(token[:1])  # the argmax is committed
        assert entry.logprob == pytest.approx(best[0].item(), abs=1e-4)
        shown = [candidate.logprob for candidate in entry.top_logprobs]
        assert shown == pytest.approx(best.tolist(), abs=1e-4)


def test_thoughts_have_no_entries_and_completions_have_columns(server: Running) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    choice = server.ask(seed=5, logprobs=True, extra_body=thinking).choices[0]
    assert "".join(e.token for e in choice.logprobs.content) == choice.message.content
    asked: Any = {"model": "bundled", "prompt": QUESTION, "max_tokens": 20, "logprobs": 2}
    asked["extra_body"] = FEW
    for seed in range(
        20
    ):  # until no token of the template is among the answer's: text leaves it out
        found = server.openai.completions.create(**asked, seed=seed).choices[0]
        if "<|turn>" not in "".join((found.logprobs and found.logprobs.tokens) or []):
            break
    columns = found.logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.text_offset is not None
    assert "".join(columns.tokens) == found.text
    assert found.text[columns.text_offset[3] :].startswith(columns.tokens[3])
    assert [len(top) for top in columns.top_logprobs or []] == [2] * len(columns.tokens)


NAMED = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
NONE = {"type": "integer", "minimum": 8, "maximum": 13, "multipleOf": 7}


def fields(**schemas: Any) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False}
    return closed | {"properties": schemas, "required": list(schemas)}


LOOP = fields(next={"$ref": "#"})


@pytest.mark.parametrize(
    ("schema", "path", "says"),
    [
        ({"type": "object", "patternProperties": {"^a$": {}}, "minProperties": 2,
          "additionalProperties": False}, "minProperties", "at most 1"),
        ({"properties": {"a": {"anyOf": [{"minProperties": 3}]}}},
         "properties.a.anyOf[0].minProperties", "at most 1"),
        (NAMED | {"minProperties": 3}, "minProperties", "at most 2"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance", "not taken"),
        ({"properties": {"b": {"items": {"anyOf": [{}, {"not": {}}]}}}},
         "properties.b.items.anyOf[1]", 'held to "not"; leave it out'),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
         "properties.a", r"oneOf constraints are not supported\.$"),
        ({"properties": {"a": {"pattern": "(a"}}}, "properties.a", "unclosed group$"),
        ({"$defs": {"a": {"type": "frog"}}, "properties": {"b": {"$ref": "#/$defs/a"}}},
         "$defs.a", "Invalid type: frog"),
        (fields(b=NONE, a=NONE), "properties.b", "a multiple of 7$"),
        (fields(b=NONE, a=NONE) | {"required": ["a"]}, "properties.a", "a multiple of 7$"),
        (fields(x={}, a=fields(b={"enum": []})), "properties.a.properties.b", "Unsatisfiable"),
        ({"type": "array", "items": {"anyOf": [NONE, {"enum": ["ab"], "maxLength": 1}]}, "minItems": 1},
         "items.anyOf[0]", "Unsatisfiable"),
        (fields(a={"type": "array", "prefixItems": [{}, NONE], "minItems": 2}),
         "properties.a.prefixItems[1]", "Unsatisfiable"),
        (fields(a={"allOf": [{"type": "string"}, {"type": "null"}]}), "properties.a", "incompatible"),
        (LOOP, "properties.next", "holds itself again, without an end"),
        ({"$defs": {"n": LOOP}, "allOf": [{"$ref": "#/$defs/n"}]}, "allOf[0]", "itself"),
        ({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1},
                    "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
          "type": "object", "properties": {"x": {"$ref": "#/$defs/b"}}, "required": ["x"]},
         "properties.x", "without an end"),
    ],
)  # fmt: skip
def test_what_a_schema_cannot_hold_is_refused_by_path(
    schema: dict[str, Any], path: str, says: str
) -> None:
    body = ChatRequest.model_validate({"model": "m", "messages": ASKED, "guided_json": schema})
    with pytest.raises(RequestError, match=says) as caught:
        Forms(tokenizer(), EOS).matcher(body)
    assert caught.value.param == f"guided_json.{path}"


@pytest.mark.parametrize(
    "schema",
    [
        LOOP | {"required": []}, LOOP | {"type": ["object", "null"]}, LOOP | {"required": "next"},
        LOOP | {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        LOOP | {"properties": {"next": {"type": "array", "items": {"$ref": "#"}, "minItems": 0}}},
        {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}, {"$ref": "#/$defs/none"},
        {"$ref": 5, "type": "array", "minItems": "1", "allOf": 5, "properties": []}, True,
    ],
)  # fmt: skip
def test_a_form_that_may_end_is_not_called_endless(schema: Any) -> None:
    assert endless(schema) is None


def test_looking_for_an_end_is_bounded() -> None:
    """References may form a chain of any length, and alternatives a tree of any size."""
    chain: Any = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}
    tree: Any = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 9} for n in range(90)}
    begun = time.process_time()
    for definitions in (chain, tree):
        assert endless({"$ref": "#/$defs/d0", "$defs": definitions}) is None
    assert time.process_time() - begun < 1


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {}, "minProperties": 1, "maxProperties": 1},
        NAMED | {"additionalProperties": {"const": 1}, "minProperties": 2, "maxProperties": 2},
        NAMED | {"patternProperties": {"^[ab]$": {"const": 1}}, "additionalProperties": False,
                 "minProperties": 2, "maxProperties": 2},
    ],
)  # fmt: skip
def test_as_many_names_as_asked_for_differ(grammars: Grammars, schema: dict[str, Any]) -> None:
    for seed in range(3):
        text = said(written(grammars, grammars.matcher("json", schema), 61, seed))
        assert jsonschema_rs.is_valid(schema, json.loads(text, object_pairs_hook=_distinct)), text
