"""Holds answers to a grammar, canvas by canvas, within a budget of work; decides what is committed.

A canvas is denoised freely. Then an automaton (llguidance) reads its tokens from left to right. A
token that the grammar forbids is replaced by the most probable allowed token, under the last step's
logits. All later tokens were denoised beside the forbidden token, so the canvas is denoised again.
In this round, the tokens up to the new token are pinned, and so are all tokens that must follow it.
A canvas has at most ROUNDS such rounds; after that, tokens are only replaced.

The answer always ends where the grammar accepts an end: room is kept for known tokens that lead to
such an end. If the text would leave too little room, it goes as far as it can, and then takes the
first token of the known way. So does a text from which no way is found. Thoughts are free, but closed
early enough for the answer to fit after them. JSON is written without blanks, so many of its tokens
are certain; these are pinned before the first step.

All this runs on the engine's thread, for all requests. So each canvas has a budget (`budget`): past
its units of work, the text follows its known way; past its seconds, the request ends with an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quantize.errors import InputError
from quantize.runtime.sampler.known_tokens import GuideVerdict
from quantize.serve.budget import PREPARING, Allowance, OverBudgetError, WorkMeter
from quantize.serve.grammars import (
    AT_ONCE,
    LONGEST,
    Grammars,
    Mask,
    Matcher,
    allowed,
    complaint,
    take,
)
from quantize.serve.json_forms import FormError

ROUNDS = 8  # most times that a canvas is denoised again
UNITS = 4096  # of work on one canvas, and UNITS_A_TOKEN for each of its tokens
UNITS_A_TOKEN = 16
UNITS_OF_A_FORM = 1 << 16  # of work until a first text of a form is found
NO_END = (
    "no text of the answer's form was found; write out the letters that its pattern needs, or let it "
    "match fewer kinds of text"
)
DEAD_END = "none of the texts that were tried leads to an end of the form; make it simpler"


class Constraint:
    """Makes one answer follow a form; `matcher` is at the start of the form, and is copied.

    The answer has at most `room` tokens, thoughts included and EOS excluded. `closes` is the token
    that ends the thoughts, None for an answer without thoughts. `allowance` is that of the request,
    shared by its choices. `texts` are tokens that the form may want (`Grammars.texts`).
    InputError: no text of the form fits, or finding one takes too long; FormError: more tokens would
    not help.
    """

    def __init__(
        self, grammars: Grammars, matcher: Matcher, room: int, closes: int | None = None,
        allowance: Allowance | None = None, texts: Sequence[list[int]] = (),
    ) -> None:  # fmt: skip
        self.error: str | None = None  # why the answer could not be held to its form
        self.allowance = Allowance() if allowance is None else allowance
        self._grammars, self._matcher = grammars, matcher.deep_copy()
        self._room, self._closes, self._rounds, self._texts = room, closes, 0, texts
        meter = WorkMeter(UNITS_OF_A_FORM, lambda: PREPARING, "a text of the answer's form")
        try:
            way = grammars.way_out(self._matcher, room - (closes is not None), meter, texts)
            longer = way is None and grammars.way_out(self._matcher, LONGEST, meter, texts)
        except OverBudgetError as error:
            raise InputError(str(error)) from error
        if way is None:
            if meter.complaint:
                raise FormError((), meter.complaint)
            if longer is None:
                raise FormError((), NO_END)
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
        with self.allowance.meter(1):
            return self._matcher.compute_ff_tokens()[: min(length, self._room)]

    def settle(self, logits: Tensor, tokens: list[int]) -> GuideVerdict:
        """Return the verdict on a canvas: tokens to commit, or how many to pin for a new round."""
        try:
            with self.allowance.meter(UNITS + UNITS_A_TOKEN * len(tokens)) as meter:
                return self._settled(logits, tokens, meter)
        except OverBudgetError as error:
            self.error = str(error)
        return GuideVerdict(self._grammars.ends[:1] * len(tokens))

    def _settled(self, logits: Tensor, tokens: list[int], meter: WorkMeter) -> GuideVerdict:
        start, tokens, closed = self._thoughts(tokens)
        again = self._rounds < ROUNDS
        written, matcher, way = tokens, self._matcher, self._way
        if start < len(tokens):
            at = start, self._room, meter
            line = _Line(self._grammars, self._texts, logits, tokens, *at)
            written, matcher, way = line.write(self._matcher, self._way, hasty=again)
        if matcher.is_error():
            self.error = complaint(matcher) or DEAD_END
            return GuideVerdict(self._grammars.ends[:1] * len(tokens))
        pairs = enumerate(zip(written, tokens, strict=True))
        changed = next((n for n, (new, old) in pairs if new != old), None)
        changed = changed if closed is None else closed
        settled = (
            self._stands(written, start, changed, meter) if again and changed is not None else None
        )
        if settled is not None and settled < len(tokens):
            self._rounds += 1
            return GuideVerdict(written, settled)
        if again and changed is not None:  # what was written stops at the change
            self._rounds = ROUNDS
            return self._settled(logits, tokens, meter)
        self._rounds = 0
        self._room -= len(tokens)
        self._matcher, self._way = matcher, way
        if start < len(tokens) or tokens[-1:] == [self._closes]:
            self._closes = None
        return GuideVerdict(written)

    def _thoughts(self, tokens: list[int]) -> tuple[int, list[int], int | None]:
        """Return where the form begins, the tokens, and where thoughts were cut off, or None."""
        if self._closes is None:
            return 0, tokens, None
        ends = (self._closes, *self._grammars.ends)
        last = self._room - len(self._way) - 1  # where thoughts must end at the latest
        first = next((n for n, token in enumerate(tokens) if token in ends), len(tokens))
        at = min(first, last)
        if at >= len(tokens):
            return len(tokens), tokens, None
        cut = None if tokens[at] == self._closes else at
        return at + 1, [*tokens[:at], self._closes, *tokens[at + 1 :]], cut

    def _stands(self, written: list[int], start: int, changed: int, meter: WorkMeter) -> int | None:
        """Write the tokens that must follow a change; return how many are fixed; None: it ends."""
        matcher, ends = self._matcher.deep_copy(), self._grammars.ends
        if written[changed] in ends or not take(matcher, written[start : changed + 1], meter):
            return None
        follows = matcher.compute_ff_tokens()[: len(written) - changed - 1]
        written[changed + 1 : changed + 1 + len(follows)] = follows
        return changed + 1 + len(follows)


@dataclass
class _Line:
    """One reading of a finished canvas, whose form begins at `start`."""

    grammars: Grammars
    texts: Sequence[list[int]]  # tokens that the form may want
    logits: Tensor
    tokens: list[int]
    start: int
    room: int  # tokens of the answer, from the canvas' first on
    meter: WorkMeter

    def write(
        self, matcher: Matcher, way: list[int], *, hasty: bool
    ) -> tuple[list[int], Matcher, list[int]]:
        """Return the canvas in its form, the matcher that has read it, and a way from there.

        `way` leads `matcher`, which is copied, to an accepted end. A `hasty` line stops at the first
        token that it changes; what is behind this token is as it was.
        """
        matcher = matcher.deep_copy()
        written, limit = self.tokens[: self.start], min(len(self.tokens), self.room)
        while len(written) < limit and not self._ended(written) and not matcher.is_error():
            wished = self._wished(matcher.deep_copy(), len(written), limit, hasty=hasty)
            kept, way = self._that_fit(matcher, wished, len(written), way)
            if len(kept) < len(wished) or not wished:
                kept, way = [*kept, *(way or self.grammars.ends)[:1]], way[1:]
            self._read(matcher, kept)
            written += kept
            if hasty and written != self.tokens[: len(written)]:
                break
            if self.meter.units <= 0 and not self._ended(written):
                rest = [*way, *self.grammars.ends[:1]][: limit - len(written)]
                self._read(matcher, rest)
                written, way = written + rest, way[len(rest) :]
        if len(written) < limit and not self._ended(written):
            return written + self.tokens[len(written) :], matcher, way
        filled = self.grammars.ends[:1] * (len(self.tokens) - len(written))
        return written + filled, matcher, way

    def _ended(self, written: list[int]) -> bool:
        return len(written) > self.start and written[-1] in self.grammars.ends

    def _read(self, matcher: Matcher, tokens: list[int]) -> None:
        ended = tokens[-1:] and tokens[-1] in self.grammars.ends
        take(matcher, tokens[:-1] if ended else tokens, self.meter)

    def _wished(self, matcher: Matcher, position: int, limit: int, *, hasty: bool) -> list[int]:
        """Return tokens that the form allows from `position` on, as far as there are any."""
        wished: list[int] = []
        while position + len(wished) < limit:
            self.meter.step()
            at = position + len(wished)
            ahead = self.tokens[at : min(at + AT_ONCE, limit)]
            end = next((n for n, t in enumerate(ahead) if t in self.grammars.ends), len(ahead))
            valid = ahead[: matcher.validate_tokens(ahead[:end])] if end else []
            if not valid:
                may = allowed(matcher)
                if reason := complaint(matcher):
                    raise OverBudgetError(reason)
                valid = self._likeliest(may, at)
            wished += valid
            changed = valid[:1] != ahead[:1]
            if not valid or valid[-1] in self.grammars.ends or (hasty and changed):
                break
            if not take(matcher, valid, self.meter):
                break
        return wished

    def _likeliest(self, may: Mask, position: int) -> list[int]:
        """Return the most probable token that may stand at a position, the canvas' own first."""
        token = self.tokens[position]
        if token < len(may) and may[token]:
            return [token]
        chances = self.logits[position].float().cpu().numpy()
        size = min(len(may), len(chances))
        if not may[:size].any():
            return []
        return [int(np.where(may[:size], chances[:size], -np.inf).argmax())]

    def _that_fit(
        self, matcher: Matcher, wished: list[int], position: int, way: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the longest beginning of `wished` that is known to leave room, and a way after it.

        `way` is one before its first token. Beginnings are bisected: each takes a search of its own.
        """

        def way_after(count: int) -> list[int] | None:
            if wished[:count] and wished[count - 1] in self.grammars.ends:
                return []
            trial = matcher.deep_copy()
            if not take(trial, wished[:count], self.meter):
                return None
            room = self.room - position - count
            return self.grammars.way_out(trial, room, self.meter, self.texts)

        fits, fails = 0, len(wished) + 1
        count = len(wished)
        while fits < count < fails:
            if (known := way_after(count)) is None:
                fails = count
            else:
                fits, way = count, known
            count = (fits + fails) // 2
        return wished[:fits], way
