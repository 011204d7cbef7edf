"""Others' checkpoints, NVIDIA ModelOpt's and RedHatAI's, in both loaders: every weight to the bit.

The files come from `foreign`, which shares no code with our writer. They are NOT the published ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_dequant import Weight, formats, weights

from quantize.checkpoints.inspect import inspect
from quantize.checkpoints.layout import bf16_layout, quantized_layout, schemes_by_module
from quantize.checkpoints.load import lazy_weights, load, read_input_schemes, read_weight
from quantize.checkpoints.modelopt import ModelOptSchemes
from quantize.checkpoints.reader import Checkpoint, known_config
from quantize.errors import InputError
from quantize.runtime.weights.load import TextWeights, load_packed
from tests.support.activations import as_multiplied
from tests.support.foreign import Foreign, Format, config_with, foreign
from tests.support.modules_oracle.simulated import load_rounding
from tests.support.tiny import EXPERTS, LAYERS

TEXT = ["experts", "self_attn", "mlp"]
# What the cards say is left alone (RedHatAI), and what ModelOpt writes for "everything but experts".
KEPT = ["lm_head", "re:.*embed.*", "re:.*router", "re:.*vision_tower.*", "re:.*self_conditioning.*"]
NVIDIA = [
    "lm_head", "model.encoder.vision_tower*", "model.encoder.embed_vision*", "*router*",
    "model.decoder.self_conditioning*",
]  # fmt: skip
DENSE = ["model.encoder.language_model.layers.*.self_attn*", "model.decoder.layers.*.mlp*"]


def modelopt(algorithm: str, ignore: list[str], **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, **more}


def compressed(kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    inputs: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    if kind == "ct-nvfp4":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        inputs = {**weights, "dynamic": "local"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": KEPT,
    }


def layers(schemes: dict[str, str]) -> dict[str, Any]:
    """ModelOpt's `quantized_layers`: experts named by their container."""
    names = {"experts": ["experts"], "mlp": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]}
    names["self_attn"] = [f"self_attn.{p}_proj" for p in "qkvo"]
    return {
        f"model.decoder.layers.{n}.{name}": {"quant_algo": algorithm, "group_size": 16}
        for n in range(LAYERS)
        for part, algorithm in schemes.items()
        for name in names[part]
    }


CASES: dict[str, tuple[dict[str, Format], dict[str, Any]]] = {
    "experts": ({"experts": "modelopt-nvfp4"}, modelopt("NVFP4", NVIDIA + DENSE)),
    "nvfp4": (dict.fromkeys(TEXT, "modelopt-nvfp4"), modelopt("NVFP4", NVIDIA)),
    "w4a16": (dict.fromkeys(TEXT, "modelopt-w4a16"), modelopt("W4A16_NVFP4", NVIDIA)),
    "fp8": (dict.fromkeys(TEXT, "modelopt-fp8"), modelopt("fp8", NVIDIA)),
    "mixed": (
        {"experts": "modelopt-nvfp4", "self_attn": "modelopt-fp8"},
        modelopt(
            "MIXED_PRECISION", [], quantized_layers=layers({"experts": "NVFP4", "self_attn": "FP8"})
        ),
    ),
    "redhat-fp8": (dict.fromkeys(TEXT, "ct-fp8"), compressed("ct-fp8")),
    "redhat-nvfp4": (dict.fromkeys(TEXT, "ct-nvfp4"), compressed("ct-nvfp4")),
}
Case = tuple[str, Foreign, Path]


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    kinds, stated = CASES[request.param]
    made = foreign(tiny_checkpoint, kinds)
    folder = made.write(tmp_path_factory.mktemp("foreign") / request.param, config_with(stated))
    return request.param, made, folder


def parts_of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The Linears in a tensor of the BF16 layout."""
    if ".experts." not in name:
        return {name.removesuffix(".weight"): tensor}
    prefix, _, kind = name.rpartition(".")
    found: dict[str, torch.Tensor] = {}
    for expert, weight in enumerate(tensor):
        if kind == "down_proj":
            found[f"{prefix}.{expert}.down_proj"] = weight
        else:
            gate, up = weight.chunk(2)
            found |= {f"{prefix}.{expert}.gate_proj": gate, f"{prefix}.{expert}.up_proj": up}
    return found


def test_dequantized_weights_to_the_bit(case: Case) -> None:
    """`load`, as the makers' code dequantizes: in float32, and then one rounding to BF16."""
    _, made, folder = case
    compared = 0
    for name, lazy in lazy_weights(Checkpoint.open(folder)).items():
        for module, weight in parts_of(name, lazy[...]).items():
            if module in made.single:
                expected = torch.from_numpy(made.single[module]).bfloat16()
                assert torch.equal(weight.view(torch.int16), expected.view(torch.int16)), module
                compared += 1
    assert compared == len(made.single) >= LAYERS * EXPERTS * 3


