"""Reads function calls, as Gemma 4's chat template writes them, from an answer's text.

    <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>],deep:{x:true}}<tool_call|>

Calls follow each other without a separator. Models write Python too, so a value is one of:

    <|"|>text<|"|>                  text without escapes
    "a"  'a'  '''a'''  r'a'  u'a'   text with JSON's escapes, or Python's; 'a' 'b' is 'ab'
    -1.5e3                          a number, as JSON writes it
    true false null                 and Python's True, False and None
    [v,v]  (v,v)  {key:v}           a list, a tuple (a list too), an object; [v,] is one too
    other words                     text: 007, 1_000, 2026-11-22, it's, 'tis late, f(x), (see below)

A key is a word, or text in quotes. Blanks may stand between all of these. A call stays text if it
cannot be read so (bytes, f-strings, sets, 'a' + 'b': no value keeps the quotes of a string), or if the
request has no tool of its name.
"""

import ast
import json
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
DEEPEST = 32  # levels of lists and objects in an argument

BARE_KEY = r'[^\s:,{}\[\]<"]++'  # a key that needs no quotes

_HEAD = re.compile(r"\s*call:([\w.\-]+)\s*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_PLAIN = re.compile(r'\s*+<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_PREFIX = "(?:[bBfFtT][rR]?|[rR][bBfFtT]?|[uU])?"
_QUOTED = r"""(?>'{3}(?:[^\\]|\\.)*?'{3}|"{3}(?:[^\\]|\\.)*?"{3}""" + (
    r"""|'(?!'')(?:[^'\\]|\\.)*+'|"(?!"")(?:[^"\\]|\\.)*+")"""
)
_LITERAL = re.compile(rf"\s*+({_PREFIX})({_QUOTED})(?!\w)", re.DOTALL)
# a word that holds a string's quotes: it begins and ends with one, or begins with two
_HOLDS_QUOTES = re.compile(rf"{_PREFIX}'(?:'.*|.*')", re.DOTALL)
_END_OF_VALUE, _END_OF_KEY = re.compile(r"\s*[,}\])]"), re.compile(r"\s*:")
_COMMA = re.compile(r"\s*+,")
# a round bracket is a tuple's unless it holds nothing but words
_OPENS = re.compile(rf"""\s*+([\[{{]|\((?!(?!\s*{_PREFIX}['"])[^"(),{{}}\[\]<]++\)))""")
_CLOSES = {mark: re.compile(rf"\s*+\{end}") for mark, end in ("[]", "{}", "()")}
_KEY = re.compile(rf"\s*+({BARE_KEY})")
_WORD = re.compile(r'\s*+([^,{}\[\]<"]++)')
_WORD_IN_TUPLE = re.compile(r'\s*+((?:[^,{}\[\]<"()]|\([^,{}\[\]<"()]*+\))++)')
_ESCAPE, _ESCAPED = re.compile(r"\\(.)", re.DOTALL), "\\'\"abfnrtvxuUN01234567"
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Call:
    """One call: the tool's name, its arguments as the text of a JSON object, and an id."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


def read_calls(text: str, names: Collection[str], *, whole: bool) -> tuple[str, list[Call]]:
    """Return a pair: an answer's text without its calls to the tools in `names`, and these calls.

    `whole` says that the answer is complete. Then a call without an end is text; else it is held back.
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
    """Return the call in `body` (text between markers); None: malformed, or tool not in `names`."""
    head = _HEAD.match(body)
    if head is None or head[1] not in names:
        return None
    try:
        arguments = _Reader(body[head.end() :].rstrip()).whole()
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair is no text
    except ValueError:
        return None
    return Call(head[1], text) if isinstance(arguments, dict) else None


class _Reader:
    """Reads a value from a call's text, from left to right; ValueError: it cannot be read."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def whole(self) -> Any:
        """Return the value that the whole text is."""
        value = self._value(0)
        if self._at < len(self._text):
            raise ValueError("there is more behind the value")
        return value

    def _next(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if match := pattern.match(self._text, self._at):
            self._at = match.end()
        return match

    def _value(self, depth: int, *, in_tuple: bool = False) -> Any:
        if opened := self._next(_OPENS):
            if depth > DEEPEST:
                raise ValueError("nested too deeply")
            return self._object(depth) if opened[1] == "{" else self._list(opened[1], depth)
        if (text := self._string(_END_OF_VALUE)) is not None:
            return text
        word = self._word(_WORD_IN_TUPLE if in_tuple else _WORD)
        return json.loads(word) if _NUMBER.fullmatch(word) else _WORDS.get(word, word)

    def _list(self, mark: str, depth: int) -> Any:
        """Return a list or a tuple; brackets around one value without a comma are this value."""
        values, comma = list[Any](), True
        while not self._next(_CLOSES[mark]):
            if not comma:
                raise ValueError("no comma")
            values.append(self._value(depth + 1, in_tuple=mark == "("))
            comma = self._next(_COMMA) is not None
        return values[0] if mark == "(" and len(values) == 1 and not comma else values

    def _object(self, depth: int) -> dict[str, Any]:
        fields, comma = dict[str, Any](), True
        while not self._next(_CLOSES["{"]):
            if not comma:
                raise ValueError("no comma")
            key = self._string(_END_OF_KEY)
            key = self._word(_KEY) if key is None else key
            if not self._next(_END_OF_KEY):
                raise ValueError("a key without a value")
            fields[key] = self._value(depth + 1)
            comma = self._next(_COMMA) is not None
        return fields

    def _word(self, pattern: re.Pattern[str]) -> str:
        match = self._next(pattern)
        word = match[1].strip() if match else ""
        if not word or _HOLDS_QUOTES.fullmatch(word):
            raise ValueError("not a value")
        return word

    def _string(self, ends: re.Pattern[str]) -> str | None:
        """Return the next text in quotes, None if there is none; `ends` must match behind it."""
        texts = [plain[1]] if (plain := self._next(_PLAIN)) else list[str]()
        while not plain and (literal := self._next(_LITERAL)):
            texts.append(_of_literal(literal[1].lower(), literal[2]))
        if texts and not ends.match(self._text, self._at):
            raise ValueError("there is more behind the string")
        return "".join(texts) if texts else None


def _of_literal(prefix: str, quoted: str) -> str:
    """Return the text of one string of JSON or Python; ValueError: it is not text, or wrong."""
    if prefix not in ("", "r", "u"):
        raise ValueError("bytes or a template, not text")
    if prefix == "r":
        marks = 3 if quoted[:3] in ("'''", '"""') else 1
        return quoted[marks:-marks]
    if quoted[0] == '"' and not prefix:
        with suppress(ValueError):
            return json.loads(quoted, strict=False)
    known = _ESCAPE.sub(lambda match: match[0] if match[1] in _ESCAPED else rf"\{match[0]}", quoted)
    try:
        return ast.literal_eval(known.replace("\r", r"\r").replace("\n", r"\n"))
    except (SyntaxError, ValueError) as error:
        raise ValueError("not a string of Python") from error
