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
EMPTY = "Unsatisfiable schema"  # so the engine's words about what has no value begin
VISITS, LEVELS = 10_000, 100  # most parts that are looked at for an end, and how deep
ENDLESS = "each text of it holds itself again, without an end; let that be left out, or null"


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
    """Refuse what the engine would not hold, or never end; FormError says what and where."""
    if not path and (place := endless(schema)) is not None:
        raise FormError(place, ENDLESS)
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


def place_of(fault: str, schema: Any, fault_of: Callable[[Any], str | None]) -> tuple[Path, str]:
    """Return the path and the fault of the deepest part that is to blame for a schema's fault.

    It alone has the same fault; or it has no value, and the whole lacks the fault if it had any value.
    """
    path: Path = ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    trials, begun = 0, time.monotonic()
    inside = list(parts(schema))
    while inside and trials < TRIALS and time.monotonic() - begun < SECONDS:
        step, part = inside.pop(0)
        trials += 1
        alone = fault_of(shared | part) if isinstance(part, dict) else None
        empty = alone is not None and alone.startswith(EMPTY) and fault.startswith(EMPTY)
        if alone == fault or (empty and fault_of(_freed(schema, *step)) != fault):
            path, fault, schema = path + step, alone or fault, shared | part
            inside = list(parts(part))
    return path, fault


def _freed(schema: Any, step: str | int, *steps: str | int) -> Any:
    """Return a schema in which the part at some steps allows every value."""
    freed = _freed(schema[step], *steps) if steps else {}
    if isinstance(schema, dict):
        return schema | {step: freed}
    return [*schema[:step], freed, *schema[int(step) + 1 :]]


def pointed(root: Any, reference: Any) -> Any:
    """Return what a reference such as #/$defs/node points to in a schema, None if nothing is known."""
    start, *parts = reference.split("/") if isinstance(reference, str) else [""]
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root if start == "#" else None


def endless(root: Any) -> Path | None:
    """Return the path of a part whose every text holds itself again, None if the schema has an end."""
    visits = iter(range(VISITS))

    def place(schema: Any, above: frozenset[int]) -> Path | None:
        if id(schema) in above:
            return ()
        if not isinstance(schema, dict) or len(above) > LEVELS or next(visits, None) is None:
            return None
        for alternatives in _demands(schema, root):
            places = [(path, place(part, above | {id(schema)})) for path, part in alternatives]
            if places and all(inner is not None for _, inner in places):
                path, inner = places[0]
                return path + (inner or ()) if path else ()  # a reference is told by its own place
        return None

    return place(root, frozenset())


def _demands(schema: dict[str, Any], root: Any) -> Iterator[list[tuple[Path, Any]]]:
    """Yield (path, part) of parts of which each text of a schema holds at least one."""
    listed = {key: value for key, value in schema.items() if isinstance(value, list)}
    yield [((), pointed(root, schema.get("$ref")))]
    for n, part in enumerate(listed.get("allOf", [])):
        yield [(("allOf", n), part)]
    for key in ("anyOf", "oneOf"):
        yield [((key, n), part) for n, part in enumerate(listed.get(key, []))]
    fields, least = schema.get("properties"), schema.get("minItems")
    if schema.get("type") == "object" and isinstance(fields, dict):
        for name in listed.get("required", []):
            yield [(("properties", name), fields.get(name) if isinstance(name, str) else None)]
    if schema.get("type") == "array" and isinstance(least, (int, float)) and least > 0:
        yield [(("items",), None if "prefixItems" in schema else schema.get("items"))]
