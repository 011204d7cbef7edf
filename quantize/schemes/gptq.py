"""GPTQ: rounds weights, trying block scales near amax / 6, so that a layer's output changes little.

A Linear y = x W^T with inputs x seen in calibration has the loss

    tr (W - Q) H (W - Q)^T,    H = mean of x x^T, [in, in]

Rounding to nearest minimises it only where H is diagonal and even. Three steps lower it:

  1. GPTQ (Frantar et al., arXiv 2210.17323): round one input after the other and spread each error
     over the inputs not yet rounded, with the rows of U, H^-1 = U^T U.
  2. NVFP4 only: each block of 16 inputs is tried under the e4m3 neighbours of its usual scale,
     amax / 6, and keeps the one of least GPTQ loss, the sum of (error / U_ii)^2.
  3. Coordinate descent: codes, and for NVFP4 block scales, are moved one at a time to where the
     loss by the damped H is least given all the others. It never raises that loss.

Weights are [experts, out, in], one Hessian an expert; everything is batched over experts. Arithmetic is
float32, the inverse and its factor float64. H is damped: `DAMPING` times its mean diagonal is added.
The NVFP4 global scale is not touched: q/k/v and gate/up share it (`rounding.global_scale`).

Left out: ordering of inputs by their energy (blocks of 16 are fixed on disk), asymmetric zero points,
and the asymmetric loss of GPTAQ, which was worse here.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from fused_dequant.dispatch import launches
from fused_dequant.formats import GROUP, block_scale, pack_e2m1
from torch import Tensor

from quantize.errors import QuantizeError
from quantize.schemes.records import Scheme
from quantize.schemes.rounding import FP8, FP8_MAX, Codes

DAMPING = 0.01
SWEEPS = 4  # passes of coordinate descent
FACTORS = 4  # Hessians that are factored side by side
SPAN = 8 * GROUP  # inputs whose errors are spread together: one product for 8 blocks
SMALLEST_SCALE = 2.0**-9  # e4m3's least positive number


@dataclass(frozen=True)
class Rounded:
    """What `gptq` found for one stack of Linears [E, out, in]."""

    tensors: dict[str, Tensor]  # by suffix, as `Scheme.quantize`'s
    loss: Tensor  # [E] f32, tr (W - Q) H (W - Q)^T over tr W H W^T
    nearest: Tensor  # [E] f32, the same of rounding to nearest
    fell_back: Tensor  # bool [E], rounded to nearest since H had no factor


def shrunk(
    sums: Tensor, tokens: Tensor, at: slice = slice(None), inputs: int | None = None
) -> Tensor:
    """Return experts' mean Hessians [E', in, in], each mixed with the layer's mean.

    An expert that saw n tokens keeps n / (n + in) of its own: few tokens make a Hessian of low rank,
    which GPTQ would trust too much. A dense Linear, E = 1, keeps its own. `sums` [E, in, in] of x x^T
    are over the `tokens` [E] that each expert saw, or are their tiles, of `inputs` inputs. The experts
    `at` are returned; the layer's mean is over all. Raise QuantizeError if no expert saw a token, or a
    Hessian is not finite.
    """
    total = tokens.sum()
    if total == 0:
        raise QuantizeError("no token was seen: there is no Hessian; use more prompts")
    found = sums[at] / tokens[at].clamp(min=1).view(-1, *[1] * (sums.dim() - 1))
    extremes = torch.stack(found.flatten(1).aminmax(dim=1))  # NaN where there is one
    if not bool(extremes.isfinite().all()):
        bad = int((~extremes.isfinite()).any(0).nonzero()[0]) + (at.start or 0)
        raise QuantizeError(f"the Hessian of expert {bad} is not finite: its inputs were not")
    if len(sums) == 1:
        return found
    own = tokens[at].to(found)
    own = (own / (own + (inputs or found.shape[-1]))).view(-1, *[1] * (found.dim() - 1))
    return found.mul_(own).addcmul_(1 - own, sums.sum(0) / total)


def gptq(scheme: Scheme, weight: Tensor, hessian: Tensor, shared: Tensor | None = None) -> Rounded:
    """Round weights to a scheme's tensors, by the three steps above, so that outputs change little.

    `weight` is [E, out, in] BF16, finite, `in` a multiple of 16; `hessian` [E, in, in] float32, as
    `shrunk` returns it, damped in place while this runs; `shared` [E, 1] FP32 global scales, where
    the scheme has them.
    """
    hessian = hessian.contiguous()
    if shared is None:
        return _gptq_fixed(scheme, weight, hessian)
    return _gptq_groups(scheme, weight, hessian, shared)


def _gptq_groups(scheme: Scheme, weight: Tensor, hessian: Tensor, shared: Tensor) -> Rounded:
    own = shared.unsqueeze(-1)  # [E, 1, 1]
    usual = block_scale(scheme.observe(weight, "memoryless_minmax"), own)  # [E, out, in / 16]
    weight, grid = weight.float(), scheme.codes
    blocks = weight.unflatten(-1, (-1, GROUP))
    nearest = grid.nearest(blocks / (usual / own)[..., None]).flatten(-2)
    codes, scales, singular = _round_all(weight, hessian, nearest, usual, shared[:, 0], grid)
    tensors = {
        "weight_packed": pack_e2m1(codes),
        "weight_scale": scales.to(FP8),
        "weight_global_scale": shared.clone(),
    }
    found = (_values(c, s / own) for c, s in ((codes, scales), (nearest, usual)))
    loss, plain = layer_losses(weight, found, hessian)
    return Rounded(tensors, loss, plain, singular)


def _gptq_fixed(scheme: Scheme, weight: Tensor, hessian: Tensor) -> Rounded:
    """Round under the BF16 scales of rounding to nearest, which stay: one a row, or a group."""
    grid, ranges = scheme.codes, scheme.observe(weight, "memoryless_minmax")
    plain = scheme.quantize(weight, ranges, None, None)
    scale = grid.scale(ranges)[..., None]  # [E, out, groups, 1] BF16
    blocks = weight.unflatten(-1, (scale.shape[-2], -1))
    nearest = grid.nearest(blocks / scale).flatten(-2)
    steps = scale.float().expand(*scale.shape[:-1], blocks.shape[-1] // GROUP).flatten(-2)
    weight = weight.float()
    one = weight.new_ones(len(weight))
    codes, _, singular = _round_all(weight, hessian, nearest, steps, one, grid)
    tensors = plain | {next(iter(plain)): grid.store(codes)}
    loss, own = layer_losses(weight, (_values(each, steps) for each in (codes, nearest)), hessian)
    return Rounded(tensors, loss, own, singular)


def _round_all(
    weight: Tensor, hessian: Tensor, nearest: Tensor, usual: Tensor, shared: Tensor, grid: Codes
) -> tuple[Tensor, Tensor, Tensor]:
    """Return code values, block scales, and which experts [E] were left at the nearest codes.

    `nearest` [E, out, in] and `usual` [E, out, in / 16] are codes and scales of rounding to nearest; a
    code's step is its scale over `shared` [E].
    """
    undamped = hessian.diagonal(dim1=-2, dim2=-1).clone()
    factor, singular = _factored(hessian)
    codes, scales = torch.empty_like(weight), usual.clone()
    _spread_errors(weight, factor, shared, codes, scales, grid)
    del factor
    _descend(weight, codes, scales, hessian, shared, grid)
    hessian.diagonal(dim1=-2, dim2=-1).copy_(undamped)
    lost = singular[:, None, None]
    return torch.where(lost, nearest, codes), torch.where(lost, usual, scales), singular


def layer_losses(weight: Tensor, found: Iterable[Tensor], hessian: Tensor) -> list[Tensor]:
    """Return tr (W - Q) H (W - Q)^T / tr W H W^T of each Q [E, out, in] in `found`: [E] float32."""
    whole = _energy(weight, hessian).clamp(min=1e-30)
    return [_energy(weight - each, hessian) / whole for each in found]


def _energy(x: Tensor, hessian: Tensor) -> Tensor:
    return (x @ hessian).mul_(x).sum(-1).sum(-1)  # in an order that threads do not change


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.unflatten(-1, (-1, GROUP)) * scale[..., None]).flatten(-2)


def _factored(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Damp H [E, in, in] in place; return the upper factor U of its inverse, and which [E] lack U.

    With the inputs in reverse order, H = L L^T, and H^-1 = U^T U where U is L^-1, reversed again. A
    matrix at a time, since libraries' batched factorisations are made for small ones; on a GPU on
    several streams, since one of 2,816 inputs leaves most of it idle.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.double().mean(-1)
    diagonal.add_((DAMPING * mean).to(hessian)[:, None])
    factor, failed = torch.empty_like(hessian), torch.empty_like(mean, dtype=torch.int32)
    identity = torch.eye(hessian.shape[-1], dtype=torch.float64, device=hessian.device)
    with _one_thread(), _streams(hessian.device) as streams:
        for each, own in enumerate(hessian):
            with torch.cuda.stream(streams[each % FACTORS]):
                lower, failed[each] = torch.linalg.cholesky_ex(own.double().flip(0, 1))
                lower = torch.where(failed[each] != 0, identity, lower)
                inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
                factor[each] = inverse.flip(0, 1)
    return factor, (failed != 0) | (mean <= 0)


@contextmanager
def _streams(device: torch.device) -> Generator[list[torch.cuda.Stream | None]]:
    """Yield FACTORS streams of a GPU, the current one first, which waits for the others at the end."""
    if device.type != "cuda":
        yield [None] * FACTORS
        return
    current = torch.cuda.current_stream(device)
    others = [torch.cuda.Stream(device) for _ in range(FACTORS - 1)]
    for other in others:
        other.wait_stream(current)
    yield [current, *others]
    for other in others:
        current.wait_stream(other)


@contextmanager
def _one_thread() -> Generator[None]:
    """Hold torch to one thread of the CPU: a factorisation's bits depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _spread_errors(
    weight: Tensor, factor: Tensor, shared: Tensor, codes: Tensor, scales: Tensor, grid: Codes
) -> None:
    """Run GPTQ from left to right; errors are spread in a SPAN by block, then to all later inputs."""
    left = weight.clone()
    errors = weight.new_empty(*weight.shape[:-1], SPAN)
    for start in range(0, weight.shape[-1], SPAN):
        stop = min(start + SPAN, weight.shape[-1])
        for at in range(start, stop, GROUP):
            block = slice(at, at + GROUP)
            error = errors[..., at - start : at - start + GROUP]
            round_block(
                left[..., block], factor[:, block, block], shared, scales[..., at // GROUP],
                codes[..., block], error, grid,
            )  # fmt: skip
            _subtract(left[..., at + GROUP : stop], error, factor[:, block, at + GROUP : stop])
        _subtract(left[..., stop:], errors[..., : stop - start], factor[:, start:stop, stop:])


def _subtract(target: Tensor, rows: Tensor, matrix: Tensor) -> None:
    if target.shape[-1]:
        target.baddbmm_(rows, matrix, alpha=-1)


def _near(scale: Tensor, neighbours: int) -> Tensor:
    """Return the e4m3 numbers around `scale` [...]: [..., 2 * neighbours + 1], never 0 nor NaN."""
    bits = scale.to(FP8).view(torch.uint8).short()
    offsets = torch.arange(-neighbours, neighbours + 1, dtype=torch.int16, device=scale.device)
    near = (bits[..., None] + offsets).clamp(1, 126).to(torch.uint8)
    return near.view(FP8).float()


def round_block(
    weight: Tensor, factor: Tensor, shared: Tensor, scales: Tensor, codes: Tensor, errors: Tensor,
    grid: Codes,
) -> None:  # fmt: skip
    """Round a block of 16 inputs under each candidate scale, and keep the result of least loss.

    `weight` [E, out, 16] holds the errors spread from earlier inputs, `factor` [E, 16, 16] is U's block
    on its diagonal, `shared` [E] the global scale. It writes `codes` [E, out, 16], as the values that
    codes stand for, `errors` [E, out, 16], each divided by U_ii, and the chosen `scales` [E, out],
    which it only reads where `grid.neighbours` is 0.
    """
    if launches(weight.device):
        from fused_dequant import gptq

        gptq.round_block(weight, factor, shared, scales, codes, errors, grid.name, grid.neighbours)
        return
    candidates = scales[..., None]  # [E, out, C]
    if grid.neighbours:  # around the scale of the block's values as they are by now
        amax = weight.abs().amax(-1).bfloat16()  # as `Scheme.observe` has it
        candidates = _near(block_scale(amax, shared[:, None]), grid.neighbours)
    step = candidates / shared[:, None, None]
    # [16, E, out, C]: what is rounded at once lies together, which takes a quarter less
    left = weight.movedim(-1, 0)[..., None].repeat(1, 1, 1, candidates.shape[-1])
    found, error, factor = torch.empty_like(left), torch.empty_like(left), factor.movedim(0, -1)
    for i in range(GROUP):
        found[i] = grid.nearest(left[i] / step)
        error[i] = (left[i] - found[i] * step) / factor[i, i, :, None, None]
        left[i + 1 :] -= error[i] * factor[i, i + 1 :, :, None, None]
    squares = error.movedim(0, -1).contiguous().square_()
    best = squares.sum(-1).argmin(-1, keepdim=True)  # [E, out, 1]
    pick = best.expand(GROUP, *best.shape)
    codes.copy_(found.gather(-1, pick)[..., 0].movedim(0, -1))
    errors.copy_(error.gather(-1, pick)[..., 0].movedim(0, -1))
    scales.copy_(candidates.gather(-1, best)[..., 0])


def _descend(
    weight: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, shared: Tensor, grid: Codes
) -> None:
    """Move block scales and codes one at a time to where the loss by `hessian` is least."""
    slope = (weight - _values(codes, scales / shared[:, None, None])) @ hessian  # -d loss / d Q / 2
    moved = weight.new_empty(*weight.shape[:-1], SPAN)
    for _ in range(SWEEPS):
        for start in range(0, weight.shape[-1], SPAN):
            span = slice(start, min(start + SPAN, weight.shape[-1]))
            near = slope[..., span].clone()
            for at in range(span.start, span.stop, GROUP):
                block, own = slice(at, at + GROUP), slice(at - start, at - start + GROUP)
                descend_block(
                    near[..., own], hessian[:, block, block], shared, scales[..., at // GROUP],
                    codes[..., block], moved[..., own], grid,
                )  # fmt: skip
                after = hessian[:, block, at + GROUP : span.stop]
                _subtract(near[..., own.stop :], moved[..., own], after)
            _subtract(slope, moved[..., : near.shape[-1]], hessian[:, span])


def descend_block(
    slope: Tensor, hessian: Tensor, shared: Tensor, scales: Tensor, codes: Tensor, moved: Tensor,
    grid: Codes,
) -> None:  # fmt: skip
    """Move a block's scales, then its codes, one at a time to where the loss is least.

    `slope` [E, out, 16] is (W - Q) H of the block's inputs, `hessian` [E, 16, 16] H's block on its
    diagonal, `shared` [E] the global scale. It moves `codes` [E, out, 16], decoded, and `scales`
    [E, out] unless `grid.neighbours` is 0. `moved` gets the change of codes * scale / shared.
    """
    if launches(slope.device):
        from fused_dequant import gptq

        gptq.descend_block(
            slope, hessian, shared, scales, codes, moved, grid.name, scaled=grid.neighbours > 0
        )  # fmt: skip
        return
    before = codes * (scales / shared[:, None])[..., None]
    if grid.neighbours:
        scales.copy_(_best_scale(codes, scales, slope, hessian, shared[:, None]))
    step = scales / shared[:, None]
    values = codes * step[..., None]
    slope = (slope - (values - before) @ hessian).movedim(-1, 0).contiguous()  # [16, E, out]
    found, own = torch.empty_like(slope), hessian.movedim(0, -1)[..., None]  # [16, 16, E, 1]
    for i, value in enumerate(values.movedim(-1, 0).contiguous()):
        found[i] = grid.nearest((value + slope[i] / own[i, i]) / step)
        slope -= (found[i] * step - value) * own[i]
    codes.copy_(found.movedim(0, -1))
    torch.sub(codes * step[..., None], before, out=moved)


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
