"""Compiles the form that a request demands of its answer: JSON, a regular expression, or calls.

Each holds as a whole, or the request is refused: schemas of JSON by the engine and `json_forms`, those
of tools by `call_grammars`.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from quantize.errors import InputError
from quantize.serve.call_grammars import call_grammar
from quantize.serve.failures import RequestError, invalid, written
from quantize.serve.grammars import Grammars, Matcher
from quantize.serve.json_forms import FormError, check
from quantize.serve.protocol import ChatRequest, CompletionRequest


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

    def texts(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Return the tokens of texts that the form in `body` may want; RequestError 400: none exist."""
        ((param, kind, form),) = body.forms
        try:
            return self.grammars.texts(kind, form)
        except InputError as error:
            raise invalid(param, error) from error

    def matcher(self, body: ChatRequest | CompletionRequest) -> Matcher | None:
        """Return the matcher of the form in `body`, None if none; RequestError 400: invalid."""
        if not body.forms:
            return None
        ((param, kind, form),) = body.forms
        try:
            if kind == "calls":
                several = isinstance(body, ChatRequest) and body.parallel_tool_calls
                form = call_grammar(form, self._tokenizer.get_vocab(), several=several)
                kind = "lark"
            if kind == "json":
                check(form)
            return self.grammars.matcher(kind, form)
        except FormError as error:
            place = ".json_schema.schema" if param == "response_format" else ""
            raise invalid(written((f"{param}{place}", *error.path)), error) from error
        except (InputError, ValueError) as error:
            if isinstance(body, ChatRequest) and param == "tool_choice":
                raise self._placed(body, str(error)) from error
            raise invalid(param, error) from error

    def _placed(self, body: ChatRequest, fault: str) -> RequestError:
        """Return the refusal of calls by the path of the tool's keyword that is to blame, if one is."""
        place, _, reason = fault.partition(": ")
        for n, tool in enumerate(body.tools):
            begin, name = f"tools[{n}].function", tool.function.name
            if name in body.callable and f"{place}.".startswith(f"{name}.parameters."):
                return invalid(begin + place.removeprefix(name), reason)
        for n, tool in enumerate(body.tools):  # alone, as JSON, it may have the same fault
            try:
                self.grammars.matcher("json", tool.function.parameters)
            except FormError as error:
                return invalid(written(("tools", n, "function", "parameters", *error.path)), error)
            except (InputError, ValueError):
                continue
        return invalid("tool_choice", fault)
