"""GPTQ: rounds the weights of Linears so that outputs change little on inputs seen in calibration.

If a Linear's weight W is rounded to Q, its output x W^T changes. The squared change has the mean

    loss = tr (W - Q) H (W - Q)^T,    H = mean of x x^T, [in, in]

With fixed scales, rounding to nearest minimises this loss only if H is diagonal. Three steps lower it:

  1. GPTQ (Frantar et al., arXiv 2210.17323) rounds the weights of one input after another. It spreads
     each error over the inputs not yet rounded, weighted by a row of U (H^-1 = U^T U).
  2. For NVFP4, rounding to nearest gives a block of 16 inputs the scale amax / 6. GPTQ also tries the
     e4m3 numbers around this scale, and keeps the scale with the least sum of (error / U_ii)^2.
  3. Coordinate descent takes one code, or one block scale of NVFP4, at a time. It moves this number to
     the value of least loss under the damped H. It never raises that loss.

Weights are [experts, out, in], batched over experts, with one Hessian per expert. Arithmetic is
float32; H is factored and inverted in float64. H is damped: `DAMPING` times its mean diagonal is added
to the diagonal. NVFP4's global scale stays that of rounding to nearest (`global_scale`); Linears that
share one, q/k/v or gate/up, are rounded as one matrix.

Left out: ordering of inputs by their energy (blocks of 16 are fixed on disk), asymmetric zero points,
and GPTAQ's asymmetric loss, which was worse here.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from fused_dequant.formats import GROUP, block_scale
from fused_dequant.launch.dispatch import launches
from torch import Tensor

from quantize.errors import QuantizeError
from quantize.schemes.records import Scheme
from quantize.schemes.rounding import FP8, FP8_MAX, Codes, global_scale

DAMPING = 0.01
SWEEPS = 4  # passes of coordinate descent
VERSION = 3  # of this arithmetic: another may round some weights to other codes
FACTORED = 2**30  # bytes of the float64 Hessians that are factored at once
LEAF = 352  # inputs of the blocks that a GPU's library factors
SPAN = 8 * GROUP  # inputs whose errors are spread together: one product for 8 blocks
COLUMNS = 512  # columns of a Hessian that `energy` multiplies at once
SMALLEST_SCALE = 2.0**-9  # e4m3's least positive number


@dataclass(frozen=True)
class Rounded:
    """The tensors that `gptq` made of weights [E, out, in], and how well they fit."""

    tensors: dict[str, Tensor]  # by suffix, as `Scheme.quantize` returns them
    loss: Tensor  # [E] f32, tr (W - Q) H (W - Q)^T divided by tr W H W^T
    nearest: Tensor  # [E] f32, the same ratio for rounding to nearest
    fell_back: Tensor  # bool [E], whether an expert was rounded to nearest: its H had no factor


def shrunk(
    sums: Tensor, tokens: Tensor, at: slice = slice(None), inputs: int | None = None
) -> Tensor:
    """Return the mean Hessians [E', in, in] of the experts `at`, drawn towards the mean of all experts.

    `sums` [E, in, in] holds each expert's sum of x x^T, `tokens` [E] each expert's number n of tokens.
    An expert's own mean has weight n / (n + in); the rest of the weight is on the mean of all. Few
    tokens give a Hessian of low rank, which GPTQ would trust too much. A dense Linear (E = 1) keeps its
    mean. If `inputs` (= in) is given, `sums` and the result hold tiles (`hessians`), not matrices.
    Raise QuantizeError if no expert saw a token, or a Hessian of `at` is not finite.
    """
    if (total := tokens.sum()) == 0:
        raise QuantizeError("no token was seen: there is no Hessian; use more prompts")
    means = sums[at] / tokens[at].clamp(min=1).view(-1, *[1] * (sums.dim() - 1))
    extremes = torch.stack(means.flatten(1).aminmax(dim=1))  # NaN where there is one
    if not bool(extremes.isfinite().all()):
        bad = int((~extremes.isfinite()).any(0).nonzero()[0]) + (at.start or 0)
        raise QuantizeError(f"the Hessian of expert {bad} is not finite: its inputs were not")
    if len(sums) == 1:
        return means
    trust = tokens[at].to(means)
    trust = (trust / (trust + (inputs or means.shape[-1]))).view(-1, *[1] * (means.dim() - 1))
    return means.mul_(trust).addcmul_(1 - trust, sums.sum(0) / total)


def gptq(scheme: Scheme, weight: Tensor, hessian: Tensor) -> Rounded:
    """Round weights to a scheme's tensors by the module's three steps; return tensors and losses.

    `weight` is BF16 [E, out, in], finite, `in` a multiple of 16. `hessian` is float32 [E, in, in], as
    `shrunk` returns it; it is damped in place at first and restored at the end.
    """
    grid, ranges, wide = scheme.codes, scheme.observe(weight, "memoryless_minmax"), weight.float()
    shared = global_scale([ranges]) if scheme.shares_global_scale else None  # [E, 1]
    if shared is None:  # the BF16 scales of rounding to nearest stay: one per row or per group
        tensors = scheme.quantize(weight, ranges, None, None)
        step = grid.scale(ranges)[..., None]  # [E, out, groups, 1]
        blocks = weight.unflatten(-1, (step.shape[-2], -1))
        usual = step.float().expand(*step.shape[:-1], blocks.shape[-1] // GROUP).flatten(-2)
        divisor = wide.new_ones(len(wide))
    else:
        tensors = {"weight_global_scale": shared}
        divisor, blocks = shared[:, 0], wide.unflatten(-1, (-1, GROUP))
        usual = block_scale(ranges, divisor[:, None, None])  # [E, out, in / 16]
        step = (usual / divisor[:, None, None])[..., None]
    nearest = grid.nearest(blocks / step).flatten(-2)
    codes, scales, *facts = _round_all(wide, hessian.contiguous(), nearest, usual, divisor, grid)
    if shared is None:
        tensors[next(iter(tensors))] = grid.store(codes)
    else:
        tensors = {"weight_packed": grid.store(codes), "weight_scale": scales.to(FP8), **tensors}
    return Rounded(tensors, *facts)


def _round_all(
    weight: Tensor, hessian: Tensor, nearest: Tensor, usual: Tensor, shared: Tensor, grid: Codes
) -> tuple[Tensor, ...]:
    """Return code values, block scales, and `Rounded`'s loss, nearest and fell_back.

    `nearest` [E, out, in] and `usual` [E, out, in / 16] are codes and scales of rounding to nearest; a
    code's step is its scale over `shared` [E].
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    undamped = diagonal.clone()
    factor, failed = _factored(hessian)
    codes, scales = torch.empty_like(weight), usual.clone()
    _spread_errors(weight, factor, shared, codes, scales, grid)
    del factor
    divisor = shared[:, None, None]
    slope = _descend(weight, codes, scales, hessian, shared, grid)
    # The product of the error with the damped H is the slope.
    error = weight - _values(codes, scales / divisor)
    slope.addcmul_(error, (diagonal - undamped)[:, None], value=-1)
    loss = slope.mul_(error).sum(-1).sum(-1)
    del slope, error
    diagonal.copy_(undamped)
    plain, whole = (
        energy(x, hessian) for x in (weight - _values(nearest, usual / divisor), weight)
    )
    loss, plain = (x / whole.clamp(min=1e-30) for x in (torch.where(failed, plain, loss), plain))
    lost = failed[:, None, None]
    return torch.where(lost, nearest, codes), torch.where(lost, usual, scales), loss, plain, failed


def energy(x: Tensor, hessian: Tensor) -> Tensor:
    """Return tr x H x^T, f32 [E], of x [E, out, in] and symmetric H [E, in, in]; half of H is read."""
    total = x.new_zeros(len(x))
    for at in range(0, x.shape[-1], COLUMNS):
        columns = slice(at, at + COLUMNS)
        pulls = torch.zeros_like(x[..., columns])
        add_product(pulls, x[..., columns], hessian[:, columns, columns].mT)
        add_product(pulls, x[..., :at], hessian[:, columns, :at].mT, 2)
        # Threads do not change the order of these sums.
        total += pulls.mul_(x[..., columns]).sum(-1).sum(-1)
    return total


def add_product(total: Tensor, lhs: Tensor, rhs: Tensor, factor: float = 1) -> None:
    """Add factor * lhs @ rhs to `total`: [E, M, K] @ [E, K, N], float32.

    A GPU's tensor cores multiply TF32 numbers, which have 11 bits. So each number is split into a TF32
    number and a rest, which is rounded to TF32 too. Only rest times rest is left out; the errors that
    were measured are those of float32. A GPU is fastest if `rhs` has stride 1 along K, as the
    transpose of a Hessian's rows has.
    """
    if launches(total.device):
        from fused_dequant.gptq import blockwise

        blockwise.add_product(total, lhs, rhs, factor)
    else:
        total.baddbmm_(lhs, rhs, alpha=factor)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.unflatten(-1, (-1, GROUP)) * scale[..., None]).flatten(-2)


