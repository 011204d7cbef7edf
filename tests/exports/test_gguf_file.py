"""Whole files: each tensor read back by the `gguf` package and compared with the checkpoint's bits."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from fused_dequant.formats import unpack_e2m1
from safetensors.torch import load_file, save_file

import quantize.checkpoints.shards
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.shards import state_path
from quantize.errors import ResourceError
from quantize.exports.gguf_file import export_gguf
from quantize.host.locks import locked
from quantize.runs.manifest import fingerprint
from tests.support.conversions import recipe_for, run
from tests.support.exported import read_keys, read_tensors, shape_of, values_of

LAYERS, FULL = 6, 5
# GGUF's names, per layer, beside those on disk; written down from llama.cpp's table, not from ours.
IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "layer_output_scale.weight": "layer_scalar",
}
TOP = {
    "token_embd.weight": "model.decoder.embed_tokens.weight",
    "output_norm.weight": "model.decoder.norm.weight",
    "self_cond_pre_norm.weight": "model.decoder.self_conditioning.pre_norm.weight",
    "self_cond_gate.weight": "model.decoder.self_conditioning.gate_proj.weight",
    "self_cond_up.weight": "model.decoder.self_conditioning.up_proj.weight",
    "self_cond_down.weight": "model.decoder.self_conditioning.down_proj.weight",
}


def bf16_names() -> dict[str, str]:
    """GGUF name -> on-disk name of every tensor of the bundled model but rope_freqs."""
    names = dict(TOP)
    for layer in range(LAYERS):
        encoder = f"model.encoder.language_model.layers.{layer}.layer_scalar"
        names[f"blk.{layer}.enc_layer_output_scale.weight"] = encoder
        for theirs, ours in IN_LAYER.items():
            names[f"blk.{layer}.{theirs}"] = f"model.decoder.layers.{layer}.{ours}"
    del names[f"blk.{FULL}.attn_v.weight"]  # a full-attention layer has none
    return names


def exported(source: Path, out: Path, **options) -> Path:
    export_gguf(Checkpoint.open(source), out, name="a model", **options)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def bf16(folder: Path) -> Path:
    return exported(CHECKPOINT, folder / "bf16.gguf")


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Path:
    """The bundled model in NVFP4."""
    run(CHECKPOINT, folder / "nvfp4", recipe_for("NVFP4"))
    return folder / "nvfp4"


@pytest.fixture(scope="module")
def nvfp4(folder: Path, quantized: Path) -> Path:
    return exported(quantized, folder / "nvfp4.gguf")


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_bf16_is_the_checkpoint_tensor_by_tensor(bf16: Path):
    source, found = load_file(CHECKPOINT / "model.safetensors"), read_tensors(bf16)
    names = bf16_names()
    assert found.keys() == names.keys() | {"rope_freqs.weight"}
    assert {n for n in source if "vision" not in n} == set(names.values())
    for theirs, ours in names.items():
        weight = source[ours].float()
        assert shape_of(found[theirs]) == tuple(weight.shape)
        assert torch.equal(torch.from_numpy(values_of(found[theirs])), weight), theirs
        exact = weight.ndim == 1 or "ffn_gate_inp" in theirs
        assert found[theirs].tensor_type.name == ("F32" if exact else "BF16"), theirs


def test_angles_of_full_layers_rotate_a_quarter(bf16: Path):
    freqs = values_of(read_tensors(bf16)["rope_freqs.weight"])
    assert freqs.tolist() == [1.0] * 8 + [np.float32(1e30)] * 24  # heads of 64, of which 16 rotate


def test_q8_0_has_the_gguf_packages_codes(folder: Path):
    out = exported(CHECKPOINT, folder / "q8_0.gguf", kept_as="Q8_0")
    source, found = load_file(CHECKPOINT / "model.safetensors"), read_tensors(out)
    kinds = {theirs: tensor.tensor_type.name for theirs, tensor in found.items()}
    assert sorted(set(kinds.values())) == ["F32", "Q8_0"]
    for theirs, ours in bf16_names().items():
        weight = source[ours].float().numpy()
        assert (kinds[theirs] == "Q8_0") == (weight.ndim > 1 and "ffn_gate_inp" not in theirs)
        wanted = gguf.quants.quantize(weight, found[theirs].tensor_type)
        assert np.array_equal(np.asarray(found[theirs].data), wanted), theirs


def linears_of(nvfp4: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each NVFP4 tensor of a file and the Linears on disk that stand in it, in order."""
    projections = {"attn_q": "self_attn.q", "attn_k": "self_attn.k", "attn_v": "self_attn.v"}
    projections |= {"attn_output": "self_attn.o", "ffn_gate": "mlp.gate", "ffn_up": "mlp.up"}
    projections |= {"ffn_down": "mlp.down"}
    for name, tensor in read_tensors(nvfp4).items():
        if tensor.tensor_type.name != "NVFP4":
            continue
        _, layer, kind, _ = name.split(".")
        above = f"model.decoder.layers.{layer}."
        if kind.endswith("_exps"):
            projection = kind.removeprefix("ffn_").removesuffix("_exps")
            yield name, [f"{above}experts.{e}.{projection}_proj" for e in range(16)]
        else:
            yield name, [f"{above}{projections[kind]}_proj"]


