"""GPTQ on block-scaled formats: it rounds weights to keep the layer's output near, not the weight.

A Linear y = x W^T with inputs x seen in calibration has the loss

    tr (W - Q) H (W - Q)^T,    H = mean of x x^T, [in, in]

Rounding to nearest minimises it only where H is diagonal and even. Three steps lower it:

  1. GPTQ (Frantar et al., arXiv 2210.17323): round one input after the other and spread each error
     over the inputs not yet rounded, with the rows of U, H^-1 = U^T U.
  2. NVFP4 only: each block of 16 inputs is tried under the e4m3 neighbours of its usual scale,
     amax / 6, and keeps the one of least GPTQ loss, the sum of (error / U_ii)^2.
  3. Coordinate descent: codes, and for NVFP4 block scales, are moved one at a time to where the exact
     loss is least given all the others. It never raises the loss.

Weights are [experts, out, in], one Hessian an expert; everything is batched over experts. Arithmetic is
float32, the inverse and its factor float64. The damped H adds `DAMPING` times its mean diagonal.
The NVFP4 global scale is not touched: q/k/v and gate/up share it (`rounding.global_scale`).

Left out: ordering of inputs by their energy (blocks of 16 are fixed on disk), asymmetric zero points,
and the asymmetric loss of GPTAQ, which was worse here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.errors import QuantizeError
from quantize.rounding import (
    E2M1_MAX,
    FP8,
    FP8_MAX,
    GROUP,
    block_scale,
    pack_e2m1,
    round_e2m1,
)
from quantize.schemes import Scheme

DAMPING = 0.01
NEIGHBOURS = 6  # e4m3 codes below and above amax / 6 that a block scale may take
SWEEPS = 4  # passes of coordinate descent
FACTORED = (
    4  # experts whose Hessians are in float64 at a time: 64 MB each, six times, at 2,816 inputs
)
SPAN = 8 * GROUP  # inputs whose errors are spread together: one product for 8 blocks
SMALLEST_SCALE = 2.0**-9  # e4m3's least positive number


@dataclass(frozen=True)
class Rounded:
    """The result for one stack of Linears [E, out, in].

    Attributes:
        tensors: tensors by on-disk suffix, as the scheme's `quantize` returns them.
        loss: [E] float32, tr (W - Q) H (W - Q)^T over tr W H W^T.
        nearest: [E] the same of rounding to nearest.
        fell_back: [E] bool, whether H had no factor, so that the expert was rounded to nearest.
    """

    tensors: dict[str, Tensor]
    loss: Tensor
    nearest: Tensor
    fell_back: Tensor


def shrunk(sums: Tensor, tokens: Tensor, at: slice = slice(None)) -> Tensor:
    """Return experts' mean Hessians [E', in, in], drawn to the layer's: each keeps n / (n + in).

    An expert of few tokens has a Hessian of low rank, which GPTQ would trust too much. A dense Linear,
    E = 1, keeps its own.

    Args:
        sums: [E, in, in], x x^T summed over the tokens that each expert of the layer saw.
        tokens: [E], how many those were.
        at: the experts that are asked for; all count for the layer's mean.

    Raises:
        QuantizeError: no expert saw a token, or a Hessian is not finite.
    """
    total = tokens.sum()
    if total == 0:
        raise QuantizeError("no token was seen: there is no Hessian; use more prompts")
    found = sums[at] / tokens[at].clamp(min=1)[:, None, None]
    if not bool(found.isfinite().all()):
        bad = int((~found.isfinite()).flatten(1).any(1).nonzero()[0]) + (at.start or 0)
        raise QuantizeError(f"the Hessian of expert {bad} is not finite: its inputs were not")
    if len(sums) == 1:
        return found
    own = tokens[at].to(found)
    own = (own / (own + found.shape[-1]))[:, None, None]
    return found.mul_(own).add_((1 - own) * (sums.sum(0) / total))


@dataclass(frozen=True)
class Grid:
    """The numbers that a weight over its step can take, and how far its block scale may move.

    Attributes:
        round: float32 -> the nearest code's value; saturates.
        neighbours: e4m3 codes below and above the usual block scale; 0 where scales are fixed.
    """

    round: Callable[[Tensor], Tensor]
    neighbours: int


def _round_e2m1(x: Tensor) -> Tensor:
    return round_e2m1(x.clamp(-E2M1_MAX, E2M1_MAX))


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()


def _round_int8(x: Tensor) -> Tensor:
    return x.clamp(-128, 127).round()


# By the dtype that a scheme's codes are cast to.
GRIDS = {
    torch.float32: Grid(_round_e2m1, NEIGHBOURS),
    FP8: Grid(_round_e4m3, 0),
    torch.int8: Grid(_round_int8, 0),
}


def gptq(scheme: Scheme, weight: Tensor, hessian: Tensor, shared: Tensor | None = None) -> Rounded:
    """Round weights to a scheme's tensors so that the layers' outputs stay near.

    Args:
        scheme: scheme of the weights.
        weight: [E, out, in] BF16, finite; `in` a multiple of 16.
        hessian: [E, in, in] float32, as `shrunk` returns it.
        shared: [E, 1] FP32 global scales, where the scheme has them.
    """
    if shared is None:
        return _gptq_rows(scheme, weight, hessian)
    return _gptq_groups(scheme, weight, hessian, shared)


def _gptq_groups(scheme: Scheme, weight: Tensor, hessian: Tensor, shared: Tensor) -> Rounded:
    own = shared.unsqueeze(-1)  # [E, 1, 1]
    usual = block_scale(scheme.observe(weight, "memoryless_minmax"), own)  # [E, out, in / 16]
    weight, grid = weight.float(), GRIDS[scheme.codes.cast]
    nearest = grid.round(weight / _spread(usual / own))
    codes, scales, singular = _round_all(weight, hessian, nearest, usual, own, grid)
    tensors = {
        "weight_packed": pack_e2m1(codes),
        "weight_scale": scales.to(FP8),
        "weight_global_scale": shared.clone(),
    }
    return Rounded(
        tensors,
        layer_loss(weight, _values(codes, scales / own), hessian),
        layer_loss(weight, _values(nearest, usual / own), hessian),
        singular,
    )


def _gptq_rows(scheme: Scheme, weight: Tensor, hessian: Tensor) -> Rounded:
    """Round under one BF16 scale a row, which its largest magnitude sets."""
    plain = scheme.quantize(weight, scheme.observe(weight, "memoryless_minmax"), None, None)
    nearest, scale = plain["weight"].float(), plain["weight_scale"]  # [E, out, in], [E, out, 1]
    weight, grid = weight.float(), GRIDS[scheme.codes.cast]
    steps = scale.float().expand(*weight.shape[:-1], weight.shape[-1] // GROUP)
    one = weight.new_ones(len(weight), 1, 1)
    codes, _, singular = _round_all(weight, hessian, nearest, steps, one, grid)
    return Rounded(
        {"weight": codes.to(scheme.codes.cast), "weight_scale": scale},
        layer_loss(weight, codes * scale.float(), hessian),
        layer_loss(weight, nearest * scale.float(), hessian),
        singular,
    )


def _round_all(
    weight: Tensor, hessian: Tensor, nearest: Tensor, usual: Tensor, shared: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Return code values, block scales, and which experts were left at the nearest codes.

    `nearest` [E, out, in] and `usual` [E, out, in / 16] are codes and scales of rounding to nearest; a
    code's step is its scale over `shared` [E, 1, 1].
    """
    damped, factor, singular = _factored(hessian)
    codes, scales = _spread_errors(weight, factor, usual, shared, grid)
    codes, scales = _descend(weight, codes, scales, damped, shared, grid)
    lost = singular[:, None, None]
    return torch.where(lost, nearest, codes), torch.where(lost, usual, scales), singular


