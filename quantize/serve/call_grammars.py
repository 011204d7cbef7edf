"""Writes the grammar of calls that must be made, for the engine.

Calls have Gemma 4's syntax (`calls`), with arguments sorted by name, as the template writes them. The
arguments fit the tool's schema; a keyword that cannot be held is refused with its place. Fields without
a name in the schema are written only where it has no names at all. The grammar has a few rules for each
field, so that it is never larger than a few times the schema:

    o1: "{" o1_from0? "}"                           an object; its fields are field0, field1, ...
    o1_from0: o1_field0 o1_after1 | o1_from1        nothing is written before field 0
    o1_after1: ("," o1_field1)? o1_after2           something is; without "?" if it is required
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantize.errors import InputError
from quantize.serve.calls import BARE_KEY, CLOSE, MARKERS, OPEN, QUOTE
from quantize.serve.failures import written
from quantize.serve.json_forms import ENDLESS, endless, pointed
from quantize.serve.leaf_forms import (
    TYPES,
    bounds,
    fitting,
    number,
    string,
    text_of,
    type_of,
    values_of,
)
from quantize.serve.messages import Function
from quantize.serve.tool_schemas import OF_TYPE, faults, without_nulls

DEEPEST = 24  # levels of a parameter's schema
FREE = 6  # levels of a value that may be any; with DEEPEST, fewer than a reader of calls takes
SCALARS = {"string": "string", "integer": "INTEGER", "number": "NUMBER", "null": '"null"'}
SCALARS["boolean"] = '("true" | "false")'
# numbers are short enough to be finite
VALUES = rf"""
TEXT: {string({}, "")}
NUMBER: /-?(0|[1-9][0-9]{{0,39}})(\.[0-9]{{1,40}})?([eE][+-]?[0-9]{{1,2}})?/
INTEGER: /-?(0|[1-9][0-9]{{0,39}})/
KEY: /[A-Za-z_][A-Za-z0-9_]*/
any0: string | NUMBER | "true" | "false" | "null" | "[]" | "{{}}"
any: any{FREE}
object: "{{" (pair{FREE - 1} ("," pair{FREE - 1})*)? "}}"
"""
NESTED = """any{n}: any{m} | "[" any{m} ("," any{m})* "]" | "{{" pair{m} ("," pair{m})* "}}"
pair{m}: KEY ":" any{m}"""
MOST_APART = 100  # alternatives of a oneOf, of which each is compared with each
COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
READ = {"type", "enum", "const", *COMBINING}.union(*OF_TYPE.values())
NOT_HELD = {
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "patternProperties",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems", "uniqueItems", "contains",
    "prefixItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip


def call_grammar(
    functions: Sequence[Function], vocabulary: Mapping[str, int], *, several: bool
) -> str:
    """Return the Lark grammar of one call, or `several`, of functions, in a vocabulary of token ids.

    InputError: the vocabulary lacks a marker of calls, or a keyword of a schema cannot be held.
    """
    if missing := [marker for marker in (OPEN, CLOSE, QUOTE) if marker not in vocabulary]:
        raise InputError(f"this model's tokenizer has no token {missing[0]}")
    opens, closes, quote = (f"<[{vocabulary[name]}]>" for name in (OPEN, CLOSE, QUOTE))
    rules = _CallRules(quote)
    calls = " | ".join(
        f'"call:{function.name}" {rules.parameters_of(function)}' for function in functions
    )
    start = f"start: call{'+' if several else ''}\ncall: {opens} ({calls}) {closes}\n"
    free = [NESTED.format(n=n, m=n - 1) for n in range(1, FREE + 1)]
    texts = f"string: {quote} TEXT {quote}\n{VALUES}"
    return start + texts + "".join(f"{line}\n" for line in [*free, *rules.lines])


class _CallRules:
    """Grows the rules of a grammar of calls; each method returns a term that stands for a value."""

    def __init__(self, quote: str) -> None:
        self.lines: list[str] = []
        self._quote, self._named = quote, 0
        self._root: dict[str, Any] = {}  # the schema that the function's references point into
        self._references: dict[str, str] = {}  # their rules
        self._marked: dict[
            int, tuple[Any, dict[str, set[str]]]
        ] = {}  # by id of a schema, held here
        # rule, schema and place of use of the references that are not written yet
        self._unwritten: list[tuple[str, Any, str]] = []

    def parameters_of(self, function: Function) -> str:
        """Return the term of the function's arguments; InputError names a keyword that is not held."""
        self._root, self._references = function.parameters, {}
        where = f"{function.name}.parameters"
        if held := {*COMBINING, "enum", "const"} & set(self._root):
            raise InputError(f"{where}.{min(held)}: a demanded call cannot be held to it")
        _refuse_what_is_not_held(self._root, where)
        if (place := endless({"type": "object"} | self._root)) is not None:
            raise InputError(f"{where}{written(('', *place))}: {ENDLESS}")
        term = self._object(self._root, 0, where)
        while self._unwritten:  # no recursion: references may form a long chain
            rule, schema, used = self._unwritten.pop()
            self.lines.append(f"{rule}: {self._value(_checked(schema, used), 1, used)}")
        return term

    def _name(self, kind: str) -> str:
        self._named += 1
        return f"{kind}{self._named}"

    def _object(self, schema: dict[str, Any], depth: int, where: str) -> str:
        """Return the term of an object with the fields that `properties` names, or a free one.

        Without `properties` it is empty at the top, unless the schema says something of its fields.
        """
        properties, needed = schema.get("properties") or {}, set(schema.get("required", []))
        least, most = bounds(schema, "object", where)
        if unknown := sorted(needed - set(properties)):
            raise InputError(f"{where}.required: {unknown[0][:100]!r} is not in properties")
        if not properties:
            return self._map(schema, (least, most), depth, where)
        keys = [key for key in properties if properties[key] is not False or key in needed]
        if most is not None and most < len(keys):
            keys = [key for key in keys if key in needed]
        if least >= len(keys):
            needed = set(keys)
        if most is not None and most < len(needed):
            raise InputError(f"{where}.maxProperties: fewer than `required` names")
        if least > max(len(needed), min(len(keys), 1)):
            raise InputError(f"{where}.minProperties: require fields by their names instead")
        if not keys:
            return '"{}"'
        name = self._name("o")
        fields = [
            (self._field(f"{name}_field{n}", key, properties[key], depth, where), key in needed)
            for n, key in enumerate(sorted(keys, key=str.lower))
        ]
        listed, maybe = self._listed(name, fields), "" if least or needed else "?"
        self.lines.append(f'{name}: "{{" {listed}{maybe} "}}"')
        return name

    def _map(
        self, schema: dict[str, Any], sizes: tuple[int, int | None], depth: int, where: str
    ) -> str:
        """Return the term of an object whose fields have no names in the schema."""
        more, (least, most) = schema.get("additionalProperties"), sizes
        bare = more is None and not least and (depth == 0 or schema.get("properties") == {})
        if more is False or bare or most == 0:
            if least:
                raise InputError(f"{where}.minProperties: no fields are allowed")
            return '"{}"'
        if least > 1:
            raise InputError(f"{where}.minProperties: at most 1 here: a name may stand twice")
        if not isinstance(more, dict) and sizes == (0, None):
            return "object"
        place = f"{where}.additionalProperties"
        value = self._value(_checked(more, place), depth + 1, place)
        self.lines.append(f'{(field := self._name("named"))}: KEY ":" {value}')
        return _repeated("{", field, sizes, "}")

    def _field(self, rule: str, key: str, schema: Any, depth: int, where: str) -> str:
        if any(marker in key for marker in MARKERS):
            raise InputError(f"no call can hold a field of the name {key[:100]!r}")
        head = json.dumps(f"{key}:")
        if not re.fullmatch(BARE_KEY, key):
            head = f'{self._quote} {json.dumps(key)} {self._quote} ":"' if key else '"\\"\\":"'
        value = self._value(schema, depth + 1, f"{where}.properties.{key[:100]}")
        self.lines.append(f"{rule}: {head} {value}")
        return rule

    def _listed(self, name: str, fields: Sequence[tuple[str, bool]]) -> str:
        """Return the term of fields with commas between those that are present, of which one is."""
        last = len(fields) - 1
        begins = next((n for n, (_, needed) in enumerate(fields) if needed), last)
        for n, (field, needed) in enumerate(fields):
            on = f" {name}_after{n + 1}" if n < last else ""
            if n > 0:
                self.lines.append(f'{name}_after{n}: ("," {field}){"" if needed else "?"}{on}')
            if n <= begins:  # no answer's first field comes after the first one that is needed
                later = f" | {name}_from{n + 1}" if n < begins else ""
                self.lines.append(f"{name}_from{n}: {field}{on}{later}")
        return f"{name}_from0"

    def _value(self, schema: Any, depth: int, where: str) -> str:
        if schema is False:
            raise InputError(f"{where}: no value satisfies it")
        if not isinstance(schema, dict):
            return "any"
        if depth > DEEPEST:
            raise InputError(
                f"{where}: nested too deeply; a demanded call is held to {DEEPEST} levels"
            )
        _refuse_what_is_not_held(schema, where)
        for word in COMBINING:
            if word in schema:
                if beside := READ & set(schema) - {word}:
                    raise InputError(f"{where}.{word}: cannot be held beside {min(beside)}")
                return self._combined(word, schema[word], depth, f"{where}.{word}")
        kinds = _kinds(schema)
        if "const" in schema or "enum" in schema:
            return self._one_of(schema, kinds, where)
        if not kinds:
            raise InputError(f"{where}.type: no value has a type of an empty list")
        terms = [self._typed(kind, schema, depth, where) for kind in kinds]
        return "(" + " | ".join(terms) + ")"

    def _combined(self, word: str, schemas: Any, depth: int, where: str) -> str:
        if word == "$ref":
            return self._referred(schemas, where)
        if not isinstance(schemas, list) or not schemas or (word == "allOf" and len(schemas) > 1):
            raise InputError(f"{where}: a demanded call cannot be held to it")
        if word == "oneOf":
            self._check_apart(schemas, where)
        terms = (
            self._value(_checked(one, f"{where}[{n}]"), depth + 1, f"{where}[{n}]")
            for n, one in enumerate(schemas)
        )
        return "(" + " | ".join(terms) + ")"

    def _check_apart(self, schemas: Sequence[Any], where: str) -> None:
        """Refuse alternatives of which two may take the same value: exactly one is to take it."""
        if len(schemas) > MOST_APART:
            raise InputError(f"{where}: of more than {MOST_APART} alternatives; ask for anyOf")
        marks = [self._marks(_checked(one, f"{where}[{n}]")) for n, one in enumerate(schemas)]
        for n, mark in enumerate(marks):
            for m, earlier in enumerate(marks[:n]):
                if not any(mark[by].isdisjoint(earlier[by]) for by in set(mark) & set(earlier)):
                    raise InputError(f"{where}: {m} and {n} may take the same value; ask for anyOf")

    def _marks(self, schema: Any) -> dict[str, set[str]]:
        """Return by what the values of a schema are told apart, and what theirs may be of each.

        "" is their types; a required field's name is its constants, for no object has others.
        """
        for _ in range(DEEPEST):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._pointed(schema["$ref"])
        if not isinstance(schema, dict):
            return {}
        if id(schema) not in self._marked:  # many alternatives may refer to one long list
            self._marked[id(schema)] = schema, self._told_apart(schema)
        return self._marked[id(schema)][1]

    def _told_apart(self, schema: dict[str, Any]) -> dict[str, set[str]]:
        values = values_of(schema)
        kinds = [kind for kind in _kinds(schema) if kind is not None]
        marks = {"": {"number" if kind == "integer" else kind for kind in kinds}} if kinds else {}
        if values is not None:
            return {
                "values": {text_of(one) for one in values},
                "": {type_of(one) for one in values},
            }
        if kinds == ["object"]:
            properties = schema.get("properties") or {}
            for key in schema.get("required", []):
                if (values := values_of(properties.get(key))) is not None:
                    marks[f".{key}"] = {text_of(one) for one in values}
        return marks

    def _pointed(self, reference: Any) -> Any:
        """Return the schema that a reference leads to; None: it leads to none below the root."""
        return None if reference == "#" else pointed(self._root, reference)

    def _referred(self, reference: Any, where: str) -> str:
        """Return the rule of a reference within the schema; each is written once."""
        schema = self._pointed(reference)
        if not isinstance(schema, dict):
            raise InputError(f"{where}: leads to no schema below these parameters")
        if reference not in self._references:
            rule = self._references[reference] = self._name("ref")
            self._unwritten.append((rule, schema, where))
        return self._references[reference]

    def _one_of(self, schema: dict[str, Any], kinds: Sequence[Any], where: str) -> str:
        place = f"{where}.{'const' if 'const' in schema else 'enum'}"
        values = fitting(values_of(schema) or [], schema, kinds, where)
        if not values:
            raise InputError(f"{place}: no value satisfies it")
        if any(isinstance(one, (list, dict)) for one in values):
            raise InputError(f"{place}: a demanded call cannot be held to lists or objects")
        texts = [one for one in values if isinstance(one, str)]
        if any(marker in text for text in texts for marker in MARKERS):
            raise InputError(f"{place}: no call can hold a text with markup of calls")
        terms = [f"{self._quote} {json.dumps(text)} {self._quote}" for text in texts]
        terms += [json.dumps(json.dumps(one)) for one in values if not isinstance(one, str)]
        return "(" + " | ".join(terms) + ")"

    def _typed(self, kind: str | None, schema: dict[str, Any], depth: int, where: str) -> str:
        if kind == "object":
            return self._object(schema, depth, where)
        if kind == "array":
            sizes = bounds(schema, kind, where)
            items = schema.get("items")
            item = "" if items is False else self._value(items, depth + 1, f"{where}.items")
            if items is False and sizes[0]:
                raise InputError(f"{where}.minItems: no items are allowed")
            name = self._name("item")  # items may be lists: each is written once
            self.lines += [f"{name}: {item}"] if item else []
            return _repeated("[", name, sizes if item else (0, 0), "]")
        if kind is None or kind not in SCALARS:
            return "any"
        if not set(OF_TYPE.get(kind, ())) & set(schema):
            return SCALARS[kind]
        if kind == "string":
            self.lines.append(f"{(name := self._name('TEXT'))}: {string(schema, where)}")
            return f"{self._quote} {name} {self._quote}"
        self.lines.append(f"{(name := self._name('number'))}: {number(kind, schema, where)}")
        return name


