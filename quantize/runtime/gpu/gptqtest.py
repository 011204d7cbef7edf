"""Checks that GPTQ's kernels round on this GPU as torch does on a CPU: Hessians, codes and scales.

A few codes near a tie may differ, so losses are compared: those that the GPU states, and those of the
tensors that it made.
"""

import torch
from fused_dequant.tune import cases
from fused_dequant.tune.selftest import describe
from torch import Tensor

from quantize.schemes.gptq import energy, gptq
from quantize.schemes.hessians import Hessians
from quantize.schemes.records import Scheme

EXPERTS, OUT, TOKENS = 2, 128, 1024
CPU = torch.device("cpu")


def fault(scheme: Scheme, device: torch.device) -> str | None:
    """Return what is wrong with GPTQ's rounding to `scheme` on a GPU, as a predicate; or None."""
    return describe(lambda: relative_error(scheme, device))


def relative_error(scheme: Scheme, device: torch.device) -> float:
    """Return the largest relative difference between an expert's losses on a GPU and on the CPU."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(TOKENS, cases.INNER, generator=generator)
    x = (x + x.roll(1, 1)).bfloat16()  # neighbours correlate, so GPTQ gains on rounding to nearest
    ids = torch.randint(EXPERTS, (TOKENS, 1), generator=generator)
    weight = torch.randn(EXPERTS, OUT, cases.INNER, generator=generator).bfloat16()
    expected, hessian = _losses(scheme, x, ids, weight, CPU)
    actual, _ = _losses(scheme, x, ids, weight, device, hessian)
    return float(((actual - expected) / expected).abs().max())  # NaN if one is


def _losses(
    scheme: Scheme, x: Tensor, ids: Tensor, weight: Tensor, device: torch.device,
    judged_by: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return losses [2, E], stated and of the tensors, and the Hessians [E, in, in] of rows `x`."""
    hessians = Hessians(["x"], EXPERTS)
    hessians.see("x", x.to(device), ids.to(device))
    hessian, moved = hessians.mean("x"), weight.to(device)
    rounded = gptq(scheme, moved, hessian)
    judge = hessian if judged_by is None else judged_by
    made = scheme.dequantize({name: tensor.cpu() for name, tensor in rounded.tensors.items()})
    error = energy(weight.float() - made.float(), judge) / energy(weight.float(), judge)
    return torch.stack([rounded.loss.cpu(), error]), hessian
