"""Holds answers to a grammar: decides from left to right which tokens of a canvas are committed.

A canvas is denoised freely. Then an automaton (llguidance) reads its tokens from left to right. A
token that the grammar forbids is replaced by the most probable allowed token, under the last step's
logits. All later tokens were denoised beside the forbidden token, so the canvas is denoised again.
In this round, the tokens up to the new token are pinned, and so are all tokens that must follow it.
A canvas has at most ROUNDS such rounds; after that, tokens are only replaced.

The answer always ends where the grammar accepts an end: room is kept for known tokens that lead to
such an end. If a canvas would leave too little room, the automaton reads it again and checks room
at every token. Thoughts are free, but closed early enough for the answer to fit after them. JSON is
written without blanks, so many of its tokens are certain; these are pinned before the first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.sampler.known_tokens import Verdict
from quantize.serve.calls import CLOSE, QUOTE

ROUNDS = 8  # most times that a canvas is denoised again
SHORTLIST = 64  # most probable tokens of a position that are tried before all of them
LONGEST = 4096  # most tokens on a way to an accepted end; longer ways are not tried
TAKEN = 1 << 32  # weighs more than the shape of any token
ENDS_FIRST = ('"}]', '}]"', "\n", "")  # closing characters, in the orders that are tried
THEN = ",:{[0tfn"
MARKERS = (CLOSE, QUOTE)  # the only tokens that end a call, and a string in a call
Matcher = Any  # llguidance's class, which has no types


class Grammars:
    """Makes llguidance's matchers for a fast transformers tokenizer; tokens `ends` end an answer."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self.ends = list(ends)
        self._tokenizer = from_tokenizer(tokenizer, eos_token=self.ends)
        self._shapes = np.full(self._tokenizer.vocab_size, -1)
        vocabulary = tokenizer.get_vocab()
        marks = [vocabulary[mark] for mark in MARKERS if mark in vocabulary]  # no text holds them
        self.orders = [
            marks + self._ids(order) + self._ids(THEN) if order else marks for order in ENDS_FIRST
        ]

    def _ids(self, characters: str) -> list[int]:
        found = [self._tokenizer.tokenize_str(character) for character in characters]
        return [ids[0] for ids in found if len(ids) == 1]

    def _shape(self, tokens: np.ndarray[Any, np.dtype[np.int_]]) -> Any:
        """Return int [n]: twice the length of each token in bytes, plus 1 for letters and digits."""
        for token in tokens[self._shapes[tokens] < 0].tolist():
            text: bytes = self._tokenizer.decode_bytes([token])
            self._shapes[token] = 2 * len(text) + text.isalnum()
        return self._shapes[tokens]

    def matcher(self, kind: str, form: Any) -> Matcher:
        """Return a matcher of `form`; `kind`: "json", "regex" or "lark". InputError: invalid."""
        # an odd number of backslashes at the end would escape what the library adds
        if kind == "regex" and (len(form) - len(form.rstrip("\\"))) % 2:
            raise InputError("the answer's form cannot be compiled: it ends in a backslash")
        make = {"json": LLMatcher.grammar_from_json_schema, "regex": LLMatcher.grammar_from_regex}
        compact: Any = {"overrides": {"whitespace_flexible": False}} if kind == "json" else {}
        grammar = make.get(kind, LLMatcher.grammar_from_lark)(form, **compact)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            raise InputError(f"the answer's form cannot be compiled: {reason}")
        return matcher

    def way_out(self, matcher: Matcher, room: int) -> list[int] | None:
        """Return at most `room` tokens that lead `matcher` to an accepted end; None: none found."""
        walks = (
            self._walk(matcher.deep_copy(), order, min(room, LONGEST)) for order in self.orders
        )
        return next((way for way in walks if way is not None), None)

    def _walk(self, matcher: Matcher, order: Sequence[int], room: int) -> list[int] | None:
        """Take the tokens that must follow, else the first of `order` that may, else the least used.

        Of equally used tokens the shortest is taken, and punctuation rather than letters or digits.
        """
        way: list[int] = []
        taken = np.zeros_like(self._shapes)
        while not matcher.is_accepting():
            ahead: list[int] = matcher.compute_ff_tokens()
            if not ahead:
                may = allowed(matcher)
                may[self.ends] = False
                ahead = [token for token in order if may[token]][:1]
                if not ahead:
                    choices = np.flatnonzero(may)[:4096]
                    if not len(choices):
                        return None
                    least = (taken[choices] * TAKEN + self._shape(choices)).argmin()
                    ahead = [int(choices[least])]
                taken[ahead] += 1
            way += ahead
            if len(way) > room or not matcher.consume_tokens(ahead):
                return None
        return way


def allowed(matcher: Matcher) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return whether the matcher accepts each token next: bool [V], followed by padding."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(mask, bitorder="little").astype(np.bool_)


