"""Reads recipes: those that ship, and files of ours or of llm-compressor; each error is one line.

An unknown key is an error, and the message names the nearest known key: a misspelt `ignore` must not
quantize the router.
"""

import importlib.resources
import re
import reprlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from quantize.errors import InputError, ResourceError
from quantize.host.progress import say
from quantize.recipe.llm_compressor import is_llm_compressor, quantization_of
from quantize.recipe.sections import Recipe, Section, nearest
from quantize.recovery.strict_yaml import read_yaml
from quantize.schemes.records import SCHEMES


def shipped_recipes() -> dict[str, str]:
    """Return name -> YAML text of every recipe that ships with quantize."""
    files = {file.name: file for file in importlib.resources.files("quantize.recipes").iterdir()}
    names = sorted(name for name in files if name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): files[name].read_text("utf-8") for name in names}


def load_recipe(name_or_path: str) -> Recipe:
    """Return a shipped recipe, given its name, or the recipe in a YAML file, given its path.

    Raises:
        InputError: the recipe does not exist or is not YAML; a key is missing, unknown or has a wrong
            value (the message names the key); or a task's file cannot be read.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        recipe = read_recipe(Path(name_or_path))
        for evaluation in (recipe.evaluation, recipe.bundled.evaluation):
            for own_task in evaluation.own_tasks.values() if evaluation else ():
                own_task.definition()
        return recipe
    shipped = shipped_recipes()
    if name_or_path not in shipped:
        raise InputError(
            f"no recipe named {name_or_path!r}{nearest(name_or_path, shipped)}; "
            f"there are: {', '.join(shipped)}"
        )
    return parse_recipe(shipped[name_or_path], name_or_path)


def resolved(
    name: str, *, bundled: bool, tasks: Sequence[str] = (), limit: int | None = None
) -> Recipe:
    """Return recipe `name` after `for_bundled_model`, if `bundled`, and `asking(tasks, limit)`.

    Warn of edited keys, also under `bundled`, that the bundled model does not use. Raise InputError as
    `load_recipe` does, or if a task is unknown or has no margin.
    """
    recipe = load_recipe(name)
    if bundled and name not in shipped_recipes() and (keys := _edited_in_vain(recipe)):
        say(
            f"warning: {name}: on the bundled model its section `bundled` holds, so these keys of "
            f"the recipe are not used: {', '.join(keys)}; edit them under `bundled`"
        )
    if bundled and recipe.bundled.calibration and recipe.calibration is None:
        keys = sorted(recipe.bundled.calibration.model_fields_set)
        say(
            f"warning: {name}: the recipe has no stage `calibration`, so these keys are not used: "
            f"{', '.join(f'bundled.calibration.{key}' for key in keys)}; leave them out"
        )
    return (recipe.for_bundled_model() if bundled else recipe).asking(tasks, limit)


def _edited_in_vain(recipe: Recipe) -> list[str]:
    """Return the keys that `bundled` replaces and that no shipped recipe has with the same value."""

    def value(of: Recipe, name: str) -> Any:
        section, key = name.split(".")
        return getattr(getattr(of, section), key, None)

    shipped = [parse_recipe(text, name) for name, text in shipped_recipes().items()]
    unused = recipe.unused_on_bundled()
    return [key for key in unused if value(recipe, key) not in [value(r, key) for r in shipped]]


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a YAML file; raise InputError if it is unreadable or no valid recipe."""
    try:
        return parse_recipe(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: this recipe cannot be read ({error})") from error


def parse_recipe(text: str, source: str) -> Recipe:
    """Return the recipe in a YAML text; raise InputError, which names `source`, if it is not valid."""
    with errors_of(source):
        try:
            fields = read_yaml(text)
        except ValueError as error:
            raise InputError(f"not valid YAML: {error}") from error
        if not isinstance(fields, dict):
            raise InputError("not a mapping of sections")
        if is_llm_compressor(fields):
            fields = _completed(quantization_of(fields), source)
        try:
            return Recipe.model_validate(fields)
        except ValidationError as error:
            # A misspelt key is reported before the key that it leaves missing, a wrong value before
            # the other form that a field may take.
            telling = ("extra_forbidden", "value_error")
            first = min(error.errors(), key=lambda e: [e["type"] != kind for kind in telling])
            raise InputError(_explain(first)) from error


@contextmanager
def errors_of(source: str) -> Generator[None]:
    """Put the recipe's name, `source`, before the message of an error that the block raises."""
    try:
        yield
    except (InputError, ResourceError) as error:
        raise type(error)(f"recipe {source}: {error}") from error


def _completed(quantization: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a recipe's fields: `quantization`; most others are the nearest shipped recipe's."""
    shipped = [parse_recipe(text, name) for name, text in shipped_recipes().items()]
    wanted = set(quantization["scheme"])

    def likeness(recipe: Recipe) -> tuple[int, int]:
        schemes = set(recipe.quantization.targets_by_scheme())
        return len(schemes & wanted), -len(schemes - wanted)

    base = max(shipped, key=likeness)
    limits = {name: SCHEMES[name].largest_error(quantization["rounding"]) for name in wanted}
    fields = base.model_dump()
    if fields["calibration"] is None:
        calibrates = next(recipe for recipe in shipped if recipe.calibration).model_dump()
        fields["calibration"] = calibrates["calibration"]
        fields["bundled"]["calibration"] = calibrates["bundled"]["calibration"]
    name = re.sub(r"[^a-z0-9]+", "_", Path(source).stem.lower()).strip("_")
    verification = {"max_relative_error": limits}
    return {**fields, "name": name, "quantization": quantization, "verification": verification}


def _explain(error: Any) -> str:
    """Turn pydantic's first error into one line with the key, what is wrong, the nearest known key."""
    path = [str(part) for part in error["loc"] if "[" not in str(part)]  # not pydantic's own
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(path[-1], _known_keys(path[:-1]))}"
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if error["type"] == "value_error":  # one of the checks above
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    return f"{key}: {error['msg']} (found {reprlib.repr(error['input'])})"


def _known_keys(path: list[str]) -> list[str]:
    section: Any = Recipe
    for part in path:
        if part not in section.model_fields:
            continue  # a key of a mapping: a task's or a point's name
        annotation = section.model_fields[part].annotation
        choices = get_args(annotation) or (annotation,)
        section = next(c for c in choices if isinstance(c, type) and issubclass(c, Section))
    return list(section.model_fields)
