"""Estimates follow from the plan and from stated rates; sizes are those of the headers."""

import pytest
from rich.console import Console

from quantize.checkpoints.targets import Target, plan_targets, sum_bytes
from quantize.recipe.sections import Recipe, load_recipe
from quantize.stages.memory_needs import needs
from quantize.stages.plan.estimate import (
    ASSUMED_ANSWER_TOKENS,
    HASH_BYTES_A_SECOND,
    calibration_steps,
    convert_seconds,
    estimate_table,
    evaluation_answers,
    round_seconds,
)
from quantize.stages.plan.plan import config_of_known, tensors_from_config

REAL = "google/diffusiongemma-26B-A4B-it"


@pytest.fixture(scope="module")
def nvfp4() -> tuple[list[Target], Recipe]:
    recipe = load_recipe("nvfp4_w4a4")
    return plan_targets(
        tensors_from_config(config_of_known(REAL) or {}), recipe.quantization
    ), recipe


def needs_text(recipe: Recipe, targets: list[Target], budget: float | None = None) -> str:
    config = config_of_known(REAL) or {}
    needed = needs(recipe, config, tensors_from_config(config), targets, hopper=True)
    return text_of(estimate_table(targets, recipe, needed, config, budget))


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
    targets, recipe = nvfp4
    text = needs_text(recipe, targets)
    for word in (
        "51.6 GB + 16.5 GB",
        "24,576 steps",
        "10 min",
        "9,575",
        f"{ASSUMED_ANSWER_TOKENS:,}",
    ):
        assert word in text
    assert "verify" not in text  # nobody measured it on a CPU by the core
    assert "time, round" not in text
    assert "time, calibrate" not in needs_text(load_recipe("nvfp4a16"), targets)


def test_a_gpu_has_rates_of_its_own(nvfp4: tuple[list[Target], Recipe]) -> None:
    targets, recipe = nvfp4
    text = needs_text(recipe, targets, 24e9)
    rows = {
        cells[1].strip(): cells[2].strip()
        for row in text.splitlines()
        if len(cells := row.split("│")) > 2
    }
    assert rows["memory, convert"] == "1.60 GB"
    assert rows["time, convert"] == "32 s"
    assert rows["time, verify"] == "38 s"
    assert "18 to 32 s measured on an H200" in text
    assert "cores; CPU seconds" not in text


def test_recorded_steps_go_once_through_each_layer() -> None:
    """Measured at 141 GB, of 64 prompts x 16 steps: 18.6 and 89.0 s."""
    assert round_seconds(64 * 16, 30) == pytest.approx(107.6)


def test_rounding_that_does_not_fit_says_so() -> None:
    recipe, config = load_recipe("nvfp4"), config_of_known(REAL) or {}
    targets = plan_targets(tensors_from_config(config), recipe.quantization)
    assert "does not fit 12.0 GB" in needs_text(recipe, targets, 12e9)
    for budget in (22e9, 141e9, None):
        assert "estimate: at most 24,576 steps" in needs_text(recipe, targets, budget)
