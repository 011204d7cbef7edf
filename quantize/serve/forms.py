"""Compiles the form that a request demands of its answer: JSON, a regular expression, or calls.

Calls have Gemma 4's syntax (`calls`), with arguments sorted by name, as the template writes them.
Only the names, types, enums, constants and required fields of a tool's schema are enforced, through
`$ref`, `anyOf` and `oneOf` too; where they cannot be, the schema is refused. The grammar has a few
rules for each field, so that it is never larger than a few times the schema:

    o1: "{" o1_from0? "}"                           an object; its fields are field0, field1, ...
    o1_from0: o1_field0 o1_after1 | o1_from1        nothing is written before field 0
    o1_after1: ("," o1_field1)? o1_after2           something is; without "?" if it is required
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from quantize.errors import InputError
from quantize.serve.calls import BARE_KEY, CLOSE, MARKERS, OPEN, QUOTE
from quantize.serve.failures import invalid, written
from quantize.serve.grammars import Grammars, Matcher
from quantize.serve.json_forms import FormError, check
from quantize.serve.messages import Function
from quantize.serve.protocol import ChatRequest, CompletionRequest
from quantize.serve.tool_schemas import faults, without_nulls

VALUES = r"""
TEXT: /(.|\n)*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
INTEGER: /-?(0|[1-9][0-9]*)/
KEY: /[A-Za-z_][A-Za-z0-9_]*/
any: string | NUMBER | "true" | "false" | "null" | list | object
list: "[" (any ("," any)*)? "]"
object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"
"""
SCALARS = {"string": "string", "integer": "INTEGER", "number": "NUMBER", "null": '"null"'}
SCALARS["boolean"] = '("true" | "false")'
TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    "array": list, "object": dict,
}  # fmt: skip
DECIDING = ("type", "enum", "const", "properties", "required", "items")
DEEPEST = 8  # levels of a parameter's schema that are enforced; deeper, any value is allowed


class Forms:
    """Compiles forms (JSON, regex, calls) for a tokenizer; the token ids `ends` end an answer."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends

    @cached_property
    def grammars(self) -> Grammars:
        """The `Grammars` of the tokenizer, which make matchers; built on first use."""
        return Grammars(self._tokenizer, self._ends)

    def warm_up(self) -> None:
        """Build the grammars before any canvas can wait for it: seconds for a large vocabulary."""
        with suppress(ValueError):  # the tokenizer is not fast: forms are refused, one by one
            assert self.grammars

    def close(self) -> None:
        """End the process that tries forms, if one runs."""
        if "grammars" in self.__dict__:
            self.grammars.trial.close()

    def matcher(self, body: ChatRequest | CompletionRequest) -> Matcher | None:
        """Return the matcher of the form in `body`, None if none; RequestError 400: invalid."""
        if not body.forms:
            return None
        ((param, kind, form),) = body.forms
        try:
            if kind == "calls":
                several = isinstance(body, ChatRequest) and body.parallel_tool_calls
                kind, form = "lark", self._calls(form, several)
            if kind == "json":
                check(form)
            return self.grammars.matcher(kind, form)
        except FormError as error:
            place = ".json_schema.schema" if param == "response_format" else ""
            raise invalid(written((f"{param}{place}", *error.path)), error) from error
        except (InputError, ValueError) as error:
            raise invalid(param, error) from error

    def _calls(self, functions: Sequence[Function], several: bool) -> str:
        vocabulary = self._tokenizer.get_vocab()
        if missing := [marker for marker in (OPEN, CLOSE, QUOTE) if marker not in vocabulary]:
            raise InputError(f"this model's tokenizer has no token {missing[0]}")
        opens, closes, quote = (f"<[{vocabulary[name]}]>" for name in (OPEN, CLOSE, QUOTE))
        rules = _CallGrammar(quote)
        calls = " | ".join(
            f'"call:{function.name}" {rules.parameters_of(function)}' for function in functions
        )
        start = f"start: call{'+' if several else ''}\ncall: {opens} ({calls}) {closes}\n"
        texts = f"string: {quote} TEXT {quote}\n{VALUES}"
        return start + texts + "".join(f"{line}\n" for line in rules.lines)


