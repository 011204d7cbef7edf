"""A tiny random DiffusionGemma with every trait of the real layout, for tests."""

import json
from pathlib import Path

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

LAYERS, EXPERTS, VOCAB, CANVAS = 6, 8, 512, 16


def tiny_config(layers: int = LAYERS, experts: int = EXPERTS) -> DiffusionGemmaConfig:
    """5 sliding + 1 full layer, k=v full attention, 8 experts top-2, awkward widths, a tiny tower."""
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": experts,
        "top_k_experts": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        "sliding_window": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "standardize": True,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    }
    return DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=CANVAS,
        image_token_id=VOCAB - 1,
        boi_token_id=VOCAB - 2,
        eoi_token_id=VOCAB - 3,
        architectures=["DiffusionGemmaForBlockDiffusion"],
    )


def tiny_model(seed: int = 0) -> DiffusionGemmaForBlockDiffusion:
    """A random model whose layers all matter: weights drawn at 1/sqrt(fan in)."""
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(tiny_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.to(torch.bfloat16)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the printable ASCII signs, and a template that shows the messages."""
    signs = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {chr(n): n for n in range(32, 127)}
    tokenizer = {
        "version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": signs, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
