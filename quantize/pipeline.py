"""The stages in order, each skipped when its result is already there: what `quantize run` does.

    plan -> calibrate -> convert -> verify -> fidelity -> evaluate -> report

The run folder is named after the recipe and a hash of the resolved recipe and the model's
fingerprint, so the same run finds itself again. Stages know nothing of each other: they meet in the
files of the run folder. The manifest records versions, hardware, seconds and peak memory per stage;
nothing that must be equal between two runs depends on it.
"""

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from quantize.checkpoints.reader import Checkpoint, resolve
from quantize.checkpoints.targets import Target, plan_targets
from quantize.errors import GateError, InputError
from quantize.manifest import fingerprint, new_manifest
from quantize.progress import console, say
from quantize.recipe import ACTIVATION_MODES, Recipe, load_recipe, parse_recipe
from quantize.run_dir import RunDir, read_json, write_json
from quantize.stages.estimate import estimate_table, sizes_table
from quantize.stages.plan import plan, plan_table, tensors_of_known

STAGES = ("plan", "calibrate", "convert", "verify", "fidelity", "evaluate", "report")


@dataclass(frozen=True)
class Run:
    """One run: its folder, resolved recipe, source checkpoint and plan."""

    folder: RunDir
    recipe: Recipe
    source: Checkpoint
    targets: list[Target]
    is_bundled: bool
    noise_floor: bool = False

    def record(self, stage: str, facts: dict[str, Any]) -> None:
        """Add facts about a stage to the manifest; of several processes the first one does."""
        if os.environ.get("RANK", "0") != "0":
            return
        manifest = read_json(self.folder.manifest_json)
        manifest["stages"].setdefault(stage, {}).update(facts)
        write_json(self.folder.manifest_json, manifest)


