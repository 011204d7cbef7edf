"""Makes llguidance's matchers of regexes, JSON forms and calls, and finds the texts that end them."""

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from itertools import cycle
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quantize.errors import InputError
from quantize.serve.budget import WorkMeter
from quantize.serve.calls import CLOSE, QUOTE
from quantize.serve.json_forms import FormError, place_of
from quantize.serve.patterns import least_text, patterns_in
from quantize.serve.trial import TOO_MUCH, Trial, compiled

LONGEST = 4096  # most tokens on a way to an accepted end; longer ways are not tried
TAKEN = 1 << 32  # weighs more than the shape of any token
# Closing characters, in the orders that are tried; the last write what an unanchored pattern wants.
ENDS_FIRST = ('"}]', '}]"', "\n", "", '"0}]', '"a}]', '"A}]', "0")
THEN = ",:{[0tfn"
MARKERS = (CLOSE, QUOTE)  # the only tokens that end a call, and a string in a call
AT_ONCE = 16  # tokens that a matcher takes between two looks at the clock
PAST_LIMITS = ("LexerTooComplex", "ParserTooComplex", "InternalError")
TOO_COMPLEX = "the form's patterns have too many states or alternatives; make them simpler"
Matcher = Any  # llguidance's class, which has no types
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Grammars:
    """Makes llguidance's matchers for a fast transformers tokenizer; tokens `ends` end an answer."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self.ends = list(ends)
        text = _text_of(tokenizer)
        self._tokenizer = LLTokenizer(text, eos_token=self.ends)
        self.trial = Trial(text, self.ends)
        self._shapes = np.full(self._tokenizer.vocab_size, -1)
        vocabulary = tokenizer.get_vocab()
        marks = [vocabulary[mark] for mark in MARKERS if mark in vocabulary]  # no text holds them
        self.after_texts = [self._ids("\n"), self._ids('"}]' + THEN)]
        self.orders = [
            marks + self._ids(order) + self._ids(THEN) if order else marks for order in ENDS_FIRST
        ]

    def _ids(self, characters: str) -> list[int]:
        pieces = [self._tokenizer.tokenize_str(character) for character in characters]
        return [ids[0] for ids in pieces if len(ids) == 1]

    def _shape(self, tokens: np.ndarray[Any, np.dtype[np.int_]]) -> Any:
        """Return int [n]: twice the length of each token in bytes, plus 1 for letters and digits."""
        for token in tokens[self._shapes[tokens] < 0].tolist():
            text: bytes = self._tokenizer.decode_bytes([token])
            self._shapes[token] = 2 * len(text) + text.isalnum()
        return self._shapes[tokens]

    def matcher(self, kind: str, form: Any) -> Matcher:
        """Return a matcher of `form`; `kind`: "json", "regex" or "lark".

        InputError: the form is invalid, or compiling it takes too much time or memory (`trial`); a
        FormError names the part of a schema.
        """
        # an odd number of backslashes at the end would escape what the library adds
        if kind == "regex" and (len(form) - len(form.rstrip("\\"))) % 2:
            raise InputError("the answer's form cannot be compiled: it ends in a backslash")
        grammar = _grammar(kind, form)
        fault = self.trial.fault(grammar)
        matcher, fault = compiled(self._tokenizer, grammar) if fault is None else (None, fault)
        if fault is not None:
            if kind != "json":
                raise InputError(f"the answer's form cannot be compiled: {fault}")
            tried = fault != TOO_MUCH and isinstance(form, dict)
            place, fault = place_of(fault, form, self._fault_of_schema) if tried else ((), fault)
            raise FormError(place, f"the answer's form cannot be compiled: {fault}")
        return matcher

    def _fault_of_schema(self, schema: Any) -> str | None:
        try:
            return self.trial.fault(_grammar("json", schema))
        except ValueError:
            return None

    def texts(self, kind: str, form: Any) -> list[list[int]]:
        """Return the tokens of a least text of each regex in a form: an answer may end by them.

        InputError: the form is a regex that matches nothing.
        """
        if kind == "regex":
            return [self._tokenizer.tokenize_str(least_text(form))]
        wanted = list[list[int]]()
        for pattern in patterns_in(form) if kind == "json" else []:
            with suppress(InputError):  # the property may be left out
                wanted.append(self._tokenizer.tokenize_str(least_text(pattern)))
        return wanted

    def way_out(
        self, matcher: Matcher, room: int, meter: WorkMeter, texts: Sequence[list[int]] = ()
    ) -> list[int] | None:
        """Return at most `room` tokens that lead `matcher` to an accepted end; None: none found.

        `texts` are tokens that the form may want, which are tried in turn, before closing characters.
        None is also returned when `meter` has no units left. OverBudgetError: it has no seconds left.
        """
        if matcher.is_accepting():
            return []
        room = min(room, LONGEST)
        meter.step()
        begins = matcher.deep_copy()
        way: list[int] = begins.compute_ff_tokens()  # once for all orders: it may take long
        if len(way) > room:
            return None
        if not take(begins, way, meter):
            meter.complaint = self._unwritable(way) or complaint(begins)
            return None
        orders = [(order, texts) for order in self.after_texts if any(texts)]
        walks = (
            self._walk(begins.deep_copy(), order, room - len(way), meter, wanted)
            for order, wanted in [*orders, *((order, ()) for order in self.orders)]
        )
        rest = next((rest for rest in walks if rest is not None), None)
        return None if rest is None else way + rest

    def _walk(
        self, matcher: Matcher, order: Sequence[int], room: int, meter: WorkMeter,
        texts: Sequence[list[int]] = (),
    ) -> list[int] | None:  # fmt: skip
        """Take the tokens that must follow, else the first of `order` that may, else the least used.

        `texts` come before `order`: one, a token of `order`, the next one.
        Of equally used tokens the shortest is taken, and punctuation rather than letters or digits.
        """
        way: list[int] = []
        taken = np.zeros_like(self._shapes)
        turns = cycle(texts)
        text = [*next(turns, [])]
        while not matcher.is_accepting():
            meter.step()
            ahead: list[int] = matcher.compute_ff_tokens() if way else []
            if not ahead:
                may = allowed(matcher)
                may[self.ends] = False
                if text and may[text[0]]:
                    ahead = [text.pop(0)]
                else:
                    ahead = [token for token in order if may[token]][:1]
                    text = [*next(turns, [])]
                if not ahead:
                    choices = np.flatnonzero(may)[:4096]
                    if not len(choices):
                        meter.complaint = complaint(matcher)
                        return None
                    least = (taken[choices] * TAKEN + self._shape(choices)).argmin()
                    ahead = [int(choices[least])]
                taken[ahead] += 1
            way += ahead
            if meter.units <= 0 or len(way) > room:
                return None
            if not take(matcher, ahead, meter):
                meter.complaint = self._unwritable(ahead) or complaint(matcher)
                return None
        return way

    def _unwritable(self, tokens: Sequence[int]) -> str | None:
        """Return why the form's matcher does not take the tokens that it demands, None if unknown."""
        names = [self._tokenizer.decode_bytes([token]) for token in tokens if token in self.ends]
        text = names[0].decode("utf-8", "replace") if names else ""
        return (
            f"it demands the text {text!r}, which ends an answer wherever it stands"
            if text
            else None
        )