def _repeated(opens: str, term: str, sizes: tuple[int, int | None], closes: str) -> str:
    """Return the term of a list of as many `term` as `sizes`, the least and the most, allow."""
    least, most = sizes
    if most == 0:
        return f'"{opens}{closes}"'
    times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    more = "" if most == 1 else f' ("," {term}){times}'
    return f'"{opens}" ({term}{more}){"" if least else "?"} "{closes}"'


def _checked(schema: Any, where: str) -> Any:
    """Return a schema that requests do not check, without nulls; InputError: a keyword is wrong."""
    schema = without_nulls(schema)
    if isinstance(schema, dict) and (fault := next(faults(schema), None)):
        raise InputError(f"{where}.{written(fault[0])}: {fault[1]}")
    return schema


def _refuse_what_is_not_held(schema: dict[str, Any], where: str) -> None:
    if held := {word for word in NOT_HELD & set(schema) if schema[word] not in (False, None)}:
        raise InputError(f"{where}.{min(held)}: a demanded call cannot be held to it")


def _kinds(schema: dict[str, Any]) -> list[str | None]:
    """Return the types of a schema's values; those of which it says something if it has no `type`."""
    kinds = schema.get("type")
    if kinds is None:
        return [kind for kind in TYPES if set(OF_TYPE.get(kind, ())) & set(schema)] or [None]
    return list(dict.fromkeys(kinds)) if isinstance(kinds, list) else [kinds]
