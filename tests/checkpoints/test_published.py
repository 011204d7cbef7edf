"""The published builds' own headers, as patterns: our layouts and our plan give the same tensors.

Source: the public repository dogebi/diffusiongemma-26b-atlas at c72a9584 (hf-bf16.json, hf-fp8.json,
hf-nvfp4.json: every tensor's name, dtype and shape as read from the Hub, and the two config.json). The
values of the weights are not in it.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest

from quantize.checkpoints.layout import bf16_layout, quantized_layout, stated_schemes
from quantize.checkpoints.reader import TensorSpec, known_config
from quantize.checkpoints.targets import plan_targets, sum_bytes
from quantize.recipe.reading import load_recipe
from quantize.stages.convert.convert import quantized_config
from quantize.stages.plan.plan import tensors_from_config

GOOGLE = "google/diffusiongemma-26B-A4B-it"
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
LAYERS, EXPERTS, HIDDEN, FULL = range(30), range(128), 2816, (5, 11, 17, 23, 29)
TREES = ("model.encoder.language_model", "model.decoder")
VISION = [
    "model.encoder.vision_tower.patch_embedder.input_proj",
    *(
        f"model.encoder.vision_tower.encoder.layers.{n}.{part}_proj.linear"
        for n in range(27)
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
                     "mlp.gate", "mlp.up", "mlp.down")
    ),
]  # fmt: skip

REDHAT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True,
                "dynamic": False, "observer": "memoryless_minmax",
            },
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True,
                "dynamic": True, "observer": None,
            },
            "output_activations": None,
        }
    },
    "ignore": [
        *(f"{tree}.layers.{n}.router.proj" for tree in TREES for n in LAYERS),
        *VISION,
        "model.encoder.embed_vision.embedding_projection",
        *(f"model.decoder.self_conditioning.{part}_proj" for part in ("gate", "up", "down")),
        "lm_head",
    ],
    "kv_cache_scheme": None,
}  # fmt: skip
FOUR_BITS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVIDIA = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": FOUR_BITS, "input_activations": FOUR_BITS,
        }
    },
    "ignore": [
        "lm_head", "*embed_vision*", "*mlp*", "*router*", "*self_attn*", "*self_conditioning*",
        "*vision_tower*",
    ],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.45.0.dev127+ga3a02ca5b.d20260608"},
}  # fmt: skip


def released() -> dict[str, Any]:
    found = known_config(GOOGLE)
    assert found is not None
    return found


def experts() -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of each expert's matrices."""
    for layer in LAYERS:
        for expert in EXPERTS:
            stem = f"model.decoder.layers.{layer}.experts.{expert}"
            yield f"{stem}.gate_proj", 704, HIDDEN
            yield f"{stem}.up_proj", 704, HIDDEN
            yield f"{stem}.down_proj", HIDDEN, 704


def dense() -> Iterator[tuple[str, int, int]]:
    """Those of attention and MLPs; layers of full attention have no v_proj."""
    for n in LAYERS:
        stem = f"model.decoder.layers.{n}"
        queries, keys = (8192, 1024) if n in FULL else (4096, 2048)
        yield f"{stem}.self_attn.q_proj", queries, HIDDEN
        yield f"{stem}.self_attn.k_proj", keys, HIDDEN
        if n not in FULL:
            yield f"{stem}.self_attn.v_proj", keys, HIDDEN
        yield f"{stem}.self_attn.o_proj", HIDDEN, queries
        yield f"{stem}.mlp.gate_proj", 2112, HIDDEN
        yield f"{stem}.mlp.up_proj", 2112, HIDDEN
        yield f"{stem}.mlp.down_proj", HIDDEN, 2112


def fp8(module: str, rows: int, columns: int) -> dict[str, TensorSpec]:
    return {
        f"{module}.weight": TensorSpec("F8_E4M3", (rows, columns)),
        f"{module}.weight_scale": TensorSpec("BF16", (rows, 1)),
    }


def nvfp4(module: str, rows: int, columns: int) -> dict[str, TensorSpec]:
    return {
        f"{module}.weight": TensorSpec("U8", (rows, columns // 2)),
        f"{module}.weight_scale": TensorSpec("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": TensorSpec("F32", ()),
        f"{module}.input_scale": TensorSpec("F32", ()),
    }


def published(name: str) -> dict[str, TensorSpec]:
    """Every tensor of a published build."""
    found = dict(bf16_layout(released()))
    if name == "bf16":
        return found
    for layer in LAYERS:
        for part in ("gate_up", "down"):
            del found[f"model.decoder.layers.{layer}.experts.{part}_proj"]
    if name == "nvfp4":
        for module in experts():
            found |= nvfp4(*module)
        return found
    for module in (*experts(), *dense()):
        found |= fp8(*module)
    return found


def nbytes(tensors: dict[str, TensorSpec]) -> int:
    return sum(BYTES[spec.dtype] * prod(spec.shape) for spec in tensors.values())


@pytest.mark.parametrize(
    ("name", "stated", "tensors", "payload"),
    [
        ("bf16", None, 1_047, 51_647_562_456),
        ("fp8", REDHAT, 24_232, 27_197_665_496),
        ("nvfp4", NVIDIA, 47_067, 18_818_050_776),
    ],
)
def test_the_layout_is_the_published_one(
    name: str, stated: dict[str, Any] | None, tensors: int, payload: int
) -> None:
    wanted = published(name)
    assert (len(wanted), nbytes(wanted)) == (tensors, payload)  # as the headers say
    config = released() if stated is None else released() | {"quantization_config": stated}
    found = quantized_layout(config)
    assert found == wanted


def test_what_fp8_dynamic_writes_is_redhats_tensor_for_tensor() -> None:
    recipe, config = load_recipe("fp8_dynamic"), known_config(GOOGLE)
    assert config is not None
    targets = plan_targets(tensors_from_config(config), recipe.quantization)
    ours = quantized_config(released(), targets, recipe)
    assert quantized_layout(ours) == published("fp8")
    assert sum_bytes(targets)[1] == 27_197_665_496
    theirs = stated_schemes({"quantization_config": REDHAT})
    assert theirs is not None
    modules = [module for target in targets for module in target.modules]
    assert {(s := theirs.of(module)) and s.name for module in modules} == {"FP8_DYNAMIC"}