def layer_loss(weight: Tensor, rounded: Tensor, hessian: Tensor) -> Tensor:
    """Return tr (W - Q) H (W - Q)^T over tr W H W^T of [E, out, in]: [E] float32."""
    error = weight - rounded
    return _energy(error, hessian) / _energy(weight, hessian).clamp(min=1e-30)


def _energy(x: Tensor, hessian: Tensor) -> Tensor:
    return ((x @ hessian) * x).sum((-1, -2))


def _block_amax(weight: Tensor) -> Tensor:
    """Return the largest |w| of every block of 16 inputs, in BF16 as `schemes.observe` has it."""
    return weight.unflatten(-1, (-1, GROUP)).abs().amax(-1).bfloat16()


def _spread(scale: Tensor) -> Tensor:
    """Repeat the scale of a block for its 16 inputs: [E, out, in / 16] to [E, out, in]."""
    return scale.repeat_interleave(GROUP, -1)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply code values [E, out, in] by the scale of their blocks [E, out, in / 16]."""
    return codes * _spread(scale)


def _factored(hessian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return damped H, the upper factor U of its inverse (both float32), and which [E] lack U."""
    found = [_factored_in_float64(each) for each in hessian.split(FACTORED)]
    damped, factor, singular = (torch.cat(each) for each in zip(*found, strict=True))
    return damped, factor, singular


