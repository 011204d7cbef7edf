"""The schema of a tool's parameters: what counts as absent, and which keywords are refused where."""

from typing import Any

import pytest

from quantize.serve.tool_schemas import faults, without_nulls

NAMES, SCHEMA = "must be a list of names", "must be a schema"
KIND = "must be the name of a type, or a list of names"


def test_keywords_that_are_null_are_absent_at_all_levels() -> None:
    inner = {"enum": None, "default": None, "items": {"required": None, "example": None}}
    schema = {"type": None, "properties": {"a": inner, "b": True}, "items": True, "title": None}
    read = {"a": {"default": None, "items": {"example": None}}, "b": True}
    assert without_nulls(schema) == {"properties": read, "items": True, "title": None}


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"type": 3}, ("type",), KIND), ({"type": ["string", 3]}, ("type",), KIND),
        ({"required": 5}, ("required",), NAMES), ({"required": [["b"]]}, ("required",), NAMES),
        ({"enum": 5}, ("enum",), "must be a list of values"),
        ({"properties": []}, ("properties",), "must be an object of schemas"),
        ({"properties": {"a": 3}}, ("properties", "a"), SCHEMA), ({"items": 3}, ("items",), SCHEMA),
        ({"items": {"items": {"type": 3}}}, ("items", "items", "type"), KIND),
        ({"properties": {"a": {"items": {"required": 5}}}},
         ("properties", "a", "items", "required"), NAMES),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_place(schema: Any, path: Any, reason: str) -> None:
    assert list(faults(schema)) == [(path, reason)]
    assert list(faults({"properties": {"x": schema}})) == [(("properties", "x", *path), reason)]


@pytest.mark.parametrize(
    "schema",
    [
        {}, {"items": True}, {"items": False}, {"type": ["string", "null"]}, {"enum": [None, 1]},
        {"properties": {"a": {"type": "object", "properties": {}}}, "required": ["a"]},
    ],
)  # fmt: skip
def test_schemas_without_faults(schema: Any) -> None:
    assert list(faults(schema)) == []
