"""`quantize` in this process on the tiny model: real plan, convert, verify and report in a second.

What needs a trained model is made up: the replay found no distance, and both models answered every
problem as told, so that the verdict is what a test wants it to be.
"""

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantize import cli
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.host.files import folder_when_complete, write_json
from quantize.recipe.reading import shipped_recipes
from quantize.recipe.sections import Evaluation, Recipe
from quantize.recovery.rows import Row, Scoring
from quantize.reports.scores import write_scoring
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint
from quantize.runs.models import AT_POINT
from quantize.runtime import Sampler
from quantize.schemes import gptq
from quantize.stages.evaluate.compared_models import ModelOptions
from quantize.stages.evaluate.tasks import questions_digest
from tests.support.conversions import write_input_scales

TASK = "word_problems"
PROBLEMS = 60


def quick_recipe(folder: Path) -> Path:
    """Write an NVFP4 recipe with one task and a margin that 60 problems can decide."""
    fields = yaml.safe_load(shipped_recipes()["nvfp4_w4a4"]) | {"name": "quick"}
    fields["evaluation"] |= {"tasks": [TASK], "repeats": {}}
    fields["gate"] |= {"margin_pp": {TASK: 30}}
    path = folder / "quick.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def rows(scores: list[float]) -> list[Row]:
    """Return one row a problem with these scores."""
    return [
        Row(i, 0, f"d{i}", f"p{i}", "1", "1", {"exact": score}, i, "text", 3, [2], False, [])
        for i, score in enumerate(scores)
    ]


