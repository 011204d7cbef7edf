"""Answers held to schemas as clients send them, drawn at random, and judged by another library.

pytest tests/serve/test_random_schemas.py -m slow -s    600 of each kind, and what became of them
"""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from quantize.errors import InputError
from quantize.serve.calls import read_calls
from quantize.serve.failures import RequestError
from quantize.serve.forms import Forms
from quantize.serve.protocol import ChatRequest
from tests.support.serving import EOS, tokenizer, written

USER = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
NAMES = st.sampled_from(["name", "city", "days", "a b", "é", "tags", "x-y", "$k", 'q"q', "value"])
COUNTS, NUMBERS = st.integers(0, 4), st.sampled_from([-20, -1.5, 0, 0.1, 2, 7, 99.5, 1000])
PATTERNS = st.sampled_from(
    [
        "^[a-z]+$", r"^\d{3}-\d{4}$", "[A-Z]{2}", "^(foo|bar)", "x$", "^.{2,4}$", r"\w+@\w+\.com",
        "a|b", r"^\S+$", r"^[\w.-]+$", r"(?:ab)+", "a.c", r'["\\]', "^/[a-z]+/$", "^a|b$",
        r"\$$",
    ]
)  # fmt: skip
VALUES = st.one_of(
    st.integers(-3, 99), st.booleans(), st.none(), st.sampled_from([0.5, 1.0, -2.25, 1e21]),
    st.sampled_from(["a", "bb", "two words", "", 'q"', "é😀", "line\nx", "True", "12"]),
)  # fmt: skip


def joined(*parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(*parts).map(lambda drawn: {k: v for part in drawn for k, v in part.items()})


def range_of(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """At most two keywords, in order."""
    some = st.fixed_dictionaries({}, optional={low: values, high: values})
    return some.filter(lambda drawn: drawn.get(low, 0) < drawn.get(high, 10**9))


STRINGS = joined(
    st.just({"type": "string"}), range_of("minLength", "maxLength", st.integers(0, 9)),
    st.one_of(st.just({}), st.just({"format": "date"}), st.builds(lambda p: {"pattern": p}, PATTERNS)),
)  # fmt: skip
BOUNDED = joined(
    st.sampled_from([{"type": "integer"}, {"type": "number"}, {}, {"type": ["number", "null"]}]),
    st.one_of(range_of("minimum", "maximum", NUMBERS), range_of("exclusiveMinimum", "maximum", NUMBERS),
              range_of("minimum", "exclusiveMaximum", NUMBERS)),
    st.sampled_from([{}, {}, {}, {"multipleOf": 5}, {"multipleOf": 0.25}]),
)  # fmt: skip
LEAVES: st.SearchStrategy[Any] = st.one_of(
    STRINGS, BOUNDED, VALUES.map(lambda value: {"const": value}),
    joined(st.sampled_from([{}, {"type": "string"}, {"minimum": 2}, {"minLength": 2}]),
           st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values})),
    st.sampled_from([{"type": "boolean"}, {}, True, False, {"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"},
                     {"type": ["integer", "string"], "minLength": 2, "minimum": 5}]),
)  # fmt: skip


def objects_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def fields_of(named: dict[str, Any], needed: int) -> dict[str, Any]:
        names = [name for n, name in enumerate(sorted(named)) if needed >> n & 1]
        return {"type": "object"} | ({"properties": named, "required": names} if named else {})

    more = st.one_of(st.just({}), st.builds(lambda one: {"additionalProperties": one}, inner))
    return joined(
        st.builds(fields_of, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 7)), more,
        st.one_of(st.just({}), range_of("minProperties", "maxProperties", COUNTS)),
    )  # fmt: skip


def _of_schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(inner, min_size=1, max_size=3)
    unions = st.builds(lambda word, some: {word: some}, st.sampled_from(["anyOf", "oneOf"]), many)
    alone = st.builds(lambda word, one: {word: [one]}, st.sampled_from(["allOf", "anyOf"]), inner)
    lists = joined(
        st.just({"type": "array"}), inner.map(lambda one: {"items": one}),
        range_of("minItems", "maxItems", COUNTS),
        st.sampled_from([{}, {}, {"prefixItems": [{}]}, {"uniqueItems": True}, {"not": {}}]),
    )  # fmt: skip
    return st.one_of(objects_of(inner), objects_of(inner), lists, unions, alone)


E = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/e"}}}
WITHIN = st.recursive(LEAVES, _of_schema, max_leaves=6)
SCHEMAS = {"json": st.one_of(objects_of(WITHIN), _of_schema(WITHIN)), "calls": objects_of(WITHIN)}


def asked(kind: str, schema: Any, count: int) -> dict[str, Any]:
    if kind == "json":
        return USER | {"guided_json": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named: Any = {"type": "function", "function": {"name": "f"}}
    chosen = named if count % 2 else "required"
    return USER | {"tools": [tool], "tool_choice": chosen, "parallel_tool_calls": False}


def judged(kind: str, count: int, first: int) -> Counter[str]:
    """Let random logits answer to random schemas; return how many answers were right and refused."""
    # cyclonedx-python-lib brings it; it compiles grammars of addresses for seconds when it is imported.
    import jsonschema

    forms, seen = Forms(tokenizer(), EOS), Counter[str]()

    @seed(first)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(SCHEMAS[kind], st.one_of(STRINGS, BOUNDED))
    def answer(schema: dict[str, Any], part: Any) -> None:
        drawn, schema = seen.total(), schema | {"$defs": {"d": part, "e": E | {"required": ["v"]}}}
        try:
            matcher = forms.matcher(ChatRequest.model_validate(asked(kind, schema, drawn)))
            text = tokenizer().decode(written(forms.grammars, matcher, 150, drawn))
        except (RequestError, InputError, ValueError) as error:
            seen["refused: " + str(error).partition(": ")[2][:100]] += 1
            return
        if kind == "calls":
            said, (call,) = read_calls(text, ["f"], whole=True)
            assert said == ""
            text = call.arguments
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        seen["right"] += 1

    try:
        assert forms.grammars.trial.start()
        answer()
    finally:
        forms.close()
    return seen


@pytest.mark.parametrize("kind", ["json", "calls"])
def test_answers_are_what_another_library_says_that_they_are(kind: str) -> None:
    seen = judged(kind, 40, 51)
    assert seen["right"] >= 15, seen
    broken = [why for why in seen if "cannot be compiled" in why and "Unsatisfiable" not in why]
    assert kind == "json" or not broken  # a call's grammar is ours


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "calls"])
def test_six_hundred_answers(kind: str) -> None:
    seen = judged(kind, 600, 5)
    print(f"\n{kind}: {seen.most_common(20)}")
    assert seen["right"] >= 200, seen
