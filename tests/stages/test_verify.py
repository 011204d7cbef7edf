"""Static verification passes what convert wrote, and names each kind of damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe import load_recipe
from quantize.run_dir import RunDir, read_json
from quantize.stages.verify import Verification, verify

LAYER = "model.decoder.layers.2."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["fp8", "nvfp4"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def artifact(request: pytest.FixtureRequest, scheme: str) -> Path:
    return request.getfixturevalue(f"{scheme}_artifact")


def run_verify(artifact: Path, source: Path, scheme: str, out: Path) -> Verification:
    recipe = load_recipe({"fp8": "fp8_dynamic", "nvfp4": "nvfp4"}[scheme])
    bf16 = Checkpoint.open(source)
    targets = plan_targets(bf16.tensors, recipe.quantization)
    return verify(Checkpoint.open(artifact), bf16, targets, recipe, RunDir(out))


def test_what_convert_wrote_passes(
    artifact: Path, tiny_checkpoint: Path, scheme: str, tmp_path: Path
) -> None:
    found = run_verify(artifact, tiny_checkpoint, scheme, tmp_path)
    assert found.passed, found.summary()
    assert all(check.looked_at > 0 for check in found.checks.values())
    assert len(found.relative_error) == 6 * 2 + 6 * 3 + 6 * 4 - 1
    assert read_json(tmp_path / "verification.json")["passed"] is True


def exchange_experts(tensors: Tensors) -> str:
    """Swap two experts of one layer, whole and consistently: names, dtypes, scales all fit."""
    for name in [n for n in tensors if n.startswith(f"{LAYER}experts.1.")]:
        other = name.replace("experts.1.", "experts.4.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return "error"


def silence_an_expert(tensors: Tensors) -> str:
    for name in [n for n in tensors if n.startswith(f"{LAYER}experts.1.")]:
        if name.endswith((".weight", ".weight_packed")):
            tensors[name] = torch.zeros_like(tensors[name])
    return "experts"


def change_a_kept_weight(tensors: Tensors) -> str:
    tensors[f"{LAYER}router.proj.weight"][0, 0] += 1
    return "kept"


def negate_a_scale(tensors: Tensors) -> str:
    name = f"{LAYER}mlp.up_proj.weight_scale"
    tensors[name] = (-tensors[name].float()).to(tensors[name].dtype)
    return "scales"


def poison_a_scale(tensors: Tensors) -> str:
    tensors[f"{LAYER}mlp.up_proj.weight_scale"][0, 0] = float("nan")
    return "scales"


def keep_an_encoder_copy(tensors: Tensors) -> str:
    name = f"{LAYER}mlp.up_proj.weight_scale"
    copy = name.replace("model.decoder.", "model.encoder.language_model.")
    tensors[copy] = tensors[name].clone()
    return "layout"


@pytest.mark.parametrize(
    "damage",
    [
        exchange_experts,
        silence_an_expert,
        change_a_kept_weight,
        negate_a_scale,
        poison_a_scale,
        keep_an_encoder_copy,
    ],
)
def test_damage_is_found_by_its_check(
    artifact: Path,
    tiny_checkpoint: Path,
    scheme: str,
    tmp_path: Path,
    damage: Callable[[Tensors], str],
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    check = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = run_verify(folder, tiny_checkpoint, scheme, tmp_path)
    assert not found.passed
    assert found.checks[check].faults, found.summary()


def test_another_source_is_found(
    artifact: Path, tiny_checkpoint: Path, scheme: str, tmp_path: Path
) -> None:
    from tiny import tiny_model

    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    found = run_verify(artifact, tmp_path / "other", scheme, tmp_path)
    assert not found.checks["error"].passed
    assert not found.checks["kept"].passed