def start(
    recipe_name: str,
    model: str | None,
    out: Path,
    *,
    resume: bool,
    revision: str | None = None,
    limit: int | None = None,
    noise_floor: bool = False,
) -> Run:
    """Resolve recipe and model, name the run folder, plan, and show the plan.

    Raises:
        InputError: the run exists and `resume` is off, recipe or model are wrong, or torchrun
            started several processes.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            "`quantize run` is one process; torchrun is for `quantize calibrate RUN` and "
            "`quantize evaluate RUN`"
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
    run = Run(folder, recipe, source, plan(source, recipe, folder), is_bundled, noise_floor)
    if not folder.manifest_json.exists():
        write_json(folder.manifest_json, new_manifest(source, digest, recipe.name, model))
    console.print(plan_table(run.targets, f"{recipe.name}: {source.folder.name} -> {folder.path}"))
    return run


def show_plan(recipe_name: str, model: str | None, revision: str | None) -> None:
    """Print what a recipe would do to a model; from the config alone where that is enough."""
    recipe = load_recipe(recipe_name)
    tensors = tensors_of_known(model) if model and revision is None else None
    if tensors is None:
        tensors = Checkpoint.open(resolve(model, revision)).tensors
    if model is None:
        recipe = recipe.for_bundled_model()
    targets = plan_targets(tensors, recipe.quantization)
    screen = Console()
    screen.print(plan_table(targets, f"{recipe.name}: {model or 'the bundled model'}"))
    if model is not None:  # the rates are those of the real layer shapes
        screen.print(estimate_table(targets, recipe), sizes_table(tensors))


def open_run(path: Path) -> Run:
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
    return Run(folder, recipe, source, targets, manifest["source"]["bundled"])


def advance(run: Run, until: str = STAGES[-1]) -> int:
    """Run every stage up to `until` whose result is not there yet; return the exit code.

    0 done and gate passed, 4 inconclusive or not comparable.

    Raises:
        GateError: verification, fidelity or the gate failed (exit code 1).
    """
    code = 0
    for stage in STAGES[1 : STAGES.index(until) + 1]:  # `start` has planned already
        code = run_stage(run, stage)
    return code


def run_stage(run: Run, stage: str, *, again: bool = False) -> int:
    """Run one stage unless its result is there already (or `again`); return its exit code."""
    result = _result(run.folder, stage)
    if stage == "calibrate" and not run.recipe.needs_calibration:
        say("calibrate: this scheme has no calibrated scales")
    elif result.exists() and not again:
        say(f"{stage}: done before ({result.relative_to(run.folder.path)})")
    else:
        _work(run, stage)
    return _exit_code(run, stage)


def _work(run: Run, stage: str) -> None:
    say(f"{stage}: started")
    started = time.monotonic()
    _STAGE_WORK[stage](run)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    run.record(stage, {"seconds": round(seconds, 2), "peak_rss_bytes": peak})
    say(f"{stage}: done in {seconds:.1f} s")


def _result(folder: RunDir, stage: str) -> Path:
    """Return the file or folder whose presence says that a stage is done."""
    return {
        "calibrate": folder.calibration,
        "convert": folder.checkpoint,
        "verify": folder.verification_json,
        "fidelity": folder.fidelity_json,
        "evaluate": folder.evaluation / "done.json",
        "report": folder.report_json,
    }[stage]


def _calibrate(run: Run) -> None:
    from quantize.stages.calibrate import calibrate

    calibrate(run.source.folder, run.recipe, run.folder.calibration, device=best_device())


def _convert(run: Run) -> None:
    from quantize.stages.convert import convert

    scales = run.folder.calibration / "input_scales.safetensors"
    convert(
        run.source,
        run.targets,
        run.folder.checkpoint,
        recipe=run.recipe,
        input_scales=scales if run.recipe.needs_calibration else None,
        overwrite=True,
    )


def _verify(run: Run) -> None:
    from quantize.stages.verify import verify

    verify(Checkpoint.open(run.folder.checkpoint), run.source, run.targets, run.recipe, run.folder)


def _fidelity(run: Run) -> None:
    from quantize.stages.fidelity import fidelity

    fidelity(
        run.source.folder,
        run.folder.checkpoint,
        run.folder.calibration,
        run.folder.fidelity_json,
        activations=run.recipe.evaluation.activations,
        limits=run.recipe.gate.max_kl_nats,
        device=best_device(),
    )


def _evaluate(run: Run) -> None:
    evaluate_more(run, noise_floor=run.noise_floor)


def evaluate_more(
    run: Run, *, modes: Sequence[str] = (), batch_size: int | None = None, **options: Any
) -> None:
    """Score what is not scored yet, activation modes besides the recipe's included.

    `batch_size` overrules the recipe's. `options` are those of `evaluate.evaluate`: noise_floor,
    data_dir, server, base_server, in_flight.
    """
    from quantize.stages.evaluate import evaluate

    settings = run.recipe.evaluation
    if batch_size is not None:
        settings = settings.model_copy(update={"batch_size": batch_size})
    digest = read_json(run.folder.manifest_json)["source"]["fingerprint"]
    evaluate(
        run.folder,
        run.source.folder,
        digest,
        settings,
        modes=[mode for mode in ACTIVATION_MODES if mode in modes],
        device=best_device(),
        **options,
    )


def _report(run: Run) -> None:
    from quantize.stages.report import report

    report(run.folder, run.recipe, run.targets)


_STAGE_WORK: dict[str, Callable[[Run], None]] = {
    "calibrate": _calibrate,
    "convert": _convert,
    "verify": _verify,
    "fidelity": _fidelity,
    "evaluate": _evaluate,
    "report": _report,
}


def _exit_code(run: Run, stage: str) -> int:
    """Return the code that a finished stage ends with: 0, or 4 for a verdict that is neither.

    Raises:
        GateError: verification, fidelity or the gate failed.
    """
    if stage == "verify":
        result = read_json(run.folder.verification_json)
        faults = [fault for check in result["checks"] for fault in check["faults"]]
        if not result["passed"]:
            path = run.folder.verification_json
            raise GateError(f"{path}: {faults[0] if faults else 'a check looked at nothing'}")
    if stage == "fidelity" and (faults := read_json(run.folder.fidelity_json)["faults"]):
        raise GateError(f"{run.folder.fidelity_json}: {faults[0]}")
    if stage == "report":
        from quantize.reports.render import summary

        content = read_json(run.folder.report_json)
        verdict = content["verdict"]
        console.print(summary(content))
        say(f"report: {run.folder.report_html}")
        if verdict["outcome"] == "FAIL":
            raise GateError(verdict["reason"])
        return verdict["exit_code"]
    return 0


def best_device() -> str:
    """Return the GPU, this process' own under torchrun, or cpu where there is none."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