def test_nvfp4_keeps_codes_and_scales_bit_for_bit(nvfp4: Path, quantized: Path):
    source, found = load_file(quantized / "model.safetensors"), read_tensors(nvfp4)
    seen: list[str] = []
    for name, modules in linears_of(nvfp4):
        packed = torch.stack([source[f"{m}.weight_packed"] for m in modules])
        scales = torch.stack([source[f"{m}.weight_scale"] for m in modules])
        blocks = np.asarray(found[name].data).reshape(-1, 36)
        assert np.array_equal(blocks[:, :4].reshape(-1), scales.view(torch.uint8).flatten())
        exact = unpack_e2m1(packed).unflatten(-1, (-1, 16)) * scales.float().unsqueeze(-1)
        assert torch.equal(torch.from_numpy(values_of(found[name])).flatten(), exact.flatten())
        expected = 1 / torch.cat([source[f"{m}.weight_global_scale"] for m in modules])
        if name.endswith("ffn_down_exps.weight"):
            above = modules[0].split("experts")[0]
            expected = source[f"{above}router.per_expert_scale"].float() * expected
        scale = values_of(found[name.removesuffix("weight") + "scale"])
        assert torch.equal(torch.from_numpy(scale), expected), name
        seen += modules
    assert sorted(seen) == sorted(n[:-14] for n in source if n.endswith(".weight_packed"))
    assert len(seen) == 6 * (7 + 3 * 16) - 1


def test_what_nvfp4_leaves_is_as_in_bf16(nvfp4: Path, bf16: Path):
    plain, found = read_tensors(bf16), read_tensors(nvfp4)
    quantized = {name for name, _ in linears_of(nvfp4)}
    scales = {name.removesuffix("weight") + "scale" for name in quantized}
    split = {f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(6) for part in ("gate", "up")}
    assert quantized >= split
    for name in found.keys() - quantized - scales:
        assert np.array_equal(found[name].data, plain[name].data), name
        assert found[name].tensor_type == plain[name].tensor_type


def test_the_rest_of_nvfp4_may_be_q8_0(folder: Path, quantized: Path, nvfp4: Path):
    found = read_tensors(exported(quantized, folder / "mixed.gguf", kept_as="Q8_0"))
    kept = [name for name, tensor in found.items() if tensor.tensor_type.name == "Q8_0"]
    assert sorted(kept) == sorted(n for n in TOP if "norm" not in n)
    plain = read_tensors(nvfp4)
    for name, _ in linears_of(nvfp4):
        assert np.array_equal(found[name].data, plain[name].data)


