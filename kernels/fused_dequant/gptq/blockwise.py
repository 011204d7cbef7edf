"""GPTQ over a block of 16 inputs, coordinate descent over a span's blocks, and products of changes.

    round_block     for each scale s that is tried, step = s / shared; for i = 0 .. 15:
                        left_i = w_i - sum_{j < i} error_j * U_ji
                        q_i = nearest(left_i / step), error_i = (left_i - q_i * step) / U_ii
                    keeps the s with the least sum of error_i^2
    descend_span    for one block after the other, with slopes that follow what earlier blocks moved:
                    first, with all codes fixed, moves s to the best e4m3 number near its optimum;
                    then moves each q_i in turn to nearest((q_i * step + slope_i / H_ii) / step)

    add_product     total += factor * left @ right: each number is split into two of TF32, and three of
                    the four products are summed (input_precision="tf32x3")

With e2m1 codes, round_block tries the usual s (from amax / 6) and its e4m3 neighbours, and
descend_span moves s. With e4m3 and int8 codes s stays. `quantize/schemes/gptq.py` explains H, U and
slope; it also has the method in torch.

In round_block and descend_span a thread has one row, which is one output's weights. The row's 16
weights stay in registers: each of the 16 inputs is a vector over the rows, in a tuple indexed at
compile time. round_block tries scales one after the other and keeps only the best scale and its loss.
It then rounds again with the best scale. A program's rows belong to one expert, with one U and H.
In descend_span tensor cores multiply what earlier blocks moved, which other threads have stored.
Kernels take strides, so tensors may be columns of larger matrices and need no copy.
"""

# Tuples are joined with +, since a Triton kernel cannot unpack them (RUF005).

import triton
import triton.language as tl

from fused_dequant.inputs.rounding import round_e2m1, round_e4m3
from fused_dequant.launch.hopper import BEFORE_3_8
from fused_dequant.launch.targets import capability, is_hopper

ROWS, WARPS = 64, 2  # one row per thread; small programs, since a dense Linear has few rows
# What kernels are not specialized on. Of rows known to be aligned a thread loads 4 by 4 inputs, else
# 16 by one; the addresses of 16 rows of three tensors spill, though in round_block from 3.8 on only.
SIZES = ("OUT", "BLOCKS", "scales_expert", "scales_row")
PLACES = range(17) if BEFORE_3_8 else SIZES
# Tiles of products. For 32 of [1408, 128] @ [128, 2816] an H100 takes 0.73 ms with HOPPER, and 0.97 if
# `right` has stride 1 along columns; products in float32 take 0.99 and 1.08.
USUAL = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
HOPPER = {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}


