"""Quantizes activations as products read them (`formats.Activation`), on a GPU or in torch."""

import torch

from fused_dequant import formats, reference
from fused_dequant.dispatch import launches
from fused_dequant.formats import EIGHT_BIT, FOUR_BIT, Activation


def quantize_rows(
    x: torch.Tensor, scheme: str, shared: torch.Tensor | None = None, *, gelu_mul: bool = False
) -> Activation:
    """Quantize rows bf16 [M, K] for products with weights of `scheme`: to 8 bits, or to NVFP4.

    `shared` f32 [1] is the global scale of NVFP4 rows, else None. With `gelu_mul` x is [M, 2K], gate
    first, and gelu_tanh(gate) * up is quantized. Raise ValueError if such products read bf16.
    """
    if scheme not in EIGHT_BIT and shared is None:
        raise ValueError(f"activations are quantized to fp8 or int8, not {scheme}")
    if launches(x.device):
        from fused_dequant import quantize

        return quantize.quantize_rows(x.contiguous(), scheme, shared, gelu_mul=gelu_mul)
    # NVFP4's are bf16 before they get codes, as where kernels run: another rounding, another code
    rows = x.to(torch.bfloat16) if scheme == FOUR_BIT else x.float()
    if gelu_mul:
        rows = reference.gelu_mul(*rows.chunk(2, -1))
    return in_torch(rows, scheme, shared)


def in_torch(x: torch.Tensor, scheme: str, shared: torch.Tensor | None = None) -> Activation:
    """Do what `quantize_rows` does, in torch; rows stay as they are if the scheme reads bf16."""
    if scheme == FOUR_BIT and shared is not None:
        return formats.quantize_nvfp4(x, shared)
    return formats.quantize_rows(x, EIGHT_BIT[scheme]) if scheme in EIGHT_BIT else (x, None)


def values(x: Activation) -> torch.Tensor:
    """Return an activation dequantized, f32 [M, K]; NVFP4's is still multiplied by its global scale."""
    rows, scale = x
    if scale is None:
        return rows.float()
    if rows.dtype == torch.uint8:
        return formats.dequantize_nvfp4(rows, scale, torch.ones(1, device=rows.device))
    return rows.float() * scale[:, None]
