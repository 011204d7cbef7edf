"""Writes judged sampler settings into a run's checkpoint, so that servers serve what was judged.

`generation_config.json` becomes that of the BF16 model, with the settings of an operating point that
passed. Then the checkpoint is verified again, and the report is written again. Answers and replay stay
valid, since the settings under which they were made are noted beside them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantize.checkpoints.reader import GENERATION, Checkpoint
from quantize.errors import GateError, InputError
from quantize.host.files import read_json, write_bytes, write_json
from quantize.host.progress import say
from quantize.pipeline.run import advance, opened
from quantize.pipeline.stages import STAGES, Run, stage
from quantize.pipeline.staleness import change_for, check_fresh
from quantize.reports.headline import fastest_point
from quantize.runs.manifest import checksums
from quantize.runs.models import AT_POINT
from quantize.runs.weights import Weights


def adopt(path: Path, name: str | None, *, restores: bool) -> int:
    """Write a point's sampler settings to the checkpoint, verify and report; return the exit code.

    `path` is a run's folder. `name` is the operating point; None takes the fastest point that passes.
    If it `restores`, the model's own settings are restored instead.

    Raises:
        InputError: a result is stale; the point was not judged, or on other weights, or not in the
            run's activation mode.
        GateError: the named point fails, no point passes, or `advance` raises one.
    """
    with opened(path) as run:
        check_fresh(run.folder, run.recipe, STAGES)
        point = None if restores else _point(run, name)
        _write(run, point["settings"] if point else {})
        whose = f"operating point {point['name']}" if point else "the BF16 model"
        say(
            f"adopt: {GENERATION} in {run.folder.checkpoint} has the settings of {whose} now; the "
            f"weights are as they were. That changed convert's result, so verify reads the files "
            f"again, and report is written again"
        )
        return advance(run)


def _point(run: Run, name: str | None) -> Mapping[str, Any]:
    """Return the operating point that is adopted, as the report has it; errors as in `adopt`."""
    report = read_json(run.folder.report_json, "operating_points", "tasks", "speeds")
    points = report["operating_points"]
    if not points:
        raise InputError(
            f"{run.folder.report_json}: no operating points were judged; `quantize evaluate "
            f"{run.folder.path} --steps T` judges one"
        )
    fastest = fastest_point(report)
    chosen = [p for p in points if (p is fastest if name is None else p["name"] == name)]
    if name is not None and not chosen:
        judged = ", ".join(point["name"] for point in points)
        raise InputError(f"no operating point {name!r} was judged; there are: {judged}")
    if not chosen or not chosen[0]["passes"]:
        none = "no operating point passes and is faster than the model's own settings"
        what = f"operating point {name} does not pass" if name else none
        raise GateError(f"{run.folder.report_json}: {what}")
    candidate = next(task["made_with"] for task in report["tasks"] if task["gated"])
    if why := Weights.of(run.folder).fault(
        AT_POINT + chosen[0]["name"], _made_with(report, chosen[0])
    ):
        raise InputError(f"operating point {chosen[0]['name']}: {why}")
    if chosen[0]["activations"] != candidate["model"]["activations"]:
        raise InputError(
            f"operating point {chosen[0]['name']} rounds activations {chosen[0]['activations']}, which "
            f"{GENERATION} cannot state; serve it with --activations {chosen[0]['activations']}"
        )
    return chosen[0]


def _made_with(report: Mapping[str, Any], point: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the conditions of a point's answers to the first task, as the report has them."""
    at_point = (
        t["made_with"] for t in report["tasks"] if t["activations"] == f"at {point['name']}"
    )
    return next(at_point, {})


def _write(run: Run, settings: Mapping[str, Any]) -> None:
    """Write generation_config.json, and its checksum into the list of files that convert wrote."""
    source, file = run.source.folder / GENERATION, run.folder.checkpoint / GENERATION
    if settings:
        config: dict[str, Any] = read_json(source) if source.is_file() else {}
        config |= settings
        bound = {"entropy_bound": config.pop("entropy_bound")}
        sampler = {"_cls_name": "EntropyBoundSamplerConfig", **bound}
        write_json(file, config | {"sampler_config": sampler})
    elif source.is_file():
        write_bytes(file, source.read_bytes())
    else:
        file.unlink(missing_ok=True)
    record = read_json(run.folder.conversion_json, "files")
    others = {name: digest for name, digest in record["files"].items() if name != GENERATION}
    files = checksums(Checkpoint.open(run.folder.checkpoint), others)
    write_json(run.folder.conversion_json, record | {"files": files})
    change_for(run.folder, stage("convert"), ("fidelity", "evaluate"))