@triton.jit
def columns(block, ROWS: tl.constexpr, N: tl.constexpr):
    """Return the N columns of `block` [ROWS, N] as a tuple of vectors [ROWS]."""
    if N == 1:
        return (tl.reshape(block, (ROWS,)),)
    else:
        first, last = tl.split(tl.permute(tl.reshape(block, (ROWS, 2, N // 2)), (0, 2, 1)))
        return columns(first, ROWS, N // 2) + columns(last, ROWS, N // 2)


@triton.jit
def joined(vectors, ROWS: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr):
    """Return a tensor [ROWS, N] whose columns are N vectors of `vectors`, a tuple, from FIRST on."""
    if N == 1:
        return tl.reshape(vectors[FIRST], (ROWS, 1))
    else:
        first = joined(vectors, ROWS, FIRST, N // 2)
        last = joined(vectors, ROWS, FIRST + N // 2, N // 2)
        return tl.reshape(tl.permute(tl.join(first, last), (0, 2, 1)), (ROWS, N))


@triton.jit
def clamp(v, least, most):
    """Return v limited to the range from least to most."""
    return tl.minimum(tl.maximum(v, least), most)


@triton.jit
def nearest(v, CODES: tl.constexpr):
    """Return the value of format CODES nearest to v, ties to even, saturating; int8: 0 for -0."""
    if CODES == "int8":  # adding 1.5 * 2^23 leaves no fraction bits
        return (clamp(v, -128.0, 127.0) + 12582912.0) - 12582912.0
    if CODES == "e2m1":
        rounded = round_e2m1(tl.minimum(tl.abs(v), 6.0))
    else:
        rounded = round_e4m3(tl.minimum(tl.abs(v), 448.0))
    sign = v.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def bits_of(s):
    """Return the int32 code of s, an e4m3 number > 0 held in float32; s < 2^-6 is subnormal."""
    bits = s.to(tl.int32, bitcast=True)
    return tl.where(s < 0.015625, (s * 512.0).to(tl.int32), (bits >> 20) - 960)


@triton.jit
def neighbour(bits, offset):
    """Return the float32 value of e4m3 code `bits` + `offset`; the code is limited to 1 .. 126."""
    bits = tl.minimum(tl.maximum(bits + offset, 1), 126)
    normal = ((bits + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)


@triton.jit
def scale_of(largest, g):
    """Return a block's usual scale, e4m3(g * bf16(bf16(largest) / 6)), or 0.125 if this is 0."""
    sixth = tl.div_rn(largest.to(tl.bfloat16).to(tl.float32), 6.0)
    scale = round_e4m3(tl.minimum(g * sixth.to(tl.bfloat16).to(tl.float32), 448.0))
    return tl.where(scale == 0.0, 0.125, scale)


@triton.jit
def round_row(given, factor, factor_row, step, CODES: tl.constexpr):
    """Round rows' 16 weights in order; return each row's loss (sum of error_i^2), q_i and error_i."""
    loss = tl.zeros_like(step)
    codes, errors = (), ()
    for i in tl.static_range(16):
        weight = given[i]
        for j in tl.static_range(i):
            weight -= errors[j] * tl.load(factor + j * factor_row + i)
        code = nearest(tl.div_rn(weight, step), CODES)
        error = tl.div_rn(weight - code * step, tl.load(factor + i * factor_row + i))
        loss += error * error
        codes, errors = codes + (code,), errors + (error,)  # noqa: RUF005
    return loss, codes, errors


@triton.jit(do_not_specialize=PLACES, do_not_specialize_on_alignment=PLACES)
def round_block_kernel(
    weight, factor, shared, scales, codes, errors, OUT,
    weight_expert, weight_row, factor_expert, factor_row, scales_expert, scales_row,
    codes_expert, codes_row, errors_expert, errors_row,
    CODES: tl.constexpr, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (m, e) rounds ROWS rows of expert e; T_expert and T_row are the strides of tensor T."""
    e = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = m < OUT
    row, k = m[:, None], tl.arange(0, 16)[None, :]
    weight += e * weight_expert + row * weight_row + k
    codes += e * codes_expert + row * codes_row + k
    errors += e * errors_expert + row * errors_row + k
    scales += e * scales_expert + m * scales_row
    factor += e * factor_expert
    g = tl.load(shared + e)
    given = columns(tl.load(weight, mask=row < OUT, other=0.0), ROWS, 16)
    scale = tl.load(scales, mask=inside, other=1.0)
    if NEIGHBOURS > 0:
        largest = tl.abs(given[0])
        for i in tl.static_range(1, 16):
            largest = tl.maximum(largest, tl.abs(given[i]))
        scale = scale_of(largest, g)
        bits = bits_of(scale)
        least = tl.full((ROWS,), float("inf"), tl.float32)
        for offset in range(-NEIGHBOURS, NEIGHBOURS + 1):
            tried = neighbour(bits, offset)
            loss, _, _ = round_row(given, factor, factor_row, tl.div_rn(tried, g), CODES)
            scale = tl.where(loss < least, tried, scale)
            least = tl.minimum(loss, least)
        tl.store(scales, scale, mask=inside)
    _, chosen, done = round_row(given, factor, factor_row, tl.div_rn(scale, g), CODES)
    tl.store(codes, joined(chosen, ROWS, 0, 16), mask=row < OUT)
    tl.store(errors, joined(done, ROWS, 0, 16), mask=row < OUT)


@triton.jit
def best_scale(scale, curvature, pull, g):
    """Return the scale of least loss among `scale` and three e4m3 numbers around the optimum."""
    wanted = scale + tl.div_rn(pull, tl.maximum(curvature, 1e-30)) * g
    bits = bits_of(round_e4m3(clamp(wanted, 0.001953125, 448.0)))
    best, least = scale, tl.zeros_like(scale)
    for offset in tl.static_range(-1, 2):
        near = neighbour(bits, offset)
        change = tl.div_rn(near - scale, g)
        cost = change * change * curvature - 2.0 * change * pull
        best = tl.where((cost < least) & (curvature > 0.0), near, best)
        least = tl.minimum(cost, least)
    return best


@triton.jit(do_not_specialize=SIZES)
def descend_span_kernel(
    slope, hessian, shared, scales, codes, moved, OUT, BLOCKS,
    slope_expert, slope_row, hessian_expert, hessian_row, scales_expert, scales_row,
    codes_expert, codes_row, moved_expert, moved_row,
    CODES: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (m, e) improves ROWS rows of expert e; T_expert and T_row are the strides of tensor T."""
    e = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = m < OUT
    row, k = m[:, None], tl.arange(0, 16)[None, :]
    slope += e * slope_expert + row * slope_row + k
    codes += e * codes_expert + row * codes_row + k
    moved += e * moved_expert + row * moved_row + k
    scales += e * scales_expert + m * scales_row
    hessian += e * hessian_expert
    square = tl.arange(0, 16)[:, None] * hessian_row + k
    g = tl.load(shared + e)
    for b in range(BLOCKS):
        near = tl.load(slope + b * 16, mask=row < OUT, other=0.0)
        for c in range(b):  # what the blocks before it moved
            shift = tl.load(moved + c * 16, mask=row < OUT, other=0.0)
            across = tl.load(hessian + c * 16 * hessian_row + b * 16 + square)
            near -= tl.dot(shift, across, input_precision="tf32x3")
        pulls = columns(near, ROWS, 16)
        block_codes = columns(tl.load(codes + b * 16, mask=row < OUT, other=0.0), ROWS, 16)
        corner = hessian + b * 16 * (hessian_row + 1)
        scale = tl.load(scales + b, mask=inside, other=1.0)
        before = tl.div_rn(scale, g)
        step = before
        bent = ()  # own @ H
        if SCALED:
            curvature = tl.zeros_like(scale)
            pull = tl.zeros_like(scale)
            for i in tl.static_range(16):
                product = tl.zeros_like(scale)
                for j in tl.static_range(16):
                    product += block_codes[j] * tl.load(corner + j * hessian_row + i)
                curvature += product * block_codes[i]
                pull += pulls[i] * block_codes[i]
                bent = bent + (product,)  # noqa: RUF005
            scale = best_scale(scale, curvature, pull, g)
            step = tl.div_rn(scale, g)
            tl.store(scales + b, scale, mask=inside)
        new_codes, shifts = (), ()
        for i in tl.static_range(16):
            spread = tl.zeros_like(scale)
            for j in tl.static_range(i):
                spread += (new_codes[j] - block_codes[j]) * tl.load(corner + j * hessian_row + i)
            gradient = pulls[i] - step * spread
            if SCALED:
                gradient -= (step - before) * bent[i]
            wanted = block_codes[i] * step + tl.div_rn(
                gradient, tl.load(corner + i * hessian_row + i)
            )
            new_codes = new_codes + (nearest(tl.div_rn(wanted, step), CODES),)  # noqa: RUF005
        # Not a difference of products: contracted, that is not 0 where nothing changes.
        for i in tl.static_range(16):
            shift = (new_codes[i] - block_codes[i]) * step
            if SCALED:
                shift += block_codes[i] * (step - before)
            shifts = shifts + (shift,)  # noqa: RUF005
        tl.store(codes + b * 16, joined(new_codes, ROWS, 0, 16), mask=row < OUT)
        tl.store(moved + b * 16, joined(shifts, ROWS, 0, 16), mask=row < OUT)
        tl.debug_barrier()  # the next block reads what other threads have stored


def round_block(weight, factor, shared, scales, codes, errors, kind, neighbours):
    """Launch the kernel for `quantize.schemes.gptq.round_block`, which describes the tensors.

    Tensors are float32, with stride 1 along inputs. `kind` is the codes' format: e2m1, e4m3 or int8.
    `neighbours` scales on each side of the usual scale are tried; if it is 0, `scales` stay.
    """
    E, OUT, _ = weight.shape
    round_block_kernel[(triton.cdiv(OUT, ROWS), E)](
        weight, factor, shared, scales, codes, errors, OUT, *weight.stride()[:2],
        *factor.stride()[:2], *scales.stride(), *codes.stride()[:2], *errors.stride()[:2],
        CODES=kind, NEIGHBOURS=neighbours, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip


def descend_span(slope, hessian, shared, scales, codes, moved, kind, *, scaled):
    """Launch the kernel for `quantize.schemes.gptq.descend_span`; if `scaled`, scales move too."""
    E, OUT, inputs = slope.shape
    descend_span_kernel[(triton.cdiv(OUT, ROWS), E)](
        slope, hessian, shared, scales, codes, moved, OUT, inputs // 16, *slope.stride()[:2],
        *hessian.stride()[:2], *scales.stride()[:2], *codes.stride()[:2], *moved.stride()[:2],
        CODES=kind, SCALED=scaled, ROWS=ROWS, num_warps=WARPS,
        maxnreg=255,  # else ptxas may spill, to keep to 128
    )  # fmt: skip


@triton.jit
def product_kernel(
    total, lhs, rhs, factor, M, N, K,
    total_expert, total_row, left_expert, left_row, right_expert, right_row, right_column,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (n, m, e) adds factor * left[e] @ right[e] to a tile of total[e], by TF32 products."""
    e = tl.program_id(2).to(tl.int64)
    m = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None]
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    k = tl.arange(0, BK)
    lhs += e * left_expert + m * left_row + k[None, :]
    rhs += e * right_expert + n * right_column + k[:, None] * right_row
    tile = tl.zeros((BM, BN), tl.float32)
    for at in range(0, K, BK):
        a = tl.load(lhs + at, mask=(m < M) & (at + k[None, :] < K), other=0.0)
        b = tl.load(rhs + at * right_row, mask=(n < N) & (at + k[:, None] < K), other=0.0)
        tile = tl.dot(a, b, tile, input_precision="tf32x3")
    total += e * total_expert + m * total_row + n
    inside = (m < M) & (n < N)
    tl.store(total, tl.load(total, mask=inside, other=0.0) + factor * tile, mask=inside)


def add_product(total, lhs, rhs, factor):
    """Launch the kernel for `quantize.schemes.gptq.add_product`, which describes the tensors.

    `total` and `lhs` have stride 1 along columns.
    """
    E, M, N = total.shape
    tiles = HOPPER if is_hopper(total.device) else USUAL
    if total.device.type != "cpu" and capability(total.device) >= (12, 0):
        tiles = USUAL | {"num_warps": 8}  # four spill with Triton 3.8
    product_kernel[(triton.cdiv(N, tiles["BN"]), triton.cdiv(M, tiles["BM"]), E)](
        total, lhs, rhs, float(factor), M, N, lhs.shape[-1], *total.stride()[:2],
        *lhs.stride()[:2], *rhs.stride(), **tiles,
    )  # fmt: skip
