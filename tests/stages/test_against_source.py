"""Faults of a stranger's checkpoint are found by its weights alone, without running the model."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.stages.verify.against_source import compare
from tests.support.conversions import recipe_for, run
from tests.support.foreign import foreign
from tests.support.tiny import tiny_config, write_tokenizer

Tensors = dict[str, torch.Tensor]
Fault = Callable[[Tensors], None]
LAYER = "model.decoder.layers.1."
EXPERTS = f"{LAYER}experts."
SCHEMES = ("NVFP4", "FP8_DYNAMIC", "INT8_DYNAMIC")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of four experts, with norms that differ, as no random model's do."""
    folder = tmp_path_factory.mktemp("source") / "bf16"
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(tiny_config(3, 4)).to(torch.bfloat16)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() >= 2:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
            elif tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(source: Path) -> dict[str, Path]:
    """Scheme -> folder of a sound checkpoint in one shard."""
    for name in SCHEMES:
        run(source, source.parent / name, recipe_for(name))
    return {name: source.parent / name for name in SCHEMES}


def swap(a: str, b: str) -> Fault:
    """Exchange all tensors whose names begin with `a` and `b`."""

    def fault(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(a)]:
            other = b + name.removeprefix(a)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return fault


def change(pattern: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Replace tensors whose names match by what `edit` makes of their values."""

    def fault(tensors: Tensors) -> None:
        names = [name for name in tensors if re.fullmatch(pattern, name)]
        assert names
        for name in names:
            tensors[name] = edit(tensors[name]).to(tensors[name].dtype).contiguous()

    return fault


def bits(edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Edit a tensor's bytes."""
    return lambda tensor: edit(tensor.view(torch.uint8)).view(tensor.dtype)


def roll(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Move everything by one place."""
    return lambda tensor: tensor.float().roll(1, dim)


def last_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Change the first number by the least that BF16 can."""
    changed = tensor.clone().view(torch.int16)
    changed.view(-1)[0] ^= 1
    return changed.view(tensor.dtype)


OF_ANY: dict[str, Fault] = {
    "two experts exchanged": swap(f"{EXPERTS}2.", f"{EXPERTS}3."),
    "experts of two layers exchanged": swap(f"{EXPERTS}0.", "model.decoder.layers.0.experts.0."),
    "gate and up of an expert exchanged": swap(f"{EXPERTS}0.gate_proj.", f"{EXPERTS}0.up_proj."),
    "gate and up of an MLP exchanged": swap(f"{LAYER}mlp.gate_proj.", f"{LAYER}mlp.up_proj."),
    "k and v exchanged": swap(f"{LAYER}self_attn.k_proj.", f"{LAYER}self_attn.v_proj."),
    "attention of two layers exchanged": swap(
        f"{LAYER}self_attn.", "model.decoder.layers.0.self_attn."
    ),
    "two norms of a layer exchanged": swap(
        f"{LAYER}input_layernorm.", f"{LAYER}post_attention_layernorm."
    ),
    "norms of two layers exchanged": swap(
        f"{LAYER}input_layernorm.", "model.decoder.layers.0.input_layernorm."
    ),
    "router rolled": change(rf"{LAYER}router\.proj\.weight", roll(0)),
    "scales of a router rolled": change(rf"{LAYER}router\.per_expert_scale", roll(0)),
    "router scaled": change(rf"{LAYER}router\.scale", lambda t: 1.01 * t),
    "scalar of a layer off by a bit": change(rf"{LAYER}layer_scalar", last_bit),
    "embedding off by a row": change(r"model\.decoder\.embed_tokens\.weight", roll(0)),
    "final norm off by a bit": change(r"model\.decoder\.norm\.weight", last_bit),
    "self-conditioning zeroed": change(
        r"model\.decoder\.self_conditioning\.gate_proj\.weight", torch.zeros_like
    ),
    "picture tower zeroed": change(r"model\.encoder\.vision_tower\..*norm\.weight", torch.zeros_like),
}  # fmt: skip
OF_CODES: dict[str, Fault] = {
    "scales a row off": change(rf"{LAYER}mlp\.up_proj\.weight_scale", roll(0)),
    "scales of an expert a row off": change(rf"{EXPERTS}3\.down_proj\.weight_scale", roll(0)),
    "scales doubled": change(rf"{LAYER}self_attn\.o_proj\.weight_scale", lambda t: 2 * t.float()),
    "scales a tenth too large": change(
        rf"{EXPERTS}1\.up_proj\.weight_scale", lambda t: 1.1 * t.float()
    ),
    "scales inverted": change(rf"{LAYER}mlp\.down_proj\.weight_scale", lambda t: 1 / t.float()),
    "a matrix zeroed": change(rf"{EXPERTS}2\.up_proj\.weight(_packed)?", torch.zeros_like),
    "codes a row off": change(
        rf"{EXPERTS}0\.down_proj\.weight(_packed)?", bits(lambda t: t.roll(1, 0))
    ),
    "signs flipped": change(rf"{LAYER}mlp\.up_proj\.weight(_packed)?", bits(lambda t: t ^ 0x88)),
}  # fmt: skip
OF_NVFP4: dict[str, Fault] = {
    "nibbles exchanged": change(
        rf"{EXPERTS}1\.gate_proj\.weight_packed", lambda t: t >> 4 | t << 4
    ),
    "scales a block off": change(rf"{LAYER}self_attn\.q_proj\.weight_scale", roll(1)),
    "global scale a tenth too large": change(
        rf"{LAYER}self_attn\.[qkv]_proj\.weight_global_scale", lambda t: 1.1 * t
    ),
    "global scale inverted": change(rf"{EXPERTS}0\..*\.weight_global_scale", lambda t: 1 / t),
    "a scale that is no number": change(
        rf"{EXPERTS}0\.up_proj\.weight_scale", bits(lambda t: t | 0x7F)
    ),
}
PLANTED = [("NVFP4", name) for name in OF_ANY | OF_NVFP4]
PLANTED += [(scheme, name) for scheme in SCHEMES for name in OF_CODES]


def faults(folder: Path, source: Path) -> list[str]:
    """What the comparison finds wrong."""
    checks = compare(Checkpoint.open(folder), Checkpoint.open(source))["checks"]
    assert all(check["looked_at"] for check in checks)
    return [fault for check in checks for fault in check["faults"]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sound_checkpoint_has_no_fault(
    quantized: dict[str, Path], source: Path, scheme: str
) -> None:
    found = compare(Checkpoint.open(quantized[scheme]), Checkpoint.open(source))
    assert [check["faults"] for check in found["checks"]] == [[], [], []]
    assert found["worst"]["error"] < 1.1 * found["worst"]["nearest"]
    assert {check["name"]: check["looked_at"] > 30 for check in found["checks"]} == {
        "kept": True, "error": True, "length": True,
    }  # fmt: skip
    for name, error in found["relative_error"].items():
        assert 0 < error < 0.13, name


@pytest.mark.parametrize(("scheme", "name"), PLANTED)
def test_no_planted_fault_passes(
    quantized: dict[str, Path], source: Path, tmp_path: Path, scheme: str, name: str
) -> None:
    folder = Path(shutil.copytree(quantized[scheme], tmp_path / "planted"))
    (shard,) = folder.glob("*.safetensors")
    sound = load_file(shard)
    tensors = dict(sound)
    (OF_ANY | OF_CODES | OF_NVFP4)[name](tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    changed = [
        key
        for key in sound
        if not torch.equal(*(t[key].flatten().view(torch.uint8) for t in (sound, tensors)))
    ]
    modules = {key.rsplit(".", 1)[0] for key in changed}
    found = faults(folder, source)
    assert found
    assert all(any(module in fault for module in modules) for fault in found)


def test_the_worst_linear_is_named_first(
    quantized: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(quantized["NVFP4"], tmp_path / "planted"))
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    change(rf"{LAYER}.*\.weight_scale", lambda t: (1.4 * t.float()).clamp(max=448))(tensors)
    # e4m3 ends at 448; beyond it torch 2.11 casts to NaN where later versions saturate
    worse = change(rf"{EXPERTS}3\.up_proj\.weight_scale", lambda t: (2 * t.float()).clamp(max=448))
    worse(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    found = compare(Checkpoint.open(folder), Checkpoint.open(source))
    assert found["worst"]["module"] == f"{EXPERTS}3.up_proj"
    (_, error, length) = found["checks"]
    assert error["faults"][0].startswith(f"{EXPERTS}3.up_proj: relative error ")
    assert length["faults"][0].startswith(f"{EXPERTS}3.up_proj: 1.")


def test_modelopts_layout_is_compared_too(source: Path, tmp_path: Path) -> None:
    """Random codes: every quantized Linear is unlike BF16's, every other tensor is the same."""
    made = foreign(source, {"experts": "modelopt-nvfp4", "mlp": "modelopt-fp8"})
    parts = {"experts": {"quant_algo": "NVFP4"}, "mlp": {"quant_algo": "FP8"}}
    layers = {f"model.decoder.layers.{i}.{part}": parts[part] for i in range(3) for part in parts}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
    }  # fmt: skip
    folder = made.write(tmp_path / "theirs", config)
    found = compare(Checkpoint.open(folder), Checkpoint.open(source))
    kept, error, _ = found["checks"]
    assert (kept["passed"], error["passed"]) == (True, False)
    assert error["looked_at"] == len(made.exact)


def test_a_model_of_another_shape_is_refused(quantized: dict[str, Path], source: Path) -> None:
    other = Checkpoint.open(source)
    del other.tensors["model.decoder.norm.weight"]
    with pytest.raises(
        InputError, match=r"model.decoder.norm.weight is None there, and .*'BF16', 64"
    ):
        compare(Checkpoint.open(quantized["NVFP4"]), other)
