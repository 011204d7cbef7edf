"""The stages of a run, one record each, in order.

    plan -> calibrate -> round -> convert -> verify -> fidelity -> evaluate -> report

A record holds everything about one stage. `pipeline.run` runs the list; the command line makes its
commands and the values of `--until` from the list. Work functions import what they need when they are
called, so importing this module is cheap.
"""

import hashlib
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantize.errors import GateError, InputError, ResourceError
from quantize.host.files import read_json, write_json
from quantize.host.locks import locked
from quantize.host.processes import best_device, is_first
from quantize.runs.folder import SHARED, RunDir
from quantize.runs.models import AT_POINT, BASELINE_AGAIN, CANDIDATE
from quantize.runs.weights import is_scored

if TYPE_CHECKING:
    from pathlib import Path

    from quantize.checkpoints.reader import Checkpoint
    from quantize.checkpoints.targets import Target
    from quantize.recipe.sections import Recipe
    from quantize.runtime.gpu.placement import Placement


# Options that say what a run may use of the machine. `gpu_memory` is in bytes, None for all free ones;
# results depend on it only if it makes a batch of answers smaller. `scratch` is the folder for files
# that only the run's stages read, None for the run's own folder.
MACHINE = {"gpu_memory", "scratch"}


@dataclass(frozen=True)
class Run:
    """One run: its folder, resolved recipe, source checkpoint and plan.

    `options` holds those of MACHINE and of stages: `full` for verify, `modes` for fidelity,
    `hourly_price` for report, and the arguments of `evaluate_more`. `instead` maps a stage's name to
    a function that replaces its work, or to None, which leaves the stage out.
    """

    folder: RunDir
    recipe: "Recipe"
    source: "Checkpoint"
    targets: "list[Target]"
    is_bundled: bool
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    instead: "Mapping[str, Task | None]" = field(default_factory=dict[str, Any])

    @property
    def place(self) -> "Placement":
        """Where models run: on this machine's GPU within `gpu_memory`, or its CPU."""
        from quantize.runtime.gpu.placement import Placement

        return Placement.here(self.options.get("gpu_memory"))

    @property
    def recording(self) -> "Path":
        """Folder in which calibrate records passes for GPTQ; the stage round removes it when done."""
        if (scratch := self.options.get("scratch")) is None:
            return self.folder.path / "recording"
        # Runs of one recipe and model have one name in all folders of runs.
        where = hashlib.sha256(str(self.folder.path.resolve()).encode()).hexdigest()[:8]
        return scratch / f"{self.folder.path.name}-{where}-recording"

    @contextmanager
    def at_recording(self) -> "Generator[Path]":
        """Yield `recording`, which no other process uses during the block.

        Raise ResourceError if another process works there, or if scratch cannot be written to.
        """
        folder, scratch = self.recording, self.options.get("scratch")
        if scratch is None:  # the run's own folder, which is locked
            yield folder
            return
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            lock = scratch / f".{folder.name}.lock"
            lock.touch()
        except OSError as error:
            why = f"{scratch}: cannot be written to ({error.strerror})"
            raise ResourceError(f"{why}; name another disk with --scratch") from error
        with locked(lock, str(folder)):
            yield folder

    def __post_init__(self) -> None:
        """Raise InputError if the recipe limits steps but servers answer: they report no steps.

        And if operating points are asked for of which the recipe has none.
        """
        gate, points = self.recipe.gate, self.recipe.evaluation.operating_points
        if self.options.get("operating_points") and not points:
            raise InputError(
                f"recipe {self.recipe.name}: no evaluation.operating_points (of the bundled model: "
                f"under `bundled`); write some, or judge limits by `quantize evaluate RUN --steps T`"
            )
        limits = {
            "max_step_inflation": gate.max_step_inflation,
            "health_pp.never_stopped": gate.health_pp.get("never_stopped"),
        }
        for name, most in limits.items() if self.options.get("servers") else ():
            if most is not None:
                raise InputError(
                    f"recipe {self.recipe.name}: gate.{name}, {most:g}, cannot be judged, since "
                    f"servers report no denoising steps; run a recipe that says "
                    f"`{name.split('.')[-1]}: null`"
                )

    def record(self, stage: str, facts: dict[str, Any]) -> None:
        """Add facts about a stage to the manifest; under torchrun only the first process writes."""
        if not is_first():
            return
        manifest = read_json(self.folder.manifest_json, "stages")
        manifest["stages"].setdefault(stage, {}).update(facts)
        write_json(self.folder.manifest_json, manifest)


Task = Callable[[Run], None]


