"""An activation is what a product reads: a pair of rows and scales.

The pair is bf16 [M, K] and None, or e4m3 or int8 [M, K] and f32 [M], one scale a row.
"""

import torch

from fused_dequant import formats, reference
from fused_dequant.dispatch import launches
from fused_dequant.formats import EIGHT_BIT

Activation = tuple[torch.Tensor, torch.Tensor | None]


def quantize_rows(x: torch.Tensor, scheme: str, *, gelu_mul: bool = False) -> Activation:
    """Quantize rows bf16 [M, K] to 8 bits: values of the scheme's dtype [M, K], and scales f32 [M].

    With `gelu_mul` x is [M, 2K], gate first, and gelu_tanh(gate) * up is quantized.

    Raises:
        ValueError: the scheme's activations are not quantized.
    """
    if scheme not in EIGHT_BIT:
        raise ValueError(f"activations are quantized to fp8 or int8, not {scheme}")
    if launches(x.device):
        from fused_dequant import quantize

        return quantize.quantize_rows(x.contiguous(), scheme, gelu_mul=gelu_mul)
    rows = x.float()
    if gelu_mul:
        rows = reference.gelu_mul(*rows.chunk(2, -1))
    return formats.quantize_rows(rows, EIGHT_BIT[scheme])


def in_torch(x: torch.Tensor, scheme: str) -> Activation:
    """Return bf16 rows as a product of `scheme` reads them, computed in torch."""
    return formats.quantize_rows(x, EIGHT_BIT[scheme]) if scheme in EIGHT_BIT else (x, None)


def values(x: Activation) -> torch.Tensor:
    """Return the float32 values of an activation."""
    rows, scale = x
    return rows.float() if scale is None else rows.float() * scale[:, None]
