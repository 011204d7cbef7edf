"""Estimates hold the figures that were measured, and say the same of every GPU as they did before.

python tests/stages/test_estimate.py    writes what `plan` says of every GPU to tests/data/plans.txt
"""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from quantize.checkpoints.reader import known_config
from quantize.checkpoints.targets import Target
from quantize.cli import cli
from quantize.cli.options import REAL_MODEL
from quantize.pipeline.stages import STAGES, Stage
from quantize.recipe.reading import load_recipe, shipped_recipes
from quantize.recipe.sections import Recipe
from quantize.runtime.gpu.gpus import GPUS, Gpu
from quantize.stages.plan.estimate import (
    STEPS_A_CANVAS,
    StageRow,
    calibration_steps,
    evaluation_seconds,
    planned,
    tokens_by_task,
)
from quantize.stages.plan.gpu_support import planned_gpu
from quantize.stages.plan.plan import plans_of, tensors_from_config
from quantize.stages.plan.serving import serving_table
from quantize.stages.plan.show import SEVERAL, between, stage_table, task_table

GOLDEN = Path(__file__).parents[1] / "data/plans.txt"
CONFIG = known_config(REAL_MODEL) or {}
TENSORS = tensors_from_config(CONFIG)
NVFP4 = load_recipe("nvfp4")


@cache
def shipped_plans() -> dict[str, list[Target]]:
    return plans_of(TENSORS)


def rows(recipe: Recipe, gpu: Gpu) -> dict[str, StageRow]:
    return {
        row.stage: row for row in planned(recipe, CONFIG, TENSORS, shipped_plans()["nvfp4"], gpu)
    }


def at(gb: float) -> Gpu:
    return planned_gpu(None, gb * 1e9)


def test_what_a_rehearsal_measures_is_not_timed() -> None:
    """All but evaluation, which takes most of a run's time."""
    timed = {stage for stage, row in rows(NVFP4, at(141)).items() if row.seconds is not None}
    assert timed == {"evaluate"}


def test_evaluation_is_a_range_that_one_source_gives() -> None:
    """docs/evaluation.md, by its own rates at 32 slots: 8.3 hours to a verdict."""
    tokens = tokens_by_task(NVFP4)
    assert list(tokens.values()) == [
        30 * 40 * 32768, 198 * 8 * 16384, 1319 * 1024, 30 * 20 * 32768, 198 * 3 * 32768, 1319 * 8192
    ]  # fmt: skip
    found = rows(NVFP4, at(141))["evaluate"].seconds
    assert found is not None
    assert 8.3 / 1.5 < found[0] / 3600 < 8.3 * 1.5
    assert found[1] / found[0] == pytest.approx(1 / (0.35 * 0.61), rel=0.01)
    assert evaluation_seconds(NVFP4) == pytest.approx(found[0], rel=0.2)
    few = NVFP4.asking(["gsm8k_thinking", "aime25"], 15)
    assert tokens_by_task(few) == {"gsm8k_thinking": 15 * 8192, "aime25": 15 * 40 * 32768}
    with (shown := Console(width=80)).capture() as told:
        shown.print(task_table(few, (3600, 36000)))
    assert " aime25              600       32,768  3 points  60 min to 9.9 h" in told.get()
    assert STEPS_A_CANVAS == 26


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_verdict_on_a_shipped_recipe_takes_8_hours_of_an_h200(name: str) -> None:
    """4.5 with BF16's answers. Of typical length, without loss, all tasks: docs/evaluation.md."""
    row = rows(load_recipe(name), at(141))["evaluate"]
    assert row.seconds is not None
    assert row.candidate is not None
    assert row.seconds[0] <= 8 * 3600
    assert row.candidate[0] <= 4.5 * 3600


def test_a_slower_card_and_a_slower_link_take_longer() -> None:
    whole, fast, slow = (rows(NVFP4, gpu) for gpu in (at(141), at(22), replace(at(22), link=25e9)))
    small = rows(NVFP4, planned_gpu(GPUS["rtx4090"], None))
    seconds = [row["evaluate"].seconds or (0, 0) for row in (whole, fast, slow)]
    assert sorted(set(seconds)) == seconds
    assert seconds[0] < (small["evaluate"].seconds or (0, 0))


@pytest.mark.parametrize(("gpu", "days"), [("h200", False), ("rtx4090", True), ("spark", True)])
def test_where_evaluating_takes_days_the_ways_out_are_named(gpu: str, days: bool) -> None:
    shown = CliRunner().invoke(
        cli, ["plan", "--recipe", "nvfp4", "--model", REAL_MODEL, "--gpu", gpu],
        env={"COLUMNS": "80"},
    )  # fmt: skip
    said = " ".join(shown.output.split())
    assert ("evaluate takes days on this GPU" in said) is days
    for command in (
        "quantize run --until verify",
        "quantize judge",
        "quantize baseline import PACK",
    ):
        assert (f"`{command}" in said) is days
    assert ("(never run on one)" in said) is days
    assert "min)" not in said  # no recipe is recommended by a time