def _factored_in_float64(hessian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs = hessian.shape[-1]
    damped = hessian.double()
    mean = damped.diagonal(dim1=-2, dim2=-1).mean(-1)
    diagonal = (DAMPING * mean)[:, None].expand(-1, inputs)
    damped = damped + torch.diag_embed(diagonal)
    lower, failed = torch.linalg.cholesky_ex(damped)
    singular = (failed != 0) | (mean <= 0)
    identity = torch.eye(inputs, dtype=damped.dtype, device=damped.device)
    lower = torch.where(singular[:, None, None], identity, lower)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return damped.float(), factor.float(), singular


def _spread_errors(
    weight: Tensor, factor: Tensor, usual: Tensor, shared: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Run GPTQ from left to right, choosing block scales; return code values and block scales."""
    left = weight.clone()
    codes, scales = torch.empty_like(weight), torch.empty_like(usual)
    for start in range(0, weight.shape[-1], SPAN):
        stop = min(start + SPAN, weight.shape[-1])
        errors = torch.empty_like(left[..., start:stop])
        for at in range(start, stop, GROUP):
            block = slice(at, at + GROUP)
            tried = usual[..., at // GROUP, None]
            if grid.neighbours:  # around the scale of the block's values as they are by now
                amax = _block_amax(left[..., block])
                tried = _near(block_scale(amax, shared)[..., 0], grid.neighbours)
            found = _round_block(left[..., block], factor[:, block, block], tried, shared, grid)
            codes[..., block], scales[..., at // GROUP], error = found
            errors[..., at - start : at - start + GROUP] = error
            left[..., at + GROUP : stop] -= error @ factor[:, block, at + GROUP : stop]
        left[..., stop:] -= errors @ factor[:, start:stop, stop:]
    return codes, scales


def _near(scale: Tensor, neighbours: int) -> Tensor:
    """Return the e4m3 numbers around `scale` [...]: [..., 2 * neighbours + 1], never 0 nor NaN."""
    bits = scale.to(FP8).view(torch.uint8).short()
    offsets = torch.arange(-neighbours, neighbours + 1, dtype=torch.int16, device=scale.device)
    near = (bits[..., None] + offsets).clamp(1, 126).to(torch.uint8)
    return near.view(FP8).float()


def _round_block(
    weight: Tensor, factor: Tensor, candidates: Tensor, shared: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Round one block [E, out, 16] under each candidate scale [E, out, C]; keep the best.

    Returns:
        Code values [E, out, 16], the chosen scale [E, out], and the errors over U_ii [E, out, 16].
    """
    step = candidates / shared  # [E, out, C]
    left = weight[..., None, :].expand(*candidates.shape, GROUP).clone()  # [E, out, C, 16]
    codes, errors = torch.empty_like(left), torch.empty_like(left)
    for i in range(GROUP):
        codes[..., i] = grid.round(left[..., i] / step)
        errors[..., i] = (left[..., i] - codes[..., i] * step) / factor[:, i, i, None, None]
        rest = factor[:, None, None, i, i + 1 :]
        left[..., i + 1 :] -= errors[..., i, None] * rest
    best = errors.square().sum(-1).argmin(-1, keepdim=True)  # [E, out, 1]
    pick = best[..., None].expand(*best.shape, GROUP)
    return (
        codes.gather(-2, pick)[..., 0, :],
        candidates.gather(-1, best)[..., 0],
        errors.gather(-2, pick)[..., 0, :],
    )


def _descend(
    weight: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, shared: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Move block scales and codes one at a time to where the exact loss is least."""
    codes, scales = codes.clone(), scales.clone()
    own_shared = shared[..., 0]  # [E, 1]
    slope = (weight - _values(codes, scales / shared)) @ hessian  # half of -d loss / d Q
    for _ in range(SWEEPS):
        for at in range(0, weight.shape[-1], GROUP):
            block, group = slice(at, at + GROUP), at // GROUP
            pull, own = slope[..., block], hessian[:, block, block]
            before = codes[..., block] * (scales[..., group] / own_shared)[..., None]
            if grid.neighbours:
                scales[..., group] = _best_scale(
                    codes[..., block], scales[..., group], pull, own, own_shared
                )
            step = scales[..., group] / own_shared
            codes[..., block] = _best_codes(codes[..., block], step, before, pull, own, grid)
            moved = codes[..., block] * step[..., None] - before
            slope -= moved @ hessian[:, block]
    return codes, scales


def _best_scale(codes: Tensor, scale: Tensor, slope: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    """Return the e4m3 scale [E, out] next to the optimum of the quadratic in a block's scale."""
    curvature = ((codes @ own) * codes).sum(-1)
    pull = (slope * codes).sum(-1)
    wanted = scale + pull / curvature.clamp(min=1e-30) * shared
    near = _near(wanted.clamp(SMALLEST_SCALE, FP8_MAX), 1)
    change = (near - scale[..., None]) / shared[..., None]
    cost = change.square() * curvature[..., None] - 2 * change * pull[..., None]
    least, best = cost.min(-1)
    chosen = near.gather(-1, best[..., None])[..., 0]
    return torch.where((least < 0) & (curvature > 0), chosen, scale)


def _best_codes(
    codes: Tensor, step: Tensor, before: Tensor, slope: Tensor, own: Tensor, grid: Grid
) -> Tensor:
    """Return a block's code values [E, out, 16], each moved in turn to its own optimum.

    `before` holds the block's values when `slope` was computed.
    """
    codes = codes.clone()
    values = codes * step[..., None]
    slope = slope - (values - before) @ own
    for i in range(GROUP):
        wanted = values[..., i] + slope[..., i] / own[:, i, i, None]
        codes[..., i] = grid.round(wanted / step)
        moved = codes[..., i] * step - values[..., i]
        values[..., i] += moved
        slope -= moved[..., None] * own[:, None, i]
    return codes