class _CallGrammar:
    """Grows the rules of a grammar of calls; each method returns a term that stands for a value."""

    def __init__(self, quote: str) -> None:
        self.lines: list[str] = []
        self._quote, self._named = quote, 0
        self._root: dict[str, Any] = {}  # the schema that the function's references point into
        self._references: dict[str, str] = {}  # their rules
        # rule, schema and place of use of the references that are not written yet
        self._unwritten: list[tuple[str, Any, str]] = []

    def parameters_of(self, function: Function) -> str:
        """Return the term of the function's arguments; InputError names a keyword that is not held."""
        self._root, self._references = function.parameters, {}
        where = f"{function.name}.parameters"
        if held := {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & set(self._root):
            raise InputError(f"{where}.{min(held)}: a demanded call cannot be held to it")
        term = self._object(self._root, 0, where)
        while self._unwritten:  # no recursion: references may form a long chain
            rule, schema, used = self._unwritten.pop()
            self.lines.append(f"{rule}: {self._value(_checked(schema, used), 1, used)}")
        return term

    def _object(self, schema: dict[str, Any], depth: int, where: str) -> str:
        """Return the term of an object; without `properties` any object, at the top the empty one."""
        properties = schema.get("properties")
        if depth > DEEPEST:
            return "object"
        needed = set(schema.get("required", []))
        if unknown := sorted(needed - set(properties or {})):
            raise InputError(f"{where}.required: {unknown[0][:100]!r} is not in properties")
        if not isinstance(properties, dict) or not properties:
            return '"{}"' if properties == {} or depth == 0 else "object"
        self._named += 1
        name = f"o{self._named}"
        fields = [
            (
                self._field(f"{name}_field{n}", key, properties[key], depth, where),
                key in needed,
            )
            for n, key in enumerate(sorted(properties, key=str.lower))
        ]
        self.lines.append(f'{name}: "{{" {self._listed(name, fields)} "}}"')
        return name

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
        """Return the term of fields with commas between those that are present."""
        last = len(fields) - 1
        begins = next((n for n, (_, needed) in enumerate(fields) if needed), last)
        for n, (field, needed) in enumerate(fields):
            on = f" {name}_after{n + 1}" if n < last else ""
            if n > 0:
                self.lines.append(f'{name}_after{n}: ("," {field}){"" if needed else "?"}{on}')
            if n <= begins:  # no answer's first field comes after the first one that is needed
                later = f" | {name}_from{n + 1}" if n < begins else ""
                self.lines.append(f"{name}_from{n}: {field}{on}{later}")
        return f"{name}_from0" + ("" if fields[begins][1] else "?")

    def _value(self, schema: Any, depth: int, where: str) -> str:
        if not isinstance(schema, dict) or depth > DEEPEST:
            return "any"
        for word in ("$ref", "anyOf", "oneOf", "allOf"):
            if word in schema:
                if beside := {*DECIDING, "$ref", "anyOf", "oneOf", "allOf"} & set(schema) - {word}:
                    raise InputError(f"{where}.{word}: cannot be held beside {min(beside)}")
                return self._combined(word, schema[word], depth, f"{where}.{word}")
        types = schema.get("type", "object" if "properties" in schema else None)
        types = types if isinstance(types, list) else [types]
        for word in ("const", "enum"):
            if word in schema:
                values = [schema[word]] if word == "const" else schema[word]
                return self._one_of(values, types, f"{where}.{word}")
        if not types:
            raise InputError(f"{where}.type: no value has a type of an empty list")
        return "(" + " | ".join(self._typed(kind, schema, depth, where) for kind in types) + ")"

    def _combined(self, word: str, schemas: Any, depth: int, where: str) -> str:
        if word == "$ref":
            return self._referred(schemas, where)
        if not isinstance(schemas, list) or not schemas or (word == "allOf" and len(schemas) > 1):
            raise InputError(f"{where}: a demanded call cannot be held to it")
        terms = (
            self._value(_checked(one, f"{where}.{n}"), depth + 1, f"{where}.{n}")
            for n, one in enumerate(schemas)
        )
        return "(" + " | ".join(terms) + ")"

    def _referred(self, reference: Any, where: str) -> str:
        """Return the rule of a reference within the schema; each is written once."""
        schema: Any = self._root
        parts = reference.split("/") if isinstance(reference, str) else [""]
        for part in parts[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
        if parts[0] != "#" or len(parts) == 1 or not isinstance(schema, dict):
            raise InputError(f"{where}: leads to no schema below these parameters")
        if reference not in self._references:
            self._named += 1
            rule = self._references[reference] = f"ref{self._named}"
            self._unwritten.append((rule, schema, where))
        return self._references[reference]

    def _one_of(self, values: Sequence[Any], types: Sequence[Any], where: str) -> str:
        fitting = [one for one in values if any(_is_of(one, kind) for kind in types)]
        if not fitting:
            raise InputError(f"{where}: no value satisfies it")
        if any(isinstance(one, (list, dict)) for one in fitting):
            raise InputError(f"{where}: a demanded call cannot be held to lists or objects")
        texts = [one for one in fitting if isinstance(one, str)]
        if any(marker in text for text in texts for marker in MARKERS):
            raise InputError(f"{where}: no call can hold a text with markup of calls")
        terms = [f"{self._quote} {json.dumps(text)} {self._quote}" for text in texts]
        terms += [json.dumps(json.dumps(one)) for one in fitting if not isinstance(one, str)]
        return "(" + " | ".join(terms) + ")"

    def _typed(self, kind: str | None, schema: dict[str, Any], depth: int, where: str) -> str:
        if kind == "object":
            return self._object(schema, depth, where)
        if kind == "array":
            self._named += 1
            name = f"item{self._named}"  # items may be lists: each is written once
            item = self._value(schema.get("items"), depth + 1, f"{where}.items")
            self.lines.append(f"{name}: {item}")
            return f'"[" ({name} ("," {name})*)? "]"'
        return SCALARS.get(kind or "", "any")


def _checked(schema: Any, where: str) -> Any:
    """Return a schema that requests do not check, without nulls; InputError: a keyword is wrong."""
    schema = without_nulls(schema)
    if isinstance(schema, dict) and (fault := next(faults(schema), None)):
        raise InputError(f"{where}.{'.'.join(map(str, fault[0]))}: {fault[1]}")
    return schema


def _is_of(value: Any, kind: str | None) -> bool:
    """Return whether a value of JSON has the type; unknown types and None have every value."""
    if isinstance(value, bool):
        return kind not in TYPES or kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(kind or "", object))