@dataclass(frozen=True)
class Stage:
    """What a stage reads, does and writes, and what its command offers."""

    name: str  # name of the stage and of its command
    result: str  # path in the run folder that exists once the stage has been done
    inputs: tuple[str, ...]  # names of the stages whose results it reads
    work: Task  # function that makes the result
    summary: str = ""  # help text of the command that runs this stage alone
    # Returns the exit code of the finished stage, 0 or 4; raises GateError for 1.
    verdict: Callable[[Run], int] = lambda _: 0
    # All files and folders that it writes, if there are more than `result`.
    files: tuple[str, ...] = ()
    # Returns, as text, what this run asks for and the finished stage lacks; None if nothing.
    lacks: Callable[[Run], str | None] = lambda _: None
    is_needed: "Callable[[Recipe], bool]" = lambda _: True  # whether a recipe has this stage at all
    # Checks, before the first stage of a run, what this stage will read from outside the run.
    ahead: Callable[[Run], object] = lambda _: None
    # Whether torchrun's processes share its work; if not, only one process may run it.
    shares_work: bool = False
    adds: bool = False  # whether its old result stays until the new one is complete
    options: tuple[str, ...] = ()  # options of its command, by their names in `cli.options`

    def command(self, run: RunDir) -> str:
        """Return the command line that does this stage again for a run."""
        if self.name == "plan":
            return "quantize run ... --resume"
        return shlex.join(["quantize", self.name, str(run.path)])


def _plan(run: Run) -> None:
    from quantize.checkpoints.reader import check_tokenizer
    from quantize.stages.plan.plan import write_plan

    check_tokenizer(run.source.folder)
    write_plan(run.folder, run.recipe, run.targets)


def _calibrate(run: Run) -> None:
    from quantize.stages.calibrate.calibrate import calibrate

    out, place = run.folder.calibration, run.place
    with run.at_recording() as recording:
        calibrate(run.source.folder, run.recipe, out, place, scratch=recording)


def _round(run: Run) -> None:
    from quantize.stages.round_weights.round_weights import round_weights

    out, place = run.folder.rounding, run.place
    _trust_rounding(run)
    with run.at_recording() as recording:
        round_weights(run.source, run.targets, run.recipe, out, place, scratch=recording)


def _trust_rounding(run: Run) -> None:
    """Test GPTQ's kernels where they will run, before any work; raise ResourceError if one is wrong."""
    from torch import device

    from quantize.runtime.gpu.trust import trust_rounding

    schemes = (target.scheme for target in run.targets if target.scheme)
    trust_rounding(schemes, device(run.place.device))


def _rounds_weights(recipe: "Recipe") -> bool:
    return recipe.quantization.rounding == "gptq"


def _convert(run: Run) -> None:
    from quantize.stages.convert.convert import convert, quantized_config
    from quantize.stages.verify.witness import Witness

    run.folder.witness_json.unlink(missing_ok=True)
    config = quantized_config(run.source.config, run.targets, run.recipe)
    witness = Witness(run.source, config, run.recipe, best_device())
    scales = run.folder.calibration / "input_scales.safetensors"
    convert(
        run.source,
        run.targets,
        run.folder.checkpoint,
        recipe=run.recipe,
        input_scales=scales if run.recipe.needs_calibration else None,
        rounded=run.folder.rounding if _rounds_weights(run.recipe) else None,
        device=best_device(),
        record=run.folder.conversion_json,
        look=witness.check,
        overwrite=True,
    )
    witness.write(run.targets, run.folder)


def _verify(run: Run) -> None:
    from quantize.checkpoints.reader import Checkpoint
    from quantize.stages.verify.verify import verify

    made = Checkpoint.open(run.folder.checkpoint)
    full = run.options.get("full", False)
    verify(made, run.source, run.targets, run.recipe, run.folder, device=best_device(), full=full)


def _verified(run: Run) -> int:
    path = run.folder.verification_json
    if not (result := read_json(path, "checks", "passed"))["passed"]:
        faults = [fault for check in result["checks"] for fault in check["faults"]]
        raise GateError(f"{path}: {faults[0] if faults else 'a check looked at nothing'}")
    return 0


def replay(run: Run, fine_tuned: bool = False) -> None:
    """Write fidelity.json; weights of a `fine_tuned` model differ from BF16's on purpose."""
    from quantize.stages.fidelity.fidelity import fidelity
    from quantize.stages.memory_needs import replayed_of

    fidelity(
        run.source.folder,
        run.folder.checkpoint,
        run.folder.calibration,
        run.folder.fidelity_json,
        activations=run.recipe.evaluation.activations,
        limits=run.recipe.gate.max_kl_nats,
        overlaps=run.recipe.gate.min_routing_overlap,
        more=run.options.get("modes", ()),
        count=replayed_of(run.recipe),
        shared=run.folder.path.parent / SHARED,
        place=run.place,
        fine_tuned=fine_tuned,
    )


