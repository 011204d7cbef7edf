"""The router: logits of all experts, the topk experts of each token, and their routing weights.

    logits [M, E] = x @ w.T      float32 sums, rounded to bf16 as transformers' linear layer does
    p = softmax(logits)          over all experts, in float32
    ids, weights                 the topk largest p, renormalised, times each expert's scale

The product has few outputs (256 x 128 at one canvas) and a long K. One program per tile would leave
most of the GPU idle, so K is split. `choose_kernel` has one program per token, and adds up the
splits without atomics. With few rows `logits_kernel` starts to load weights before it waits for the
previous kernel.

The choice takes TOPK maxima one after the other. Score and index form one integer, so a maximum is
one instruction of a warp. docs/kernels-log.md ("The router and sorting") has times.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.dispatch import launched_as

PROGRAMS = 132  # as many as an H200 has streaming multiprocessors
# Tiles of the logits. With few rows a program has one step, whose weights it loads while it waits.
FEW = {"BM": 32, "BK": 256, "num_warps": 4}
MANY = {"BM": 64, "BK": 64, "num_warps": 4, "num_stages": 4}


@triton.jit
def columns_of(x, row, rows, column, K):
    """Return the columns of some rows of x [rows, K]; rows and columns that x lacks are zero."""
    place = x + row.to(tl.int64)[:, None] * K + column[None, :]
    return tl.load(place, mask=(row < rows)[:, None] & (column < K)[None, :], other=0.0)


@triton.jit
def logits_kernel(
    x, w, partial, M, E, K,
    CHAINED: tl.constexpr, STEPS: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Program (i, s) stores BM rows of x @ w.T over split s of K: `partial` f32 [splits, M, E].

    EXPERTS is E rounded up to a power of two, at least 16.
    """
    split = tl.program_id(1)
    m, e = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, EXPERTS)
    k = split * STEPS * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, EXPERTS), tl.float32)
    if STEPS == 1:
        b = columns_of(w, e, E, k, K)
        follow(CHAINED)
        acc = tl.dot(columns_of(x, m, M, k, K), b.T, acc)
    else:
        follow(CHAINED)
        for step in range(STEPS):
            b = columns_of(w, e, E, k + step * BK, K)
            acc = tl.dot(columns_of(x, m, M, k + step * BK, K), b.T, acc)
    place = partial + (split * M + m).to(tl.int64)[:, None] * E + e[None, :]
    tl.store(place, acc, mask=(m < M)[:, None] & (e < E)[None, :])


@triton.jit
def ordered(bits):
    """Map bf16 bits, sign-extended to int32, to integers that sort like the bf16 values, or back."""
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@triton.jit
def score_of(key):
    """Return the float32 score that the upper 16 bits of a key of `choose_kernel` hold."""
    return (ordered(key >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def choose_kernel(
    partial, per_expert_scale, ids, weights, M, E,
    CHAINED: tl.constexpr, SPLITS: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program m stores ids and weights of row m's TOPK largest logits; ties go to the lowest index."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    scale = tl.load(per_expert_scale + e, mask=e < E, other=0.0).to(tl.float32)
    follow(CHAINED)
    score = tl.zeros((EXPERTS,), tl.float32)
    for split in tl.static_range(SPLITS):
        score += tl.load(partial + (split * M + m) * E + e, mask=e < E, other=0.0)
    score = score.to(tl.bfloat16)
    # All keys differ, so even a row of NaN gets TOPK experts.
    key = ordered(score.to(tl.int16, bitcast=True).to(tl.int32)) << 16 | (EXPERTS - 1 - e)
    key = tl.where(e < E, key, -0x80000000)
    best = tl.max(key)
    top = score_of(best)
    p = tl.exp(score.to(tl.float32) - top)
    total = 1.0
    # A token's slots follow the expert's index, not its score: only a sum's order depends on this.
    rank = (e > EXPERTS - 1 - (best & 0xFFFF)).to(tl.int32)
    for _ in tl.static_range(TOPK - 1):
        best = tl.max(tl.where(key < best, key, -0x80000000))
        total += tl.exp(score_of(best) - top)
        rank += (e > EXPERTS - 1 - (best & 0xFFFF)).to(tl.int32)
    chosen = key >= best
    tl.store(ids + m * TOPK + rank, e, mask=chosen)
    tl.store(weights + m * TOPK + rank, p / total * scale, mask=chosen)


def choose_experts(x, router, per_expert_scale, topk):
    """Launch the kernels for `operations.choose_experts`, which describes the arguments."""
    (M, K), E = x.shape, len(router)
    rows = launched_as(M)
    tile = FEW if rows <= 512 else MANY
    columns = triton.cdiv(K, tile["BK"])
    splits = columns if tile is FEW else max(2, PROGRAMS // triton.cdiv(rows, tile["BM"]))
    steps = triton.cdiv(columns, splits)
    splits = triton.cdiv(columns, steps)
    experts, device = max(16, triton.next_power_of_2(E)), x.device
    partial = torch.empty(splits, M, E, dtype=torch.float32, device=device)
    ids = torch.empty(M, topk, dtype=torch.int32, device=device)
    weights = torch.empty(M, topk, dtype=torch.float32, device=device)
    logits_kernel[(triton.cdiv(M, tile["BM"]), splits)](
        x, router, partial, M, E, K, STEPS=steps, EXPERTS=experts, **tile, **chained(device)
    )
    choose_kernel[(M,)](
        partial, per_expert_scale, ids, weights, M, E,
        SPLITS=splits, TOPK=topk, EXPERTS=experts, num_warps=1, **chained(device),
    )  # fmt: skip
    return ids, weights
