"""Products for calibration and scoring, whose inputs are rounded as W4A4 rounds them, or observed.

    round_nvfp4        rows -> bf16 rows of codes times block scales (`input_rounding` has the numbers)
    scaled             an NVFP4 weight whose products are those of rows rounded so
    plain              an 8-bit weight in bf16, whose inputs stay as they are
    experts            routed experts, whose inputs are rounded with the scale of each expert, or of all

The factor of an NVFP4 weight takes 1 / global_scale in float32, so the products are those of W4A4 but
for the order of float32 sums. On a CPU the same is done in torch.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_dequant import formats, weights
from fused_dequant.dispatch import launches
from fused_dequant.formats import EIGHT_BIT, Activation
from fused_dequant.kept import kept
from fused_dequant.operations import routed_experts
from fused_dequant.weights import Weight

EXPERTS_AT_ONCE = 16


def round_nvfp4(x: Tensor, global_scale: Tensor, experts: Tensor | None = None) -> Tensor:
    """Round rows bf16 or f32 [M, K] as the module's docstring says: bf16 [M, K]; K is in whole blocks.

    `global_scale` is f32 [1], or [E] with `experts` int [M, topk]: each row is then rounded once for
    each of its experts, bf16 [M * topk, K].
    """
    if launches(x.device):
        from fused_dequant import input_rounding

        chosen = None if experts is None else experts.contiguous()
        return input_rounding.round_nvfp4(x.contiguous(), global_scale, chosen)
    return round_in_torch(x, global_scale, experts)


def round_in_torch(x: Tensor, global_scale: Tensor, experts: Tensor | None = None) -> Tensor:
    """Round as `round_nvfp4` does, in plain torch."""
    if experts is not None:
        x = x.repeat_interleave(experts.shape[1], 0)
        global_scale = global_scale[experts.flatten().long()]
    rounded, scale = formats.round_groups(x, global_scale[:, None])
    return (rounded * scale[..., None]).flatten(-2).to(torch.bfloat16)


def scaled(weight: Weight, global_scale: Tensor) -> Weight:
    """Return an NVFP4 weight whose products are divided by the global scale f32 [1] or [E]."""
    if weight.factor is None:
        raise ValueError(f"rounded rows are multiplied with NVFP4 weights, not {weight.scheme}")
    return replace(weight, factor=weight.factor / global_scale[:, None])


def plain(weight: Weight) -> Weight:
    """Return an 8-bit weight in bf16, so that its inputs stay as they are; others unchanged.

    It goes through float32 some experts at a time: all of a layer's at once would take 4 GB.
    """
    if weight.scheme not in EIGHT_BIT or weight.scale is None:
        return weight
    if launches(weight.data.device):
        return weights.bf16(_in_bf16(weight))
    return weights.bf16(kept(weight.data, "bf16", lambda: _in_bf16(weight)))


def _in_bf16(weight: Weight) -> Tensor:
    found = torch.empty(weight.data.shape, dtype=torch.bfloat16, device=weight.data.device)
    assert weight.scale is not None
    parts = (tensor.split(EXPERTS_AT_ONCE) for tensor in (found, weight.data, weight.scale))
    for out, data, scale in zip(*parts, strict=True):
        out.copy_(weights.dequantize(replace(weight, data=data, scale=scale)))
    return found


def experts(
    x: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    scales: tuple[Tensor, Tensor] | None = None,
    see: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Run experts as `operations.routed_experts`, of bf16 rows [M, H]: [M, topk, H].

    Weights are bf16 or NVFP4, gate_up interleaved; all `ids` [M, topk] are below E. `scales` are
    global scales of the inputs of both products, f32 [E] or [1]; None rounds nothing. `see` is called
    with `down`'s input before it is rounded: [M * topk, I], row by row of `ids`.
    """

    def rounded(rows: Tensor, product: int, chosen: Tensor) -> Tensor:
        if scales is None:
            return rows
        own = scales[product]
        return round_nvfp4(rows, own, chosen if len(own) > 1 else None)

    def between(hidden: Tensor) -> Activation:
        hidden = hidden.to(torch.bfloat16)  # as on a GPU: other roundings could give other codes
        if see is not None:
            see(hidden)
        return rounded(hidden, 1, ids.reshape(-1, 1)), None

    if scales is not None:
        gate_up, down = (scaled(*pair) for pair in zip((gate_up, down), scales, strict=True))
    rows = rounded(x, 0, ids)
    return routed_experts(rows, None, ids, routing_weights, gate_up, down, between)
