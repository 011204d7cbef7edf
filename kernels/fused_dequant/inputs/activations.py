"""Quantizes activations to the form that products read (`formats.Activation`), on a GPU or in torch."""

import torch

from fused_dequant import formats, reference
from fused_dequant.formats import EIGHT_BIT, FOUR_BIT, Activation
from fused_dequant.launch.dispatch import launches


def quantize_rows(
    x: torch.Tensor, scheme: str, shared: torch.Tensor | None = None, *, gelu_mul: bool = False
) -> Activation:
    """Quantize rows x bf16 [M, K] for a product with weights of `scheme`; return codes and scales.

    Codes are 8-bit [M, K] with scales f32 [M]; for nvfp4_e2m1, NVFP4 under the global scale `shared`
    f32 [1] (see `formats.Activation`). With `gelu_mul`, x is [M, 2K], gate first, and gelu_tanh(gate)
    * up is quantized. Raise ValueError for another scheme, or for nvfp4_e2m1 without `shared`.
    """
    if scheme not in EIGHT_BIT and (scheme != FOUR_BIT or shared is None):
        raise ValueError(f"activations are quantized to fp8 or int8, not {scheme}")
    if launches(x.device):
        from fused_dequant.inputs import quantize

        return quantize.quantize_rows(x.contiguous(), scheme, shared, gelu_mul=gelu_mul)
    # Kernels round to bf16 before they make NVFP4 codes. So torch must too, or some codes would differ.
    rows = x.to(torch.bfloat16) if scheme == FOUR_BIT else x.float()
    if gelu_mul:
        rows = reference.gelu_mul(*rows.chunk(2, -1))
    return in_torch(rows, scheme, shared)


def in_torch(x: torch.Tensor, scheme: str, shared: torch.Tensor | None = None) -> Activation:
    """Return what `quantize_rows` returns, made in torch; (x, None) if `scheme` reads bf16 rows."""
    if scheme == FOUR_BIT and shared is not None:
        return formats.quantize_nvfp4(x, shared)
    return formats.quantize_rows(x, EIGHT_BIT[scheme]) if scheme in EIGHT_BIT else (x, None)


def values(x: Activation) -> torch.Tensor:
    """Return a dequantized activation, f32 [M, K]; NVFP4 values still contain the global scale."""
    rows, scale = x
    if scale is None:
        return rows.float()
    if rows.dtype == torch.uint8:
        return formats.dequantize_nvfp4(rows, scale, torch.ones(1, device=rows.device))
    return rows.float() * scale[:, None]
