"""Recipes are strict: a misspelt key must never pass as a default."""

from pathlib import Path

import pytest
import yaml

from quantize.errors import InputError
from quantize.recipe import load_recipe, parse_recipe, shipped_recipes


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_and_keeps_its_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert set(recipe.gate.margin_pp) == set(recipe.evaluation.tasks)
    bundled = recipe.for_bundled_model()
    assert set(bundled.gate.margin_pp) == set(bundled.evaluation.tasks)
    assert set(recipe.quantization.targets_by_scheme()) <= set(
        recipe.verification.max_relative_error
    )
    if recipe.needs_calibration:
        assert bundled.calibration is not None
        assert bundled.calibration.datasets == ["bundled"]


def test_at_least_the_two_main_recipes_ship() -> None:
    assert {"fp8_dynamic", "nvfp4"} <= set(shipped_recipes())


def edited(**changes: object) -> str:
    fields = yaml.safe_load(shipped_recipes()["nvfp4"])
    for path, value in changes.items():
        section = fields
        *parents, last = path.split("__")
        for parent in parents:
            section = section[parent]
        section[last] = value
    return yaml.safe_dump(fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization__ingore": []},
            "unknown key 'quantization.ingore' (did you mean 'ignore'?)",
        ),
        ({"evaluaton": {}}, "unknown key 'evaluaton' (did you mean 'evaluation'?)"),
        (
            {"bundled__gate__margin": {}},
            "unknown key 'bundled.gate.margin' (did you mean 'margin_pp'?)",
        ),
        ({"quantization__scheme": "NVFP5"}, "quantization.scheme"),
        ({"calibration__thinking": 2}, "calibration.thinking"),
        ({"gate__margin_pp": {"gsm8k": 0}}, "above 0"),
    ],
)
def test_a_wrong_key_or_value_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_recipe(edited(**changes), "mine.yaml")
    assert message in str(error.value)
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1, 2", "- a list", "name: nvfp4"])
def test_text_that_is_no_recipe_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_recipe(text, "mine.yaml")
    assert "\n" not in str(error.value)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'nvfp4'"):
        load_recipe("nvpf4")


def test_a_recipe_file_round_trips_through_its_resolved_form(tmp_path: Path) -> None:
    recipe = load_recipe("nvfp4").for_bundled_model()
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(str(path)) == recipe


def test_digest_depends_on_recipe_and_model() -> None:
    recipe = load_recipe("nvfp4")
    assert recipe.digest("a") != recipe.digest("b")
    assert recipe.digest("a") != recipe.for_bundled_model().digest("a")
    assert recipe.digest("a") == load_recipe("nvfp4").digest("a")
