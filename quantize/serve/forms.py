"""Compiles the form that a request demands of its answer: JSON, a regular expression, or calls.

Calls have Gemma 4's syntax (`calls`), with arguments sorted by name, as the template writes them.
Only the names, types, enums of strings and required fields of a tool's schema are enforced. Their
grammar has a few rules for each field, so that it is never larger than a few times the schema:

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
from quantize.serve.failures import invalid
from quantize.serve.grammars import Grammars, Matcher
from quantize.serve.messages import Function
from quantize.serve.protocol import ChatRequest, CompletionRequest

VALUES = r"""
TEXT: /(.|\n)*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
INTEGER: /-?(0|[1-9][0-9]*)/
KEY: /[A-Za-z_][A-Za-z0-9_]*/
any: string | NUMBER | "true" | "false" | "null" | list | object
list: "[" (any ("," any)*)? "]"
object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"
"""
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
            return self.grammars.matcher(kind, form)
        except (InputError, ValueError, RecursionError) as error:
            raise invalid(param, error) from error

    def _calls(self, functions: Sequence[Function], several: bool) -> str:
        vocabulary = self._tokenizer.get_vocab()
        if missing := [marker for marker in (OPEN, CLOSE, QUOTE) if marker not in vocabulary]:
            raise InputError(f"this model's tokenizer has no token {missing[0]}")
        opens, closes, quote = (f"<[{vocabulary[name]}]>" for name in (OPEN, CLOSE, QUOTE))
        rules = _CallGrammar(quote)
        calls = " | ".join(
            f'"call:{function.name}" {rules.object_of(function.parameters, 0)}'
            for function in functions
        )
        start = f"start: call{'+' if several else ''}\ncall: {opens} ({calls}) {closes}\n"
        texts = f"string: {quote} TEXT {quote}\n{VALUES}"
        return start + texts + "".join(f"{line}\n" for line in rules.lines)


class _CallGrammar:
    """Grows the rules of a grammar of calls; each method returns a term that stands for a value."""

    def __init__(self, quote: str) -> None:
        self.lines: list[str] = []
        self._quote, self._named = quote, 0

    def object_of(self, schema: dict[str, Any], depth: int) -> str:
        """Return the term of an object; without `properties` any object, at the top the empty one."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties or depth > DEEPEST:
            return '"{}"' if properties == {} or (not properties and depth == 0) else "object"
        self._named += 1
        name = f"o{self._named}"
        needed = set(schema.get("required", []))
        fields = [
            (self._field(f"{name}_field{n}", key, properties[key], depth), key in needed)
            for n, key in enumerate(sorted(properties, key=str.lower))
        ]
        self.lines.append(f'{name}: "{{" {self._listed(name, fields)} "}}"')
        return name

    def _field(self, rule: str, key: str, schema: Any, depth: int) -> str:
        if any(marker in key for marker in MARKERS):
            raise InputError(f"no call can hold a field of the name {key[:100]!r}")
        head = json.dumps(f"{key}:")
        if not re.fullmatch(BARE_KEY, key):
            head = f'{self._quote} {json.dumps(key)} {self._quote} ":"' if key else '"\\"\\":"'
        self.lines.append(f"{rule}: {head} {self._value(schema, depth + 1)}")
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

    def _value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, dict) or depth > DEEPEST:
            return "any"
        texts = [text for text in schema.get("enum", []) if isinstance(text, str)]
        match schema.get("type"):
            case "string" if texts:
                quoted = (f"{self._quote} {json.dumps(text)} {self._quote}" for text in texts)
                return "(" + " | ".join(quoted) + ")"
            case "string":
                return "string"
            case "integer":
                return "INTEGER"
            case "number":
                return "NUMBER"
            case "boolean":
                return '("true" | "false")'
            case "array":
                self._named += 1
                name = f"item{self._named}"  # items may be lists: each is written once
                item = self._value(schema.get("items"), depth + 1)
                self.lines.append(f"{name}: {item}")
                return f'"[" ({name} ("," {name})*)? "]"'
            case "object":
                return self.object_of(schema, depth)
            case _:
                return "any"
