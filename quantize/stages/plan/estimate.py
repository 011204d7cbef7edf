"""Estimates what a run will cost: memory, disk and time, from a plan and measured rates alone.

On a CPU conversion is computed from CPU seconds a GB on this machine's cores, and cannot be faster than
one thread hashes what is written. GPU times are those of the 26B shape on one H200, whichever GPU is
planned for. Calibration stops a canvas that is stable, so its time, and that of GPTQ's Hessians, is an
upper bound; evaluation depends on how long answers are, and its row says what it assumes.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from recovery.gate import out_of_reach
from recovery.health import least_limit
from rich.table import Table

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target, plan_targets, sum_bytes
from quantize.errors import ResourceError
from quantize.host.units import duration, size
from quantize.recipe.sections import Recipe, load_recipe, shipped_recipes
from quantize.runtime.memory import Need, plan

HASH_BYTES_A_SECOND = 0.85e9  # sha256 on one core of the same machine
# The converter's own memory on the same files: 0.66 GB with 2 threads, 1.44 GB with 16.
CONVERT_BYTES, CONVERT_BYTES_A_THREAD = 0.55e9, 0.056e9
# One H200 with 16 cores, 51.6 GB of BF16 in memory, four runs at a time on one host: the slowest of 18
# to 32 s (convert) and of 33 to 38 s (verify), and the most that a process held, which had rounded too.
GPU_CONVERT_SECONDS, GPU_VERIFY_SECONDS = 32.2 / 51.65, 37.8 / 51.65  # a GB
GPU_CONVERT_BYTES = {"nearest": 1.6e9, "gptq": 3.6e9}
# GPTQ there, with all 30 layers' Hessians held at once: 64 prompts x 16 steps of one canvas in batches
# of 16 took 18.6 s, rounding 89.0 s. Streamed layers came at 52 to 55 GB/s.
HESSIAN_STEP_SECONDS, ROUNDING_LAYER_SECONDS = 18.6 / (64 * 16), 89.0 / 30
H200_BYTES = 141e9
# 64 prompts x 16 steps of one canvas in batches of 16 took 25.2 s: the 26B shape on one H200, BF16.
CALIBRATION_STEP_SECONDS = 25.2 / (64 * 16)
CALIBRATION_GPU_BYTES = 81.9e9  # largest allocation of that run, 52 GB of it weights
SERVED_TOKENS_A_SECOND = 1450  # vLLM 0.26, BF16, batch 4, 16 steps a canvas, one H200
ASSUMED_ANSWER_TOKENS = 1024
# Bytes of published checkpoints, which a plan can be compared with.
PUBLISHED = {
    "fp8_dynamic": "27.2 GB, RedHatAI FP8-dynamic",
    "nvfp4": "18.9 GB, NVIDIA NVFP4 (experts only)",
}


def estimate_table(
    targets: list[Target],
    recipe: Recipe,
    needed: Sequence[Need],
    config: Mapping[str, Any],
    budget: float | None = None,
) -> Table:
    """Return what running `recipe` on a model with these targets needs, row by row.

    Args:
        targets: the plan of the model.
        recipe: the recipe.
        needed: what its stages ask of a GPU (`needs`).
        config: config.json of the model.
        budget: bytes of the GPU that is there or planned for, None without one: then weights are
            converted on the CPU, and the stages that denoise run on an H200.
    """
    before, after = sum_bytes(targets)
    table = Table(title="needs", title_justify="left")
    for name in ("what", "how much", "from"):
        table.add_column(name)
    table.add_row("disk", f"{size(before)} + {size(after)}", "source and artifact")
    for row in _on_gpu(before, recipe.quantization.rounding) if budget else _on_cpu(targets):
        table.add_row(*row)
    device = (
        f"BF16 weights and the sampler's logits; {size(CALIBRATION_GPU_BYTES)} at batch 16, 26B"
    )
    table.add_row("GPU memory, calibrate and evaluate", f"over {size(before)}", device)
    steps = calibration_steps(recipe)
    if recipe.calibration and recipe.needs_calibration:
        source = f"at most {steps:,} steps; 24.6 ms each measured on an H200, 26B, batches of 16"
        table.add_row("time, calibrate", duration(steps * CALIBRATION_STEP_SECONDS), source)
    for need in (each for each in needed if each.stage == "round"):
        table.add_row("time, round", *_rounding(need, config, budget or H200_BYTES, steps))
    answers = evaluation_answers(recipe)
    if answers:
        source = (
            f"2 x {answers:,} answers of {ASSUMED_ANSWER_TOKENS:,} tokens (assumed); 1,450 tokens/s "
            f"measured: vLLM 0.26, batch 4, H200"
        )
        table.add_row("time, evaluate", duration(evaluation_seconds(recipe)), source)
    return table


def _on_cpu(targets: list[Target]) -> list[tuple[str, str, str]]:
    cores = len(os.sched_getaffinity(0))
    own = CONVERT_BYTES + CONVERT_BYTES_A_THREAD * cores
    seconds = duration(convert_seconds(targets, cores))
    return [
        ("memory, convert", size(own), f"{cores} threads; measured with 2 and 16"),
        ("time, convert", seconds, f"{cores} cores; CPU seconds a GB measured"),
    ]


def _on_gpu(before: float, rounding: str) -> list[tuple[str, str, str]]:
    source = "measured on an H200, 16 cores, 26B, files in memory, 4 runs at once"
    convert, verify = (before / 1e9 * each for each in (GPU_CONVERT_SECONDS, GPU_VERIFY_SECONDS))
    return [
        ("memory, convert", size(GPU_CONVERT_BYTES[rounding]), f"the most {source}"),
        ("time, convert", duration(convert), f"the slowest of 18 to 32 s {source}"),
        ("time, verify", duration(verify), f"the slowest of 33 to 38 s {source}"),
    ]


def _rounding(need: Need, config: Mapping[str, Any], budget: float, steps: int) -> tuple[str, str]:
    try:
        plan(need, config, budget)
    except ResourceError:
        return "-", f"does not fit {size(budget)}"
    source = f"estimate: at most {steps:,} steps, 18.2 ms each, 3.0 s a layer; measured: H200, 26B"
    return duration(round_seconds(steps, config["text_config"]["num_hidden_layers"])), source


def round_seconds(steps: int, layers: int) -> float:
    """Return the estimated seconds of GPTQ: recorded steps go once through each layer."""
    return steps * HESSIAN_STEP_SECONDS + layers * ROUNDING_LAYER_SECONDS


def evaluation_seconds(recipe: Recipe) -> float:
    """Return the estimated seconds of both sides' planned answers, of tasks whose size is known."""
    return 2 * evaluation_answers(recipe) * ASSUMED_ANSWER_TOKENS / SERVED_TOKENS_A_SECOND


