"""Computes the names and shapes of a DiffusionGemma's tensors from its config only.

The result equals that of transformers, which needs 6 s of one core to build its model; a test compares
every tensor. If the vision tower is not as in Google's release, `layout` uses transformers.
"""

from typing import Any

from quantize.checkpoints.reader import TensorSpec

# Names, each followed by its shape, one letter per dimension: H hidden size, V vocabulary, F width of
# a dense MLP, E experts, I width of an expert, U = 2 I (its gate and up), Q all queries, K all keys, D
# one head, C values of a patch, P positions. For the vision tower, H is its own size, T the text's.
DECODER = """
    embed_tokens.weight VH  norm.weight H  self_conditioning.pre_norm.weight H
    self_conditioning.gate_proj.weight FH  self_conditioning.up_proj.weight FH
    self_conditioning.down_proj.weight HF
"""
LAYER = """
    layer_scalar 1  self_attn.q_proj.weight QH  self_attn.k_proj.weight KH  self_attn.v_proj.weight KH
    self_attn.o_proj.weight HQ  self_attn.q_norm.weight D  self_attn.k_norm.weight D
    mlp.gate_proj.weight FH  mlp.up_proj.weight FH  mlp.down_proj.weight HF
    router.scale H  router.per_expert_scale E  router.proj.weight EH
    experts.gate_up_proj EUH  experts.down_proj EHI
    input_layernorm.weight H  post_attention_layernorm.weight H  pre_feedforward_layernorm.weight H
    post_feedforward_layernorm.weight H  post_feedforward_layernorm_1.weight H
    post_feedforward_layernorm_2.weight H  pre_feedforward_layernorm_2.weight H
"""
TOWER = """
    std_bias H  std_scale H  patch_embedder.position_embedding_table 2PH
    patch_embedder.input_proj.weight HC
"""
TOWER_LAYER = """
    self_attn.q_proj.linear.weight QH  self_attn.k_proj.linear.weight KH
    self_attn.v_proj.linear.weight KH  self_attn.o_proj.linear.weight HQ
    self_attn.q_norm.weight D  self_attn.k_norm.weight D
    mlp.gate_proj.linear.weight FH  mlp.up_proj.linear.weight FH  mlp.down_proj.linear.weight HF
    input_layernorm.weight H  post_attention_layernorm.weight H  pre_feedforward_layernorm.weight H
    post_feedforward_layernorm.weight H
"""


def spelled_out(config: dict[str, Any]) -> dict[str, TensorSpec] | None:
    """Return on-disk name -> spec of each BF16 tensor; None if transformers must build the model."""
    text, vision = config["text_config"], config["vision_config"]
    if vision["standardize"] is not True or vision["use_clipped_linears"] is not False:
        return None
    sizes = {"1": 1, "H": text["hidden_size"], "V": text["vocab_size"], "E": text["num_experts"]}
    sizes |= {"F": text["intermediate_size"], "I": text["moe_intermediate_size"]}
    sizes["U"] = 2 * sizes["I"]
    found = _specs("model.decoder", DECODER, sizes)
    for index, kind in enumerate(text["layer_types"]):
        layer, full = f"layers.{index}", kind == "full_attention"
        D = text["global_head_dim" if full else "head_dim"]
        heads = text["num_global_key_value_heads" if full else "num_key_value_heads"]
        own = sizes | {"D": D, "Q": text["num_attention_heads"] * D, "K": heads * D}
        found |= _specs(f"model.encoder.language_model.{layer}", "layer_scalar 1", own)
        found |= _specs(f"model.decoder.{layer}", LAYER, own)
        if full:  # its keys are its values
            del found[f"model.decoder.{layer}.self_attn.v_proj.weight"]
    return found | _tower(vision, text["hidden_size"])


def _tower(vision: dict[str, Any], hidden: int) -> dict[str, TensorSpec]:
    D, root = vision["head_dim"], "model.encoder.vision_tower"
    sizes = {"2": 2, "P": vision["position_embedding_size"], "C": 3 * vision["patch_size"] ** 2}
    sizes |= {"H": vision["hidden_size"], "F": vision["intermediate_size"], "D": D, "T": hidden}
    sizes |= {"Q": vision["num_attention_heads"] * D, "K": vision["num_key_value_heads"] * D}
    found = _specs(root, TOWER, sizes)
    for index in range(vision["num_hidden_layers"]):
        found |= _specs(f"{root}.encoder.layers.{index}", TOWER_LAYER, sizes)
    return found | _specs("model.encoder.embed_vision", "embedding_projection.weight TH", sizes)


def _specs(root: str, table: str, sizes: dict[str, int]) -> dict[str, TensorSpec]:
    words = table.split()
    return {
        f"{root}.{name}": TensorSpec("BF16", tuple(sizes[letter] for letter in letters))
        for name, letters in zip(words[::2], words[1::2], strict=True)
    }
