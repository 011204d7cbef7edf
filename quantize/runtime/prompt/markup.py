"""Keeps control tokens in people's text from becoming control tokens of a prompt.

A chat template writes markup (`<|turn>`, `<|image|>`), and the tokenizer makes one token of each. The
same characters in a message, a tool or a document would become the same tokens: turns that nobody
took, pictures that nobody sent. So before the template runs, a guard character is put into each such
string of the texts. Afterwards only the template's own markup is whole. The pieces between it are
tokenized as text, without the guard. A chat without such strings is tokenized as before, at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

GUARDS = "\ufdd0\ufdd1\ufdd2\ufdd3\ue000\uf8ff"  # not characters, or private; one not in the texts
LIKE_MARKUP = re.compile(r"<\|.*>|<.*\|>", re.DOTALL)


@dataclass(frozen=True)
class Markup:
    """The control tokens of a tokenizer: `ids` by their text."""

    tokenizer: Any
    ids: Mapping[str, int]

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _begun(self) -> frozenset[str]:  # all beginnings: the template may write the rest
        return frozenset(text[:n] for text in self.ids for n in range(1, len(text)))

    def in_text(self, text: str) -> bool:
        """Return whether a text holds a control token, or ends in the beginning of one."""
        return bool(self._tokens.search(text)) or self._begins_at_end(text)

    def _begins_at_end(self, text: str) -> bool:
        longest = max(map(len, self.ids), default=0)
        ends = (text[-n:] for n in range(1, min(longest, len(text) + 1)))
        return any(end in self._begun for end in ends)

    def guarded(self, text: str, guard: str) -> str:
        """Return a text with `guard` after the first character of each control token in it.

        Overlapping control tokens are guarded one by one. One that begins at the text's end, which the
        template might complete, has a guard behind it.
        """
        starts = re.compile(f"(?=(?:{self._tokens.pattern}))(.)", re.DOTALL)
        return starts.sub(rf"\1{guard}", text) + guard * self._begins_at_end(text)

    def encode(self, rendered: str, guard: str) -> list[int]:
        """Return the token ids of a rendered chat, in which `guard` marks what is text."""
        tokens: list[int] = []
        at = 0
        for markup in self._tokens.finditer(rendered):
            tokens += self._as_text(rendered[at : markup.start()], guard)
            tokens.append(self.ids[markup[0]])
            at = markup.end()
        return tokens + self._as_text(rendered[at:], guard)

    def _as_text(self, text: str, guard: str) -> list[int]:
        def encoded(piece: str) -> list[int]:
            asked: Any = {"add_special_tokens": False, "split_special_tokens": True}
            return list(self.tokenizer(piece, **asked)["input_ids"])

        tokens = encoded(text.replace(guard, ""))
        if set(tokens).isdisjoint(self.ids.values()):
            return tokens
        # A control token that the tokenizer does not call special: it is never seen as a whole.
        return [token for piece in text.split(guard) for token in encoded(piece)]


@lru_cache(maxsize=4)
def markup_of(tokenizer: Any) -> Markup:
    """Return the control tokens of a tokenizer: its special tokens, and those that look like markup."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    ids = {
        token.content: number
        for number, token in added.items()
        if len(token.content) > 1 and (token.special or LIKE_MARKUP.fullmatch(token.content))
    }
    return Markup(tokenizer, ids)


def texts_of(value: Any) -> list[str]:
    """Return all strings in JSON of any shape, names of fields included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in texts_of(part)]
    if isinstance(value, Sequence):
        return [text for part in value for text in texts_of(part)]
    return []


def with_guards(value: Any, markup: Markup, guard: str) -> Any:
    """Return JSON of any shape in which each text that needs it is guarded."""
    if isinstance(value, str):
        return markup.guarded(value, guard) if markup.in_text(value) else value
    if isinstance(value, Mapping):
        return {
            with_guards(name, markup, guard): with_guards(part, markup, guard)
            for name, part in value.items()
        }
    if isinstance(value, Sequence):
        return [with_guards(part, markup, guard) for part in value]
    return value
