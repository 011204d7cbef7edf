"""Dynamic activation quantization, alone or fused into the activation before it.

Per token (FP8, INT8): scale[m] = amax(|h[m]|) / 448 or / 127, q = h * (1 / scale), where h is x[m], or

    GELU_MUL   gelu_tanh(x[m, :K]) * x[m, K:]       (x [M, 2K]: gate first)

The row is held in registers between the reduction and the division, so x is read once and a byte a
value is written. `residual` and `attention` quantize the rows they make with the same functions.

NVFP4 (W4A4): groups of 16 with an e4m3 scale under the calibrated global scale; the arithmetic of
compressed-tensors. e2m1 rounding is to nearest, ties to even.

A token holding NaN or infinity gets scale NaN: its outputs are NaN and no other token's are.
"""

# Kernels are compiled from their syntax: their parameters have no Python types, and a launch passes
# numbers for `constexpr`.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

from fused_dequant.chain import chained, follow
from fused_dequant.formats import LARGEST
from fused_dequant.tiles import gelu_mul as gelu_mul_tile


@triton.jit
def magnitude(h):
    """The bits of |h|, ordered as |h| is and NaN above infinity, which a warp reduces at once."""
    return h.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """The scale of a row whose largest `magnitude` is `largest`; NaN if that is no finite number."""
    s = tl.where(largest > 0, tl.div_rn(largest.to(tl.float32, bitcast=True), LARGEST), 1.0)
    return tl.where(largest < 0x7F800000, s, float("nan"))


@triton.jit
def codes(h, scale, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Round h / scale to 8 bits."""
    v = h * tl.div_rn(1.0, scale)
    v = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)  # of NaN too
    if dtype == tl.int8:
        # Round half to even: adding 1.5 * 2^23 leaves no fraction bits.
        v = (v + 12582912.0) - 12582912.0
    return v.to(dtype)


@triton.jit
def quantize_rows_kernel(
    x, q, scale, M, K,
    CHAINED: tl.constexpr, GELU_MUL: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program; BLOCK >= K is a power of two."""
    follow(CHAINED)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)[None, :]
    inside = (m < M)[:, None] & (k < K)
    place = m[:, None] * K + k
    if GELU_MUL:
        gate = tl.load(x + place + m[:, None] * K, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + place + m[:, None] * K + K, mask=inside, other=0.0).to(tl.float32)
        h = gelu_mul_tile(gate, up)
    else:
        h = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    s = scale_of(tl.max(magnitude(h), 1), LARGEST)
    tl.store(q + place, codes(h, s[:, None], q.dtype.element_ty, LARGEST), mask=inside)
    tl.store(scale + m, s, mask=m < M)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, gelu_mul: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """X [M, K] ([M, 2K] for gelu_mul) -> (dtype [M, K], scale f32 [M]); dtype float8_e4m3fn or int8."""
    M, width = x.shape
    K = width // 2 if gelu_mul else width
    q = torch.empty(M, K, dtype=dtype, device=x.device)
    scale = torch.empty(M, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(K)
    # Thousands of short rows (the experts' hidden ones) would be as many tiny programs: 8,192 rows of
    # 704 take 5.1 us, one a program 10.3.
    rows = max(1, 4096 // block) if M >= 1024 else 1
    loaded = rows * block * (width // K)
    quantize_rows_kernel[(triton.cdiv(M, rows),)](
        x, q, scale, M, K, GELU_MUL=gelu_mul, LARGEST=LARGEST[dtype], ROWS=rows, BLOCK=block,
        num_warps=max(1, min(8, loaded // 1024)), **chained(x.device),
    )  # fmt: skip
    return q, scale


@triton.jit
def encode_e2m1(v):
    """Nearest E2M1 code (0..15), ties to even, saturating at 6."""
    a = tl.abs(v)
    code = (a > 0.25).to(tl.uint8) + (a >= 0.75).to(tl.uint8) + (a > 1.25).to(tl.uint8)
    code += (a >= 1.75).to(tl.uint8) + (a > 2.5).to(tl.uint8) + (a >= 3.5).to(tl.uint8)
    code += (a > 5.0).to(tl.uint8)
    return code | ((v < 0.0).to(tl.uint8) << 3)


@triton.jit
def quantize_nvfp4_kernel(x, global_scale, packed, scale, K, GROUPS: tl.constexpr):
    """Program (m, i) quantizes GROUPS groups of 16 of row m."""
    m = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    h = tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32) * tl.load(global_scale)
    amax = tl.max(tl.abs(h), 1)
    s = tl.minimum(tl.div_rn(amax, 6.0), 448.0).to(tl.float8e4nv)
    divisor = s.to(tl.float32)[:, None]
    v = tl.where(divisor > 0.0, tl.div_rn(h, tl.where(divisor > 0.0, divisor, 1.0)), 0.0)
    low, high = tl.split(encode_e2m1(v).reshape(GROUPS, 8, 2))
    half = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(packed + m * (K // 2) + half, low | (high << 4), mask=half < K // 2)
    tl.store(scale + m * (K // 16) + group, s, mask=group < K // 16)


def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """X [M, K], global_scale f32 [1] -> (packed uint8 [M, K/2], scale e4m3 [M, K/16]); K % 16 == 0."""
    M, K = x.shape
    packed = torch.empty(M, K // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(M, K // 16, dtype=torch.float8_e4m3fn, device=x.device)
    grid = (M, triton.cdiv(K // 16, 64))
    quantize_nvfp4_kernel[grid](x, global_scale, packed, scale, K, GROUPS=64)
    return packed, scale
