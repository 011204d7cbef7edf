"""The tensors of a DiffusionGemma by name and shape, from its config alone: H hidden, V vocabulary.

They are those of the model that transformers builds, without importing it. Only configs that say
everything a shape depends on are spelled out, so that no default of a library is written down a second
time; a test compares every name and shape with transformers'.
"""

from collections.abc import Iterator
from typing import Any

from quantize.checkpoints.reader import TensorSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]

TEXT_SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "num_attention_heads",
    "num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim",
    "num_hidden_layers", "vocab_size",
)  # fmt: skip
VISION_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "patch_size", "position_embedding_size",
)  # fmt: skip
LARGEST = 1 << 24  # the largest size spelled out here; transformers may refuse what is larger


def spelled_out(config: dict[str, Any]) -> dict[str, TensorSpec] | None:
    """Return on-disk name -> spec of the BF16 checkpoint, None where the config leaves a shape open."""
    text, vision = config.get("text_config"), config.get("vision_config")
    if not (
        isinstance(text, dict) and isinstance(vision, dict) and _says_all(config, text, vision)
    ):
        return None
    H = text["hidden_size"]
    shapes = dict(_text(text)) | dict(_tower(vision))
    shapes["model.encoder.embed_vision.embedding_projection.weight"] = (H, vision["hidden_size"])
    return {name: TensorSpec("BF16", shape) for name, shape in shapes.items()}


def _says_all(config: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]) -> bool:
    sizes = [text.get(key) for key in TEXT_SIZES] + [vision.get(key) for key in VISION_SIZES]
    kinds = text.get("layer_types")
    return (
        all(type(size) is int and 0 < size < LARGEST for size in sizes)
        and isinstance(kinds, list)
        and len(kinds) == text["num_hidden_layers"]
        and kinds[-1] == "full_attention"
        and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        and text.get("attention_bias") is False
        and "per_layer_config" not in text
        and "attention_k_eq_v" not in text
        and config.get("tie_word_embeddings") is True
        and vision.get("model_type") == "gemma4_vision"
        and vision.get("standardize") is True
        and vision.get("use_clipped_linears") is False
    )


def _text(text: dict[str, Any]) -> Shapes:
    H, F = text["hidden_size"], text["intermediate_size"]
    root = "model.decoder"
    yield f"{root}.embed_tokens.weight", (text["vocab_size"], H)
    yield f"{root}.norm.weight", (H,)
    yield f"{root}.self_conditioning.pre_norm.weight", (H,)
    yield from _mlp(f"{root}.self_conditioning", H, F)
    for index, kind in enumerate(text["layer_types"]):
        layer = f"{root}.layers.{index}"
        yield f"model.encoder.language_model.layers.{index}.layer_scalar", (1,)
        yield f"{layer}.layer_scalar", (1,)
        yield from _attention(layer, text, is_full=kind == "full_attention")
        yield from _mlp(f"{layer}.mlp", H, F)
        yield from _mixture(layer, text)


def _attention(layer: str, text: dict[str, Any], *, is_full: bool) -> Shapes:
    """Full attention has its own widths, and its keys are its values."""
    D = text["global_head_dim" if is_full else "head_dim"]
    wide = text["num_attention_heads"] * D
    narrow = text["num_global_key_value_heads" if is_full else "num_key_value_heads"] * D
    H = text["hidden_size"]
    yield f"{layer}.self_attn.q_proj.weight", (wide, H)
    yield f"{layer}.self_attn.k_proj.weight", (narrow, H)
    if not is_full:
        yield f"{layer}.self_attn.v_proj.weight", (narrow, H)
    yield f"{layer}.self_attn.o_proj.weight", (H, wide)
    yield from _norms(f"{layer}.self_attn", D, "q_norm", "k_norm")


def _mixture(layer: str, text: dict[str, Any]) -> Shapes:
    """Router and experts, and the norms around them and around the layer's other halves."""
    H, E, F = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    yield f"{layer}.router.scale", (H,)
    yield f"{layer}.router.per_expert_scale", (E,)
    yield f"{layer}.router.proj.weight", (E, H)
    yield f"{layer}.experts.gate_up_proj", (E, 2 * F, H)
    yield f"{layer}.experts.down_proj", (E, H, F)
    norms = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    yield from _norms(layer, H, *BLOCK_NORMS, *norms, "pre_feedforward_layernorm_2")


BLOCK_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _norms(root: str, width: int, *names: str) -> Shapes:
    for name in names:
        yield f"{root}.{name}.weight", (width,)


def _mlp(root: str, H: int, F: int, kind: str = "weight") -> Shapes:
    yield f"{root}.gate_proj.{kind}", (F, H)
    yield f"{root}.up_proj.{kind}", (F, H)
    yield f"{root}.down_proj.{kind}", (H, F)


def _tower(vision: dict[str, Any]) -> Shapes:
    """The vision tower, whose Linears lie one level deeper."""
    H, D = vision["hidden_size"], vision["head_dim"]
    wide, narrow = vision["num_attention_heads"] * D, vision["num_key_value_heads"] * D
    root = "model.encoder.vision_tower"
    yield f"{root}.std_bias", (H,)
    yield f"{root}.std_scale", (H,)
    table = (2, vision["position_embedding_size"], H)
    yield f"{root}.patch_embedder.position_embedding_table", table
    yield f"{root}.patch_embedder.input_proj.weight", (H, 3 * vision["patch_size"] ** 2)
    for index in range(vision["num_hidden_layers"]):
        layer = f"{root}.encoder.layers.{index}"
        shapes = {"q": (wide, H), "k": (narrow, H), "v": (narrow, H), "o": (H, wide)}
        for letter, shape in shapes.items():
            yield f"{layer}.self_attn.{letter}_proj.linear.weight", shape
        yield from _norms(f"{layer}.self_attn", D, "q_norm", "k_norm")
        yield from _mlp(f"{layer}.mlp", H, vision["intermediate_size"], "linear.weight")
        yield from _norms(layer, H, *BLOCK_NORMS)
