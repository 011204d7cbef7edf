"""Shows a plan: what the weights become, what each stage takes, what other recipes would make."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.table import Table

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import plan_targets, sum_bytes
from quantize.host.progress import say, screen
from quantize.host.units import size
from quantize.recipe.reading import errors_of, load_recipe, resolved
from quantize.recipe.sections import Recipe
from quantize.recovery.estimands import IN_WORDS
from quantize.runtime.gpu.gpus import Gpu
from quantize.stages.memory_needs import HELD_OUT, replayed_of
from quantize.stages.plan.chances import outlook
from quantize.stages.plan.estimate import (
    AS_REPORTED,
    TYPICAL,
    StageRow,
    cannot_pass,
    known_plans,
    least_of,
    planned,
    tokens_by_task,
)
from quantize.stages.plan.gpu_support import AS_ASSUMED, gpu_of, gpu_table, planned_gpu, runs
from quantize.stages.plan.measured import measured_denoising
from quantize.stages.plan.plan import described, narrow_table, plan_table, plans_of
from quantize.stages.plan.serving import serving_line

# Recipes in order of preference; the first that a GPU can make and run is recommended.
PREFERRED = ("nvfp4", "nvfp4_w4a4", "nvfp4a16", "fp8_dynamic", "int8_dynamic")


A_DAY = 86400  # seconds
DAYS = (
    "evaluate takes days on this GPU. Make and check the checkpoint here (`quantize run --until "
    "verify`), and let a faster GPU judge it (`quantize judge CHECKPOINT --against MODEL`), with "
    "BF16's answers from a pack if somebody has one (`quantize baseline import PACK`). Or serve a "
    "checkpoint that was judged elsewhere"
)
TO_THE_LIMITS = (
    "from answers of typical length until the verdict is certain, to all at their limits"
)
PACK = "`quantize baseline pull`, or `import`"
SEVERAL = (
    "{0} GPUs of one kind share calibrate, round, fidelity and evaluate (`torchrun --nproc-per-node "
    "{0} -m quantize STAGE RUN`): the time of evaluate is one GPU's divided by {0}, by arithmetic; of "
    "the others a part is. Convert, verify and report take one GPU. Memory is that of each, for each "
    "loads whole models"
)
JUDGING = (
    "a second recipe or judgement of this model in the same --out asks only its own model: BF16's "
    "answers stay. So do the trajectories that BF16 is recorded on without a calibration; BF16 reads "
    "them again beside each model, for its results of all steps would take gigabytes"
)
LOSSES = {"none": 0.0, "half the margin": 0.5, "the margin": 1.0}  # in every task -> shares of it


def show_plan(
    recipe_name: str,
    model: str | None,
    revision: str | None,
    gpu_memory: float | None = None,
    gpu: str | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    hourly_price: float | None = None,
    gpus: int = 1,
    measured: Path | None = None,
) -> int:
    """Print what a recipe would do to a model, from headers or only from the model's config.

    Stages are estimated for `gpu` (None: this machine's GPU or, if it has none, an H200) with
    `gpu_memory` bytes (None: all). They are left out for the bundled model if both are None. With
    `hourly_price`, the price of an hour of the GPU, evaluation's cost stands beside its time. The time
    is that of `gpus` such GPUs, and a sentence says what they share. `measured` is measured.json of the
    model, whose steps and experts hit are taken. Return 4 if the gate cannot PASS
    on a task, whatever the answers are, else 0.
    Raise InputError for an unknown GPU or task, ResourceError if a stage lacks room in `gpu_memory`.
    """
    recipe = resolved(recipe_name, bundled=model is None, tasks=tasks, limit=limit)
    chosen = gpu_of(gpu, gpu_memory)  # a wrong name is refused before any table
    config, tensors = described(model, revision)
    with errors_of(recipe_name):
        targets = plan_targets(tensors, recipe.quantization)
    page = screen()
    page.print(plan_table(targets, f"{recipe.name}: {model or 'the bundled model'}"))
    if chosen is not None:
        page.print(gpu_table(targets, config, chosen, recipe.evaluation.activations))
    out_of_reach = cannot_pass(recipe)
    for sentence in out_of_reach:
        say(sentence)
    code = 4 if out_of_reach else 0
    if model is gpu_memory is gpu is measured is None:
        tables = task_table(recipe, None), outlook_table(recipe, None)
        page.print(*tables, "\n".join(asking_lines(recipe)), soft_wrap=False)
        return code
    within = planned_gpu(chosen, gpu_memory)
    denoising = None if measured is None else measured_denoising(measured, config)
    rows = planned(recipe, config, tensors, targets, within, denoising or AS_REPORTED)
    page.print(stage_table(recipe.name, rows, within))
    (asking,) = (row for row in rows if row.stage == "evaluate")
    if asking.seconds and asking.candidate:
        (low, high), (least, most) = asking.seconds, asking.candidate
        shares = (low / gpus, high / gpus), (least / gpus, most / gpus)
        asking = replace(asking, seconds=shares[0], candidate=shares[1])
        page.print(task_table(recipe, shares[0]), outlook_table(recipe, shares[0][1]))
    count = replayed_of(recipe)
    few = [] if count == HELD_OUT else [f"replay: {count} of {HELD_OUT} held-out trajectories"]
    lines = [*few, *ending(asking, hourly_price and hourly_price * gpus), JUDGING]
    lines += [SEVERAL.format(gpus)] if gpus > 1 else []
    if denoising is not None:
        experts = config["text_config"]["num_experts"]
        lines.append(
            f"as measured ({measured}): {denoising.steps:.1f} steps a canvas, each of which hits "
            f"{denoising.hit * experts:.1f} of {experts} experts a layer"
        )
    lines.append(serving_line(config, targets, within, denoising or AS_ASSUMED))
    page.print("\n".join(lines), soft_wrap=False)
    if model is not None:  # the estimates hold for the real layer shapes
        page.print(recipes_table(config, tensors, within))
    if gpu_memory is not None and (lacks := next((r.lacks for r in rows if r.lacks), None)):
        raise lacks
    return code


def stage_table(name: str, rows: Sequence[StageRow], gpu: Gpu) -> Table:
    """Return a table of what each stage takes, with one row per stage, 80 columns wide at most."""
    never = "" if gpu.ran else " (never run on one)"
    numbers = ("GPU", "streamed", "host", "disk")
    title = f"{name} on {gpu.name}, {gpu.memory / 1e9:.0f} GB{never}: estimates"
    table = narrow_table(title, ("stage", *numbers), numbers)
    for row in rows:
        if row.lacks is not None:
            table.add_row(row.stage, f"needs {least_of(row.lacks)}")
            continue
        disk = size(row.disk + row.scratch) if row.disk + row.scratch else ""
        streamed = size(row.streamed) if row.streamed else ""
        cells = (size(row.gpu), streamed, size(row.host), disk + ("*" if row.scratch else ""))
        table.add_row(row.stage, *cells)
    table.caption = (
        "streamed: of each pass; *: scratch that is removed again is in it; `quantize rehearse` "
        "measures each stage's time"
    )
    return table


def asking_lines(recipe: Recipe) -> list[str]:
    """Return sentences on the looks at each task, on the gate's limits, and on times."""
    gate = recipe.gate
    looks = (
        f"{task}: judged after {', '.join(f'{look.fraction:.0%}' for look in plan.looks)} of "
        f"{plan.questions} questions x {plan.repeats}, until the verdict is certain"
        for task, plan in known_plans(recipe).items()
    )
    kl = ", ".join(f"{limit:g} nats ({mode})" for mode, limit in gate.max_kl_nats.items())
    steps = gate.max_step_inflation
    return [
        *looks,
        f"replay: {replayed_of(recipe)} held-out trajectories",
        f"gate at {gate.confidence:.0%}, {IN_WORDS[gate.estimand]}; KL "
        f"{f'at most {kl}' if kl else 'not judged'}; steps "
        f"{'not judged' if steps is None else f'at most {steps:.0%} more'}",
        "the bundled model runs on this CPU, in minutes; --gpu NAME estimates what a GPU takes",
    ]


def task_table(recipe: Recipe, seconds: tuple[float, float] | None) -> Table:
    """Return a table of tasks; each gets a share of `seconds` (least, most) by its most tokens."""
    numbers = ("answers", "tokens each", "margin")
    table = narrow_table(None, ("task", *numbers, *(["time"] if seconds else [])), numbers)
    tokens = tokens_by_task(recipe)
    for task in recipe.evaluation.tasks:
        margin = f"{recipe.gate.margin_pp[task]:g} points"
        limit = recipe.evaluation.answer_tokens(task)
        answers, time = "?", None
        if task in tokens:
            share, answers = tokens[task] / sum(tokens.values()), f"{tokens[task] // limit:,}"
            time = seconds and (share * seconds[0], share * seconds[1])
        cells = (task, answers, f"{limit:,}", margin)
        table.add_row(*cells, *([between(time)] if seconds else []))
    return table


def outlook_table(recipe: Recipe, seconds: float | None) -> Table:
    """Return a table of how runs end by the true loss; `seconds` is the time of all tokens."""
    numbers, time = ("PASS", "FAIL", "tokens asked"), ["time"] if seconds else []
    table = narrow_table(None, ("true loss in each task", *numbers, *time), numbers)
    table.caption = "not known: nor is the number of a task's questions, before its data is read"
    if known_plans(recipe).keys() != {*recipe.evaluation.tasks}:
        return table
    for name, lost in LOSSES.items():
        shares = outlook(recipe, lost)
        times = [rounded(TYPICAL * shares[-1] * seconds)] if seconds else []
        table.add_row(name, *(f"{share:.0%}" for share in shares), *times)
    table.caption = "by arithmetic, of accuracy alone; answers of typical length"
    if budget := recipe.evaluation.token_budget:
        table.caption += f"; no look begins after {budget:,} tokens"
    return table


def between(seconds: tuple[float, float] | None) -> str:
    """Return a range of seconds as text, "9 min to 3.1 h", and "?" for None."""
    if seconds is None:
        return "?"
    low, high = map(rounded, seconds)
    return low if low == high else f"{low} to {high}"


def rounded(seconds: float) -> str:
    """Return a rounded time in the unit that fits it: "32 s", "9 min", "3.1 h", "12 days"."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            value = seconds / unit
            return f"{value:.1f} {name}" if value < 9.95 else f"{value:,.0f} {name}"
    return f"{seconds:.0f} s"


def ending(row: StageRow, hourly_price: float | None = None) -> list[str]:
    """Return sentences on evaluation's time and cost, and on what makes a verdict cheaper."""
    if row.seconds is None or row.candidate is None:
        return []
    lines = [
        f"evaluate: {takes(row.seconds, hourly_price)}, {TO_THE_LIMITS}",
        f"with BF16's answers from a pack ({PACK}): {takes(row.candidate, hourly_price)}",
    ]
    return [*lines, DAYS] if row.seconds[0] > A_DAY else lines


def takes(seconds: tuple[float, float], hourly_price: float | None) -> str:
    """Return a range of times and, if an hour has a price, what they cost."""
    if hourly_price is None:
        return between(seconds)
    low, high = (f"{second / 3600 * hourly_price:,.2f}" for second in seconds)
    return f"{between(seconds)}, at {hourly_price:g} an hour: {low} to {high}"


def recipes_table(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], gpu: Gpu) -> Table:
    """Return a table of shipped recipes' sizes; the caption says which recipe to make here."""
    numbers = ("size", "of BF16")
    table = narrow_table("all recipes", ("recipe", *numbers, "here"), numbers)
    able: list[str] = []
    for name, targets in plans_of(tensors).items():
        stages = planned(load_recipe(name), config, tensors, targets, gpu)
        making = takewhile(lambda row: row.stage != "fidelity", stages)
        lacks = [f"{row.stage} needs {least_of(row.lacks)}" for row in making if row.lacks]
        lacks += [] if runs(targets, gpu) else ["no kernels for it"]
        if not lacks:
            able.append(name)
        before, after = sum_bytes(targets)
        table.add_row(name, size(after), f"{after / before:.1%}", lacks[0] if lacks else "")
    ways = [name for name in PREFERRED if name in able]
    if ways:
        table.caption = f"take {ways[0]}; else {', '.join(ways[1:3])}"
    return table
