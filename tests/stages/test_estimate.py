"""Estimates follow from the plan and from stated rates; sizes are those of the headers."""

from typing import Any

import pytest
from rich.console import Console

from quantize.checkpoints.targets import Target, plan_targets, sum_bytes
from quantize.errors import ResourceError
from quantize.recipe.sections import Recipe, load_recipe
from quantize.runtime.memory import Need
from quantize.stages.memory_needs import needs
from quantize.stages.plan.estimate import (
    ASSUMED_ANSWER_TOKENS,
    HASH_BYTES_A_SECOND,
    calibration_steps,
    convert_seconds,
    estimate_table,
    evaluation_answers,
    round_seconds,
    sizes_table,
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
    needed = needs(recipe, config, tensors_from_config(config), targets)
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


@pytest.mark.parametrize(
    ("gb", "runs", "seconds"),
    # Of 64 prompts x 16 steps. At 141 GB measured: 18.6 + 89.0 s. At 80 GB 13.3 GB hold Hessians of 5
    # layers; at 24 GB those of one layer are held, and 49 GB are streamed a pass of 4 canvases.
    [(141, 1, 107.6), (80, 6, 6 * 18.6 + 89), (24, 30, 30 * (18.6 + 256 * 48.97 / 52) + 89)],
)
def test_gptq_runs_the_loop_as_often_as_hessians_fit(gb: int, runs: int, seconds: float) -> None:
    need, config = rounding_need()
    found = round_seconds(need, config, gb * 1e9, 64 * 16)
    assert found[0] == runs
    assert found[1] == pytest.approx(seconds, rel=0.01)


def test_rounding_that_does_not_fit_says_so() -> None:
    need, config = rounding_need()
    with pytest.raises(ResourceError, match=r"12\.0 GB"):
        round_seconds(need, config, 12e9, 1024)
    recipe = load_recipe("nvfp4")
    targets = plan_targets(tensors_from_config(config), recipe.quantization)
    assert "does not fit 12.0 GB" in needs_text(recipe, targets, 12e9)
    assert "estimate for 141 GB: 1 run of at most 24,576 steps" in needs_text(recipe, targets)


def rounding_need() -> tuple[Need, dict[str, Any]]:
    recipe, config = load_recipe("nvfp4"), config_of_known(REAL) or {}
    tensors = tensors_from_config(config)
    needed = needs(recipe, config, tensors, plan_targets(tensors, recipe.quantization))
    return next(need for need in needed if need.stage == "round"), config


def test_all_recipes_stand_beside_the_published_sizes() -> None:
    rows = text_of(sizes_table(tensors_from_config(config_of_known(REAL) or {}))).splitlines()
    sizes = {cells[1]: cells[3:5] for row in rows if len(cells := row.split()) > 4}
    wanted = {"fp8_dynamic": ["27.2", "GB"], "nvfp4": ["16.5", "GB"], "nvfp4_fp8": ["17.2", "GB"]}
    assert sizes | wanted == sizes
    assert any("18.9 GB, NVIDIA" in row for row in rows)
