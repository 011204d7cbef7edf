"""The stages in order, each skipped when its result is already there: what `quantize run` does.

    plan -> calibrate -> round -> convert -> verify -> fidelity -> evaluate -> report

The run folder is named after the recipe and a hash of the resolved recipe and the model's
fingerprint, so the same run finds itself again. Stages (`quantize.stage` lists them) know nothing of
each other: they meet in the files of the run folder. The manifest records versions, hardware, seconds
and peak memory per stage; nothing that must be equal between two runs depends on it.
"""

import os
import resource
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from quantize.checkpoints.reader import Checkpoint, resolve
from quantize.checkpoints.targets import plan_targets
from quantize.errors import InputError
from quantize.manifest import fingerprint, new_manifest
from quantize.processes import best_device
from quantize.progress import console, say
from quantize.recipe import load_recipe, parse_recipe
from quantize.run_dir import RunDir, read_json, write_json
from quantize.runtime.memory import budget_of
from quantize.runtime.memory import plan as fit
from quantize.stage import STAGES, Run, Stage
from quantize.stages.estimate import cannot_pass, estimate_table, sizes_table
from quantize.stages.needs import BUDGETS_GB, memory_table, needs
from quantize.stages.plan import config_of_known, plan_table, tensors_from_config


def start(
    recipe_name: str,
    model: str | None,
    out: Path,
    *,
    resume: bool,
    revision: str | None = None,
    limit: int | None = None,
    gpu_memory: float | None = None,
    **scoring: Any,
) -> Run:
    """Resolve recipe and model, name the run folder, plan, and show the plan.

    `gpu_memory` and `scoring` are those of `Run`.

    Raises:
        InputError: the run exists and `resume` is off, recipe or model are wrong, or torchrun
            started several processes.
        ResourceError: a stage does not fit the GPU, or more of it is asked for than is free.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            "`quantize run` is one process; torchrun is for `quantize calibrate RUN`, `quantize "
            "fidelity RUN` and `quantize evaluate RUN`"
        )
    recipe = load_recipe(recipe_name)
    source = Checkpoint.open(resolve(model, revision))
    if source.is_quantized:
        raise InputError(f"{source.folder}: already quantized; name the BF16 model")
    is_bundled = model is None
    if is_bundled:
        recipe = recipe.for_bundled_model()
    if limit is not None:
        recipe = recipe.limited_to(limit)
    digest = fingerprint(source)
    folder = RunDir(out / f"{recipe.name}-{recipe.digest(digest)}")
    if folder.manifest_json.exists() and not resume:
        raise InputError(
            f"{folder.path}: this run exists; --resume continues or shows it, --out starts elsewhere"
        )
    targets = plan_targets(source.tensors, recipe.quantization)
    run = Run(folder, recipe, source, targets, is_bundled, scoring, gpu_memory)
    _check_memory(run)
    if not folder.manifest_json.exists():
        write_json(folder.manifest_json, new_manifest(source, digest, recipe.name, model))
    console.print(plan_table(run.targets, f"{recipe.name}: {source.folder.name} -> {folder.path}"))
    for sentence in cannot_pass(recipe):
        say(sentence)
    return run


def show_plan(
    recipe_name: str, model: str | None, revision: str | None, gpu_memory: float | None = None
) -> None:
    """Print what a recipe would do to a model; from the config alone where that is enough.

    How its stages fit is shown for GPUs of several sizes, or for one of `gpu_memory` bytes.

    Raises:
        ResourceError: a stage does not fit `gpu_memory`.
    """
    recipe = load_recipe(recipe_name)
    config = config_of_known(model) if model and revision is None else None
    if config is None:
        source = Checkpoint.open(resolve(model, revision))
        config, tensors = source.config, source.tensors
    else:
        tensors = tensors_from_config(config)
    if model is None:
        recipe = recipe.for_bundled_model()
    targets = plan_targets(tensors, recipe.quantization)
    screen = Console()
    screen.print(plan_table(targets, f"{recipe.name}: {model or 'the bundled model'}"))
    for sentence in cannot_pass(recipe):
        say(sentence)
    if model is not None:  # the rates are those of the real layer shapes
        screen.print(estimate_table(targets, recipe), sizes_table(tensors))
    if model is not None or gpu_memory is not None:
        budgets = [gb * 1e9 for gb in BUDGETS_GB] if gpu_memory is None else [gpu_memory]
        for need in needs(recipe, config, tensors, targets):
            screen.print(memory_table(need, config, budgets))
            if gpu_memory is not None:
                fit(need, config, gpu_memory)


def open_run(path: Path, gpu_memory: float | None = None) -> Run:
    """Open an existing run folder for a single stage.

    Raises:
        InputError: no run there, or its source has changed since.
    """
    folder = RunDir(path)
    if not folder.manifest_json.exists():
        raise InputError(f"{path}: no manifest.json there; name a folder that `quantize run` made")
    manifest = read_json(folder.manifest_json)
    recipe = parse_recipe(folder.recipe_yaml.read_text("utf-8"), str(folder.recipe_yaml))
    source = Checkpoint.open(Path(manifest["source"]["folder"]))
    if fingerprint(source) != manifest["source"]["fingerprint"]:
        raise InputError(f"{source.folder}: the BF16 model has changed since this run began")
    targets = plan_targets(source.tensors, recipe.quantization)
    bundled = manifest["source"]["bundled"]
    run = Run(folder, recipe, source, targets, bundled, gpu_memory=gpu_memory)
    _check_memory(run)
    return run


def _check_memory(run: Run) -> None:
    """Plan every stage's GPU memory, so that one that cannot run is known before the first.

    Raises:
        ResourceError: a stage needs more than there is.
    """
    budget = budget_of(best_device(), run.gpu_memory)
    if budget is None:
        return
    config = run.source.config
    for need in needs(run.recipe, config, run.source.tensors, run.targets):
        fit(need, config, budget)


def advance(run: Run, until: str = STAGES[-1].name) -> int:
    """Run every stage up to `until` whose result is not there yet; return the exit code.

    0 done and gate passed, 4 inconclusive or not comparable.

    Raises:
        GateError: verification, fidelity or the gate failed (exit code 1).
    """
    code = 0
    for stage in STAGES:
        code = run_stage(run, stage)
        if stage.name == until:
            break
    return code


def run_stage(run: Run, stage: Stage, *, again: bool = False) -> int:
    """Run one stage unless its result is there already (or `again`); return its exit code."""
    if not stage.is_needed(run):
        say(f"{stage.name}: this recipe has none")
    elif (run.folder.path / stage.result).exists() and not again:
        say(f"{stage.name}: done before ({stage.result})")
    else:
        _work(run, stage)
    return stage.verdict(run)


def _work(run: Run, stage: Stage) -> None:
    say(f"{stage.name}: started")
    started = time.monotonic()
    stage.work(run)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    run.record(stage.name, {"seconds": round(seconds, 2), "peak_rss_bytes": peak})
    say(f"{stage.name}: done in {seconds:.1f} s")