def factored_at_once(inputs: int) -> int:
    """Return how many Hessians [inputs, inputs] a GPU factors at once."""
    return max(1, FACTORED // (8 * inputs**2))


def _factored(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Damp H [E, in, in] in place; return the upper factors U of H^-1, and bool [E]: which lack U.

    With the inputs in reverse order, H = L L^T, and H^-1 = U^T U where U is L^-1, reversed again.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.double().mean(-1)
    diagonal.add_((DAMPING * mean).to(hessian)[:, None])
    factor, failed = torch.empty_like(hessian), mean <= 0
    inputs = hessian.shape[-1]
    # A CPU gains nothing from many at once, which would only take memory.
    step, leaf = (factored_at_once(inputs), LEAF) if hessian.is_cuda else (1, inputs)
    with _one_thread():
        for columns in (slice(at, at + step) for at in range(0, len(hessian), step)):
            factor[columns], lacks = _upper(hessian[columns], leaf)
            failed[columns] |= lacks
    return factor, failed


def _upper(hessian: Tensor, leaf: int) -> tuple[Tensor, Tensor]:
    """Return U, float64 [E, in, in], the identity where there is none, and bool [E]: which lack U."""
    square = hessian.flip(1, 2).double()
    failed = _invert_factor(square, leaf)
    square.masked_fill_(failed[:, None, None], 0)
    square.diagonal(dim1=-2, dim2=-1).masked_fill_(failed[:, None], 1)
    return square.flip(1, 2), failed


def _invert_factor(square: Tensor, leaf: int) -> Tensor:
    """Put the inverse of L into `square` = L L^T [E, n, n]; return bool [E]: which have no L.

    Blocks [leaf, leaf] go to a library. The rest is products of the blocks of

        A = [A11 A21^T]   L21 = A21 L11^-T           L^-1 = [          L11^-1                  0   ]
            [A21  A22 ]   L22 L22^T = A22 - L21 L21^T       [-L22^-1 L21 L11^-1           L22^-1   ]

    which a GPU computes for many matrices at once, faster than a library factors each by itself.
    """
    size = square.shape[-1]
    if size <= leaf:
        lower, failed = torch.linalg.cholesky_ex(square)
        identity = torch.eye(size, dtype=square.dtype, device=square.device).expand_as(square)
        square.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return failed != 0
    half = size // 2
    first, last = square[:, :half, :half], square[:, half:, half:]
    across = square[:, half:, :half]
    failed = _invert_factor(first, leaf)
    lower = across @ first.mT
    last.baddbmm_(lower, lower.mT, alpha=-1)
    failed |= _invert_factor(last, leaf)
    across.copy_(last @ lower @ first).neg_()
    square[:, :half, half:] = 0
    return failed


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
    remaining = weight.clone()
    errors = weight.new_empty(*weight.shape[:-1], SPAN)
    for start in range(0, weight.shape[-1], SPAN):
        stop = min(start + SPAN, weight.shape[-1])
        for at in range(start, stop, GROUP):
            block = slice(at, at + GROUP)
            error = errors[..., at - start : at - start + GROUP]
            round_block(
                remaining[..., block], factor[:, block, block], shared, scales[..., at // GROUP],
                codes[..., block], error, grid,
            )  # fmt: skip
            later = slice(at + GROUP, stop)
            remaining[..., later].baddbmm_(error, factor[:, block, later], alpha=-1)
        spread = errors[..., : stop - start]
        add_product(remaining[..., stop:], spread, factor[:, start:stop, stop:], -1)


def _near(scale: Tensor, neighbours: int) -> Tensor:
    """Return the e4m3 numbers around `scale` [...]: [..., 2 * neighbours + 1], neither 0 nor NaN."""
    bits = scale.to(FP8).view(torch.uint8).short()
    offsets = torch.arange(-neighbours, neighbours + 1, dtype=torch.int16, device=scale.device)
    return (bits[..., None] + offsets).clamp(1, 126).to(torch.uint8).view(FP8).float()


def round_block(
    weight: Tensor, factor: Tensor, shared: Tensor, scales: Tensor, codes: Tensor, errors: Tensor,
    grid: Codes,
) -> None:  # fmt: skip
    """Round a block of 16 inputs under each candidate scale, and keep the result of least loss.

    `weight` [E, out, 16] includes the errors spread from earlier inputs, `factor` [E, 16, 16] is a
    diagonal block of U (H^-1 = U^T U), and `shared` [E] are the global scales. Results are written to
      codes   [E, out, 16]: the values that the codes stand for
      errors  [E, out, 16]: each error, divided by U_ii
      scales  [E, out]: the chosen scales; if `grid.neighbours` is 0, `scales` is only read
    """
    if launches(weight.device):
        from fused_dequant.gptq import blockwise

        blockwise.round_block(
            weight, factor, shared, scales, codes, errors, grid.name, grid.neighbours
        )
        return
    candidates = scales[..., None]  # [E, out, C]
    if grid.neighbours:  # around the scale of the block's values as they are by now
        amax = weight.abs().amax(-1).bfloat16()  # as `Scheme.observe` has it
        candidates = _near(block_scale(amax, shared[:, None]), grid.neighbours)
    step = candidates / shared[:, None, None]
    # [16, E, out, C]: what is rounded together is adjacent in memory, which saves a quarter of the time
    remaining = weight.movedim(-1, 0)[..., None].repeat(1, 1, 1, candidates.shape[-1])
    rounded, error = torch.empty_like(remaining), torch.empty_like(remaining)
    factor = factor.movedim(0, -1)
    for i in range(GROUP):
        rounded[i] = grid.nearest(remaining[i] / step)
        error[i] = (remaining[i] - rounded[i] * step) / factor[i, i, :, None, None]
        remaining[i + 1 :] -= error[i] * factor[i, i + 1 :, :, None, None]
    squares = error.movedim(0, -1).contiguous().square_()
    best = squares.sum(-1).argmin(-1, keepdim=True)  # [E, out, 1]
    pick = best.expand(GROUP, *best.shape)
    codes.copy_(rounded.gather(-1, pick)[..., 0].movedim(0, -1))
    errors.copy_(error.gather(-1, pick)[..., 0].movedim(0, -1))
    scales.copy_(candidates.gather(-1, best)[..., 0])


def _descend(
    weight: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, shared: Tensor, grid: Codes
) -> Tensor:
    """Move block scales and codes one at a time to the value of least loss under `hessian`.

    Return the slope (W - Q) H [E, out, in] that is left: minus half the loss's derivative by Q.
    """
    slope = torch.zeros_like(weight)
    add_product(slope, weight - _values(codes, scales / shared[:, None, None]), hessian.mT)
    moved = weight.new_empty(*weight.shape[:-1], SPAN)
    sweep: list[partial[None]] = []  # views made once, else a GPU waits for the host
    for start in range(0, weight.shape[-1], SPAN):
        span = slice(start, min(start + SPAN, weight.shape[-1]))
        groups, moves = slice(start // GROUP, span.stop // GROUP), moved[..., : span.stop - start]
        sweep.append(partial(
            descend_span, slope[..., span], hessian[:, span, span], shared, scales[..., groups],
            codes[..., span], moves, grid,
        ))  # fmt: skip
        sweep.append(partial(add_product, slope, moves, hessian[..., span].mT, -1))
    for work in SWEEPS * sweep:
        work()
    return slope


def descend_span(
    slope: Tensor, hessian: Tensor, shared: Tensor, scales: Tensor, codes: Tensor, moved: Tensor,
    grid: Codes,
) -> None:  # fmt: skip
    """Do what `descend_block` does for each block of a span of n <= SPAN inputs, from left to right.

    Each block starts from the slope that the moves of earlier blocks leave. `slope` [E, out, n] and
    `hessian` [E, n, n] are only read. `scales` are [E, out, n / 16], `codes` and `moved` [E, out, n].
    """
    if launches(slope.device):
        from fused_dequant.gptq import blockwise

        blockwise.descend_span(
            slope, hessian, shared, scales, codes, moved, grid.name, scaled=grid.neighbours > 0
        )  # fmt: skip
        return
    near = slope.clone()
    for at in range(0, slope.shape[-1], GROUP):
        columns, later = slice(at, at + GROUP), slice(at + GROUP, None)
        descend_block(
            near[..., columns], hessian[:, columns, columns], shared, scales[..., at // GROUP],
            codes[..., columns], moved[..., columns], grid,
        )  # fmt: skip
        near[..., later].baddbmm_(moved[..., columns], hessian[:, columns, later], alpha=-1)


def descend_block(
    slope: Tensor, hessian: Tensor, shared: Tensor, scales: Tensor, codes: Tensor, moved: Tensor,
    grid: Codes,
) -> None:  # fmt: skip
    """Move each row's block scale, then its 16 codes one at a time, to the value of least loss.

    `slope` [E, out, 16] is (W - Q) H at the block's inputs, `hessian` [E, 16, 16] is a diagonal block
    of H, and `shared` [E] are the global scales. Results are written to
      codes   [E, out, 16]: the values that the codes stand for
      scales  [E, out]: the block scales; if `grid.neighbours` is 0, `scales` is only read
      moved   [E, out, 16]: the change of the rounded weights, codes * scale / shared
    """
    before = codes * (scales / shared[:, None])[..., None]
    if grid.neighbours:
        scales.copy_(_best_scale(codes, scales, slope, hessian, shared[:, None]))
    step = scales / shared[:, None]
    values = codes * step[..., None]
    slope = (slope - (values - before) @ hessian).movedim(-1, 0).contiguous()  # [16, E, out]
    rounded = torch.empty_like(slope)
    curvature = hessian.movedim(0, -1)[..., None]  # [16, 16, E, 1]
    for i, value in enumerate(values.movedim(-1, 0).contiguous()):
        rounded[i] = grid.nearest((value + slope[i] / curvature[i, i]) / step)
        slope -= (rounded[i] * step - value) * curvature[i]
    codes.copy_(rounded.movedim(0, -1))
    torch.sub(codes * step[..., None], before, out=moved)


def _best_scale(
    codes: Tensor, scale: Tensor, slope: Tensor, hessian: Tensor, shared: Tensor
) -> Tensor:
    """Return the e4m3 scale [E, out] next to the optimum of the quadratic in a block's scale."""
    curvature = ((codes @ hessian) * codes).sum(-1)
    pull = (slope * codes).sum(-1)
    wanted = scale + pull / curvature.clamp(min=1e-30) * shared
    near = _near(wanted.clamp(SMALLEST_SCALE, FP8_MAX), 1)
    change = (near - scale[..., None]) / shared[..., None]
    cost = change.square() * curvature[..., None] - 2 * change * pull[..., None]
    least, best = cost.min(-1)
    return near.gather(-1, best[..., None])[..., 0].where((least < 0) & (curvature > 0), scale)
