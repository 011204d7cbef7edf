"""Forms of single values in a call: texts and numbers within bounds, and listed values."""

import json
import operator
import re
from collections.abc import Sequence
from typing import Any

from quantize.errors import InputError
from quantize.serve.calls import MARKERS
from quantize.serve.tool_schemas import BOUNDS, OF_TYPE

TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    "array": list, "object": dict,
}  # fmt: skip
HOLDS = {
    "minimum": operator.ge, "maximum": operator.le,
    "exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt,
}  # fmt: skip
FOR_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # what would end a terminal of a grammar
LARGEST = 10**18  # a number with one bound, or none but `multipleOf`, is at most so far from 0
# a text that spells a marker is read as the marker
NO_MARKER = f"~/(?s:.*)({'|'.join(map(re.escape, MARKERS))})(?s:.*)/"


def bounds(schema: dict[str, Any], kind: str, where: str) -> tuple[int, int | None]:
    """Return the least and the most length, items or properties; InputError: no such numbers."""
    sizes: list[int] = []
    for word in BOUNDS[kind]:
        size = schema.get(word, 0)
        if isinstance(size, bool) or not isinstance(size, (int, float)) or size < 0 or size % 1:
            raise InputError(f"{where}.{word}: must be a whole number, at least 0")
        sizes.append(int(size))
    least, most = sizes[0], sizes[1] if BOUNDS[kind][1] in schema else None
    if most is not None and most < least:
        raise InputError(f"{where}.{BOUNDS[kind][1]}: less than {BOUNDS[kind][0]}")
    return least, most


def string(schema: dict[str, Any], where: str) -> str:
    """Return the terminal of a string's text, without quotes; InputError: it cannot be held."""
    least, most = bounds(schema, "string", where)
    terms = [f"/(?s:.){{{least},{'' if most is None else most}}}/", NO_MARKER]
    if "pattern" in schema:
        terms.append(_searched(schema["pattern"], f"{where}.pattern"))
    return " & ".join(terms)


def _searched(pattern: Any, where: str) -> str:
    """Return the terminal of all texts in which a pattern is found."""
    if not isinstance(pattern, str) or pattern == "\\":
        raise InputError(f"{where}: must be a regular expression")
    parts = re.findall(r"\\.|.", pattern, re.DOTALL)
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    parts = parts[begins : len(parts) - (ends and len(parts) > begins)]
    depth, in_class, alternatives = 0, False, False
    for part in parts:
        if in_class or part == "[":
            in_class = part != "]"
            continue
        depth += (part == "(") - (part == ")")
        alternatives |= part == "|" and depth == 0
        if depth < 0:
            break
    if depth or parts[-1:] == ["\\"]:
        raise InputError(f"{where}: must be a regular expression")
    if alternatives and (begins or ends):
        raise InputError(f"{where}: put alternatives beside an anchor in parentheses")
    inner = "".join(FOR_LARK.get(part, part) for part in parts)
    return f"/{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}/"


def number(kind: str, schema: dict[str, Any], where: str) -> str:
    """Return the rule's term of a number within its bounds; InputError: a bound is no number."""
    given = {word: _number(schema, word, where) for word in OF_TYPE[kind] if word in schema}
    low, high = given.get("minimum", -LARGEST), given.get("maximum", LARGEST)
    if low > high:
        word = "minimum" if "minimum" in given else "maximum"
        raise InputError(f"{where}.{word}: there is no number from {low} to {high}")
    return f"%json {json.dumps({'type': kind, **given, 'minimum': low, 'maximum': high})}"


def _number(schema: dict[str, Any], word: str, where: str) -> float:
    value = schema[word]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}.{word}: must be a number")
    return value


def values_of(schema: Any) -> list[Any] | None:
    """Return the values that `const` and `enum` leave, None if a schema has neither."""
    listed = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or "const" not in schema:
        return listed if isinstance(listed, list) else None
    constant = schema["const"]
    known = not isinstance(listed, list) or text_of(constant) in map(text_of, listed)
    return [constant] if known else []


def fitting(
    values: Sequence[Any], schema: dict[str, Any], kinds: Sequence[str | None], where: str
) -> list[Any]:
    """Return the values of a type in `kinds` that fit the schema's bounds."""
    if beside := {"pattern", "multipleOf"} & set(schema):
        raise InputError(f"{where}.{min(beside)}: cannot be held beside listed values")
    least, most = bounds(schema, "string", where)
    limits = [(HOLDS[word], _number(schema, word, where)) for word in HOLDS if word in schema]

    def fits(value: Any) -> bool:
        if isinstance(value, str):
            return least <= len(value) and (most is None or len(value) <= most)
        return type_of(value) != "number" or all(holds(value, limit) for holds, limit in limits)

    return [one for one in values if fits(one) and any(_is_of(one, kind) for kind in kinds)]


def type_of(value: Any) -> str:
    """Return the name of a value's type; integers are numbers."""
    kinds = (kind for kind in TYPES if kind != "integer" and isinstance(value, TYPES[kind]))
    return "boolean" if isinstance(value, bool) else next(kinds)


def text_of(value: Any) -> str:
    """Return a text that equal values of JSON share: 1 and 1.0 do, 1 and true do not."""
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)


def _is_of(value: Any, kind: str | None) -> bool:
    """Return whether a value of JSON has the type; unknown types and None have every value."""
    if isinstance(value, bool):
        return kind not in TYPES or kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(kind or "", object))
