"""Estimates what a run will cost: memory, disk and time, from a plan and measured rates alone.

Conversion and verification are computed from CPU seconds a GB on this machine's cores, and cannot be
faster than one thread hashes what is written. GPU times are those of one H200. Calibration stops a
canvas that is stable, so its time is an upper bound; evaluation depends on how long answers are, and
its row says what it assumes.
"""

import os
from collections.abc import Mapping

from recovery.gate import out_of_reach
from rich.table import Table

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target, plan_targets, sum_bytes
from quantize.recipe import Recipe, load_recipe, shipped_recipes
from quantize.units import duration, size

HASH_BYTES_A_SECOND = 0.85e9  # sha256 on one core of the same machine
# The converter's own memory on the same files: 0.66 GB with 2 threads, 1.44 GB with 16.
CONVERT_BYTES, CONVERT_BYTES_A_THREAD = 0.55e9, 0.056e9
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


def estimate_table(targets: list[Target], recipe: Recipe) -> Table:
    """Return what running `recipe` on a model with these targets needs, row by row."""
    before, after = sum_bytes(targets)
    cores = len(os.sched_getaffinity(0))
    table = Table(title="needs", title_justify="left")
    for name in ("what", "how much", "from"):
        table.add_column(name)
    table.add_row("disk", f"{size(before)} + {size(after)}", "source and artifact")
    own = CONVERT_BYTES + CONVERT_BYTES_A_THREAD * cores
    table.add_row("memory, convert", size(own), f"{cores} threads; measured with 2 and 16")
    seconds = convert_seconds(targets, cores)
    table.add_row("time, convert", duration(seconds), f"{cores} cores; CPU seconds a GB measured")
    device = (
        f"BF16 weights and the sampler's logits; {size(CALIBRATION_GPU_BYTES)} at batch 16, 26B"
    )
    table.add_row("GPU memory, calibrate and evaluate", f"over {size(before)}", device)
    if recipe.calibration and recipe.needs_calibration:
        steps = calibration_steps(recipe)
        source = f"at most {steps:,} steps; 24.6 ms each measured on an H200, 26B, batches of 16"
        table.add_row("time, calibrate", duration(steps * CALIBRATION_STEP_SECONDS), source)
    answers = evaluation_answers(recipe)
    if answers:
        source = (
            f"2 x {answers:,} answers of {ASSUMED_ANSWER_TOKENS:,} tokens (assumed); 1,450 tokens/s "
            f"measured: vLLM 0.26, batch 4, H200"
        )
        table.add_row("time, evaluate", duration(evaluation_seconds(recipe)), source)
    return table


def evaluation_seconds(recipe: Recipe) -> float:
    """Return the estimated seconds of both sides' planned answers, of tasks whose size is known."""
    return 2 * evaluation_answers(recipe) * ASSUMED_ANSWER_TOKENS / SERVED_TOKENS_A_SECOND


def convert_seconds(targets: list[Target], cores: int) -> float:
    """Return the estimated seconds of a conversion."""
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
            margin_pp=recipe.gate.margin_pp[task],
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
