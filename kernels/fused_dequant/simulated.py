"""Products for calibration and scoring; inputs are rounded as W4A4 rounds them, or not at all.

    round_nvfp4        rounds rows to NVFP4; returns codes times block scales as bf16 (`rounding`)
    scaled             an NVFP4 weight for such rows; its factor is divided by the rows' global scale
    plain              an 8-bit weight in bf16, for rows that are not rounded
    experts            routed experts; rows are rounded with one scale per expert, or one in all, or not

Products differ from those of W4A4 only in the order of float32 sums. A CPU computes them in torch.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_dequant import formats, weights
from fused_dequant.formats import EIGHT_BIT, Activation
from fused_dequant.launch.dispatch import launches
from fused_dequant.operations import routed_experts
from fused_dequant.weights.kept import kept
from fused_dequant.weights.weight import Weight

EXPERTS_AT_ONCE = 16  # that `plain` converts at once; in float32, all of a layer would take 4 GB


def round_nvfp4(x: Tensor, global_scale: Tensor, experts: Tensor | None = None) -> Tensor:
    """Round x bf16 or f32 [M, K], K % 16 == 0, to NVFP4; return codes times block scales, bf16 [M, K].

    `global_scale` is f32 [1]. With `experts` int [M, topk], `global_scale` is f32 [E]: each row is
    rounded once for each of its experts, and the result is [M * topk, K].
    """
    if launches(x.device):
        from fused_dequant.inputs import rounding

        chosen = None if experts is None else experts.contiguous()
        return rounding.round_nvfp4(x.contiguous(), global_scale, chosen)
    return round_in_torch(x, global_scale, experts)


def round_in_torch(x: Tensor, global_scale: Tensor, experts: Tensor | None = None) -> Tensor:
    """Return what `round_nvfp4` returns, computed by plain torch on any device."""
    if experts is not None:
        x = x.repeat_interleave(experts.shape[1], 0)
        global_scale = global_scale[experts.flatten().long()]
    rounded, scale = formats.round_groups(x, global_scale[:, None])
    return (rounded * scale[..., None]).flatten(-2).to(torch.bfloat16)


def scaled(weight: Weight, global_scale: Tensor) -> Weight:
    """Return NVFP4 `weight` with its factor divided by the rows' `global_scale` f32 [1] or [E].

    Raise ValueError if the weight has no factor: it is then not NVFP4.
    """
    if weight.factor is None:
        raise ValueError(f"rounded rows are multiplied with NVFP4 weights, not {weight.scheme}")
    return replace(weight, factor=weight.factor / global_scale[:, None])


def plain(weight: Weight) -> Weight:
    """Return an 8-bit weight in bf16, for rows that are not rounded; return other weights unchanged."""
    if weight.scheme not in EIGHT_BIT or weight.scale is None:
        return weight
    if launches(weight.data.device):
        return weights.bf16(_in_bf16(weight))
    return weights.bf16(kept(weight.data, "bf16", lambda: _in_bf16(weight)))


def _in_bf16(weight: Weight) -> Tensor:
    values = torch.empty(weight.data.shape, dtype=torch.bfloat16, device=weight.data.device)
    assert weight.scale is not None
    parts = (tensor.split(EXPERTS_AT_ONCE) for tensor in (values, weight.data, weight.scale))
    for out, data, scale in zip(*parts, strict=True):
        out.copy_(weights.dequantize(replace(weight, data=data, scale=scale)))
    return values


def experts(
    x: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    scales: tuple[Tensor, Tensor] | None = None,
    see: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return `operations.routed_experts` [M, topk, H] for x bf16 [M, H], rounding products' inputs.

    `scales` are two global scales f32 [E] or [1], for the inputs of gate_up and of down. If None,
    nothing is rounded. Weights are bf16 or NVFP4; bf16 with `scales` raises ValueError. gate_up is
    interleaved; all `ids` [M, topk] are in 0..E-1. If given, `see` gets the input of down before
    rounding: bf16 [M * topk, I], in the order of `ids`.
    """

    def rounded(rows: Tensor, product: int, chosen: Tensor) -> Tensor:
        if scales is None:
            return rows
        global_scale = scales[product]
        return round_nvfp4(rows, global_scale, chosen if len(global_scale) > 1 else None)

    def between(hidden: Tensor) -> Activation:
        hidden = hidden.to(torch.bfloat16)  # as on a GPU: other roundings could give other codes
        if see is not None:
            see(hidden)
        return rounded(hidden, 1, ids.reshape(-1, 1)), None

    if scales is not None:
        gate_up, down = (scaled(*pair) for pair in zip((gate_up, down), scales, strict=True))
    rows = rounded(x, 0, ids)
    return routed_experts(rows, None, ids, routing_weights, gate_up, down, between)