def _grammar(kind: str, form: Any) -> str:
    make = {"json": LLMatcher.grammar_from_json_schema, "regex": LLMatcher.grammar_from_regex}
    compact: Any = {"overrides": {"whitespace_flexible": False}} if kind == "json" else {}
    return make.get(kind, LLMatcher.grammar_from_lark)(form, **compact)


def _text_of(tokenizer: Any) -> str:
    """Return the JSON of a fast tokenizer, added tokens included; ValueError: it is not fast."""
    backend = copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise ValueError("forms need a fast tokenizer, and this model's is not")
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str()


def take(matcher: Matcher, tokens: Sequence[int], meter: WorkMeter) -> bool:
    """Let `matcher` read tokens, and return whether it could; OverBudgetError as in `step`."""
    for start in range(0, len(tokens), AT_ONCE):
        meter.step()
        if not matcher.consume_tokens(tokens[start : start + AT_ONCE]):
            return False
    return not matcher.is_error()


def complaint(matcher: Matcher) -> str | None:
    """Return why a matcher cannot go on, None if it is not past a limit of the library."""
    return TOO_COMPLEX if matcher.is_error() and matcher.stop_reason() in PAST_LIMITS else None


def allowed(matcher: Matcher) -> Mask:
    """Return whether the matcher accepts each token next: bool [V], followed by padding.

    A matcher that is past its limits, or at a dead end, accepts none: an error ends no text.
    """
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    may = np.unpackbits(mask, bitorder="little").astype(np.bool_)
    return np.zeros_like(may) if matcher.is_error() else may
