"""The loader takes a whole checkpoint or none, and dequantizes as compressed-tensors does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from quantize.checkpoints import load as load_module
from quantize.checkpoints.config_form import google_form
from quantize.checkpoints.layout import ConfigSchemes
from quantize.checkpoints.load import lazy_weights, load, read_input_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.stages.verify.decompression import Decompressor
from tests.support.conversions import DENSE, MIXED, recipe_for, run
from tests.support.tiny import EXPERTS, LAYERS

EXPERT = "model.decoder.layers.2.experts.3.up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["fp8", "nvfp4"])
def artifact(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_artifact")


def test_bf16_weights_come_back_as_they_are(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(tiny_checkpoint, dtype=torch.bfloat16)
    assert capsys.readouterr().err == ""  # no bar of a library's
    saved = load_file(tiny_checkpoint / "model.safetensors")
    state = model.state_dict()
    assert len(saved) == 161
    for name, tensor in saved.items():
        assert torch.equal(state[name], tensor), name


def test_both_trees_hold_the_same_weights_once(artifact: Path) -> None:
    model = load(artifact)
    decoder, encoder = model.model.decoder.layers, model.model.encoder.language_model.layers
    for layer in range(LAYERS):
        ours, theirs = decoder[layer].experts.gate_up_proj, encoder[layer].experts.gate_up_proj
        assert ours.data_ptr() == theirs.data_ptr()
    assert model.lm_head.weight.data_ptr() == model.model.decoder.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    "scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC", "NVFP4", "NVFP4A16", MIXED], ids=str
)
def test_every_quantized_weight_equals_compressed_tensors_decompression(
    tiny_checkpoint: Path, tmp_path: Path, scheme: str | dict[str, list[str]]
) -> None:
    """The version that is installed reads a checkpoint whose config.json has Google's form."""
    run(tiny_checkpoint, tmp_path / "out", recipe_for(scheme))
    checkpoint = Checkpoint.open(tmp_path / "out")
    config = dict(checkpoint.config)
    stated = config.pop("quantization_config")
    assert config == google_form(config)
    groups, decompressor = ConfigSchemes(stated), Decompressor(checkpoint.config)
    weights = {name: lazy[...] for name, lazy in lazy_weights(checkpoint).items()}
    compared = 0
    for module, (scheme_of_module, _) in read_input_schemes(checkpoint).items():
        prefix, _, part = module.rpartition(".")
        if ".experts." in module:
            prefix, _, expert = prefix.rpartition(".")
            fused = weights[f"{prefix}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"]
            mine = fused[int(expert)]
            if part != "down_proj":
                mine = mine.chunk(2)[part == "up_proj"]
        else:
            mine = weights[f"{module}.weight"]
        suffixes = scheme_of_module.compressed.tensors(*mine.shape)
        stored = {suffix: checkpoint.read(f"{module}.{suffix}") for suffix in suffixes}
        theirs = decompressor.weight(str(groups.group_of(module)), stored)
        assert mine.dtype == theirs.dtype == torch.bfloat16
        assert torch.equal(mine, theirs), module
        compared += 1
    assert compared == LAYERS * EXPERTS * 3 + DENSE
    parsed = QuantizationConfig.model_validate(stated)
    assert str(parsed.quantization_status.value) == "compressed"
    for name, group in stated["config_groups"].items():
        assert parsed.config_groups[name].targets == group["targets"]
        assert parsed.config_groups[name].weights.num_bits == group["weights"]["num_bits"]


def test_the_quantized_model_generates(artifact: Path) -> None:
    prompt = torch.randint(3, 480, (1, 12), generator=torch.Generator().manual_seed(0))
    out = load(artifact).generate(prompt, max_new_tokens=16, max_denoising_steps=2)
    assert out.sequences.shape == (1, 28)


def remove_a_tensor(tensors: Tensors) -> str:
    del tensors[f"{EXPERT}.weight_scale"]
    return f"{EXPERT}.weight_scale' is missing"


def rename_an_expert(tensors: Tensors) -> str:
    for name in [n for n in tensors if n.startswith(f"{EXPERT}.")]:
        tensors[name.replace("experts.3", "experts.99")] = tensors.pop(name)
    return f"{EXPERT}.*is missing"


def add_a_tensor(tensors: Tensors) -> str:
    tensors["model.decoder.layers.2.experts.99.up_proj.weight_scale"] = torch.ones(1)
    return "unexpected tensor.*experts.99.up_proj"


def swap_a_scale_dtype(tensors: Tensors) -> str:
    name = f"{EXPERT}.weight_scale"
    tensors[name] = tensors[name].to(torch.float16)
    return f"{name}' is F16"


def poison_a_scale(tensors: Tensors) -> str:
    name = f"{EXPERT}.weight_scale"
    tensors[name][0, 0] = float("nan")
    return f"{name}' holds NaN"


def misshape_a_scale(tensors: Tensors) -> str:
    name = f"{EXPERT}.weight_scale"
    tensors[name] = tensors[name][:-1].clone()
    return f"{name}' is .*config.json calls for"


@pytest.mark.parametrize(
    "damage",
    [
        remove_a_tensor,
        rename_an_expert,
        add_a_tensor,
        swap_a_scale_dtype,
        poison_a_scale,
        misshape_a_scale,
    ],
)
def test_damage_is_refused_with_file_and_key(
    artifact: Path, tmp_path: Path, damage: Callable[[Tensors], str]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    message = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value)


def test_a_block_scale_with_a_sign_is_refused(nvfp4_artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(nvfp4_artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERT}.weight_scale"].view(torch.uint8)[0, 0] |= 0x80
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"{EXPERT}.weight_scale' has negative or NaN scales"):
        load(folder)


def test_a_truncated_shard_is_refused(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(artifact, folder)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors: truncated"):
        load(folder)


def test_a_config_that_does_not_say_quantized_is_refused(artifact: Path, tmp_path: Path) -> None:
    """What transformers would load with random experts and a warning."""
    folder = tmp_path / "damaged"
    shutil.copytree(artifact, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="missing"):
        load(folder)


def test_what_transformers_misses_is_an_error(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own report counts, should a key that the layout asks for not arrive at a module."""
    complete = load_module.lazy_weights

    def one_short(checkpoint: Checkpoint) -> dict:
        found = complete(checkpoint)
        del found["model.decoder.layers.2.mlp.up_proj.weight"]
        return found

    monkeypatch.setattr(load_module, "lazy_weights", one_short)
    with pytest.raises(InputError, match=r"missing_keys: .*layers\.2\.mlp\.up_proj"):
        load(tiny_checkpoint)


def test_a_total_size_that_lies_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run(tiny_checkpoint, tmp_path / "out", recipe_for("FP8_DYNAMIC"), max_shard_bytes=400_000)
    path = tmp_path / "out/model.safetensors.index.json"
    index = json.loads(path.read_text())
    load(tmp_path / "out")
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    with pytest.raises(
        InputError,
        match=r"index\.json: total_size is \d+, and the tensors, which",
    ):
        load(tmp_path / "out")
