"""The bundled model's shape: DiffusionGemma 26B-A4B in small, with its awkward traits kept.

|                    | google/diffusiongemma-26B-A4B-it | bundled |
|--------------------|----------------------------------|---------|
| layers             | 30 = 5 x (5 sliding + 1 full)    | 6 = 5 sliding + 1 full |
| hidden             | 2816                             | 256 |
| dense intermediate | 2112 = 16.5 x 128                | 192 = 1.5 x 128 |
| expert intermediate| 704 = 5.5 x 128                  | 64 = 0.5 x 128 |
| experts            | 128, top-8                       | 16, top-4 |
| query / KV heads   | 16 / 8 sliding, 16 / 2 full      | 8 / 4 sliding, 8 / 2 full |
| head dim           | 256 sliding, 512 full            | 32 sliding, 64 full |
| vocabulary, canvas | 262144, 256                      | 1024, 64 |

Full-attention layers have no v_proj (their values are the raw keys), the residual shrinks by a
``layer_scalar`` other than one in every layer, and a one-layer vision tower is present but random:
transformers cannot build the class without one, and the problems have no images.
"""

import re
from typing import Any, cast

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from experiments.bundled import tokenizer

CANVAS, CANVASES = 64, 2
LAYERS, HIDDEN, EXPERTS, TOP_K = 6, 256, 16, 4


def config() -> DiffusionGemmaConfig:
    """The table above as a transformers config."""
    text = {
        "hidden_size": HIDDEN,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_experts": EXPERTS,
        "top_k_experts": TOP_K,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_hidden_layers": LAYERS,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "sliding_window": 512,
        "vocab_size": tokenizer.VOCABULARY,
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
    built: Any = DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=CANVAS,
        image_token_id=tokenizer.IMAGE_ID,
        boi_token_id=tokenizer.IMAGE_BEGIN_ID,
        eoi_token_id=tokenizer.IMAGE_END_ID,
        architectures=["DiffusionGemmaForBlockDiffusion"],
    )
    built.eos_token_id = [1, 106, 50]
    return built


def generation_config() -> DiffusionGemmaGenerationConfig:
    """The released model's generation config, except for the answer's length: 2 canvases of 64."""
    return DiffusionGemmaGenerationConfig(
        max_new_tokens=CANVAS * CANVASES,
        max_denoising_steps=48,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
        t_min=0.4,
        t_max=0.8,
        stability_threshold=1,
        confidence_threshold=0.005,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=[1, 106, 50],
    )


@torch.no_grad()
def new_model(seed: int) -> DiffusionGemmaForBlockDiffusion:
    """A float32 model ready to train.

    transformers' own initialisation (std 0.02) does not learn from scratch at this size. Here every
    matrix is drawn at 1/sqrt(fan in), embeddings at 1/sqrt(hidden) (they are scaled by sqrt(hidden)
    on use), and the norms that close a branch start at 0.5.
    """
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config())
    for name, parameter in model.model.decoder.named_parameters():
        if name == "embed_tokens.weight":
            parameter.normal_(0, HIDDEN**-0.5)
        elif parameter.dim() >= 2:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        elif re.search(r"post_(attention|feedforward)_layernorm\.weight$", name):
            parameter.fill_(0.5)
    for tree in (model.model.decoder, model.model.encoder.language_model):
        for i, layer in enumerate(tree.layers):
            cast(torch.Tensor, layer.layer_scalar).fill_((10 + i) / 16)  # exact in BF16
    model.generation_config = generation_config()
    return model