def _close_enough(run: Run) -> int:
    if faults := read_json(run.folder.fidelity_json, "faults")["faults"]:
        raise GateError(f"{run.folder.fidelity_json}: {faults[0]}")
    return 0


def _open_tasks(run: Run) -> None:
    """Read tasks and imported answers of BF16 before any work; raise InputError if some lack."""
    from quantize.stages.evaluate.baseline_pack import check_packs, imports
    from quantize.stages.evaluate.tasks import open_tasks

    tasks = open_tasks(run.recipe.evaluation, run.recipe.gate, run.options.get("data_dir"))
    if not run.options.get("base_servers"):
        about = read_json(run.folder.manifest_json, "source.fingerprint")["source"]
        plans = {task.name: task.plan for task in tasks}
        check_packs(imports(run.folder.path.parent), about["fingerprint"], plans)


def _can_pass(run: Run) -> int:
    from quantize.stages.plan.estimate import cannot_pass

    return 4 if cannot_pass(run.recipe) else 0


def _changed_questions(run: Run) -> str | None:
    """Return a task whose local file of questions is another one than was asked, None if none is.

    Where no file is named, what the package bundles says nothing of a file that was named before.
    """
    from quantize.bundled import HELDOUT
    from quantize.stages.evaluate.tasks import data_file, questions_digest

    for task in run.recipe.evaluation.tasks:
        asked = run.folder.evaluation / CANDIDATE / f"{task}.conditions.json"
        file = data_file(task, run.options.get("data_dir"), run.recipe.evaluation)
        if file is None or file == HELDOUT:
            continue
        if file.exists() and asked.exists():
            was = read_json(asked, "made_with")["made_with"].get("data")
            if was is not None and was != questions_digest(file):
                return task
    return None


def _lacks_samples(run: Run) -> str | None:
    if task := _changed_questions(run):
        return f"the questions of {task} changed since they were asked"
    if not is_scored(run.folder, CANDIDATE):
        return "the scored weights or settings are not the checkpoint's"
    if run.options.get("noise_floor") and not is_scored(run.folder, BASELINE_AGAIN):
        return "the noise floor is not scored"
    if run.options.get("operating_points"):
        for name in run.recipe.evaluation.operating_points:
            if not is_scored(run.folder, AT_POINT + name):
                return f"operating point {name} is not scored"
    from quantize.stages.report.rows import other_looks

    if why := other_looks(run.folder):
        return why
    done = read_json(run.folder.evaluation / "done.json", "looks", "not_asked")
    ended = any(look["taken"] < look["of"] for look in done["looks"].values())
    if run.options.get("go_on") and (ended or done["not_asked"]):
        return "it ended when the verdict was certain"
    return None


def evaluate_more(
    run: Run, *, modes: Sequence[str] = (), batch_size: int | None = None,
    data_dir: "Path | None" = None, go_on: bool = False, operating_points: bool = False,
    steps: Sequence[int] = (), **models: Any,
) -> None:  # fmt: skip
    """Score the tasks that have no scores yet, in the recipe's activation mode and in `modes`.

    If `operating_points` is set, the recipe's operating points are scored too. Each limit on denoising
    steps in `steps` adds a point. On a GPU the tokens/s of points are measured. `batch_size` replaces
    the recipe's. `models` are fields of `ModelOptions`. For others see `stages.evaluate.evaluate`.
    """
    from quantize.recipe.sections import OperatingPoint
    from quantize.schemes.modes import ACTIVATION_MODES
    from quantize.stages.evaluate.compared_models import ModelOptions
    from quantize.stages.evaluate.evaluate import evaluate

    settings = run.recipe.evaluation
    points = dict(settings.operating_points) if operating_points else {}
    for count in steps:
        points[f"t{count}"] = OperatingPoint.model_validate({"max_denoising_steps": count})
    if batch_size is not None:
        settings = settings.model_copy(update={"batch_size": batch_size})
    about = read_json(run.folder.manifest_json, "source.fingerprint")
    rates = evaluate(
        run.folder,
        run.source.folder,
        about["source"]["fingerprint"],
        settings,
        gate=run.recipe.gate,
        options=ModelOptions(
            modes=[mode for mode in ACTIVATION_MODES if mode in modes],
            place=run.place,
            points=points,
            as_served="judged" in about,
            **models,
        ),
        data_dir=data_dir,
        go_on=go_on,
    )
    run.record("evaluate", {"rates": rates})
    if points and is_first() and run.place.device != "cpu":
        from quantize.pipeline.speeds import measure_speeds

        measure_speeds(run.folder, run.source.folder, points, run.place)