def made_up_scores(
    run: RunDir,
    source: Path,
    digest: str,
    settings: Evaluation,
    *,
    options: ModelOptions | None = None,
    lost: int = 0,
    dtype: str = "torch.float32",
    data_dir: Path | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Stand in for evaluate: the quantized model, in `dtype`, loses the first `lost` of 60 problems."""
    served = options is not None and options.as_served
    settings_of = run.checkpoint if served else source
    quantized = fingerprint(Checkpoint.open(run.checkpoint), settings_of=settings_of)
    sides = {"bf16": (digest, 0), "quantized": (quantized, lost)}
    points = options.points if options else {}
    sides |= {AT_POINT + name: (quantized, lost) for name in points}
    if options and options.noise_floor:
        sides["bf16-again"] = (digest, 0)
    for side, (model, wrong) in sides.items():
        scores = [0.0] * wrong + [1.0] * (PROBLEMS - wrong)
        sampler = asdict(Sampler.from_checkpoint(source if "bf16" in side else settings_of))
        if point := points.get(side.removeprefix(AT_POINT)):
            sampler |= point.settings()
        conditions = {"task": TASK, "seed": settings.seed, "sampler": sampler}
        made_with = {"model": {"weights": model, "activations": "none"}, "dtype": "torch.float32"}
        if side == "quantized":
            made_with["dtype"] = dtype
        made_with |= {
            "sampler": sampler,
            "device": "cpu",
            "versions": {"torch": "2"},
            "batch_size": 1,
            "seed": 0,
            "data": data_dir and questions_digest(data_dir / f"{TASK}.jsonl"),
        }
        scoring = Scoring(TASK, rows(scores), conditions, made_with)
        write_scoring(run.evaluation / side, scoring)
    looks = {task: {"taken": 1, "of": 1} for task in settings.tasks}
    done = {"tasks": settings.tasks, "not_asked": [], "looks": looks}
    write_json(run.evaluation / "done.json", done)
    return {}


def made_up_ranges(source: Path, recipe: Recipe, out: Path, *_: Any, **__: Any) -> None:
    """Stand in for calibrate: every input has a range of its own, all experts saw tokens."""
    with folder_when_complete(out) as folder:
        targets = plan_targets(Checkpoint.open(source).tensors, recipe.quantization)
        write_input_scales(folder / "input_scales.safetensors", targets)
        coverage = {"min_tokens_per_expert": 1, "fallbacks": [], "tokens_per_expert": {"0": [3, 4]}}
        write_json(folder / "coverage.json", coverage)


def made_up_replay(
    source: Path, checkpoint: Path, calibration: Path, out: Path, *_: Any, **__: Any
) -> None:
    """Stand in for fidelity: no distance."""
    value = {"mean": 0.0, "interval": [0.0, 0.0]}
    names = ("kl_nats", "top1_agreement", "acceptance_jaccard", "commit_agreement")
    replay = dict.fromkeys(names, value) | {"routing_overlap": [1.0], "by_entropy": []}
    replay["by_step"] = [{"step": 1, "canvases": 2, "kl_nats": 0.0, "top1_agreement": 1.0}]
    own = replay | {"activations": "none"}
    content = {"trajectories": 1, "max_kl_nats": {}, "faults": [], "activations": {"none": replay}}
    write_json(out, content | {"own_conditioning": own})


def in_few_steps(monkeypatch: pytest.MonkeyPatch, steps: int = 3) -> None:
    """Denoise a canvas in so few steps, and round roughly: for tests that look at no figure."""
    own = Sampler.from_checkpoint

    def from_checkpoint(folder: Path) -> Sampler:
        return replace(own(folder), max_denoising_steps=steps)

    monkeypatch.setattr(Sampler, "from_checkpoint", from_checkpoint)
    rounding_roughly(monkeypatch, sweeps=0)


def rounding_roughly(monkeypatch: pytest.MonkeyPatch, sweeps: int) -> None:
    """Let GPTQ try three scales a block in place of 13, and descend so often."""
    near = gptq._near
    monkeypatch.setattr(gptq, "_near", lambda scale, neighbours: near(scale, min(neighbours, 1)))
    monkeypatch.setattr(gptq, "SWEEPS", sweeps)


@dataclass
class Done:
    """How a command ended: exit code, output, and messages."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line of its messages."""
        return self.err.strip().splitlines()[-1]

    def redone(self) -> list[str]:
        """Return the stages that it did."""
        lines = self.err.splitlines()
        return [line.partition(":")[0] for line in lines if line.endswith(": started")]


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> Done:
    """Run a command line in this process."""
    monkeypatch.setattr("sys.argv", ["quantize", *map(str, words)])
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli._exit_code()
    assert "Traceback" not in err.getvalue()
    return Done(code, out.getvalue(), err.getvalue())


class Quick:
    """The command line in this process, on a folder of runs of its own.

    With `copy`, `model` is the folder of another Quick: its runs are copied, its model is shared.
    """

    def __init__(
        self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, *, copy: bool = False
    ) -> None:
        self.out, self.model = folder / "outputs", (model if copy else folder) / "bf16"
        if copy:
            shutil.copytree(model / "outputs", self.out)
        else:
            shutil.copytree(model, self.model)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(CHECKPOINT / name, self.model)
        self.recipe = quick_recipe(folder)
        self.monkeypatch = monkeypatch
        monkeypatch.setattr("quantize.stages.calibrate.calibrate.calibrate", made_up_ranges)
        monkeypatch.setattr("quantize.stages.fidelity.fidelity.fidelity", made_up_replay)
        monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", made_up_scores)
        monkeypatch.setattr("quantize.stages.evaluate.tasks.open_tasks", lambda *_: [])  # slow
        monkeypatch.setattr("quantize.host.progress.console.width", 1000)

    def __call__(self, *words: object) -> Done:
        """Run one command."""
        return command(self.monkeypatch, *words)

    def run(self, *more: object) -> Done:
        """Run the pipeline."""
        return self("run", "--recipe", self.recipe, "--model", self.model, "--out", self.out, *more)

    @property
    def folder(self) -> RunDir:
        """The one run."""
        (found,) = self.out.glob("quick-*")
        return RunDir(found)
