"""Fused dequantize-and-multiply kernels for DiffusionGemma: FP8, INT8 and NVFP4, dense and grouped.

    from fused_dequant import linear, routed_experts, weights
    w = weights.eight_bit(weight, weight_scale)       # or weights.nvfp4(...), weights.bf16(...)
    y = linear(x, w)                                  # bf16

`ops` lists the products, `layer` what stands between them, `denoising` what follows the logits,
`weights` the schemes and `formats` the number formats. On a GPU each runs as Triton or Gluon kernels,
elsewhere as plain torch (`reference`). Only torch and triton are needed.
"""

from fused_dequant import denoising, formats, reference, weights
from fused_dequant.layer import (
    after_attention,
    after_experts,
    attend,
    attend_quantized,
    attention_heads,
    begin,
    choose_experts,
    gelu_mul,
    scaled_norm,
)
from fused_dequant.ops import (
    linear,
    linear_quantized,
    lm_head,
    quantize_rows,
    require,
    routed_experts,
    soft_embedding,
)
from fused_dequant.weights import Weight

__all__ = [
    "Weight",
    "after_attention",
    "after_experts",
    "attend",
    "attend_quantized",
    "attention_heads",
    "begin",
    "choose_experts",
    "denoising",
    "formats",
    "gelu_mul",
    "linear",
    "linear_quantized",
    "lm_head",
    "quantize_rows",
    "reference",
    "require",
    "routed_experts",
    "scaled_norm",
    "soft_embedding",
    "weights",
]