def convert_seconds(targets: list[Target], cores: int) -> float:
    """Return the estimated seconds of a conversion on CPU cores."""
    before, after = sum_bytes(targets)
    rate = max(t.scheme.convert_seconds for t in targets if t.scheme)
    return max(rate * before / 1e9 / cores, after / HASH_BYTES_A_SECOND)


def calibration_steps(recipe: Recipe, steps: int = 48) -> int:
    """Return the most denoising steps a calibration makes: prompts x canvases x steps."""
    settings = recipe.calibration
    if settings is None:
        return 0
    return settings.prompts * settings.canvases * steps


def evaluation_answers(recipe: Recipe) -> int:
    """Return how many answers each model gives, over the tasks whose size is known."""
    return sum(
        questions * recipe.evaluation.repeats.get(task, 1)
        for task, questions in known_sizes(recipe).items()
    )


def known_sizes(recipe: Recipe) -> dict[str, int]:
    """Return task -> questions asked, for the tasks whose data set's size is known."""
    found: dict[str, int] = {}
    for task in recipe.evaluation.tasks:
        if (size := recipe.evaluation.questions(task)) is not None:
            found[task] = min(size, recipe.evaluation.limit.get(task, size))
    return found


def cannot_pass(recipe: Recipe) -> list[str]:
    """Return a sentence for each task on which the gate cannot PASS, whatever the answers are."""
    found = (
        out_of_reach(
            task,
            recipe.gate.estimand,
            questions=questions,
            repeats=recipe.evaluation.repeats.get(task, 1),
            margin_pp=least_limit(recipe.gate.health_pp, recipe.gate.margin_pp[task]),
            confidence=recipe.gate.confidence,
        )
        for task, questions in known_sizes(recipe).items()
    )
    return [sentence for sentence in found if sentence]


def sizes_table(tensors: Mapping[str, TensorInfo]) -> Table:
    """Return the size that every shipped recipe would give these tensors, beside published ones."""
    table = Table(title="all recipes", title_justify="left")
    for name in ("recipe", "size", "of BF16", "published"):
        table.add_column(name, justify="right" if name in ("size", "of BF16") else "left")
    for name in shipped_recipes():
        before, after = sum_bytes(plan_targets(tensors, load_recipe(name).quantization))
        table.add_row(name, size(after), f"{after / before:.1%}", PUBLISHED.get(name, ""))
    return table
