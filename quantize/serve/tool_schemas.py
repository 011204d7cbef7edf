"""Checks the schema of a tool's parameters, at every level that a form or a template reads.

Only keywords that decide something here are checked; `null` counts as absent, as in all requests.
"""

from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]
BOUNDS = {  # the least and the most
    "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}  # fmt: skip
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE = {  # keywords that say something of one type's values alone
    "string": (*BOUNDS["string"], "pattern"), "integer": _OF_NUMBERS, "number": _OF_NUMBERS,
    "array": (*BOUNDS["array"], "items"),
    "object": (*BOUNDS["object"], "properties", "required", "additionalProperties"),
}  # fmt: skip
READ = {"type", "enum", "description"}.union(*OF_TYPE.values())


def without_nulls(schema: Any) -> Any:
    """Return a schema without keywords of READ that are null, at all levels."""
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if not (k in READ and v is None)}
    if isinstance(properties := kept.get("properties"), dict):
        kept["properties"] = {name: without_nulls(inner) for name, inner in properties.items()}
    if "items" in kept:
        kept["items"] = without_nulls(kept["items"])
    return kept


def faults(schema: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield (path within the schema, reason) of each keyword that has no valid value."""
    kind = schema.get("type", "object")
    if not _texts(kind if isinstance(kind, list) else [kind]):
        yield (*path, "type"), "must be the name of a type, or a list of names"
    if not _texts(schema.get("required", [])):
        yield (*path, "required"), "must be a list of names"
    if not isinstance(schema.get("enum", []), list):
        yield (*path, "enum"), "must be a list of values"
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        yield (*path, "properties"), "must be an object of schemas"
        return
    for name, inner in properties.items():
        where = (*path, "properties", name)
        if isinstance(inner, dict):
            yield from faults(inner, where)
        else:
            yield where, "must be a schema"
    items = schema.get("items", True)
    if isinstance(items, dict):
        yield from faults(items, (*path, "items"))
    elif not isinstance(items, bool):
        yield (*path, "items"), "must be a schema"


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
