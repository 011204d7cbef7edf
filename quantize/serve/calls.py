"""Reads function calls, as Gemma 4's chat template writes them, from an answer's text.

    <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>],deep:{x:true}}<tool_call|>

Keys are bare words, strings are between <|"|> markers without escapes, everything else looks like
JSON. Calls follow each other without a separator. Quoted keys, strings in JSON's or Python's quotes
with their escapes, Python's True, False and None, unquoted words (read as strings) and blanks are
accepted too, though the template does not write them. A quote that does not enclose a whole value is
part of a word: 'tis late. A call stays text if it cannot be read, or if the request has no tool of its
name.
"""

import ast
import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
DEEPEST = 32  # levels of lists and objects in an argument

BARE_KEY = r'[^\s:,{}\[\]<"]++'  # a key that needs no quotes

_HEAD = re.compile(r"\s*call:([\w.\-]+)\s*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_MARK = r"\s*+(?:(?P<mark>[{}\[\],])|"
_STRING = r'(?><\|"\|>(?P<plain>.*?)<\|"\|>)|(?P<json>"(?:[^"\\]|\\.)*+")'
_PYTHON = r"(?P<python>'(?:[^'\\]|\\.)*+')"
_KEY = re.compile(_MARK + rf"(?:{_STRING}|{_PYTHON}(?=\s*:)|(?P<word>{BARE_KEY}))\s*:)", re.DOTALL)
_VALUE = re.compile(
    _MARK + rf'{_STRING}|{_PYTHON}(?=\s*(?:[,}}\]]|$))|(?P<word>[^,{{}}\[\]<"]++))', re.DOTALL
)
_ESCAPE, _ESCAPED = re.compile(r"\\(.)", re.DOTALL), "\\'\"abfnrtvxuUN01234567"
_WORDS = {"true": "true", "false": "false", "null": "null"}
_WORDS |= {"True": "true", "False": "false", "None": "null"}


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
        arguments = json.loads(_as_json(body[head.end() :].strip()), strict=False)
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair is no text
    except ValueError:
        return None
    return Call(head[1], text) if isinstance(arguments, dict) else None


def _as_json(text: str) -> str:
    """Write the strings and words of `text` as JSON's; ValueError: it holds something else."""
    said, opened, at, names = list[str](), list[str](), 0, False
    while at < len(text):
        match = (_KEY if names else _VALUE).match(text, at)
        if match is None or (len(opened) > DEEPEST and match["mark"] not in ("}", "]")):
            raise ValueError("not readable, or nested too deeply")
        at, mark = match.end(), match["mark"]
        if mark is None:
            said += [_scalar(match, names), ":" * names]
        elif mark in "{[":
            opened.append(mark)
        elif mark in "}]":
            del opened[-1:]
        said += [mark or ""]
        names = mark in ("{", ",") and opened[-1:] == ["{"]
    return "".join(said)


def _scalar(match: re.Match[str], key: bool) -> str:
    if match["json"] is not None:
        return match["json"]
    if match["plain"] is not None:
        return json.dumps(match["plain"])
    if match["python"] is not None:
        return json.dumps(_of_python(match["python"]))
    word = match["word"].strip()
    if not key and _NUMBER.fullmatch(word):
        return word
    return json.dumps(word) if key else _WORDS.get(word, json.dumps(word))


def _of_python(literal: str) -> str:
    """Return the text of a string in Python's single quotes; ValueError: a wrong escape."""
    known = _ESCAPE.sub(
        lambda match: match[0] if match[1] in _ESCAPED else rf"\{match[0]}", literal
    )
    try:
        return ast.literal_eval(known.replace("\r", r"\r").replace("\n", r"\n"))
    except (SyntaxError, ValueError) as error:
        raise ValueError("not a string of Python") from error
