"""Compiles the form that a request demands of its answer: JSON, a regular expression, or calls.

Calls have Gemma 4's syntax (`calls`), with arguments sorted by name, as the template writes them.
Only the names, types, enums of strings and required fields of a tool's schema are enforced.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quantize.errors import InputError
from quantize.serve.calls import CLOSE, OPEN, QUOTE
from quantize.serve.constraint import Grammars, Matcher
from quantize.serve.failures import invalid
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
        ids = {name: f"<[{vocabulary[name]}]>" for name in (OPEN, CLOSE, QUOTE)}
        calls = " | ".join(
            f'"call:{function.name}" {_object(function.parameters, ids[QUOTE], 0)}'
            for function in functions
        )
        start = f"start: call{'+' if several else ''}\ncall: {ids[OPEN]} ({calls}) {ids[CLOSE]}\n"
        return f"{start}string: {ids[QUOTE]} TEXT {ids[QUOTE]}\n{VALUES}"


def _object(schema: dict[str, Any], quote: str, depth: int) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties or depth > DEEPEST:
        return '"{}"' if properties == {} or (not properties and depth == 0) else "object"
    needed = set(schema.get("required", []))
    fields = [
        (f"{json.dumps(name + ':')} {_value(properties[name], quote, depth + 1)}", name in needed)
        for name in sorted(properties, key=str.lower)
    ]
    return f'"{{" {_listed(fields)} "}}"'


def _listed(fields: Sequence[tuple[str, bool]]) -> str:
    """Return the rule of fields with commas between those that are present."""
    choices: list[str] = []
    for n, (field, needed) in enumerate(fields):  # the first one that is present
        behind = "".join(f' "," {f}' if must else f' ("," {f})?' for f, must in fields[n + 1 :])
        choices.append(field + behind)
        if needed:
            return "(" + " | ".join(choices) + ")"
    return "(" + " | ".join(choices) + ")?"


def _value(schema: Any, quote: str, depth: int) -> str:
    if not isinstance(schema, dict) or depth > DEEPEST:
        return "any"
    texts = [text for text in schema.get("enum", []) if isinstance(text, str)]
    match schema.get("type"):
        case "string" if texts:
            return "(" + " | ".join(f"{quote} {json.dumps(text)} {quote}" for text in texts) + ")"
        case "string":
            return "string"
        case "integer":
            return "INTEGER"
        case "number":
            return "NUMBER"
        case "boolean":
            return '("true" | "false")'
        case "array":
            item = _value(schema.get("items"), quote, depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        case "object":
            return _object(schema, quote, depth)
        case _:
            return "any"
