"""How each scheme's products read their inputs, in torch: the truth that kernels are compared with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from fused_dequant import formats
from torch import Tensor

from quantize.schemes.records import Scheme

Rounding = Callable[[Tensor, float | None], Tensor]


def round_tokens(dtype: torch.dtype, x: Tensor, _: float | None) -> Tensor:
    """Return x [..., K] in its dtype, after rounding to e4m3 or int8 (`dtype`), one scale per token."""
    codes, scale = formats.quantize_rows(x, dtype)
    return (codes.float() * scale[..., None]).to(x.dtype)


def round_groups(x: Tensor, global_scale: float | None) -> Tensor:
    """Return x [..., K] in its dtype, rounded in FP32 to e2m1 with one e4m3 scale per 16 values.

    `global_scale` is 448 * 6 / amax, as calibrated; values beyond amax saturate.
    """
    shared = torch.tensor([global_scale], dtype=torch.float32, device=x.device)
    codes, scale = formats.round_groups(x, shared)
    return (codes * (scale / shared).unsqueeze(-1)).flatten(-2).to(x.dtype)


def dequantize_in_e4m3(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the BF16 weights [..., out, in] that W4A8 makes of NVFP4; `tensors` maps suffix -> tensor.

    They are `formats.nvfp4_as_e4m3` * 8 / global scale. Their relative error to the NVFP4 values is at
    most 1/17, but blocks with a scale below `formats.E4M3_LEAST_SCALE` become 0.
    """
    if "weight_scale_2" in tensors:  # ModelOpt's: a small number, a factor
        packed, shared = tensors["weight"], 8 * tensors["weight_scale_2"]
    else:
        packed, shared = tensors["weight_packed"], 8 / tensors["weight_global_scale"].unsqueeze(-1)
    codes = formats.nvfp4_as_e4m3(packed, tensors["weight_scale"])
    return codes.float().mul_(shared).bfloat16()


def as_multiplied(scheme: Scheme, mode: str) -> Scheme:
    """Return the scheme, or its W4A8 variant if `mode` is `fp8` and the weights are NVFP4."""
    if mode != "fp8" or scheme.kernel != "nvfp4":
        return scheme
    return replace(scheme, dequantize=dequantize_in_e4m3, calibrated=False)


def round_activations(scheme: Scheme) -> Rounding | None:
    """Return (x [..., K], input global scale or None) -> x as the product reads it; None for BF16."""
    if scheme.dequantize is dequantize_in_e4m3:
        return partial(round_tokens, formats.FP8)
    if scheme.config_activations is None:
        return None
    eight = formats.EIGHT_BIT.get(scheme.kernel)
    return round_groups if eight is None else partial(round_tokens, eight)
