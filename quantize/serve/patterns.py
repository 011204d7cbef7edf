"""Finds a least text that a regex matches, which shows how an answer held to that regex can end.

Python's own parser reads the pattern, whose dialect differs in rarities from the matcher's. So the text
is only tried: the matcher decides.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from quantize.errors import InputError

PARSER: Any = import_module("re._parser")
LONGEST = 1 << 16  # most characters of a least text; a longer one is not made
USUAL = (
    "0aA _.-\n\t"  # characters that are tried for a class, before the first ones of its own ranges
)
RANGES = ("LITERAL", "RANGE")
NAMES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
CATEGORIES = {f"CATEGORY_{name}": escape for name, escape in NAMES.items()} | {
    f"CATEGORY_NOT_{name}": escape.upper() for name, escape in NAMES.items()
}


class UnknownTextError(Exception):
    """A pattern is of a kind whose least text is not worked out here, or would be too long."""


def least_text(pattern: str) -> str:
    """Return a short text that `pattern` matches, "" if none is known; InputError: none exists."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that other dialects nest
            parsed = PARSER.parse(pattern)
        text = _least(parsed)
    except (re.error, RecursionError, OverflowError, UnknownTextError):
        return ""
    if text is None:
        raise InputError("the answer's form matches no text at all")
    return text


def patterns_in(schema: Any) -> Iterator[str]:
    """Yield every `pattern` of a JSON schema, in the schema's order."""
    parts: Any = []
    if isinstance(schema, dict):
        parts = schema.items()
    elif isinstance(schema, list):
        parts = enumerate(schema)
    for key, part in parts:
        if key == "pattern" and isinstance(part, str):
            yield part
        yield from patterns_in(part)


def _least(parsed: Iterable[tuple[Any, Any]]) -> str | None:
    """Return a short text of a parsed sequence, None if it matches nothing."""
    parts = [_least_of(str(operator), of) for operator, of in parsed]
    if None in parts:
        return None
    text = "".join(part for part in parts if part)
    if len(text) > LONGEST:
        raise UnknownTextError
    return text


def _least_of(operator: str, of: Any) -> str | None:
    match operator:
        case "LITERAL":
            return chr(of)
        case "NOT_LITERAL":
            return "a" if of != ord("a") else "b"
        case "ANY":
            return "a"
        case "AT":
            return ""
        case "IN":
            return _member(of)
        case "SUBPATTERN":
            return _least(of[-1])
        case "BRANCH":
            texts = [text for text in map(_least, of[1]) if text is not None]
            return min(texts, key=len, default=None)
        case "MAX_REPEAT" | "MIN_REPEAT":
            once = _least(of[2]) if of[0] else ""
            if once and len(once) * of[0] > LONGEST:
                raise UnknownTextError
            return None if once is None else once * of[0]
        case _:
            raise UnknownTextError


def _member(items: list[tuple[Any, Any]]) -> str | None:
    """Return a character of a class; None: a negated class leaves none out."""
    kinds = [(str(kind), of) for kind, of in items]
    negated = kinds[0][0] == "NEGATE"
    sets = kinds[negated:]
    firsts = [chr(of if kind == "LITERAL" else of[0]) for kind, of in sets if kind in RANGES]
    for character in [*USUAL, *firsts]:
        if any(_holds(kind, of, character) for kind, of in sets) != negated:
            return character
    names = {str(of) for kind, of in sets if kind == "CATEGORY"}
    if names & {name.replace("CATEGORY_", "CATEGORY_NOT_") for name in names}:
        return None
    raise UnknownTextError


def _holds(kind: str, of: Any, character: str) -> bool:
    if kind == "CATEGORY":
        return re.match(CATEGORIES[str(of)], character) is not None
    low, high = (of, of) if kind == "LITERAL" else of
    return low <= ord(character) <= high