def test_modelopts_nvfp4_is_the_same_file(folder: Path, quantized: Path, nvfp4: Path):
    source = load_file(quantized / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in source.items():
        stem = name.removesuffix("_packed")
        if name.endswith("global_scale"):
            stem = name.replace("weight_global_scale", "weight_scale_2")
            stem = stem.replace("input_global_scale", "input_scale")
            tensor = (1 / tensor)[0]
        renamed[stem] = tensor
    theirs = folder / "modelopt"
    shutil.copytree(CHECKPOINT, theirs, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(renamed, theirs / "model.safetensors")
    config = json.loads((theirs / "config.json").read_text())
    ignore = ["lm_head", "*router*", "*self_conditioning*", "*vision*"]
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    (theirs / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    ours, found = read_tensors(nvfp4), read_tensors(exported(theirs, folder / "modelopt.gguf"))
    assert list(found) == list(ours)
    for name, tensor in found.items():
        assert np.array_equal(tensor.data, ours[name].data), name


def test_what_the_file_says_of_the_model(nvfp4: Path, quantized: Path):
    keys = read_keys(nvfp4)
    said = {key.removeprefix("diffusion-gemma."): value for key, value in keys.items()}
    expected = {
        "general.architecture": "diffusion-gemma",
        "general.name": "a model",
        "general.file_type": 39,
        "quantize.fingerprint": fingerprint(Checkpoint.open(quantized)),
        "block_count": 6,
        "context_length": 4096,
        "embedding_length": 256,
        "feed_forward_length": 192,
        "expert_feed_forward_length": 64,
        "expert_count": 16,
        "expert_used_count": 4,
        "attention.head_count": 8,
        "attention.head_count_kv": [4, 4, 4, 4, 4, 2],
        "attention.key_length": 64,
        "attention.value_length_swa": 32,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [True] * 5 + [False],
        "attention.causal": False,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "final_logit_softcapping": 30.0,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 64,
        "diffusion.canvas_length": 64,
        "diffusion.eb_max_steps": 48,
        "diffusion.eb_t_min": pytest.approx(0.4),
        "diffusion.eb_t_max": pytest.approx(0.8),
        "diffusion.eb_entropy_bound": pytest.approx(0.1),
        "diffusion.eb_stability_threshold": 1,
        "diffusion.eb_confidence_threshold": pytest.approx(0.005),
    }
    assert {key: said.get(key) for key in expected} == expected


def test_an_interrupted_export_goes_on_to_the_same_bytes(
    folder: Path, bf16: Path, monkeypatch: pytest.MonkeyPatch
):
    out = folder / "again.gguf"
    partial = out.with_name("again.gguf.partial")
    written: list[int] = []
    write = quantize.checkpoints.shards._write

    def failing(path, shard, *rest):
        if len(written) == 3:
            raise ResourceError("the power went")
        written.append(shard.begin)
        return write(path, shard, *rest)

    monkeypatch.setattr(quantize.checkpoints.shards, "_write", failing)
    with pytest.raises(ResourceError, match="the power went"):
        exported(CHECKPOINT, out, stretch=2e6)
    assert not out.exists()
    done = set(json.loads(state_path(partial).read_text())["finished"])
    assert len(done) == 3
    with (partial / out.name).open("r+b") as file:  # the third finished stretch is damaged
        file.seek(written[2] + 1000)
        file.write(b"damage")
    first, *_ = written
    written.clear()
    monkeypatch.setattr(
        quantize.checkpoints.shards,
        "_write",
        lambda path, shard, *rest: written.append(shard.begin) or write(path, shard, *rest),
    )
    exported(CHECKPOINT, out, stretch=2e6)
    assert first not in written
    assert len(written) >= 4  # the damaged stretch and those behind it
    assert out.read_bytes() == bf16.read_bytes()
    assert [*folder.glob("again.gguf.*")] == []


def test_two_exports_of_one_file(folder: Path, bf16: Path):
    out = folder / "twice.gguf"
    lock = folder / "twice.gguf.partial.lock"
    with (
        locked(lock, str(out)),
        pytest.raises(ResourceError, match=f"twice.gguf: process {os.getpid()} is at work there"),
    ):
        exported(CHECKPOINT, out)
    assert not out.exists()
    assert exported(CHECKPOINT, out).read_bytes() == bf16.read_bytes()
    assert not lock.exists()
