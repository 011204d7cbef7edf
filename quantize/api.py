"""The Python interface of the pipeline: what `import quantize` offers (docs/python.md).

A function that bears a command's name does what the command does, and raises the command's errors
(`quantize.errors`). `convert` is different: it writes a checkpoint outside any run. `evaluate`,
`fidelity`, `report` raise no GateError. Give a run by its folder.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantize.checkpoints.targets import Target, plan_targets
from quantize.errors import GateError, InputError
from quantize.host.files import read_json
from quantize.pipeline.run import advance, bf16_model, failed_check, opened, run_alone, started
from quantize.pipeline.stages import STAGES, Run, stage
from quantize.pipeline.staleness import check_shown, why_stale
from quantize.recipe.reading import errors_of, load_recipe
from quantize.reports.compare import RunComparison, compare_runs
from quantize.runs.folder import RunDir, existing_run
from quantize.runtime import open as open
from quantize.runtime.weights.beside import load as load
from quantize.schemes.modes import ActivationMode
from quantize.stages.convert.convert import Conversion
from quantize.stages.convert.convert import convert as write_checkpoint
from quantize.stages.plan.plan import described


def run(
    recipe: str = "nvfp4",
    model: str | None = None,
    out: str | Path = "outputs",
    *,
    resume: bool = False,
    until: str = STAGES[-1].name,
    **options: Any,
) -> Run:
    """Run every stage of a recipe on a model, as `quantize run` does, and return the run.

    Args:
        recipe: the name of a recipe that ships, or the path of a YAML file.
        model: a checkpoint folder or a Hub id; None for the bundled model.
        out: the folder that holds the runs.
        resume: whether to continue a run that exists; a complete run is returned as it is.
        until: the name of the last stage to run.
        options: `tasks` (names), `limit` (questions per task), `revision` (of a Hub model),
            `gpu_memory` (bytes), and arguments of `quantize.pipeline.stages.evaluate_more`.

    Raises:
        GateError: verification, fidelity or the gate failed; a report exists only after the gate.
        InputError: recipe or model is wrong, or the run exists and `resume` is off.
        ResourceError: the machine lacks something.
    """
    with started(recipe, model, Path(out), resume=resume, **options) as run:
        advance(run, until)
    return run


def plan(
    recipe: str = "nvfp4", model: str | None = None, revision: str | None = None
) -> list[Target]:
    """Return a `Target` for every tensor of a model: what a recipe makes of it, why, and its bytes.

    Google's model is planned from its config, which ships, so nothing is downloaded. Raise InputError
    if recipe or model is wrong, or if the recipe matches nothing of the model.
    """
    loaded = load_recipe(recipe)
    _, tensors = described(model, revision)
    with errors_of(recipe):
        return plan_targets(tensors, loaded.quantization)


def convert(
    model: str | Path | None,
    out: str | Path,
    recipe: str = "fp8_dynamic",
    *,
    input_scales: str | Path | None = None,
    revision: str | None = None,
) -> Conversion:
    """Write a BF16 model's quantized checkpoint, rounded to nearest, to the new folder `out`.

    Model and recipe are named as in `run`; nothing is calibrated. NVFP4 with calibrated activations
    needs `input_scales`, a run's calibration/input_scales.safetensors. Return what was written.

    Raises:
        InputError: `out` exists, input scales are missing, or the recipe rounds by GPTQ.
        ResourceError: the disk is too small.
    """
    loaded = load_recipe(recipe)
    if loaded.quantization.rounding == "gptq":
        raise InputError(f"recipe {recipe}: rounding by GPTQ takes a whole run; call quantize.run")
    source = bf16_model(None if model is None else str(model), revision)
    with errors_of(recipe):
        targets = plan_targets(source.tensors, loaded.quantization)
    scales = None if input_scales is None else Path(input_scales)
    return write_checkpoint(source, targets, Path(out), recipe=loaded, input_scales=scales)


def evaluate(run: str | Path, **options: Any) -> None:
    """Score the models and tasks of a run that have no scores yet, as `quantize evaluate RUN` does.

    `options` are `gpu_memory`, in bytes, and the arguments of `evaluate_more` (pipeline.stages).
    """
    _again(run, "evaluate", **options)


def fidelity(
    run: str | Path, modes: Sequence[ActivationMode] = (), **options: Any
) -> dict[str, Any]:
    """Replay a run's trajectories through its quantized model and return fidelity.json.

    `modes` are further activation modes to replay. The one option is `gpu_memory`, in bytes.
    """
    _again(run, "fidelity", modes=tuple(modes), **options)
    return read_json(RunDir(Path(run)).fidelity_json, "activations")


def compare(a: str | Path, b: str | Path) -> RunComparison:
    """Compare run `b` with run `a` question by question.

    Raise InputError if one has no scores, or its scores or its fidelity.json are stale.
    """
    runs = existing_run(Path(a)), existing_run(Path(b))
    for folder in runs:
        if reason := failed_check(folder):
            raise InputError(
                f"{folder.path}: it ended at a failed check, so it has no scores: {reason}"
            )
        check_shown(folder, [stage("fidelity"), stage("evaluate")])
    return compare_runs(*runs)


def judge(
    checkpoint: str | Path,
    against: str | Path | None = None,
    recipe: str = "nvfp4",
    out: str | Path = "outputs",
    *,
    resume: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Judge a checkpoint that others built, as `quantize judge` does; return its report.json.

    `checkpoint` and its BF16 model `against` (None: the bundled one) are folders or Hub ids. The recipe
    gives tasks and gate. Other arguments are as in `run`; with `fine_tuned=True` no weight is compared.

    Raises:
        GateError: a check before the report failed, so that there is no new report.
        InputError: a checkpoint is of the wrong kind, or the run exists and `resume` is off.
    """
    from quantize.pipeline.judge import judging

    bf16 = None if against is None else str(against)
    with judging(str(checkpoint), bf16, recipe, Path(out), resume=resume, **options) as run:
        try:
            advance(run)
        except GateError:
            if why_stale(run.folder, stage("report")):
                raise
        return read_json(run.folder.report_json, "verdict")


def search(
    recipe: str = "nvfp4", model: str | None = None, out: str | Path = "outputs", **options: Any
) -> dict[str, Any]:
    """Choose a scheme for every layer's attention, MLP and experts, as `quantize search` does.

    `options` are the keyword arguments of `quantize.pipeline.search.search`.

    Returns:
        A dict with "recipe" (path of the written recipe), "schemes" ("LAYER.KIND" -> scheme), "bytes",
        "kl_nats" (predicted, measured), "frontier" (pairs: percent of BF16's bytes, predicted KL).

    Raises:
        InputError: as in `quantize.pipeline.search.search`.
    """
    from quantize.pipeline.search import search as search_schemes

    path = search_schemes(recipe, model, Path(out), **options)
    return read_json(path.with_suffix(".json"), "frontier") | {"recipe": path}


def report(run: str | Path) -> dict[str, Any]:
    """Write a run's report again; return report.json, with the verdict. A FAIL raises no error."""
    _again(run, "report")
    return read_json(RunDir(Path(run)).report_json, "verdict")


def _again(run: str | Path, name: str, **options: Any) -> None:
    with opened(Path(run), **options) as opened_run, suppress(GateError):
        run_alone(opened_run, stage(name))
