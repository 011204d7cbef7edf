"""A GPU finds in real shapes what the CPU finds, in little memory; test_verify.py has every damage."""

import shutil
from pathlib import Path

import pytest
import torch

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.reading import load_recipe
from quantize.runs.folder import RunDir
from quantize.stages.verify.verify import verify
from tests.support.conversions import run
from tests.support.synthetic import synthetic_config, write_synthetic

pytestmark = pytest.mark.gpu
# A CPU's float32 norm of a block of 2^19 values was seen 2.4e-5 off; an error is a quotient of two.
APART = 1e-4


@pytest.mark.parametrize("name", ["fp8_dynamic", "int8_dynamic", "nvfp4a16", "nvfp4_fp8"])
def test_real_shapes(tmp_path: Path, name: str) -> None:
    """A sliding and a full layer of 16 experts; by arithmetic at most 0.8 GB on the GPU at once."""
    config = synthetic_config(layers=2, experts=16, vision_layers=1, vocabulary=4096)
    recipe, folder = load_recipe(name), RunDir(tmp_path)
    bf16 = write_synthetic(tmp_path / "bf16", config)
    run(bf16, folder.checkpoint, recipe, record=folder.conversion_json)
    folder.calibration.mkdir()
    if (scales := tmp_path / "input_scales.safetensors").exists():
        shutil.move(scales, folder.calibration)
    artifact, source = Checkpoint.open(folder.checkpoint), Checkpoint.open(bf16)
    targets = plan_targets(source.tensors, recipe.quantization)
    on_cpu = verify(artifact, source, targets, recipe, folder)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    on_gpu = verify(artifact, source, targets, recipe, folder, device="cuda:0")
    taken = torch.cuda.max_memory_allocated() - held  # what is reserved depends on threads' turns
    reserved = torch.cuda.max_memory_reserved() / 1e9
    print(f"verify {name}: {taken / 1e9:.2f} GB of the GPU, {reserved:.2f} reserved")
    assert on_cpu.passed, on_cpu.checks
    assert on_gpu.checks == on_cpu.checks
    assert on_gpu.relative_error == pytest.approx(on_cpu.relative_error, rel=APART)
    assert 0 < taken < 1e9