def test_the_model_loads_and_answers(case: Case) -> None:
    name, made, folder = case
    inputs = read_input_schemes(Checkpoint.open(folder))
    assert inputs.keys() == made.single.keys()
    if name in ("mixed", "redhat-nvfp4"):
        model: Any = load_rounding(folder, "per_expert", dtype=torch.bfloat16)
        out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=16, max_denoising_steps=2)
        assert out.sequences.shape == (1, 19)
    for scheme, scale in inputs.values():
        assert (scale is not None) == (scheme.name == "NVFP4")
        assert scale is None or 300 < scale < 1001  # 1 / input_scale, or input_global_scale


def packed_rows(text: TextWeights) -> dict[str, torch.Tensor]:
    """Every product's weight in float64 by the Linears it was made of, gate and up apart again."""
    found: dict[str, torch.Tensor] = {}

    def put(names: list[str], rows: tuple[Weight, ...]) -> None:
        whole = torch.cat([weights.dequantize(w, torch.float64)[0] for w in rows])
        found.update(zip(names, whole.split(len(whole) // len(names)), strict=True))

    for index, layer in enumerate(text.layers):
        prefix = f"model.decoder.layers.{index}."
        qkv = torch.cat([weights.dequantize(w, torch.float64)[0] for w in layer.qkv])
        heads = text.config.text_config.num_attention_heads
        kv_rows = (len(qkv) - heads * len(layer.q_norm)) // (2 if layer.sliding else 1)
        sizes = [heads * len(layer.q_norm)] + [kv_rows] * (2 if layer.sliding else 1)
        names = [f"{prefix}self_attn.{p}_proj" for p in "qkv"[: len(sizes)]]
        found.update(zip(names, qkv.split(sizes), strict=True))
        put([f"{prefix}self_attn.o_proj"], (layer.o,))
        put([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], layer.gate_up)
        put([f"{prefix}mlp.down_proj"], (layer.down,))
        both = weights.dequantize(layer.experts_gate_up, torch.float64)
        runs = both.unflatten(1, (-1, 2, formats.GATE_UP_RUN))
        down = weights.dequantize(layer.experts_down, torch.float64)
        for e in range(EXPERTS):
            found[f"{prefix}experts.{e}.gate_proj"] = runs[e, :, 0].flatten(0, 1)
            found[f"{prefix}experts.{e}.up_proj"] = runs[e, :, 1].flatten(0, 1)
            found[f"{prefix}experts.{e}.down_proj"] = down[e]
    return found


def test_kernels_weights_are_exact(case: Case) -> None:
    """What the fused kernels multiply by, in float64: no scale was rounded on its way.

    But for the global scale of compressed-tensors, whose inverse is: 2^-24 of it.
    """
    name, made, folder = case
    found = packed_rows(load_packed(folder, "cpu"))
    for module, exact in made.exact.items():
        expected = torch.from_numpy(exact)
        if name == "redhat-nvfp4":
            torch.testing.assert_close(found[module], expected, rtol=2**-24, atol=0)
        else:
            assert torch.equal(found[module], expected), module
    assert len(made.exact) >= LAYERS * EXPERTS * 3


def test_both_loaders_round_nvfp4_alike_for_fp8_products(case: Case) -> None:
    """A scheme's own dequantization rounds to BF16 behind it, the kernels do not; others stay."""
    _, made, folder = case
    checkpoint = Checkpoint.open(folder)
    schemes = schemes_by_module(checkpoint.config)
    plain, found = (packed_rows(load_packed(folder, "cpu", in_fp8=fp8)) for fp8 in (False, True))
    multiplied = {module: as_multiplied(scheme, "fp8") for module, scheme in schemes.items()}
    for name, spec in bf16_layout(checkpoint.config).items():
        read = read_weight(checkpoint, name, spec.shape, multiplied)
        for module, weight in parts_of(name, read).items():
            if module in made.exact:
                torch.testing.assert_close(weight.double(), found[module], rtol=2**-8, atol=0)
                same = torch.equal(plain[module], found[module])
                assert same == (schemes[module].kernel != "nvfp4"), module


@pytest.mark.parametrize("name", CASES)
def test_inspect_finds_nothing_wrong(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    kinds, stated = CASES[name]
    made = foreign(tiny_checkpoint, kinds, fuses=True)
    found = inspect(made.write(tmp_path / name, config_with(stated)))
    assert found.problems == []
    assert found.quantized_modules == len(made.exact)


def test_inspect_finds_scales_that_a_server_would_take_for_others(case: Case) -> None:
    """Each Linear here has scales of its own, as nothing but the loaders may read them."""
    problems = inspect(case[2]).problems
    expected = [] if case[0] == "redhat-fp8" else ["a server fuses them (and"]
    assert len(problems) == len(expected)
    assert all(text in problem for text, problem in zip(expected, problems, strict=True))


ONE = "model.decoder.layers.2.experts.3.up_proj"


def drop(made: Foreign, _: dict[str, Any]) -> None:
    del made.tensors[f"{ONE}.weight_scale_2"]


def add(made: Foreign, _: dict[str, Any]) -> None:
    made.tensors[f"{ONE}.pre_quant_scale"] = made.tensors[f"{ONE}.weight_scale_2"]


def wrong_dtype(made: Foreign, _: dict[str, Any]) -> None:
    made.add(f"{ONE}.weight_scale_2", "BF16", [], b"\x80\x3f")


def zero(made: Foreign, _: dict[str, Any]) -> None:
    made.add(f"{ONE}.weight_scale_2", "F32", [], bytes(4))


def ignored(_: Foreign, stated: dict[str, Any]) -> None:
    stated["ignore"] = [*stated["ignore"], "model.decoder.layers.2.experts"]


def nothing_quantized(_: Foreign, stated: dict[str, Any]) -> None:
    stated.update(modelopt("MIXED_PRECISION", []))


def another_algorithm(_: Foreign, stated: dict[str, Any]) -> None:
    stated["quant_algo"] = "MXFP8"


def cache_scale(made: Foreign, _: dict[str, Any]) -> None:
    name = "model.decoder.layers.0.self_attn.k_proj.k_scale"
    made.add(name, "F32", [], b"\x00\x00\x80\x3f")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, "weight_scale_2' is missing"),
        (add, "unexpected tensor .*pre_quant_scale"),
        (wrong_dtype, r"weight_scale_2' is BF16 \[\] and config.json calls for F32"),
        (zero, r"weight_scale_2'.*(not|that is not) above 0"),
        (ignored, "layers.2.experts.*is missing"),
        (nothing_quantized, "matches no Linear"),
        (another_algorithm, "quant_algo 'MXFP8' is not read here"),
        (cache_scale, "unexpected tensor .*k_scale"),
    ],
)
def test_damage_is_refused_by_both_loaders(
    tiny_checkpoint: Path,
    tmp_path: Path,
    damage: Callable[[Foreign, dict[str, Any]], None],
    message: str,
) -> None:
    kinds, stated = CASES["experts"]
    made, config = foreign(tiny_checkpoint, kinds), config_with({**stated})
    damage(made, config["quantization_config"])
    folder = made.write(tmp_path / "damaged", config)
    with pytest.raises(InputError, match=message):
        load(folder)
    with pytest.raises(InputError, match=message):
        load_packed(folder, "cpu")


def test_old_exports_and_cache_scales(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Only hf_quant_config.json says what is quantized; FP8 cache scales are there and not used."""
    kinds, _ = CASES["experts"]
    made = foreign(tiny_checkpoint, kinds)
    cache_scale(made, {})
    folder = made.write(tmp_path / "old", config_with(None))
    stated = (
        '{"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": {"quant_algo": '
        '"NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["*mlp*", '
        '"*self_attn*", "*router*", "*self_conditioning*", "*vision*", "lm_head"]}}'
    )
    (folder / "hf_quant_config.json").write_text(stated)
    found = packed_rows(load_packed(folder, "cpu"))
    assert all(torch.equal(found[m], torch.from_numpy(v)) for m, v in made.exact.items())
    assert len(made.exact) == LAYERS * EXPERTS * 3
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(InputError, match="does not say under 'quantization'"):
        load(folder)


def test_nearest_entry_and_either_tree_count() -> None:
    layer = "model.encoder.language_model.layers.3"
    schemes = ModelOptSchemes(
        modelopt(
            "MIXED_PRECISION",
            ["*.o_proj"],
            quantized_layers={
                f"{layer}.self_attn": {"quant_algo": "NVFP4"},
                f"{layer}.self_attn.q_proj": {"quant_algo": "FP8"},
            },
        )
    )
    found = [schemes.of(f"model.decoder.layers.3.self_attn.{p}_proj") for p in "qko"]
    assert [scheme and scheme.name for scheme in found] == ["FP8_DYNAMIC", "NVFP4", None]
    assert schemes.of("model.decoder.layers.33.self_attn.q_proj") is None


def test_the_published_number_of_tensors() -> None:
    """RedHatAI's FP8-dynamic has 24,232 tensors, by a report of somebody who read its header."""
    real = known_config("google/diffusiongemma-26B-A4B-it")
    assert real is not None
    config = {**real, "quantization_config": compressed("ct-fp8")}
    assert len(quantized_layout(config)) == 24_232
    assert len(schemes_by_module(config)) == 11_725  # as INT8 ports of the same list count
