"""Makes the GGUF keys and values that llama.cpp's `diffusion-gemma` reads, from a model's configs.

Head sizes and counts come from the tensors' shapes, the rest from config.json, and the sampler's
settings from generation_config.json. llama.cpp takes some traits of the model for granted, and
`checkpoints.config_form` refuses a model without them.
"""

from typing import Any

from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint, read_json_object
from quantize.recipe.controls import CONTROLS

ARCHITECTURE = "diffusion-gemma"


def metadata(source: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's GGUF keys and values."""
    text = model_config(source.config).to_dict()["text_config"]  # with transformers' defaults
    named = {f"{ARCHITECTURE}.{key}": value for key, value in _sizes(source, text).items()}
    return named | _diffusion(source)


def _sizes(source: Checkpoint, text: dict[str, Any]) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in text["layer_types"]]
    heads = [_heads(source, layer) for layer in range(len(sliding))]
    full, swa, rope = sliding.index(False), sliding.index(True), text["rope_parameters"]
    return {
        "block_count": len(sliding),
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "expert_feed_forward_length": text["moe_intermediate_size"],
        "expert_count": text["num_experts"],
        "expert_used_count": text["top_k_experts"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": [kv_heads for _, kv_heads in heads],
        "attention.key_length": heads[full][0],
        "attention.value_length": heads[full][0],
        "attention.key_length_swa": heads[swa][0],
        "attention.value_length_swa": heads[swa][0],
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": sliding,
        "attention.causal": False,
        "final_logit_softcapping": float(text["final_logit_softcapping"]),
        "rope.dimension_count": heads[full][0],  # all dimensions: `rope_freqs` says which rotate
        "rope.dimension_count_swa": heads[swa][0],
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }


def _heads(source: Checkpoint, layer: int) -> tuple[int, int]:
    attention = f"model.decoder.layers.{layer}.self_attn."
    size = source.tensors[f"{attention}k_norm.weight"].shape[0]
    stored = (f"{attention}k_proj.{suffix}" for suffix in ("weight", "weight_packed"))
    rows = next(source.tensors[name].shape[0] for name in stored if name in source.tensors)
    return size, rows // size


def _diffusion(source: Checkpoint) -> dict[str, Any]:
    """Return the canvas length, and the sampler's settings that generation_config.json states."""
    values: dict[str, Any] = {"diffusion.canvas_length": source.config["canvas_length"]}
    path = source.folder / "generation_config.json"
    if not path.is_file():
        return values
    stated = read_json_object(path)
    stated = (stated.get("sampler_config") or {}) | stated
    for name, control in CONTROLS.items():
        if control.metadata["gguf"] and stated.get(name) is not None:
            kind: Any = control.type
            values[f"diffusion.{control.metadata['gguf']}"] = kind(stated[name])
    return values
