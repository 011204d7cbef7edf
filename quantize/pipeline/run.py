"""Runs the stages in order for `quantize run`, and skips stages whose result is up to date.

    plan -> calibrate -> round -> convert -> verify -> fidelity -> evaluate -> report

A run folder is named RECIPE-HASH. HASH covers the resolved recipe and the model's fingerprint, so the
same command finds its run again. The manifest records versions and hardware, and each stage's seconds
and peak memory. Files that must be equal in equal runs hold none of these facts.
"""

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from quantize.checkpoints.layout import check_layout
from quantize.checkpoints.reader import Checkpoint, resolve
from quantize.checkpoints.targets import plan_targets
from quantize.errors import GateError, InputError, ResourceError, unexpected_in
from quantize.host.files import REDO, read_json, write_json
from quantize.host.locks import locked, refuse_several
from quantize.host.processes import is_first
from quantize.host.progress import Meter, console, noted, say, within
from quantize.host.resources import measured
from quantize.pipeline.stages import STAGES, Run, Stage
from quantize.pipeline.staleness import (
    check_fresh,
    forget,
    reading,
    remember,
    stale,
    upstream,
    why_stale,
)
from quantize.recipe.reading import errors_of, load_recipe, read_recipe, resolved
from quantize.recipe.sections import Recipe
from quantize.runs.folder import RunDir, continued_by, existing_run
from quantize.runs.manifest import fingerprint, is_sampled_fingerprint, new_manifest
from quantize.runtime.gpu.gpus import launches_digest
from quantize.runtime.gpu.memory import MemoryPlan
from quantize.runtime.gpu.memory import plan as fit
from quantize.runtime.gpu.placement import budget_of, target_of
from quantize.runtime.weights.beside import check_beside
from quantize.stages.memory_needs import needs
from quantize.stages.plan.estimate import cannot_pass, evaluation_seconds, known_plans
from quantize.stages.plan.plan import plan_table


@contextmanager
def started(
    recipe: str | Recipe, model: str | None, out: Path, *, resume: bool,
    revision: str | None = None, tasks: Sequence[str] = (), limit: int | None = None,
    **options: Any,
) -> Generator[Run]:  # fmt: skip
    """Yield a new or continued run of a recipe on a model; show its plan; lock its folder in the block.

    `recipe` is a Recipe, which is used as it is, or a recipe's name; a named recipe is adapted to
    `model`, `tasks` and `limit`. `out` is the folder of runs. `options` are those of `Run`.

    Raises:
        InputError: the run exists and `resume` is off; recipe, model or folder is wrong; or torchrun
            started several processes.
        ResourceError: another process works in the run, or a stage does not fit the GPU.
    """
    refuse_several("run")
    named = recipe if isinstance(recipe, str) else recipe.name
    if isinstance(recipe, str):
        recipe = resolved(recipe, bundled=model is None, tasks=tasks, limit=limit)
    source = bf16_model(model, revision)
    with errors_of(named):
        targets = plan_targets(source.tensors, recipe.quantization)
    digest = fingerprint(source)
    folder, recipe = placed(recipe, out / recipe.name, digest, bundled=model is None)
    run = Run(folder, recipe, source, targets, model is None, options)
    memory_plans(run, recipe)
    with working_in(folder):
        begin(run, digest, model, resume=resume)
        about = read_json(folder.manifest_json, "stages", "source.fingerprint")["source"]
        if about["fingerprint"] != digest:
            raise InputError(
                f"{folder.manifest_json}: names another model than {source.folder}; {REDO}"
            )
        console.print(plan_table(targets, f"{recipe.name}: {source.folder.name} -> {folder.path}"))
        for sentence in cannot_pass(recipe):
            say(sentence)
        yield run


def placed(recipe: Recipe, name: Path, *digests: str, bundled: bool) -> tuple[RunDir, Recipe]:
    """Return the folder NAME-HASH of a run, and the recipe that it holds.

    A run on the bundled model holds `repeatable_on_bundled`, unless an earlier version began it.
    """
    ways = [recipe, recipe.repeatable_on_bundled()] if bundled else [recipe]
    folders = [RunDir(name.with_name(f"{name.name}-{way.digest(*digests)}")) for way in ways]
    chosen = 0 if folders[0].manifest_json.exists() else -1
    return folders[chosen], ways[chosen]


def check_imported(
    recipe: str, model: str | None, out: Path, tasks: Sequence[str], limit: int | None
) -> None:
    """Raise InputError if the packs in `out` lack answers that a run would need of a model on disk."""
    from quantize.stages.evaluate.baseline_pack import check_packs, imports

    folder = imports(out)
    if folder.is_dir() and (model is None or Path(model).is_dir()):
        wanted = load_recipe(recipe)
        wanted = (wanted.for_bundled_model() if model is None else wanted).asking(tasks, limit)
        check_packs(folder, fingerprint(Checkpoint.open(resolve(model))), known_plans(wanted))


