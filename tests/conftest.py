"""Fixtures shared by all tests: a tiny random DiffusionGemma, BF16 and quantized."""

import functools
import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import torch
from numeric import computes
from safetensors.torch import save_file
from tiny import tiny_model

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, fused_with, plan_targets
from quantize.recipe.sections import Recipe, load_recipe
from quantize.stages.convert.convert import convert


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random BF16 checkpoint in Google's layout: fused experts, decoder names."""
    folder = tmp_path_factory.mktemp("tiny") / "bf16"
    tiny_model().save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="session")
def fp8_artifact(tiny_checkpoint: Path) -> Path:
    """Folder of the tiny model in FP8_DYNAMIC."""
    recipe, targets = _planned(tiny_checkpoint, "fp8_dynamic")
    out = tiny_checkpoint.parent / "fp8"
    record = out.with_name("fp8.json")
    convert(Checkpoint.open(tiny_checkpoint), targets, out, recipe=recipe, record=record)
    return out


@pytest.fixture(scope="session")
def nvfp4_artifact(tiny_checkpoint: Path) -> Path:
    """Folder of the tiny model in NVFP4, every expert with an input scale of its own."""
    recipe, targets = _planned(tiny_checkpoint, "nvfp4_w4a4")
    modules = [module for target in targets for module in target.modules]
    inputs = {m: fused_with(m) for m in modules}  # gate and up, q and k and v read one input
    order = {name: i for i, name in enumerate(sorted(set(inputs.values())))}
    scales = tiny_checkpoint.parent / "input_scales.safetensors"
    save_file(
        {
            f"{module}.input_global_scale": torch.tensor([400.0 + 3 * order[name]])
            for module, name in inputs.items()
        },
        scales,
    )
    out = tiny_checkpoint.parent / "nvfp4"
    convert(
        Checkpoint.open(tiny_checkpoint), targets, out, recipe=recipe, input_scales=scales,
        record=out.with_name("nvfp4.json"),
    )  # fmt: skip
    return out


def _planned(checkpoint: Path, name: str) -> tuple[Recipe, list[Target]]:
    recipe = load_recipe(name)
    return recipe, plan_targets(Checkpoint.open(checkpoint).tensors, recipe.quantization)


# Begun first: a process takes a whole file, so that its tests share their fixtures, and what takes long
# would else end last.
LONGEST = (
    "test_products", "test_pipeline", "test_docs", "test_passes", "test_serve", "test_generate",
    "test_convert", "test_every_recipe", "test_llama_cpp", "test_compile", "test_bf16",
    "test_gptq_kernels", "test_forms", "test_scores", "test_bundled_parity", "test_evaluate",
    "test_linears",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest; mark what computes; skip what is marked gpu without a GPU."""
    items.sort(key=lambda item: [*LONGEST, item.path.stem].index(item.path.stem))
    for item in items:
        if computes(item.path, item.name):
            item.add_marker(pytest.mark.numeric)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    """Spare every test what one process needs once.

    What collection imported stays: the garbage collector need not walk it again. And lm-eval compiles
    a template anew for each sample: half the time of scoring made-up answers.
    """
    if utils := sys.modules.get("lm_eval.utils"):
        utils.env.from_string = functools.lru_cache(utils.env.from_string)
    gc.collect()
    gc.freeze()