def check_baseline(run: Run, answers: int, seed: int | None) -> None:
    """Let BF16 give some of a run's imported answers again, as `stages.evaluate.spot_check` does."""
    from quantize.stages.evaluate.spot_check import spot_check

    about = read_json(run.folder.manifest_json, "source.fingerprint")["source"]
    spot_check(
        run.folder, run.source.folder, about["fingerprint"], run.recipe.evaluation, run.recipe.gate,
        answers, seed, place=run.place, data_dir=run.options.get("data_dir"),
    )  # fmt: skip


def _report(run: Run) -> None:
    from quantize.stages.report.report import report

    if (price := run.options.get("hourly_price")) is not None:
        path = run.folder.manifest_json
        write_json(path, read_json(path) | {"hourly_price": price})
    report(run.folder, run.recipe, run.targets)


def _judged(run: Run) -> int:
    from quantize.host.progress import console, say
    from quantize.reports.render import summary

    content = read_json(run.folder.report_json, "verdict.outcome", "model", "recipe", "tasks")
    verdict = content["verdict"]
    console.print(summary(content))
    say(f"report: {run.folder.report_html}")
    if verdict["outcome"] == "FAIL":
        raise GateError(verdict["reason"])
    return verdict["exit_code"]


STAGES = (
    Stage("plan", "targets.csv", (), _plan, verdict=_can_pass,
          files=("recipe.yaml", "targets.csv")),
    Stage(
        "calibrate", "calibration", ("plan",), _calibrate,
        "Calibrate a run again: denoise prompts, record input scales.\n\n\b\n"
        "On several GPUs, with the files of one:\n"
        "  torchrun --nproc-per-node 8 -m quantize calibrate RUN",
        is_needed=lambda recipe: recipe.needs_calibration, shares_work=True,
        options=("machine", "scratch"),
    ),
    Stage(
        "round", "rounding", ("plan",), _round,
        "Round the weights of a run again: GPTQ on Hessians of denoising canvases.\n\n"
        "Takes calibrate's recording through all layers, one by one. A damaged one is made again.\n\n"
        "\b\nOn several GPUs, with the files of one:\n"
        "  torchrun --nproc-per-node 8 -m quantize round RUN",
        is_needed=_rounds_weights, ahead=_trust_rounding, shares_work=True,
        options=("machine", "scratch"),
    ),
    Stage(
        "convert", "checkpoint", ("plan", "calibrate", "round"), _convert,
        "Write the quantized checkpoint of a run again.", files=("checkpoint", "conversion.json"),
    ),
    Stage(
        "verify", "verification.json", ("plan", "calibrate", "convert"), _verify,
        "Check the files of a run's quantized checkpoint.\n\n"
        "Convert records how all values compared with BF16's. Verify compares every byte on disk with "
        "that record, and a sample with BF16. Without the record it compares all with BF16.",
        _verified, options=("full",),
    ),
    Stage(
        "fidelity", "fidelity.json", ("plan", "calibrate", "convert"), replay,
        "Replay recorded trajectories: how far is the quantized model from BF16?", _close_enough,
        shares_work=True, options=("modes", "machine"),
    ),
    Stage(
        "evaluate", "evaluation/done.json", ("plan", "convert"),
        lambda run: evaluate_more(run, **{k: v for k, v in run.options.items() if k not in MACHINE}),
        "Score what is not scored yet: BF16 and quantized, with the same prompts and seeds.\n\n"
        "\b\nOn several GPUs, with the scores of one:\n"
        "  torchrun --nproc-per-node 8 -m quantize evaluate RUN",
        files=("evaluation",), adds=True, lacks=_lacks_samples, ahead=_open_tasks, shares_work=True,
        options=("modes", "scoring", "gguf", "llama-cpp", "steps", "machine"),
    ),
    Stage(
        "report", "report.json", ("plan", "calibrate", "convert", "verify", "fidelity", "evaluate"),
        _report,
        "Write the report of a run, and its verdict: report.json, .md, .html and junit.xml.\n\n"
        "In a job of GitHub Actions report.md also becomes the job's summary (docs/ci.md).",
        _judged, files=("report.json", "report.md", "report.html", "junit.xml"),
        options=("hourly-price",),
    ),
)  # fmt: skip


def stage(name: str) -> Stage:
    """Return the stage called `name`."""
    return next(stage for stage in STAGES if stage.name == name)
