"""Calls that must be made: their arguments fit the tool's schema, or the request is refused."""

import json
from typing import Any

import jsonschema_rs
import pytest

from quantize.errors import InputError
from quantize.serve import call_grammars
from quantize.serve.call_grammars import call_grammar
from quantize.serve.calls import read_calls
from quantize.serve.failures import RequestError
from quantize.serve.forms import Forms
from quantize.serve.grammars import Grammars, Matcher
from quantize.serve.protocol import ChatRequest
from tests.support.serving import EOS, tokenizer, written

ASKED: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer(), EOS)


def test_a_tokenizer_without_the_markers_of_calls_is_refused() -> None:
    with pytest.raises(InputError, match=r"no token <tool_call\|>"):
        call_grammar([], {"<|tool_call>": 48}, several=True)


TREE = {"$defs": {"node": {"type": "object", "properties": {"up": {"$ref": "#/$defs/node"}}}}}


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ({"const": 7}, [7]), ({"type": "integer", "enum": [7, "x", True]}, [7]),
        ({"enum": ["a", None, 2.5, False]}, ["a", None, 2.5, False]),
        ({"$ref": "#/$defs/seven"}, [7]), ({"type": "null"}, [None]),
        ({"anyOf": [{"const": 1}, {"type": "null"}]}, [1, None]),
        ({"type": ["boolean", "null"]}, [True, False, None]),
        ({"allOf": [{"$ref": "#/$defs/seven"}]}, [7]), ({"anyOf": [{"const": 7, "enum": None}]}, [7]),
        ({"anyOf": [{"type": "null", "enum": None}]}, [None]),
    ],
)  # fmt: skip
def test_a_calls_values_are_held(grammars: Grammars, field: Any, allowed: list[Any]) -> None:
    schema = {"properties": {"a": field}, "required": ["a"], "$defs": {"seven": {"const": 7}}}
    for seed in range(3):
        text = tokenizer().decode(written(grammars, called(schema), 64, seed))
        (call,) = read_calls(text, ["f"], whole=True)[1]
        assert json.loads(call.arguments)["a"] in allowed


def asking(schema: dict[str, Any]) -> ChatRequest:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"model": "m", "messages": ASKED, "tool_choice": "required", "tools": [tool]}
    return ChatRequest.model_validate(asked | {"parallel_tool_calls": False})


def called(schema: dict[str, Any]) -> Matcher:
    matcher = Forms(tokenizer(), EOS).matcher(asking(schema))
    assert matcher is not None
    return matcher


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"enum": []}}}, "function.parameters.properties.a.enum: no value"),
        ({"properties": {"a": {"type": "string", "const": 3}}}, "properties.a.const: no value"),
        ({"properties": {"a": {}}, "required": ["zz"]}, "function.parameters.required: 'zz' is not"),
        ({"properties": {"a": {"enum": ['<|"|>']}}}, "properties.a.enum: no call can hold"),
        ({"properties": {"a": {"const": "<tool_call|>"}}}, "properties.a.const: no call can hold"),
        ({"properties": {"a": {"enum": [[1]]}}}, "properties.a.enum: a demanded call cannot"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, r"properties.a.\$ref: leads to no schema"),
        ({"properties": {"a": {"allOf": [{}, {}]}}}, "properties.a.allOf: a demanded call cannot"),
        ({"properties": {"a": {"type": "string", "anyOf": [{}]}}}, "a.anyOf: cannot be held beside"),
        ({"properties": {"a": {"anyOf": [{"enum": 5}]}}}, "a.anyOf\\[0\\].enum: must be a list"),
        ({"anyOf": [{"required": ["a"]}]}, "function.parameters.anyOf: a demanded call cannot"),
        ({"if": {}}, "function.parameters.if: a demanded call cannot"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "a.items.uniqueItems: a demanded"),
        ({"properties": {"a": {"anyOf": [False]}}}, "properties.a.anyOf\\[0\\]: no value satisfies it"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1, "required": ["a", "b"]},
         "function.parameters.maxProperties: fewer than"),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, "minProperties: require"),
        ({"minProperties": 2}, "function.parameters.minProperties: at most 1 here"),
        ({"minProperties": 1, "additionalProperties": False}, "minProperties: no fields are allowed"),
        ({"properties": {"a": {"minLength": 3, "maxLength": 2}}}, "maxLength: less than minLength"),
        ({"properties": {"a": {"minLength": "x"}}}, "a.minLength: must be a whole number, at least 0"),
        ({"properties": {"a": {"type": "array", "maxItems": -1}}}, "maxItems: must be a whole number"),
        ({"properties": {"a": {"type": "array", "items": False, "minItems": 1}}}, "minItems: no items"),
        ({"properties": {"a": {"maximum": True}}}, "a.maximum: must be a number"),
        ({"properties": {"a": {"pattern": 5}}}, "a.pattern: must be a regular expression"),
        ({"properties": {"a": {"pattern": "a)|(b"}}}, "a.pattern: must be a regular expression"),
        ({"properties": {"a": {"pattern": "a\\"}}}, "a.pattern: must be a regular expression"),
        ({"properties": {"a": {"pattern": "^a|b"}}}, "a.pattern: put alternatives beside an anchor"),
        ({"properties": {"a": {"pattern": "ab\\"}}}, "a.pattern: must be a regular expression"),
        ({"properties": {"a": {"enum": ["a"], "pattern": "b"}}}, "a.pattern: cannot be held beside"),
        ({"properties": {"a": {"anyOf": [{}], "minimum": 3}}}, "a.anyOf: cannot be held beside min"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
         "a.oneOf: 0 and 1 may take the same value"),
        ({"properties": {"a": {"oneOf": [{"const": n} for n in range(101)]}}}, "of more than 100"),
        ({"properties": {"a": json.loads('{"anyOf":[' * 30 + "{}" + "]}" * 30)}}, "nested too deeply"),
        (TREE | {"properties": {"a": {"$ref": "#/$defs/node"}}, "required": ["a"]} | {"$defs": {
            "node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1}}},
         "function.parameters.properties.a: each text of it holds itself again, without an end"),
        ({"properties": {"a": json.loads('{"items":' * 30 + "{}" + "}" * 30)}}, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_a_call_cannot_be_held_to_is_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match=place):
        called(schema)


def tagged(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}} | fields,
        "required": ["kind"],
    }


