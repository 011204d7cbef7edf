"""Artifacts do not depend on the number of threads: calibrate, round and convert a part of a model.

tests/benchmarks/threads.py does it for whole recipes.
"""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Calibration
from quantize.schemes.gptq import gptq
from quantize.schemes.hessians import Hessians
from quantize.stages import denoising
from quantize.stages.calibrate.calibrate import calibrate
from quantize.stages.convert.convert import convert
from quantize.stages.round_weights import round_weights as round_weights_stage
from quantize.stages.round_weights.round_weights import round_weights
from tests.support.chats import add_chats
from tests.support.tiny import EXPERTS


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


@pytest.mark.usefixtures("_threads")
def test_no_operation_of_rounding_is_shared_by_threads(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine such threads wait for each other longer than they compute."""
    source = Checkpoint.open(tiny_checkpoint)
    targets = plan_targets(source.tensors, load_recipe("nvfp4").quantization)
    units = [unit for unit in round_weights_stage.units_of(targets) if unit.layer == 0]
    weights = [[source.read(target.name) for target in unit.targets] for unit in units]
    hessians = Hessians([unit.reads for unit in units], EXPERTS)
    for unit, (matrix, *_) in zip(units, weights, strict=True):
        experts = torch.arange(64)[:, None] % EXPERTS if matrix.dim() == 3 else None
        hessians.see(unit.reads, torch.randn(64, matrix.shape[-1]).bfloat16(), experts)
    seen: set[tuple[int, int]] = set()

    def gptq_seen(*arguments: Any) -> Any:
        seen.add((threading.get_ident(), torch.get_num_threads()))
        return gptq(*arguments)

    monkeypatch.setattr(round_weights_stage, "gptq", gptq_seen)
    torch.set_num_threads(3)
    done = round_weights_stage.round_units(units, weights, hessians)
    assert [unit_done.unit for unit_done in done] == units
    assert {count for _, count in seen} == {1}
    assert len(seen) > 1  # of three cores


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
