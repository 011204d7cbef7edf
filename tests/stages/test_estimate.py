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
from quantize.recipe.reading import load_recipe, shipped_recipes
from quantize.recipe.sections import Recipe
from quantize.runtime.gpu.gpus import GPUS, Gpu
from quantize.stages.plan import estimate
from quantize.stages.plan.estimate import (
    STEPS_A_CANVAS,
    GpuMachine,
    StageRow,
    calibration_steps,
    evaluation_seconds,
    planned,
    tokens_by_task,
)
from quantize.stages.plan.plan import plans_of, tensors_from_config
from quantize.stages.plan.serving import serving_table
from quantize.stages.plan.show import stage_table, task_table

GOLDEN = Path(__file__).parents[1] / "data/plans.txt"
CONFIG = known_config(REAL_MODEL) or {}
TENSORS = tensors_from_config(CONFIG)
NVFP4 = load_recipe("nvfp4")


@cache
def shipped_plans() -> dict[str, list[Target]]:
    return plans_of(TENSORS)


def rows(recipe: Recipe, machine: GpuMachine) -> dict[str, StageRow]:
    return {
        row.stage: row
        for row in planned(recipe, CONFIG, TENSORS, shipped_plans()["nvfp4"], machine)
    }


def most(row: StageRow) -> float:
    assert row.seconds is not None
    return row.seconds[1]


def at(gb: float, **rates: float) -> GpuMachine:
    return GpuMachine(GPUS["h200"], gb * 1e9, **rates)


def of(prompts: int, canvases: int) -> Recipe:
    assert NVFP4.calibration is not None
    """Prompts are as short as those that were measured."""
    changes = {"prompts": prompts, "canvases": canvases, "max_prompt_tokens": 128}
    calibration = NVFP4.calibration.model_copy(update=changes)
    return NVFP4.model_copy(update={"calibration": calibration})


