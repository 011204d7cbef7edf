"""Reads function calls, as Gemma 4's chat template writes them, from an answer's text.

    <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>],deep:{x:true}}<tool_call|>

Keys are bare words, strings stand between <|"|> without escapes, the rest looks like JSON; calls follow
each other without a separator. It reads more than the template writes: quoted keys, JSON's strings,
words without quotes (as strings) and blanks. Whatever cannot be read, or names a tool that the request
does not have, stays text.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
DEEPEST = 32  # levels of lists and objects in an argument

_HEAD = re.compile(r"\s*call:([\w.\-]+)\s*")
_KEY = re.compile(r'[^\s:,{}\[\]<"]+')
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BARE = re.compile(r'[^,{}\[\]<"]+')
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "None": None}


@dataclass(frozen=True)
class Call:
    """One call: the tool's name, and its arguments as a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


def read_calls(text: str, names: Collection[str], *, whole: bool) -> tuple[str, list[Call]]:
    """Return the text around the calls, and the calls; both only grow with `text`.

    Args:
        text: the answer so far, markers included.
        names: tools that may be called.
        whole: whether nothing follows; a call without an end is text then.
    """
    content, calls, rest = "", list[Call](), text
    while (at := rest.find(OPEN)) >= 0:
        end = rest.find(CLOSE, at)
        if end < 0 and not whole:
            return content + rest[:at], calls
        behind = len(rest) if end < 0 else end + len(CLOSE)
        call = None if end < 0 else read_call(rest[at + len(OPEN) : end], names)
        content += rest[:at] if call else rest[:behind]
        calls += [call] if call else []
        rest = rest[behind:]
    return content + rest, calls


def read_call(body: str, names: Collection[str]) -> Call | None:
    """Return the call between two markers, or None for one that is malformed or to no known tool."""
    head = _HEAD.match(body)
    if head is None or head[1] not in names:
        return None
    try:
        arguments = _Reader(body, head.end()).only()
        return Call(head[1], json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


class _Reader:
    """Reads values from text; every fault is a ValueError."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self._at = text, at

    def only(self) -> dict[str, Any]:
        """Read one object, behind which nothing may stand."""
        found = self._value(0)
        self._blanks()
        if not isinstance(found, dict) or self._at != len(self._text):
            raise ValueError("not one object")
        return found

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError("nested too deeply")
        self._blanks()
        if self._take(QUOTE):
            return self._quoted()
        if self._take("{"):
            return dict(self._items("}", lambda: self._pair(depth + 1)))
        if self._take("["):
            return list(self._items("]", lambda: self._value(depth + 1)))
        return self._bare()

    def _items(self, end: str, read: Callable[[], Any]) -> Iterator[Any]:
        self._blanks()
        if self._take(end):
            return
        while True:
            yield read()
            self._blanks()
            if self._take(end):
                return
            if not self._take(","):
                raise ValueError(f"neither , nor {end}")

    def _pair(self, depth: int) -> tuple[str, Any]:
        self._blanks()
        if self._take(QUOTE):
            key = self._quoted()
        elif (found := self._match(_JSON_STRING)) is not None:
            key = json.loads(found, strict=False)
        else:
            key = self._match(_KEY)
        self._blanks()
        if key is None or not self._take(":"):
            raise ValueError("no key")
        return key, self._value(depth)

    def _bare(self) -> Any:
        if (found := self._match(_JSON_STRING)) is not None:
            return json.loads(found, strict=False)
        word = (self._match(_BARE) or "").strip()
        if not word:
            raise ValueError("no value")
        if _NUMBER.fullmatch(word):
            return json.loads(word)
        return _WORDS.get(word, word)

    def _quoted(self) -> str:
        text, quote, _ = self._text[self._at :].partition(QUOTE)
        if not quote:
            raise ValueError("a string without an end")
        self._at += len(text) + len(QUOTE)
        return text

    def _blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _take(self, expected: str) -> bool:
        found = self._text.startswith(expected, self._at)
        self._at += len(expected) if found else 0
        return found

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]