class Constraint:
    """Makes one answer follow a form; `matcher` is at the start of the form, and is copied.

    The answer has at most `room` tokens, thoughts included and EOS excluded. `closes` is the token that
    ends the thoughts, None for an answer without thoughts. InputError: no text of the form fits.
    """

    def __init__(
        self, grammars: Grammars, matcher: Matcher, room: int, closes: int | None = None
    ) -> None:
        self.error: str | None = None  # why the answer could not be held to its form
        self._grammars, self._matcher = grammars, matcher.deep_copy()
        self._room, self._closes, self._rounds = room, closes, 0
        way = grammars.way_out(self._matcher, room - (closes is not None))
        if way is None:
            raise InputError(f"no text of the answer's form is known that fits into {room} tokens")
        self._way = way  # from here to an accepted end; it fits into the room, always

    @property
    def complete(self) -> bool:
        """Whether the committed tokens are a complete text of the form."""
        return self._closes is None and bool(self._matcher.is_accepting())

    def lead(self, length: int) -> list[int]:
        """Return the next canvas' first tokens, at most `length`; [] in thoughts or on error."""
        if self._closes is not None or self.error is not None:
            return []
        return self._matcher.compute_ff_tokens()[: min(length, self._room)]

    def settle(self, logits: Tensor, tokens: list[int]) -> Verdict:
        """Return the verdict on a canvas: tokens to commit, or how many to pin for a new round."""
        start, tokens, closed = self._thoughts(tokens)
        shortlist = logits.float().topk(min(SHORTLIST, logits.shape[-1])).indices.tolist()
        line = _Line(self._grammars, logits, shortlist, tokens, start, self._room)
        written, matcher = line.write(self._matcher.deep_copy(), None)
        if not line.ends_well(matcher):
            written, matcher = line.write(self._matcher.deep_copy(), self._way)
        if matcher.is_error():
            self.error = " ".join(matcher.get_error().split())[:300]
            return Verdict(self._grammars.ends[:1] * len(tokens))
        pairs = enumerate(zip(written, tokens, strict=True))
        changed = next((n for n, (new, old) in pairs if new != old), None)
        changed = changed if closed is None else closed
        stand = None if changed is None else self._stands(written, start, changed)
        if stand is not None and stand < len(tokens) and self._rounds < ROUNDS:
            self._rounds += 1
            return Verdict(written, stand)
        self._rounds = 0
        self._room -= len(tokens)
        self._matcher, self._way = matcher, line.way or []
        if start < len(tokens) or tokens[-1:] == [self._closes]:
            self._closes = None
        return Verdict(written)

    def _thoughts(self, tokens: list[int]) -> tuple[int, list[int], int | None]:
        """Return where the form begins, the tokens, and where thoughts were cut off, or None."""
        if self._closes is None:
            return 0, tokens, None
        ends = (self._closes, *self._grammars.ends)
        last = self._room - len(self._way) - 1  # where thoughts must end at the latest
        found = next((n for n, token in enumerate(tokens) if token in ends), len(tokens))
        at = min(found, last)
        if at >= len(tokens):
            return len(tokens), tokens, None
        cut = None if tokens[at] == self._closes else at
        return at + 1, [*tokens[:at], self._closes, *tokens[at + 1 :]], cut

    def _stands(self, written: list[int], start: int, changed: int) -> int | None:
        """Write the tokens that must follow a change; return how many are fixed; None: it ends."""
        matcher, ends = self._matcher.deep_copy(), self._grammars.ends
        if written[changed] in ends or not matcher.consume_tokens(written[start : changed + 1]):
            return None
        follows = matcher.compute_ff_tokens()[: len(written) - changed - 1]
        written[changed + 1 : changed + 1 + len(follows)] = follows
        return changed + 1 + len(follows)


@dataclass
class _Line:
    """One reading of a finished canvas."""

    grammars: Grammars
    logits: Tensor
    shortlist: list[list[int]]
    tokens: list[int]
    start: int  # of the form
    room: int  # from the first token on
    ended: bool = False  # the text, once it is written
    way: list[int] | None = None  # from there to an accepted end

    def write(self, matcher: Matcher, way: list[int] | None) -> tuple[list[int], Matcher]:
        """Return the canvas with forbidden tokens replaced, and the matcher that has read it.

        `way` leads to an accepted end. If given, each token leaves room for it or for another way.
        """
        written = self.tokens[: self.start]
        self.ended, self.way = False, way
        for position in range(self.start, len(self.tokens)):
            if self.ended or position >= self.room:
                written.append(self.grammars.ends[0])
                continue
            token = self._choose(matcher, position)
            if self.way is not None:
                room = self.room - position - 1
                token, self.way = self._within(matcher, token, self.way, room)
            written.append(token)
            self.ended = token in self.grammars.ends
            if not self.ended and not matcher.consume_token(token):
                break
        return written, matcher

    def _choose(self, matcher: Matcher, position: int) -> int:
        may = allowed(matcher)
        for token in (self.tokens[position], *self.shortlist[position]):
            if token < len(may) and may[token]:
                return token
        own = self.logits[position].float().cpu().numpy()
        size = min(len(may), len(own))
        return int(np.where(may[:size], own[:size], -np.inf).argmax())

    def _within(
        self, matcher: Matcher, token: int, way: list[int], room: int
    ) -> tuple[int, list[int]]:
        """Return `token` if an end fits after it, else the first of `way`; and the way after it."""
        if token in self.grammars.ends:
            return token, []
        trial = matcher.deep_copy()
        trial.consume_token(token)
        on = self.grammars.way_out(trial, room)
        if on is not None and len(on) <= room:
            return token, on
        return (way[0], way[1:]) if way else (self.grammars.ends[0], [])

    def ends_well(self, matcher: Matcher) -> bool:
        """Return whether the text has ended, or a way to an accepted end fits into the room."""
        if self.ended or matcher.is_error():
            return True
        left = self.room - max(len(self.tokens), self.start)
        self.way = self.grammars.way_out(matcher, max(0, left))
        return self.way is not None