def test_a_pulled_baseline_leaves_the_candidates_time_and_an_hour_has_a_price() -> None:
    whole = rows(NVFP4, planned_gpu(GPUS["h200"], None))["evaluate"]
    assert whole.seconds is not None
    assert whole.candidate is not None
    pairs = list(zip(whole.candidate, whole.seconds, strict=True))
    assert all(0.3 * both < alone < 0.6 * both for alone, both in pairs)
    words = ["plan", "--recipe", "nvfp4", "--model", REAL_MODEL, "--gpu", "h200"]
    shown = CliRunner().invoke(cli, [*words, "--hourly-price", "3"], env={"COLUMNS": "80"})
    said = " ".join(shown.output.split())
    for sentence, seconds in (("evaluate: ", whole.seconds), ("or `import`): ", whole.candidate)):
        low, high = (f"{second / 1200:,.2f}" for second in seconds)
        assert f"{sentence}{between(seconds)}, at 3 an hour: {low} to {high}" in said


def test_several_gpus_divide_the_time_of_answers_and_nothing_of_its_price() -> None:
    whole = rows(NVFP4, planned_gpu(GPUS["h200"], None))["evaluate"]
    words = ["plan", "--recipe", "nvfp4", "--model", REAL_MODEL, "--gpu", "h200"]
    words += ["--hourly-price", "3", "--gpus"]
    one, four = (CliRunner().invoke(cli, [*words, n], env={"COLUMNS": "80"}) for n in "14")
    said = " ".join(four.output.split())
    for sentence, seconds in (("evaluate: ", whole.seconds), ("or `import`): ", whole.candidate)):
        assert seconds is not None
        low, high = (f"{second / 1200:,.2f}" for second in seconds)
        quarter = between((seconds[0] / 4, seconds[1] / 4))
        assert f"{sentence}{quarter}, at 12 an hour: {low} to {high}" in said
    assert "4 GPUs of one kind share calibrate, round, fidelity and evaluate" in said
    assert "torchrun --nproc-per-node 4" in said
    assert "torchrun" not in one.output


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.name)
def test_what_several_gpus_share_is_as_the_plan_says(stage: Stage) -> None:
    shared = SEVERAL.partition("share")[2].partition("(")[0]
    assert (stage.name in shared) is stage.shares_work
    assert stage.name in SEVERAL.lower()


def test_sixteen_gb_are_told_what_they_lack() -> None:
    """The rest can still be done: other recipes, conversion, and serving partly streamed."""
    found = rows(NVFP4, at(16))
    assert {stage for stage, row in found.items() if row.lacks} == {"round"}
    shown = CliRunner().invoke(
        cli, ["plan", "--recipe", "nvfp4", "--model", REAL_MODEL, "--gpu-memory", "16"],
        env={"COLUMNS": "80"},
    )  # fmt: skip
    assert shown.exit_code != 0
    assert "round      needs 19.9 GB" in shown.output
    assert "take nvfp4_w4a4" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80


def test_a_gpu_that_nobody_knows_is_refused_before_the_tables() -> None:
    shown = CliRunner().invoke(cli, ["plan", "--model", REAL_MODEL, "--gpu", "rtx9999"])
    assert "one of a100, " in str(shown.exception)
    assert not shown.output


def test_a_calibration_makes_steps_where_the_recipe_has_one() -> None:
    assert calibration_steps(NVFP4) == 256 * 2 * 48
    assert calibration_steps(load_recipe("fp8_dynamic")) == 0


def plans() -> str:
    """Return what `plan` and `plan --serve` say of every GPU by name, of 16 GB, and of a target."""
    every = [planned_gpu(gpu, None) for gpu in GPUS.values()]
    every += [planned_gpu(None, 16e9), planned_gpu(Gpu("sm_89", (8, 9), 24e9), None)]
    console = Console(width=80)
    with console.capture() as captured:
        for gpu in every:
            found = planned(NVFP4, CONFIG, TENSORS, shipped_plans()["nvfp4"], gpu)
            console.print(stage_table("nvfp4", found, gpu))
            console.print(serving_table(CONFIG, TENSORS, shipped_plans(), gpu, 8192, 4))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def test_every_gpu_gets_the_plan_that_it_got() -> None:
    found = plans()
    assert found == GOLDEN.read_text("utf-8")
    assert "…" not in found


if __name__ == "__main__":
    sys.exit(GOLDEN.write_text(plans(), "utf-8") and 0)