def bf16_model(model: str | None, revision: str | None = None) -> Checkpoint:
    """Return the BF16 checkpoint `model`, a folder or Hub id; None means the bundled model.

    Raise InputError if there is no such model, if it is quantized, or if a stage would refuse it later.
    """
    source = Checkpoint.open(resolve(model, revision))
    if source.is_quantized:
        raise InputError(f"{source.folder}: already quantized; name the BF16 model")
    check_source(source)
    return source


def check_source(source: Checkpoint) -> None:
    """Raise InputError, before any work, if a stage would refuse a BF16 checkpoint or its settings."""
    check_layout(source)
    check_beside(source.folder)


def begin(run: Run, digest: str, model: str | None, *, resume: bool, **more: str) -> None:
    """Write a new run's manifest, with the fingerprint `digest` of its `model` and the entries `more`.

    Raise InputError if the run exists and `resume` is off.
    """
    path = run.folder.manifest_json
    if not path.exists():
        write_json(path, new_manifest(run.source, digest, run.recipe.name, model) | more)
    elif not resume:
        raise InputError(
            f"{run.folder.path}: this run exists; --resume continues or shows it, --out starts "
            f"elsewhere"
        )


@contextmanager
def working_in(folder: RunDir) -> Generator[None]:
    """Make a run's folder, hold its lock during the block, and log tracebacks of unexpected errors.

    Raises:
        InputError: a file is in the place of the folder.
        ResourceError: the place cannot be written to, or another process works in the run.
        UnexpectedError: an unexpected error occurred; the traceback is in run.log.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        why = f"no folder can be made there ({error.strerror}: {error.filename})"
        raise InputError(f"{folder.path}: {why}; name another --out") from error
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise ResourceError(f"{folder.path}: {why}; name another --out") from error
    with (
        locked(folder.lock, str(folder.path)),
        noted(folder.progress_json),
        unexpected_in(folder.log),
    ):
        yield


@contextmanager
def _ours(path: Path, stages: Sequence[Stage]) -> Generator[tuple[RunDir, Recipe]]:
    """Lock an existing run; InputError: it is a judgement, or one of `stages` is not up to date."""
    folder = existing_run(path)
    with working_in(folder):
        if name := read_json(folder.manifest_json).get("judged"):
            rest = f"`{continued_by(folder, 'quantize judge ... --resume')}` goes on with it"
            if folder.report_json.exists():
                rest = (
                    f"nothing is left to do or to publish, and {folder.report_html} has the verdict"
                )
            raise InputError(f"{path}: a judgement of {name}, not a run of ours; {rest}")
        recipe = read_recipe(folder.recipe_yaml)
        check_fresh(folder, recipe, stages)
        yield folder, recipe


@contextmanager
def opened(path: Path, **options: Any) -> Generator[Run]:
    """Yield the run of an existing folder, for a single stage; hold its lock while the block runs.

    `options` are those of `Run`.

    Raises:
        InputError: there is no run; the run is a judgement; its source, recipe or plan changed.
        ResourceError: another process works in the run, or a stage does not fit the GPU.
    """
    with _ours(path, STAGES[:1]) as (folder, recipe):
        keys = ("stages", "source.folder", "source.fingerprint", "source.bundled")
        about = read_json(folder.manifest_json, *keys)["source"]
        source = Checkpoint.open(Path(about["folder"]))
        if fingerprint(source) != about["fingerprint"]:
            raise InputError(_another_model(source, about["fingerprint"]))
        targets = plan_targets(source.tensors, recipe.quantization)
        run = Run(folder, recipe, source, targets, about["bundled"], options)
        memory_plans(run, recipe)
        yield run


def _another_model(source: Checkpoint, began_with: str) -> str:
    if is_sampled_fingerprint(began_with, source):
        return (
            f"{source.folder}: the version that began this run read only samples of the BF16 model; "
            f"nothing says that the rest is unchanged. `quantize run` begins a run that does"
        )
    return f"{source.folder}: the BF16 model has changed since this run began"


def memory_plans(run: Run, recipe: Recipe) -> dict[str, MemoryPlan]:
    """Return stage -> its plan of GPU memory, made before any stage begins; {} without a GPU.

    Raise ResourceError if a stage needs more memory than there is.
    """
    place = run.place
    budget = budget_of(place)
    if budget is None:
        return {}
    config, capability = run.source.config, target_of(torch.device(place.device))
    wanted = needs(recipe, config, run.source.tensors, run.targets, capability)
    return {need.stage: fit(need, config, budget) for need in wanted}


def advance(run: Run, until: str = STAGES[-1].name) -> int:
    """Run every missing or stale stage up to `until`; return the last stage's exit code, 0 or 4.

    All tasks' data is opened before the first stage, so that unreadable data does not cost hours.

    Raises:
        GateError: verification, fidelity or the gate failed (exit code 1).
        InputError, ResourceError: a task's data cannot be read; then no stage has begun.
    """
    names = [stage.name for stage in STAGES]
    stages = [s for s in STAGES[: names.index(until) + 1] if run.instead.get(s.name, s.work)]
    for stage in stages:
        if why_stale(run.folder, stage):
            stage.ahead(run)
    code = 0
    for stage in stages:
        try:
            code = _advance(run, stage)
        except GateError as error:
            report_failure(run, stage)
            was_asked = run.is_bundled or stage.name == "report"
            if was_asked or not (hours := evaluation_seconds(run.recipe) / 3600):
                raise
            saved = f"; evaluate was not begun, which saves about {hours:.1f} hours"
            raise GateError(f"{error}{saved}") from error
    return code


def report_failure(run: Run, failed: Stage) -> None:
    """Write the report of a run that ends at a failed check, from the stages up to this one."""
    from quantize.stages.report.report import report

    later = [stage.name for stage in STAGES[STAGES.index(failed) + 1 : -1]]
    if later and (run.folder.path / failed.result).exists():  # it found a fault, and wrote so
        report(run.folder, run.recipe, run.targets, not_reached=later)
        say(f"report: {run.folder.report_html}")


def _advance(run: Run, stage: Stage) -> int:
    if not stage.is_needed(run.recipe):
        say(f"{stage.name}: this recipe has none")
        return 0
    reason = why_stale(run.folder, stage) or stage.lacks(run)
    if reason is None:
        say(f"{stage.name}: done before ({stage.result})")
    else:
        if (run.folder.path / stage.result).exists():
            say(f"{stage.name}: {reason}")
        work(run, stage)
    return stage.verdict(run)


def run_alone(run: Run, stage: Stage) -> int:
    """Run one stage again; print which later results are stale now, and return the exit code.

    Raise InputError if the recipe lacks the stage, or a result that it reads is missing or stale.
    """
    if not stage.is_needed(run.recipe):
        raise InputError(f"{run.folder.path}: recipe {run.recipe.name} has no {stage.name}")
    if stage.name == STAGES[-1].name:
        _end_at_a_failed_check(run)
    check_fresh(run.folder, run.recipe, upstream(stage))
    later = [s for s in STAGES if stage in upstream(s) and (run.folder.path / s.result).exists()]
    work(run, stage)
    read = {s: [*upstream(s), s] for s in later if is_first()}
    if redo := [s for s, inputs in read.items() if any(stale(run.folder, run.recipe, inputs))]:
        names, commands = (s.name for s in redo), (s.command(run.folder) for s in redo)
        say(f"{stage.name}: this made {', '.join(names)} stale; go on with {' && '.join(commands)}")
    return stage.verdict(run) if is_first() else 0


def _end_at_a_failed_check(run: Run) -> None:
    """Report a run again that ended at a failed check, and raise that GateError."""
    for stage in STAGES[:-1]:
        if not stage.is_needed(run.recipe):
            continue
        if why_stale(run.folder, stage):
            return
        try:
            stage.verdict(run)
        except GateError:
            report_failure(run, stage)
            raise


def failed_check(folder: RunDir) -> str | None:
    """Return the reason of a run that ended at a failed check before any score; else None."""
    if not folder.report_json.exists():
        return None
    content = read_json(folder.report_json, "verdict.reason")
    return content["verdict"]["reason"] if content.get("not_reached") else None


@contextmanager
def reported(path: Path) -> Generator[tuple[RunDir, Recipe]]:
    """Lock a run for publication, check its stages and report, and yield its folder and recipe.

    Raises:
        GateError: the run ended at a failed check, so it has no scores.
        InputError: a stage is stale or missing, or the report differs from what the scores give.
    """
    from quantize.stages.report.report import check_report

    if failed := failed_check(existing_run(path)):
        raise GateError(
            f"{path}: the verdict is FAIL: {failed}. The run ended there: without scores it is neither "
            f"described nor published, with --no-gate either"
        )
    with _ours(path, STAGES) as held:
        check_report(*held)
        yield held


def work(run: Run, stage: Stage) -> None:
    """Do a stage's work, or its replacement in `run.instead`; record time, memory, inputs and result.

    Raises:
        InputError: as in `reading`; or torchrun started several processes, and the work is one's.
    """
    if not stage.shares_work:
        refuse_several(stage.name)
    say(f"{stage.name}: started")
    before = read_json(run.folder.manifest_json, "stages")["stages"].get(stage.name, {})
    facts: dict[str, Any] = {}
    gc.freeze()  # else each collection walks old objects for seconds, while all threads wait
    try:
        with measured() as facts, within(Meter(stage.name, None, "")):
            with reading(run, stage) as inputs:
                forget(run.folder, stage)
                (run.instead.get(stage.name) or stage.work)(run)
            remember(run.folder, stage, inputs)
    finally:  # a failed try's time is recorded too, but its error comes first
        gc.unfreeze()
        seconds = before.get("seconds_in_all", 0.0) + facts["seconds"]
        with suppress(OSError):
            run.record(stage.name, {"seconds_in_all": round(seconds, 2)})
    run.record(stage.name, facts | _set_by_the_machine(on_gpu=facts["gpu"] is not None))
    say(f"{stage.name}: done in {facts['seconds']:.1f} s")


def _set_by_the_machine(*, on_gpu: bool) -> dict[str, Any]:
    """Return what decides the order of a stage's sums: a GPU's launch table, or a CPU's threads."""
    return {
        "launches": launches_digest(torch.device("cuda")) if on_gpu else None,
        "threads": None if on_gpu else torch.get_num_threads(),
    }