@pytest.mark.parametrize(
    ("stage", "gb", "prompts", "canvases", "steps", "measured"),
    [
        ("calibrate", 141, 64, 2, 48, 94.6),
        ("calibrate", 76, 64, 2, 48, 110.1),
        ("calibrate", 141, 64, 1, 16, 21.8),
        ("calibrate", 22, 64, 2, 48, 227.6),
        ("round", 141, 64, 2, 48, 154.3),
        ("round", 76, 64, 2, 48, 200.6),
        ("round", 22, 64, 2, 48, 139.0),
        ("round", 141, 64, 1, 16, 83.5),
        ("calibrate", 76, 64, 1, 16, 34.2),
        ("round", 76, 64, 1, 16, 78.1),
        ("convert", 76, 64, 1, 16, 19.0),
        ("verify", 76, 64, 1, 16, 9.9),
        ("fidelity", 76, 64, 1, 16, 67.0),
        ("verify", 141, 64, 1, 16, 10.6),
        ("verify", 22, 64, 1, 16, 9.4),
        ("fidelity", 141, 64, 1, 16, 67.1),
        ("fidelity", 22, 64, 1, 16, 93.2),
    ],
)
def test_estimates_are_near_what_an_h200_took(
    stage: str, gb: float, prompts: int, canvases: int, steps: int, measured: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """None is off by more than a factor of 1.5."""
    monkeypatch.setattr(estimate, "STEPS", steps)
    monkeypatch.setattr(estimate.calibration_steps, "__defaults__", (steps,))
    found = rows(of(prompts, canvases), at(gb, link=53e9))[stage].seconds
    assert found is not None
    assert measured / 1.5 < found[1] < measured * 1.5


def test_evaluation_is_a_range_that_one_source_gives() -> None:
    """docs/evaluation.md, by its own rates at 32 slots: 11.1 hours to a verdict."""
    tokens = tokens_by_task(NVFP4)
    assert list(tokens.values()) == [
        30 * 48 * 32768, 198 * 12 * 16384, 1319 * 1024, 30 * 20 * 32768, 198 * 4 * 32768, 1319 * 8192
    ]  # fmt: skip
    found = rows(NVFP4, at(141))["evaluate"].seconds
    assert found is not None
    assert 11.1 / 1.5 < found[0] / 3600 < 11.1 * 1.5
    assert found[1] / found[0] == pytest.approx(1 / (0.35 * 0.66), rel=0.01)
    assert evaluation_seconds(NVFP4) == pytest.approx(found[0], rel=0.2)
    few = NVFP4.asking(["gsm8k_thinking", "aime25"], 15)
    assert tokens_by_task(few) == {"gsm8k_thinking": 15 * 8192, "aime25": 15 * 48 * 32768}
    with (shown := Console(width=80)).capture() as told:
        shown.print(task_table(few, (3600, 36000)))
    assert " aime25              720       32,768  3 points  60 min to 9.9 h" in told.get()
    assert STEPS_A_CANVAS == 26


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_verdict_on_a_shipped_recipe_takes_12_hours_of_an_h200(name: str) -> None:
    """Answers of typical length, without loss, all tasks: docs/evaluation.md."""
    found = rows(load_recipe(name), at(141))["evaluate"].seconds
    assert found is not None
    assert found[0] <= 12 * 3600


def test_a_slower_card_a_slower_link_and_a_slower_disk_take_longer() -> None:
    fast, slow = rows(NVFP4, at(22, link=53e9)), rows(NVFP4, at(22, link=25e9))
    small = rows(NVFP4, replace(at(22, link=53e9), gpu=GPUS["rtx4090"]))
    disk = rows(NVFP4, at(141, disk=0.2e9))
    whole = rows(NVFP4, at(141))
    for stage in ("calibrate", "fidelity", "evaluate"):
        assert fast[stage].bound == "link"
        assert most(fast[stage]) < most(slow[stage])
        assert whole[stage].bound == "compute"
        assert most(whole[stage]) < most(fast[stage])
    assert most(fast["round"]) < most(small["round"])
    for stage in ("convert", "verify", "round"):
        assert most(whole[stage]) < most(disk[stage])
        assert disk[stage].bound == "disk"


@pytest.mark.parametrize(
    ("gpu", "clients", "said"),
    [
        ("h200", 16, True), ("l40s", 16, True), ("h200", 15, False),
        ("rtx4090", 16, False), ("a100", 16, False), ("b200", 16, False),
    ],
)  # fmt: skip
def test_serving_many_at_once_names_fp8_where_it_is_faster(
    gpu: str, clients: int, said: bool
) -> None:
    """Not for few clients, where it is streamed or cannot run, or where FP4 units take less."""
    plans = {"fp8_dynamic": shipped_plans()["fp8_dynamic"]}
    machine = GpuMachine.of(GPUS[gpu], None)
    caption = str(serving_table(CONFIG, TENSORS, plans, machine, 8192, clients).caption)
    assert caption.startswith("by arithmetic")
    assert ("from 16 clients on fp8_dynamic is faster" in caption) is said


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
    machines = [GpuMachine.of(gpu, None) for gpu in GPUS.values()]
    machines += [GpuMachine.of(None, 16e9), GpuMachine.of(Gpu("sm_89", (8, 9), 24e9), None)]
    console = Console(width=80)
    with console.capture() as captured:
        for machine in machines:
            found = planned(NVFP4, CONFIG, TENSORS, shipped_plans()["nvfp4"], machine)
            console.print(stage_table("nvfp4", found, machine))
            console.print(serving_table(CONFIG, TENSORS, shipped_plans(), machine, 8192, 4))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def test_every_gpu_gets_the_plan_that_it_got() -> None:
    found = plans()
    assert found == GOLDEN.read_text("utf-8")
    assert "…" not in found


if __name__ == "__main__":
    sys.exit(GOLDEN.write_text(plans(), "utf-8") and 0)
