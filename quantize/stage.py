"""The stages of a run, one record each, in order.

    plan -> calibrate -> round -> convert -> verify -> fidelity -> evaluate -> report

A record says everything about a stage once: its name and command, the file or folder that it leaves,
the stages whose results it reads, its work and its exit code. `pipeline` runs the list, the command
line makes its commands and `--until` from it. Works import what they need when they are called:
reading the list is cheap.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantize.errors import GateError
from quantize.processes import best_device
from quantize.run_dir import RunDir, read_json, write_json

if TYPE_CHECKING:
    from quantize.checkpoints.reader import Checkpoint
    from quantize.checkpoints.targets import Target
    from quantize.recipe import Recipe


@dataclass(frozen=True)
class Run:
    """One run: its folder, resolved recipe, source checkpoint and plan.

    `scoring` are options of `evaluate_more`. `gpu_memory` is the bytes of a GPU that may be used, None
    for all that are free; no result depends on it but where it makes a batch smaller.
    """

    folder: RunDir
    recipe: "Recipe"
    source: "Checkpoint"
    targets: "list[Target]"
    is_bundled: bool
    scoring: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gpu_memory: float | None = None

    def record(self, stage: str, facts: dict[str, Any]) -> None:
        """Add facts about a stage to the manifest; of several processes the first one does."""
        if os.environ.get("RANK", "0") != "0":
            return
        manifest = read_json(self.folder.manifest_json)
        manifest["stages"].setdefault(stage, {}).update(facts)
        write_json(self.folder.manifest_json, manifest)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: of the stage and of its command.
        result: path in the run folder of the file or folder that the stage leaves.
        inputs: names of the stages whose results it reads.
        work: makes the result.
        summary: help text of the command that runs this stage alone; None where the command has more
            to say than a run folder.
        verdict: returns the exit code of the finished stage, 0 or 4; raises GateError for 1.
        is_needed: whether a run has this stage at all.
        runs_models: whether it runs models on the device.
    """

    name: str
    result: str
    inputs: tuple[str, ...]
    work: Callable[[Run], None]
    summary: str | None = None
    verdict: Callable[[Run], int] = lambda _: 0
    is_needed: Callable[[Run], bool] = lambda _: True
    runs_models: bool = False


def _plan(run: Run) -> None:
    from quantize.stages.plan import plan

    plan(run.source, run.recipe, run.folder)


def _calibrate(run: Run) -> None:
    from quantize.stages.calibrate import calibrate

    calibrate(
        run.source.folder,
        run.recipe,
        run.folder.calibration,
        device=best_device(),
        gpu_memory=run.gpu_memory,
    )


def _round(run: Run) -> None:
    from quantize.stages.round_weights import round_weights

    round_weights(run.source, run.targets, run.recipe, run.folder.rounding, device=best_device())


def _rounds_weights(run: Run) -> bool:
    return run.recipe.quantization.rounding == "gptq"


def _convert(run: Run) -> None:
    from quantize.stages.convert import convert

    scales = run.folder.calibration / "input_scales.safetensors"
    convert(
        run.source,
        run.targets,
        run.folder.checkpoint,
        recipe=run.recipe,
        input_scales=scales if run.recipe.needs_calibration else None,
        rounded=run.folder.rounding if _rounds_weights(run) else None,
        record=run.folder.conversion_json,
        overwrite=True,
    )


def _verify(run: Run) -> None:
    from quantize.checkpoints.reader import Checkpoint
    from quantize.stages.verify import verify

    verify(Checkpoint.open(run.folder.checkpoint), run.source, run.targets, run.recipe, run.folder)


def _verified(run: Run) -> int:
    path = run.folder.verification_json
    result = read_json(path)
    faults = [fault for check in result["checks"] for fault in check["faults"]]
    if not result["passed"]:
        raise GateError(f"{path}: {faults[0] if faults else 'a check looked at nothing'}")
    return 0


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
        gpu_memory=run.gpu_memory,
    )


def _close_enough(run: Run) -> int:
    if faults := read_json(run.folder.fidelity_json)["faults"]:
        raise GateError(f"{run.folder.fidelity_json}: {faults[0]}")
    return 0


def _evaluate(run: Run) -> None:
    evaluate_more(run, **run.scoring)


def evaluate_more(
    run: Run, *, modes: Sequence[str] = (), batch_size: int | None = None, **options: Any
) -> None:
    """Score what is not scored yet, activation modes besides the recipe's included.

    `batch_size` overrules the recipe's. `options` are those of `evaluate.evaluate`: noise_floor,
    data_dir, server, base_server, in_flight.
    """
    from quantize.recipe import ACTIVATION_MODES
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
        gate=run.recipe.gate,
        modes=[mode for mode in ACTIVATION_MODES if mode in modes],
        device=best_device(),
        gpu_memory=run.gpu_memory,
        **options,
    )


def _report(run: Run) -> None:
    from quantize.stages.report import report

    report(run.folder, run.recipe, run.targets)


def _judged(run: Run) -> int:
    from quantize.progress import console, say
    from quantize.reports.render import summary

    content = read_json(run.folder.report_json)
    verdict = content["verdict"]
    console.print(summary(content))
    say(f"report: {run.folder.report_html}")
    if verdict["outcome"] == "FAIL":
        raise GateError(verdict["reason"])
    return verdict["exit_code"]


STAGES = (
    Stage("plan", "targets.csv", (), _plan),
    Stage(
        "calibrate",
        "calibration",
        ("plan",),
        _calibrate,
        "Calibrate a run again: denoise on prompts, record input scales.\n\n\b\n"
        "On several GPUs, with the files of one:\n"
        "  torchrun --nproc-per-node 8 -m quantize calibrate RUN",
        is_needed=lambda run: run.recipe.needs_calibration,
        runs_models=True,
    ),
    Stage(
        "round",
        "rounding",
        ("plan",),
        _round,
        "Round the weights of a run again: GPTQ on Hessians of denoising canvases.",
        is_needed=_rounds_weights,
    ),
    Stage(
        "convert",
        "checkpoint",
        ("plan", "calibrate", "round"),
        _convert,
        "Write the quantized checkpoint of a run again.",
    ),
    Stage(
        "verify",
        "verification.json",
        ("plan", "calibrate", "convert"),
        _verify,
        "Check the quantized checkpoint of a run statically.",
        _verified,
    ),
    Stage(
        "fidelity",
        "fidelity.json",
        ("plan", "calibrate", "convert"),
        _fidelity,
        "Replay recorded trajectories: distance of the quantized model from BF16.",
        _close_enough,
        runs_models=True,
    ),
    Stage("evaluate", "evaluation/done.json", ("plan", "convert"), _evaluate),
    Stage(
        "report",
        "report.json",
        ("plan", "calibrate", "convert", "verify", "fidelity", "evaluate"),
        _report,
        "Write the report of a run, and its verdict.",
        _judged,
    ),
)