@pytest.mark.parametrize(
    "field",
    [
        {"type": "integer", "minimum": 3, "maximum": 12}, {"type": "number", "exclusiveMinimum": 0},
        {"type": "integer", "multipleOf": 7}, {"maximum": -4}, {"type": "number"}, {"type": "integer"},
        {"type": "string", "minLength": 2, "maxLength": 3}, {"minLength": 1}, {"pattern": "^/[a|b]/$"},
        {"type": "string", "pattern": "^x\ny$"}, {"pattern": "(a|b)$", "maxLength": 4},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        {"type": "array", "items": {"type": "null"}, "minItems": 3}, {"maxItems": 0},
        {"type": "array", "items": {"type": "null"}, "maxItems": 1}, {"items": False},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
        {"type": "object", "additionalProperties": False}, {"type": "object", "maxProperties": 1},
        {"properties": {"x": {"const": 1}, "y": {"const": 2}}, "minProperties": 1},
        {"properties": {"x": {"const": 1}, "y": {"const": 2}}, "minProperties": 2},
        {"properties": {"x": {"const": 1}, "y": {"const": 2}}, "required": ["y"], "maxProperties": 1},
        {"enum": ["a", "bbb", 1, 5], "minLength": 2, "minimum": 2}, {"const": "a", "enum": ["b", "a"]},
        {"enum": ["a", "bb"], "minLength": 2, "maxLength": 2}, {"type": "boolean", "enum": [True, 3]},
        {"oneOf": [tagged("cat"), tagged("dog", age={"type": "integer"})]},
        {"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}, {"type": "integer"}]},
    ],
)  # fmt: skip
def test_a_calls_bounds_are_held(grammars: Grammars, field: Any) -> None:
    matcher = called({"properties": {"a": field}, "required": ["a"]})
    for seed in range(6):
        text = tokenizer().decode(written(grammars, matcher, 96, seed))
        (call,) = read_calls(text, ["f"], whole=True)[1]
        arguments = json.loads(call.arguments)
        assert jsonschema_rs.is_valid(field, arguments["a"]), call.arguments


def takes(matcher: Matcher, *value: str) -> bool:
    """Whether a call may have a value of these tokens as `a`."""
    vocabulary = tokenizer().get_vocab()
    tokens = ["<|tool_call>", *"call:f{a:", *value]
    return matcher.deep_copy().consume_tokens([vocabulary[token] for token in tokens])


def test_what_a_call_holds_can_be_read() -> None:
    """Numbers are finite, values are no deeper than the reader goes, and no text spells a marker."""
    matcher, quote = called({"properties": {"a": {}}}), '<|"|>'
    for value, otherwise in (("9" * 40, "9" * 41), ("1e99", "1e100"), ("[" * 6, "[" * 8)):
        assert takes(matcher, *value)
        assert not takes(matcher, *otherwise)
    assert takes(called({"properties": {"a": {"minimum": 3}}}), *"1000000")
    few, flags = {"maxProperties": 1}, {"additionalProperties": {"type": "boolean"}}
    for more, right, wrong in ((few, "{b:1}", "{b:1,c:"), (flags, "{b:true,c:false}", "{b:1")):
        of_objects = called({"properties": {"a": {"type": "object"} | more}})
        assert takes(of_objects, *right)
        assert not takes(of_objects, *wrong)
    assert takes(called({"properties": {"a": {"type": "array", "maxItems": 3}}}), *"[1]")
    deep = called({"properties": {"a": json.loads('{"anyOf":[' * 20 + "{}" + "]}" * 20)}})
    assert takes(deep, *"[1]")
    assert takes(matcher, quote, *'<|"|', quote)
    for marker in (quote, "<tool_call|>", "<|tool_call>"):
        assert not takes(matcher, quote, *marker, quote)


def test_a_schema_that_refers_to_itself_is_held() -> None:
    assert called(TREE | {"properties": {"a": {"$ref": "#/$defs/node"}}})


def test_what_stands_there_often_is_written_once() -> None:
    """Types that repeat, at each of four levels, made a grammar of 10^8 lines from 10 KB."""
    schema: Any = {"type": "null"}
    for _ in range(4):
        schema = {"type": ["array"] * 100, "items": schema}
    body = asking({"properties": {"a": schema}})
    grammar = call_grammar(body.forms[0][2], tokenizer().get_vocab(), several=False)
    assert len(grammar) < len(json.dumps(schema))


def test_alternatives_that_refer_to_one_list_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, text_of = list[Any](), call_grammars.text_of
    monkeypatch.setattr(
        call_grammars, "text_of", lambda value: [read.append(value), text_of(value)][1]
    )
    letters = {"enum": [f"v{n}" for n in range(1000)]}
    schema = {
        "properties": {"a": {"oneOf": [{"$ref": "#/$defs/d"}] * 100}},
        "$defs": {"d": letters},
    }
    with pytest.raises(RequestError, match="0 and 1 may take the same value"):
        called(schema)
    assert len(read) == 1000


def test_a_long_chain_of_references_is_held() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1000)} | {"d1000": {"const": 7}}
    assert called({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain})
