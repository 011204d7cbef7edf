"""Functions and constants that Triton kernels share: a block's rows, the activation, stores.

A *block* is `BM` rows of activations that are multiplied by the same weights. In a dense product,
block i is rows BM*i .. BM*i + BM - 1 of x. In a grouped product (of experts), block i belongs to
expert `block_expert[i]`. The slot of its row m is `slots[BM*i + m]`: token * topk + choice, or
`total` for padding. The host need not know how many blocks are in use.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: the difference of two of them is 0 and not NaN
FAR = tl.constexpr(1 << 30)  # beyond every position of a sequence
# How results of a product are cached: 700 MB of weights would otherwise push the experts' results
# (11 MB per canvas) out of the L2 before they are read (FP8: 0.12 of 9.5 ms per forward).
KEPT = tl.constexpr("evict_last")


@triton.jit
def block_rows(slots, first, total, COUNT: tl.constexpr, GROUPED: tl.constexpr):
    """Return slots [COUNT] of the rows from `first` on, and a mask [COUNT]: false for padding."""
    offsets = first + tl.arange(0, COUNT)
    slot = tl.load(slots + offsets) if GROUPED else offsets
    return slot, slot < total


@triton.jit
def gelu_mul(gate, up):
    """Return gelu_tanh(gate) * up in float32; tanh(z) = 1 - 2 / (exp(2z) + 1) has no overflow."""
    z = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
    return gate * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0)) * up


@triton.jit
def tanh(x, HARDWARE: tl.constexpr):
    """Return the tanh of x; 1 - 2 / (exp(2x) + 1) has no overflow.

    If HARDWARE is true, one instruction replaces that formula. The instruction's relative error is at
    most 2^-11 (PTX manual), an eighth of bf16's spacing. Triton's interpreter cannot run it.
    """
    if HARDWARE:
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return y


@triton.jit
def split_gate_up(acc, ROWS: tl.constexpr, BM: tl.constexpr):
    """Split acc [ROWS, BM] into gate and up [ROWS / 2, BM]; runs of 8 gate and 8 up rows alternate."""
    gate, up = tl.split(acc.reshape(ROWS // 16, 2, 8, BM).permute(0, 2, 3, 1))
    return gate.reshape(ROWS // 2, BM), up.reshape(ROWS // 2, BM)


@triton.jit
def store_nvfp4(
    result, y, factor, row_weight, slot, real, tile, N,
    BM: tl.constexpr, BN: tl.constexpr, GELU_MUL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Store f32 [BN, BM] * factor in y, after gelu_mul if GELU_MUL, times row_weight if WEIGHTED."""
    width = N
    rows: tl.constexpr = BN // 2 if GELU_MUL else BN
    if GELU_MUL:
        gate, up = split_gate_up(result, BN, BM)
        gate *= tl.load(factor)
        result = gelu_mul(gate, up * tl.load(factor + 1))
        width = N // 2
    else:
        result *= tl.load(factor)
    if WEIGHTED:
        result *= tl.load(row_weight + slot, mask=real, other=0.0)[None, :]
    column = tile * rows + tl.arange(0, rows)
    place = y + slot.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, result.T.to(tl.bfloat16), mask=real[:, None] & (column[None, :] < width))
