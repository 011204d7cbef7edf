"""The walks of docs/structure.md: a run calls the functions that they name, in their order."""

import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.reading import load_recipe
from quantize.runs.folder import RunDir
from quantize.runs.manifest import fingerprint
from quantize.runtime import Sampler, open
from quantize.runtime.gpu.cores import cores
from quantize.runtime.gpu.memory import Need, Stack, least_bytes, packed_sizes
from quantize.runtime.gpu.placement import CPU
from quantize.stages.denoising import Denoising
from quantize.stages.evaluate.evaluate import evaluate
from quantize.stages.round_weights.round_weights import round_weights
from tests.support.chats import add_chats

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "structure.md").read_text("utf-8")


def told(title: str) -> list[str]:
    """Return the functions of a walk, `module.function`, each where it is named first."""
    walk = PAGE.split(f"## {title}")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 9
    return list(dict.fromkeys(re.findall(r"`(\w+\.\w+)\(", walk)))


def called(work: Callable[[], object], names: list[str]) -> list[str]:
    """Return those of `names` that `work` calls, here or on cores' threads, by their first calls."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            name = f"{Path(path).stem}.{frame.f_code.co_name}" if str(ROOT) in path else ""
            if name in names:
                seen.setdefault(name)

    cores.cache_clear()  # a thread that is there already is not watched
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        cores.cache_clear()
    return list(seen)


def test_the_walk_of_a_canvas() -> None:
    names = told("The walk of a canvas through one denoising step")

    def walk() -> None:
        engine = open(CHECKPOINT, device="cpu", capacity=1, max_context=128)
        engine.admit(0, [5, 6, 7], 1, Sampler(max_denoising_steps=2))
        engine.denoise([0])

    assert called(walk, names) == names


def test_the_walk_of_a_gpus_memory() -> None:
    names = told("The walk of a GPU's memory")
    budget = least_bytes_of_the_bundled_model()

    def walk() -> None:
        engine = open(CHECKPOINT, device="cpu", capacity=1, max_context=128, gpu_memory=budget)
        engine.admit(0, [5, 6, 7], 1, Sampler(max_denoising_steps=1))
        engine.denoise([0])
        engine.close()

    assert called(walk, names) == names


def least_bytes_of_the_bundled_model() -> float:
    """Return a budget in which its layers are streamed."""
    checkpoint = Checkpoint.open(CHECKPOINT)
    stack = Stack.of("", packed_sizes(checkpoint, None, None), quantized=False)
    return least_bytes(Need("", stack, 1, 128), checkpoint.config) + 1


def test_the_walk_of_a_hessian(tiny_checkpoint: Path, tmp_path: Path) -> None:
    names = told("The walk of a Hessian")
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint, source)
    add_chats(source)
    short = {
        "prompts": 1,
        "canvases": 1,
        "batch_size": 1,
        "datasets": [str(source / "chats.jsonl")],
    }
    recipe = load_recipe("nvfp4")
    assert recipe.calibration is not None
    settings = recipe.calibration.model_copy(update=short)
    recipe = recipe.model_copy(update={"calibration": settings})
    checkpoint = Checkpoint.open(source)
    targets = plan_targets(checkpoint.tensors, recipe.quantization)
    targets = [own for own in targets if "layers.0." in own.name]
    scratch = tmp_path / "scratch"
    Denoising(source, settings, CPU).recording(scratch)

    def work() -> None:
        round_weights(checkpoint, targets, recipe, tmp_path / "rounding", scratch=scratch)

    assert called(work, names) == names


def test_the_walk_of_a_scored_sample_names_what_there_is() -> None:
    """The short form: every named function stands in a module of that name."""
    files = [f for folder in ("quantize", "evaluation") for f in (ROOT / folder).rglob("*.py")]
    for name in told("The walk of a scored sample"):
        module, function = name.split(".")
        found = [f for f in files if f.stem == module and f"def {function}(" in f.read_text()]
        assert found, name


@pytest.mark.slow
def test_the_walk_of_a_scored_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Sampler(max_denoising_steps=1, eos_token_ids=(1,))
    monkeypatch.setattr(Sampler, "from_checkpoint", lambda *_: short)
    names = told("The walk of a scored sample")
    recipe = load_recipe("fp8_dynamic").for_bundled_model().asking(problems=2)
    run = RunDir(tmp_path / "run")
    run.checkpoint.parent.mkdir(parents=True)
    run.checkpoint.symlink_to(CHECKPOINT)

    def work() -> None:
        digest = fingerprint(Checkpoint.open(CHECKPOINT))
        evaluate(run, CHECKPOINT, digest, recipe.evaluation, gate=recipe.gate)

    assert called(work, names) == names
