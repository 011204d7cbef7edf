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
transformers cannot build the class without one, and the problems have no images. Both configs are read
from the bundled checkpoint. An answer's length, 2 canvases of 64, is not the released model's.
"""

import re
from typing import cast

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
)

from quantize.bundled import CHECKPOINT

CANVAS, CANVASES = 64, 2
HIDDEN, TOP_K = 256, 4


@torch.no_grad()
def new_model(seed: int) -> DiffusionGemmaForBlockDiffusion:
    """A float32 model of the bundled checkpoint's shape, ready to train.

    transformers' own initialisation (std 0.02) does not learn from scratch at this size. Here every
    matrix is drawn at 1/sqrt(fan in), embeddings at 1/sqrt(hidden) (they are scaled by sqrt(hidden)
    on use), and the norms that close a branch start at 0.5.
    """
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig.from_pretrained(CHECKPOINT))
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
    model.generation_config = DiffusionGemmaGenerationConfig.from_pretrained(CHECKPOINT)
    return model
