"""Rounds activations as W4A4 does for NVFP4 weights, into bf16 rows that any kernel can multiply.

    s = e4m3(min(g * amax / 6, 448)), or 0.125 where this is 0     scale of a block of 16 values
    y = e2m1(clamp(x / (s / g), -6, 6)) * s                        the row that is stored

g is the global scale, and y / g approximates x. A code has 2 significant bits, a block scale 4, and
y is at most 6 * 448, so y is exact in bf16. `simulated.scaled` puts 1 / g into the weight's factor,
in float32. All numbers equal those of compressed-tensors in float32, ties to the even code; NaN stays
NaN. Rounding to e4m3 uses float32 additions, because sm_80 has no e4m3 type.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def round_e4m3(s):
    """Round 0 <= s <= 448 to e4m3, half to even, by adding and subtracting 1.5 * 2^23 grid steps."""
    exponent = tl.maximum(s.to(tl.int32, bitcast=True) >> 23, 121)  # 2^-6: subnormals below
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (s + magic) - magic


@triton.jit
def round_e2m1(v):
    """Round -6 <= v <= 6 to the nearest e2m1 value, ties to the even code."""
    a = tl.abs(v)
    r = 0.5 * (a > 0.25).to(tl.float32) + 0.5 * (a >= 0.75).to(tl.float32)
    r += 0.5 * (a > 1.25).to(tl.float32) + 0.5 * (a >= 1.75).to(tl.float32)
    r += (a > 2.5).to(tl.float32) + (a >= 3.5).to(tl.float32) + 2.0 * (a > 5.0).to(tl.float32)
    return tl.where(v < 0.0, -r, r)


@triton.jit
def scaled_blocks(h, g):
    """Return, in float32, scales s [n] of blocks h [n, 16], and h / (s / g) clamped to -6 .. 6."""
    s = round_e4m3(tl.minimum(g * tl.div_rn(tl.max(tl.abs(h), 1), 6.0), 448.0))
    s = tl.where(s == 0.0, 0.125, s)
    v = tl.div_rn(h, tl.div_rn(s, g)[:, None])
    return s, tl.minimum(tl.maximum(v, -6.0), 6.0)


@triton.jit
def round_nvfp4_kernel(
    x, experts, global_scale, y, K, TOPK: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr
):
    """Program (m, i) writes blocks i * GROUPS and following of row m of y, from row m // TOPK of x."""
    m = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    h = tl.load(x + m // TOPK * K + k, mask=k < K, other=0.0).to(tl.float32)
    g = tl.load(global_scale + (tl.load(experts + m) if EACH else 0))
    s, v = scaled_blocks(h, g)
    rounded = round_e2m1(v) * s[:, None]
    rounded = tl.where(h == h, rounded, h)
    tl.store(y + m * K + k, rounded.to(tl.bfloat16), mask=k < K)


def round_nvfp4(x, global_scale, experts):
    """Launch the kernel for `simulated.round_nvfp4`, which describes the arguments."""
    M, K = x.shape
    topk = 1 if experts is None else experts.numel() // M
    y = torch.empty(M * topk, K, dtype=torch.bfloat16, device=x.device)
    groups = 32
    grid = (M * topk, triton.cdiv(K, 16 * groups))
    round_nvfp4_kernel[grid](
        x, global_scale if experts is None else experts, global_scale, y, K,
        TOPK=topk, EACH=experts is not None, GROUPS=groups,
    )  # fmt: skip
    return y
