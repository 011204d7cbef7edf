"""Rehearses a run on the user's own copy of the model, and projects what the whole run would take.

    check weights, data sets, disk and GPU memory against the needs of the whole run
    calibrate on 32 prompts x 1 canvas; convert and verify everything; replay; 4 questions per task
    project seconds, memory and disk of the whole run from what was measured

A finding is a fault that would end the whole run, perhaps after days. It does not end the rehearsal, so
one try shows all findings. rehearsal.json in the run folder holds versions, hardware, seconds and
findings, but no questions or answers: users may send it to us. 4 questions do not measure quality.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from quantize.checkpoints.inspect import inspect
from quantize.checkpoints.targets import sum_bytes
from quantize.errors import GateError, QuantizeError, ResourceError, unexpected_in
from quantize.host.files import read_json, write_json
from quantize.host.progress import say, screen
from quantize.host.units import duration, size
from quantize.pipeline.run import memory_plans, started, work
from quantize.pipeline.stages import STAGES, Run, Stage
from quantize.pipeline.staleness import check_fresh, upstream, why_stale
from quantize.recipe.reading import resolved
from quantize.recipe.sections import Recipe
from quantize.runs.folder import RunDir
from quantize.runs.models import BASELINE, CANDIDATE
from quantize.runtime.weights.beside import LOOKS
from quantize.stages.memory_needs import HELD_OUT, replayed_of
from quantize.stages.plan.estimate import cannot_pass

RESULT = "rehearsal.json"
PROMPTS, CANVASES = 32, 1
QUESTIONS = 4  # per task, with one answer each
Check = Callable[[], str]  # returns what was found; raises what would end a run


@dataclass(frozen=True)
class Tried:
    """One check or stage of a rehearsal: what was `seen`, and any `finding` that would end a run."""

    name: str
    seen: str
    finding: str | None = None
    exit_code: int = 0

    def noted(self) -> dict[str, Any]:
        """Return what rehearsal.json says of it."""
        facts = asdict(self)
        return {"name": facts.pop("name"), "found": facts.pop("seen"), **facts}


def rehearse(
    recipe_name: str, model: str | None, out: Path, *,
    gpus: int = 1, began: Callable[[RunDir], None] = lambda _: None, **settings: Any,
) -> int:  # fmt: skip
    """Rehearse a run, or continue a rehearsal; return 0, or the exit code of the first finding.

    Printed times are those of `gpus` GPUs. `began` is called with the folder. `settings` are
    `revision`, `gpu_memory` and `data_dir` for `started`, whose errors are raised.
    """
    whole = resolved(recipe_name, bundled=model is None)
    with started(small(whole), model, out, resume=True, go_on=True, **settings) as run:
        began(run.folder)
        tried: list[Tried] = []
        for name, check in _checks(run, whole).items():
            say(f"rehearse: {name}")
            tried.append(_tried(run, name, check))
        tried += [_staged(run, stage) for stage in STAGES if stage.is_needed(run.recipe)]
        projected = projection(run, whole)
        results = {"tried": [attempt.noted() for attempt in tried], "whole_run": projected}
        content = _about(run, whole) | results | {"notes": cannot_pass(whole)}
        path, home = run.folder.path / RESULT, json.dumps(str(Path.home()))[1:-1]
        said = json.dumps(content)
        write_json(path, json.loads(said.replace(home, "~")) if home != "/" else content)
        here = Table("", "here", "would end a run", title="rehearsal", title_justify="left")
        for attempt in tried:
            here.add_row(attempt.name, attempt.seen, attempt.finding)
        screen().print(here, _projected(projected, gpus))
        say(f"rehearse: {path} says the same, and what it was done on")
    return next((attempt.exit_code for attempt in tried if attempt.finding), 0)


def small(recipe: Recipe) -> Recipe:
    """Return the recipe NAME_rehearsal: few prompts and questions, one canvas, one answer each."""
    settings, calibration = recipe.evaluation, recipe.calibration
    if calibration is not None:
        least = {"prompts": min(PROMPTS, calibration.prompts), "canvases": CANVASES}
        calibration = calibration.model_copy(update=least)
    limit = {task: min(QUESTIONS, settings.limit.get(task, QUESTIONS)) for task in settings.tasks}
    evaluation = settings.model_copy(update={"limit": limit, "repeats": {}})
    changed = {"calibration": calibration, "evaluation": evaluation}
    return recipe.model_copy(update=changed | {"name": f"{recipe.name}_rehearsal"})


def _checks(run: Run, whole: Recipe) -> Mapping[str, Check]:
    """Return name -> check made before the first stage; it checks what the whole run needs."""

    def weights() -> str:
        inspection = inspect(run.source.folder, LOOKS)
        if inspection.problems:
            raise GateError(inspection.problems[0])
        return f"{inspection.tensors:,} tensors, {size(run.source.nbytes)}"

    def disk() -> str:
        after, free = sum_bytes(run.targets)[1], shutil.disk_usage(run.folder.path).free
        needed = after if run.folder.checkpoint.exists() else 2 * after
        if free < needed:
            raise ResourceError(
                f"{run.folder.path}: {size(free)} free, and the rehearsal's and the run's checkpoints "
                f"take {size(needed)}; free some, or name another --out"
            )
        return f"{size(free)} free, a checkpoint takes {size(after)}"

    def memory() -> str:
        plans = memory_plans(run, whole)
        by_stage = "; ".join(f"{stage} {size(plan.total)}" for stage, plan in plans.items())
        return by_stage or "no GPU: nothing is planned"

    def prompts() -> str:
        from quantize.stages.prompts import load_prompts

        settings = whole.calibration
        if settings is None or not whole.needs_calibration:
            return "this recipe needs none"
        chats = load_prompts(run.source.folder, settings, settings.prompts + HELD_OUT)
        return f"{len(chats)} prompts of {min(map(len, (p.ids for p in chats)))} tokens or more"

    def tasks() -> str:
        opened = _tasks(run, whole)
        return ", ".join(f"{name} {samples:,} answers" for name, samples in opened.items())

    return {
        "weights": weights, "disk": disk, "GPU memory": memory, "calibration prompts": prompts,
        "tasks": tasks,
    }  # fmt: skip


def _tasks(run: Run, recipe: Recipe) -> dict[str, int]:
    from quantize.stages.evaluate.tasks import open_tasks

    opened = open_tasks(recipe.evaluation, recipe.gate, run.options.get("data_dir"))
    return {task.name: task.samples for task in opened}


def _staged(run: Run, stage: Stage) -> Tried:
    """Do one stage, unless its result is up to date or what it reads is missing."""
    try:
        check_fresh(run.folder, run.recipe, upstream(stage))
    except QuantizeError:
        return Tried(stage.name, "not tried: a stage before it has no result")

    def task() -> str:
        if why_stale(run.folder, stage):
            work(run, stage)
        try:
            stage.verdict(run)
        except GateError as error:
            if stage.name == "fidelity" and _is_uncertain(run):
                return f"{_measured(run, stage)}; of so few trajectories: {error}"
            if stage.name != STAGES[-1].name:  # so few answers say nothing of quality
                raise
            return f"{_measured(run, stage)}; of so few answers: {error}"
        return _measured(run, stage)

    return _tried(run, stage.name, task)


def _is_uncertain(run: Run) -> bool:
    """Return whether all that replay found are KLs above limits that their intervals include."""
    from quantize.stages.fidelity.fidelity import find_faults

    replay = read_json(run.folder.fidelity_json, "faults", "activations", "max_kl_nats")
    limits, modes = replay["max_kl_nats"], replay["activations"]
    included = {
        mode: modes[mode]
        for mode in limits.keys() & modes
        if modes[mode]["kl_nats"]["interval"][0] <= limits[mode]
    }
    return {*replay["faults"]} <= {*find_faults(included, limits, {})}


def _tried(run: Run, name: str, attempt: Check) -> Tried:
    try:
        with unexpected_in(run.folder.log):
            return Tried(name, attempt())
    except QuantizeError as error:
        result, code = str(error), error.exit_code
    except Exception as error:  # the operating system's, or too little memory
        result, code = f"{type(error).__name__}: {error}", ResourceError.exit_code
    say(f"rehearse: {name}: {result}")
    return Tried(name, "would end a run", result, code)


def _measured(run: Run, stage: Stage) -> str:
    facts = read_json(run.folder.manifest_json, "stages")["stages"].get(stage.name, {})
    peaks = {"peak_rss_bytes": "of memory", "peak_gpu_bytes": "of the GPU's"}
    taken = [f"{size(facts[key])} {what}" for key, what in peaks.items() if facts.get(key)]
    return ", ".join([duration(facts.get("seconds", 0.0)), *taken])


def projection(run: Run, whole: Recipe) -> dict[str, Any]:
    """Return the whole run's seconds by stage, disk and peak memory in bytes; None if not measured.

    Calibration and rounding are scaled by prompts and canvases, replay by trajectories and canvases,
    evaluation by answers. The seconds are an upper bound: loading is scaled too, and no early end is
    assumed.
    """
    stages = read_json(run.folder.manifest_json, "stages")["stages"]
    grows = _growth(run.recipe, whole)
    seconds: dict[str, float | None] = {}
    for name in (stage.name for stage in STAGES[1:] if stage.is_needed(whole)):
        measured = stages.get(name, {}).get("seconds")
        seconds[name] = measured and measured * grows.get(name, 1.0)
    seconds["evaluate"] = _evaluation_seconds(run, whole, stages)
    peaks = {"peak_memory_bytes": "peak_rss_bytes", "peak_gpu_bytes": "peak_gpu_bytes"}
    return {
        "seconds": seconds,
        "disk_bytes": run.source.nbytes + sum_bytes(run.targets)[1],
        **{
            name: max((f[key] for f in stages.values() if f.get(key)), default=None)
            for name, key in peaks.items()
        },
    }


def _growth(here: Recipe, whole: Recipe) -> dict[str, float]:
    """Return stage -> the whole run's work on prompts, as a multiple of the rehearsal's."""
    replayed = replayed_of(whole) / replayed_of(here)
    if here.calibration is None or whole.calibration is None:
        return {"fidelity": replayed}
    canvases = whole.calibration.canvases / here.calibration.canvases
    prompts = (whole.calibration.prompts + HELD_OUT) / (here.calibration.prompts + HELD_OUT)
    return {
        "calibrate": prompts * canvases,
        "round": prompts * canvases,
        "fidelity": replayed * (canvases if here.needs_calibration else 1.0),
    }


def _evaluation_seconds(run: Run, whole: Recipe, stages: Mapping[str, Any]) -> float | None:
    """Return the seconds of all answers of both models, None if a model was not measured."""
    from quantize.reports.scores import read_scoring

    seconds = 0.0
    try:
        rates, samples = stages["evaluate"]["rates"], _tasks(run, whole)
        for name in (BASELINE, CANDIDATE):
            for task, count in samples.items():
                tokens = fmean(
                    r.tokens for r in read_scoring(run.folder.evaluation / name, task).rows
                )
                seconds += count * tokens * rates[name]["seconds"] / rates[name]["tokens"]
    except (QuantizeError, KeyError, ValueError, ZeroDivisionError):
        return None
    return seconds


def _about(run: Run, whole: Recipe) -> dict[str, Any]:
    manifest = read_json(run.folder.manifest_json, "versions", "hardware", "stages")
    source = {key: manifest["source"][key] for key in ("model", "commit", "fingerprint", "bytes")}
    facts = {key: manifest[key] for key in ("began", "tool", "versions", "hardware", "stages")}
    recipes = {
        name: recipe.model_dump(mode="json", exclude={"bundled"})
        for name, recipe in (("whole", whole), ("here", run.recipe))
    }
    memory = run.options.get("gpu_memory")
    return facts | {"source": source, "recipe": recipes, "gpu_memory": memory}


def _projected(projected: Mapping[str, Any], gpus: int) -> Table:
    # round's passes go through all layers in each process
    shared = [stage.name for stage in STAGES if stage.shares_work and stage.name != "round"]
    several = f", {', '.join(shared)} divided by {gpus} GPUs" if gpus > 1 else ""
    table = Table("stage", "time", title=f"the whole run, at most{several}", title_justify="left")
    by_stage = {name: seconds and seconds / (gpus if name in shared else 1)
                for name, seconds in projected["seconds"].items()}  # fmt: skip
    times: list[float | None] = list(by_stage.values())
    for stage, seconds in by_stage.items():
        table.add_row(stage, "not measured" if seconds is None else duration(seconds))
    if None not in times:
        table.add_row("all", duration(sum(filter(None, times))))
    table.add_row("disk, with the BF16 model", size(projected["disk_bytes"]))
    return table
