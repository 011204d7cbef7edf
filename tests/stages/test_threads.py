"""Artifacts do not depend on the number of threads: calibrate, round and convert a part of a model.

tests/benchmarks/threads.py does it for whole recipes.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import add_chats

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Calibration
from quantize.stages import denoising
from quantize.stages.calibrate.calibrate import calibrate
from quantize.stages.convert.convert import convert
from quantize.stages.round_weights.round_weights import round_weights


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_a_gptq_recipe_gives_the_same_bytes(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges, Hessians, codes and scales of real denoising; the MLP stands for the experts."""
    source = tmp_path / "bf16"
    shutil.copytree(tiny_checkpoint, source)
    add_chats(source)
    settings = Calibration(
        datasets=[str(source / "chats.jsonl")], prompts=4, canvases=1, thinking=0.5, batch_size=2,
        min_tokens_per_expert=1,
    )  # fmt: skip
    recipe = load_recipe("nvfp4")
    few = [*recipe.quantization.ignore, r"re:.*layers\.[1-9].*", "re:.*experts.*"]
    scheme = {"NVFP4": [r"re:.*\.mlp\..*"], "NVFP4A16": [r"re:.*\.self_attn\..*"]}
    quantization = recipe.quantization.model_copy(update={"ignore": few, "scheme": scheme})
    recipe = recipe.model_copy(update={"calibration": settings, "quantization": quantization})
    monkeypatch.setattr(denoising, "HELD_OUT", 2)
    one, several = (_made(source, recipe, n, tmp_path / str(n)) for n in (1, 3))
    assert len(one) > 8
    assert one == several


def _made(source: Path, recipe: Any, threads: int, out: Path) -> dict[str, bytes]:
    torch.set_num_threads(threads)
    checkpoint, recording = Checkpoint.open(source), out / "recording"
    targets = plan_targets(checkpoint.tensors, recipe.quantization)
    calibrate(source, recipe, out / "calibration", scratch=recording)
    round_weights(checkpoint, targets, recipe, out / "rounding", scratch=recording)
    convert(
        checkpoint, targets, out / "checkpoint", recipe=recipe, rounded=out / "rounding",
        input_scales=out / "calibration" / "input_scales.safetensors", record=out / "record.json",
    )  # fmt: skip
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {str(path.relative_to(out)): path.read_bytes() for path in files}
