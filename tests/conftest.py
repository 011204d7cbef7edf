"""Fixtures shared by all tests: a tiny random DiffusionGemma, BF16 and quantized.

What they need is imported inside them: the process that only hands out tests needs no torch.
"""

import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from tests.support.numeric import computes

if TYPE_CHECKING:
    from quantize.checkpoints.targets import Target
    from quantize.recipe.sections import Recipe


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random BF16 checkpoint as Google writes it: layout and config."""
    from quantize.host.files import write_json
    from tests.support.tiny import LAYERS, tiny_model, write_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "bf16"
    tiny_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    full = text.pop("per_layer_config")[str(LAYERS - 1)]  # as transformers 5.17 writes it
    text |= {
        "global_head_dim": full["head_dim"],
        "num_global_key_value_heads": full["num_key_value_heads"],
    }
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def fp8_artifact(tiny_checkpoint: Path) -> Path:
    """Folder of the tiny model in FP8_DYNAMIC."""
    recipe, targets = _planned(tiny_checkpoint, "fp8_dynamic")
    return _converted(tiny_checkpoint, targets, tiny_checkpoint.parent / "fp8", recipe=recipe)


@pytest.fixture(scope="session")
def nvfp4_artifact(tiny_checkpoint: Path) -> Path:
    """Folder of the tiny model in NVFP4, every expert with an input scale of its own."""
    import torch
    from safetensors.torch import save_file

    from quantize.checkpoints.targets import fused_with

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
    return _converted(tiny_checkpoint, targets, out, recipe=recipe, input_scales=scales)


def _converted(source: Path, targets: list["Target"], out: Path, **options: Any) -> Path:
    from quantize.checkpoints.reader import Checkpoint
    from quantize.stages.convert.convert import convert

    convert(Checkpoint.open(source), targets, out, record=out.with_suffix(".json"), **options)
    return out


def _planned(checkpoint: Path, name: str) -> tuple["Recipe", list["Target"]]:
    from quantize.checkpoints.reader import Checkpoint
    from quantize.checkpoints.targets import plan_targets
    from quantize.recipe.reading import load_recipe

    recipe = load_recipe(name)
    return recipe, plan_targets(Checkpoint.open(checkpoint).tensors, recipe.quantization)


# Begun first: a process takes a whole file, so that its tests share their fixtures, and what takes long
# would else end last. Ray has 30 seconds to start in, and the machine is least busy at the beginning.
LONGEST = (
    "test_cluster",
    "test_products", "test_serve", "test_docs", "test_pipeline", "test_round_weights", "test_passes",
    "test_tampering", "test_publish", "test_forms", "test_convert", "test_compile", "test_looks",
    "test_load_of_requests", "test_fidelity", "test_linears", "test_generate", "test_every_recipe",
    "test_scores", "test_packaging", "test_verify", "test_baseline_pack", "test_invariance",
    "test_bundled_parity", "test_calibrate", "test_bundled", "test_simulation", "test_processes",
)  # fmt: skip


def pytest_configure() -> None:
    """Do not wait for the disk, and let an example of hypothesis take as long as the machine needs.

    No test loses power, and a wrong descriptor still raises.
    """
    os.fsync = os.fstat  # type: ignore[assignment]
    with suppress(ImportError):  # a GPU machine may lack it
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("any machine")


def pytest_collection() -> None:
    """Import transformers without scikit-learn, which it wants for an assisted generation of its own.

    That takes as long as torch itself, and no test of ours assists.
    """
    if not sys.modules.get("sklearn"):
        sys.modules["sklearn"] = None  # type: ignore[assignment]
        importlib.import_module("transformers.generation.candidate_generator")
        del sys.modules["sklearn"]


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest; mark what computes; skip what is marked gpu without a GPU."""
    import torch

    items.sort(key=lambda item: [*LONGEST, item.path.stem].index(item.path.stem))
    for item in items:
        if computes(item.path, item.name):
            item.add_marker(pytest.mark.numeric)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    """Spare every test what one process needs once.

    What collection imported stays: the garbage collector need not walk it again, half a second each
    time that a model is opened. And lm-eval compiles a template anew for each sample: half the time of
    scoring made-up answers.
    """
    if utils := sys.modules.get("lm_eval.utils"):
        utils.env.from_string = functools.lru_cache(utils.env.from_string)
    if placement := sys.modules.get("quantize.runtime.gpu.placement"):
        placement.gc = SimpleNamespace(unfreeze=lambda: None, collect=gc.collect)  # type: ignore[attr-defined]
    if run := sys.modules.get("quantize.pipeline.run"):
        run.gc = SimpleNamespace(freeze=lambda: None, unfreeze=lambda: None)  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Behind a file, let the collector leave out what stays for good.

    The stages collect, and would else walk all that was imported and cached since: half a second each.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
