"""Finds in a JSON schema what the grammar engine would not hold, and where a fault of it stands.

The engine counts the entries of an object, but not its distinct keys: with `minProperties` 2 it lets
a key stand twice. At least the required keys differ, and one key that is none of them.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from quantize.errors import InputError

Path = tuple[str | int, ...]
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # hold schemas by name
VALUES = ("const", "enum", "default", "examples")  # hold no schemas
TRIALS, SECONDS = 64, 1.0  # most compilations that look for a fault's place, and their time


class FormError(InputError):
    """A fault of a schema, with its path within the schema."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def parts(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield (path, part) of each schema directly within a schema, or within an unknown keyword."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in OF_NAMES and isinstance(value, dict):
            yield from (((key, name), inner) for name, inner in value.items())
        elif isinstance(value, dict) and key not in VALUES:
            yield (key,), value
        elif isinstance(value, list) and key not in VALUES:
            yield from (((key, n), inner) for n, inner in enumerate(value))


def check(schema: Any, path: Path = ()) -> None:
    """Refuse what the engine would silently not hold; FormError says what and where."""
    if isinstance(schema, dict):
        if "x-guidance" in schema:
            raise FormError((*path, "x-guidance"), "this keyword is not taken; leave it out")
        least, needed = schema.get("minProperties", 0), schema.get("required", [])
        distinct = 1 + len({str(name) for name in needed}) if isinstance(needed, list) else 1
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        names = schema.get("properties", {})
        if isinstance(least, (int, float)) and closed and isinstance(names, dict):
            if least > len(names):
                reason = f"{least} here, and `properties` allows {len(names)}"
                raise FormError((*path, "minProperties"), reason)
        elif isinstance(least, (int, float)) and least > distinct:
            reason = (
                f"at most {distinct} here: names in `required`, and one more; others may repeat it"
            )
            raise FormError((*path, "minProperties"), reason)
    for step, inner in parts(schema):
        check(inner, path + step)


def place_of(fault: str, schema: Any, fault_of: Callable[[Any], str | None]) -> Path:
    """Return the path of the deepest part of a schema that alone has the fault, () if none has."""
    path: Path = ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    trials, begun = 0, time.monotonic()
    inside = list(parts(schema))
    while inside and trials < TRIALS and time.monotonic() - begun < SECONDS:
        step, part = inside.pop(0)
        trials += 1
        if isinstance(part, dict) and fault_of(shared | part) == fault:
            path += step
            inside = list(parts(part))
    return path
