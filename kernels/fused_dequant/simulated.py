"""Products whose inputs are rounded as W4A4 serves them, or watched: what calibration and scoring need.

    round_nvfp4        rows -> bf16 rows of codes times block scales (`input_rounding` has the numbers)
    rounded_linear     x @ w.T of rows rounded so
    experts            routed experts, whose inputs are rounded with the scale of each expert, or of all

The factor of an NVFP4 weight takes 1 / global_scale in float32, so the products are those of W4A4 but
for the order of float32 sums. On a CPU the same is done in torch.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from fused_dequant import formats, reference, weights
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.weights import Weight

See = Callable[[torch.Tensor], None]


def round_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor, experts: torch.Tensor | None = None
) -> torch.Tensor:
    """Round rows; see the module's docstring.

    Args:
        x: bf16 or f32 [M, K], K a multiple of 16.
        global_scale: f32 [1], or [E] with `experts`.
        experts: int [M, topk]; each row is rounded once for each of its experts.

    Returns:
        bf16 [M, K], or [M * topk, K].
    """
    if x.is_cuda:
        from fused_dequant import input_rounding

        flat = None if experts is None else experts.contiguous()
        return input_rounding.round_nvfp4(x.contiguous(), global_scale, flat)
    if experts is None:
        return _round(x, global_scale)
    rows = x.repeat_interleave(experts.shape[1], 0)
    return _round(rows, global_scale[experts.flatten().long()])


def _round(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`round_nvfp4` in torch, of x [M, K] with g f32 [1] or [M]."""
    groups, g = x.float().unflatten(-1, (-1, formats.GROUP)), g[:, None]
    six = torch.full_like(g, formats.E2M1_MAX)
    s = (g * (groups.abs().amax(-1) / six)).clamp(max=formats.E4M3_MAX)
    s = s.to(torch.float8_e4m3fn).float()
    s = s.masked_fill(s == 0, 0.125)
    v = (groups / (s / g)[..., None]).clamp(-formats.E2M1_MAX, formats.E2M1_MAX)
    rounded = formats.decode_e2m1(formats.encode_e2m1(v)) * s[..., None]
    return torch.where(groups.isnan(), groups, rounded).flatten(-2).to(torch.bfloat16)


def scaled(weight: Weight, global_scale: torch.Tensor) -> Weight:
    """Return an NVFP4 weight whose products are divided by the global scale f32 [1] or [E]."""
    if weight.factor is None:
        raise ValueError(f"rounded rows are multiplied with NVFP4 weights, not {weight.scheme}")
    return replace(weight, factor=weight.factor / global_scale[:, None])


def plain(weight: Weight) -> Weight:
    """Return an 8-bit weight in bf16, so that its inputs stay as they are; others unchanged."""
    if weight.scheme not in EIGHT_BIT:
        return weight
    return weights.bf16(weights.dequantize(weight, torch.float32))


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    see: See | None = None,
) -> torch.Tensor:
    """Routed experts as `ops.routed_experts`, of bf16 rows: bf16 [M, C, H], addends to sum over C.

    Args:
        x: bf16 [M, H].
        ids: int [M, topk], all of them experts there are.
        routing_weights: [M, topk].
        gate_up: interleaved; bf16 or NVFP4.
        down: likewise.
        scales: global scales of the inputs of both products, f32 [E] or [1]; None rounds nothing.
        see: is shown the input of `down` before it is rounded: [M * topk, I], row by row of `ids`.
    """
    if scales is None:
        rounded: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [_same, _same]
    else:
        gate_up, down = scaled(gate_up, scales[0]), scaled(down, scales[1])
        rounded = [_rounding(scale) for scale in scales]
    run = _on_gpu if x.is_cuda else _in_torch
    return run(x, ids, routing_weights, gate_up, down, (rounded[0], rounded[1]), see or _ignore)


Round = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _ignore(_: torch.Tensor) -> None:
    pass


def _same(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x


def _rounding(scale: torch.Tensor) -> Round:
    if len(scale) == 1:
        return lambda x, ids: round_nvfp4(x, scale)
    return lambda x, ids: round_nvfp4(x, scale, ids)


def _on_gpu(
    x: torch.Tensor,
    ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    rounded: tuple[Round, Round],
    see: See,
) -> torch.Tensor:
    from fused_dequant import launch, routing, tuning

    M, topk = ids.shape
    configs = [
        tuning.choose("experts", w.scheme, M, *w.shape[1:], x.device) for w in (gate_up, down)
    ]
    rows = rounded[0](x, ids)
    # With a row for each choice a token has one choice: the slots are the same either way.
    own = ids.contiguous() if len(rows) == M else ids.reshape(-1, 1).contiguous()
    blocks = routing.route(own, gate_up.shape[0], tuning.block_rows(configs[0]))
    hidden = launch.grouped(rows, None, gate_up, blocks, configs[0], None)
    see(hidden)
    hidden = rounded[1](hidden, ids.reshape(-1, 1))
    by_choice = routing_weights.float().flatten().contiguous()
    y = launch.grouped(hidden, None, down, blocks, configs[1], by_choice)
    return y.view(M, topk, -1)


def _in_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    rounded: tuple[Round, Round],
    see: See,
) -> torch.Tensor:
    M, topk = ids.shape
    flat = ids.flatten().long()
    rows = rounded[0](x, ids)
    rows = rows if len(rows) == M * topk else rows.repeat_interleave(topk, 0)
    up, out = weights.dequantize(gate_up), weights.dequantize(down)
    hidden = torch.zeros(M * topk, up.shape[1] // 2)
    y = torch.zeros(M * topk, out.shape[1])
    chosen = flat.unique().tolist()
    for expert in chosen:
        runs = reference.matmul(rows[flat == expert], up[expert]).unflatten(-1, (-1, 2, 8))
        hidden[flat == expert] = reference.gelu_mul(*runs.unbind(-2)).flatten(-2)
    see(hidden)
    hidden = rounded[1](hidden, ids.reshape(-1, 1))
    for expert in chosen:
        y[flat == expert] = reference.matmul(hidden[flat == expert], out[expert])
    y = y * routing_weights.float().flatten()[:, None]
    return y.view(M, topk, -1).sum(1, keepdim=True).to(torch.bfloat16)
