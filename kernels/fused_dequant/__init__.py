"""Fused dequantize-and-multiply kernels for DiffusionGemma: FP8, INT8 and NVFP4, dense and grouped.

    from fused_dequant import linear, weights
    w = weights.build("fp8", weight, weight_scale)    # or weights.bf16(...)
    y = linear(x, w)                                  # bf16

`operations` has every operation: Triton or Gluon kernels compute it on a GPU, torch elsewhere.
`weights` builds weights, `formats` defines number formats. The package needs only torch and triton.
"""

from fused_dequant import formats, reference, weights
from fused_dequant.formats import Activation
from fused_dequant.inputs.activations import quantize_rows
from fused_dequant.operations import (
    CELLS,
    accept,
    after_attention,
    after_experts,
    attend,
    attention_heads,
    begin,
    choose_experts,
    gelu_mul,
    linear,
    lm_head,
    look,
    look_runs,
    routed_experts,
    sample,
    scaled_norm,
    soft_embedding,
    soft_embedding_of,
)
from fused_dequant.sampler.canvas import CanvasState, Draw, Probabilities, Rules
from fused_dequant.weights.weight import Weight, require
