"""Writes the reference part of docs/recipes.md from the recipe model; run it as a program."""

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from quantize.recipe.sections import Recipe, Section

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = (
    "<!-- generated from quantize/recipe/sections.py -->\n",
    "<!-- end of the generated part -->\n",
)


def reference() -> str:
    """Every section of a recipe: its docstring, and a table of its keys."""
    return "\n".join(_section(name, section) for name, section in _sections("", Recipe))


def page(text: str) -> str:
    """The page with its generated part as it should be."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{reference()}\n{END}{rest.partition(END)[2]}"


def _sections(name: str, section: type[Section]) -> list[tuple[str, type[Section]]]:
    found = [(name, section)]
    for key, field in section.model_fields.items():
        inner = _inner(field.annotation)
        if inner is not None and name != "bundled":  # whose sections stand there already
            place = f"{name}.{key}" if name else key
            is_mapping = get_origin(field.annotation) is dict
            found += _sections(f"{place}.NAME" if is_mapping else place, inner)
    return found


def _inner(annotation: Any) -> type[Section] | None:
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def _section(name: str, section: type[Section]) -> str:
    doc = " ".join((section.__doc__ or "").split()).replace("``", "`")
    rows = [
        f"| `{key}` | {_type(field.annotation)}{_bounds(field.metadata)} | {_default(field)} |"
        for key, field in section.model_fields.items()
    ]
    title = f"### `{name}`" if name else "### The whole file"
    return "\n".join([title, "", doc, "", "| key | type | default |", "|---|---|---|", *rows, ""])


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(choice) for choice in arguments if choice is not type(None))
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0]) + _bounds(annotation.__metadata__)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _bounds(metadata: Any) -> str:
    said: list[str] = []
    for item in metadata:
        for each in getattr(item, "metadata", None) or [item]:
            for name, sign in (
                ("gt", "above"),
                ("ge", "at least"),
                ("lt", "below"),
                ("le", "at most"),
            ):
                if (bound := getattr(each, name, None)) is not None:
                    said.append(f"{sign} {bound}")
            if pattern := getattr(each, "pattern", None):
                said.append(f"matching `{pattern}`")
    return f" ({', '.join(said)})" if said else ""


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section) or value in (None, {}):
        return "none"
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else str(value)
    return f"`{re.sub(r'[|]', '&#124;', str(text))}`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
