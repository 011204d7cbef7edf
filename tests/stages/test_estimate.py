"""Estimates follow from the plan and from stated rates; sizes are those of the headers."""

import pytest
from rich.console import Console

from quantize.checkpoints.targets import Target, plan_targets, sum_bytes
from quantize.recipe import Recipe, load_recipe
from quantize.stages.estimate import (
    ASSUMED_ANSWER_TOKENS,
    HASH_BYTES_A_SECOND,
    calibration_steps,
    convert_seconds,
    estimate_table,
    evaluation_answers,
    sizes_table,
)
from quantize.stages.plan import config_of_known, tensors_from_config

REAL = "google/diffusiongemma-26B-A4B-it"


@pytest.fixture(scope="module")
def nvfp4() -> tuple[list[Target], Recipe]:
    recipe = load_recipe("nvfp4_w4a4")
    return plan_targets(
        tensors_from_config(config_of_known(REAL) or {}), recipe.quantization
    ), recipe


def text_of(table: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_time_falls_with_cores_until_one_thread_has_to_hash_it_all(
    nvfp4: tuple[list[Target], Recipe],
) -> None:
    targets, _ = nvfp4
    assert convert_seconds(targets, 1) == pytest.approx(51.648 * 2.6, rel=1e-3)
    assert convert_seconds(targets, 4) == pytest.approx(convert_seconds(targets, 1) / 4)
    assert convert_seconds(targets, 1000) == sum_bytes(targets)[1] / HASH_BYTES_A_SECOND


def test_what_the_recipe_asks_for_is_counted(nvfp4: tuple[list[Target], Recipe]) -> None:
    _, recipe = nvfp4
    assert calibration_steps(recipe) == 256 * 2 * 48
    assert calibration_steps(load_recipe("fp8_dynamic")) == 0
    assert evaluation_answers(recipe) == 30 * 64 + 198 * 32 + 1319
    assert evaluation_answers(recipe.limited_to(10)) == 10 * 64 + 10 * 32 + 10


def test_every_figure_says_where_it_is_from(nvfp4: tuple[list[Target], Recipe]) -> None:
    text = text_of(estimate_table(*nvfp4))
    for word in (
        "51.6 GB + 16.5 GB",
        "24,576 steps",
        "10 min",
        "9,575",
        f"{ASSUMED_ANSWER_TOKENS:,}",
    ):
        assert word in text
    assert "calibrate  " not in text_of(estimate_table(nvfp4[0], load_recipe("nvfp4a16"))).replace(
        "GPU memory, calibrate", ""
    )


def test_all_recipes_stand_beside_the_published_sizes() -> None:
    rows = text_of(sizes_table(tensors_from_config(config_of_known(REAL) or {}))).splitlines()
    sizes = {cells[1]: cells[3:5] for row in rows if len(cells := row.split()) > 4}
    wanted = {"fp8_dynamic": ["27.2", "GB"], "nvfp4": ["16.5", "GB"], "nvfp4_fp8": ["17.2", "GB"]}
    assert sizes | wanted == sizes
    assert any("18.9 GB, NVIDIA" in row for row in rows)
