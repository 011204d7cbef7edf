"""The router: logits of all experts, the topk experts of each token, and their routing weights.

    logits [M, E] = x @ w.T      float32 sums, rounded to bf16 as transformers' linear layer does
    p = softmax(logits)          over all experts, in float32
    ids, weights                 the topk largest p, renormalised, times each expert's scale

The product has few outputs (256 x 128 at one canvas) and a long K. One program per tile would leave
most of the GPU idle, so K is split. `choose_kernel` has one program per token, and adds up the
splits without atomics. Both kernels start loading weights before they wait for the previous kernel.

The choice takes TOPK maxima one after the other. Score and index form one integer, so a maximum is
one instruction of a warp. On an H200 both kernels together take 4.0 us for 256 rows. With earlier tiles
they took 6.4 us when maxima were floats with separate indices and nothing was loaded early, then 4.8.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.chain import chained, follow
from fused_dequant.dispatch import launched_as

BK = 256
PROGRAMS = 264  # two per streaming multiprocessor of an H200; more splits only add sums to read
MOST_STEPS = 2  # per program: their loads are in flight together, and loads of 4 steps would spill


@triton.jit
def logits_kernel(
    x,
    w,
    partial,
    M,
    E,
    K,
    CHAINED: tl.constexpr,
    STEPS: tl.constexpr,
    EXPERTS: tl.constexpr,  # E rounded up to a power of two, at least 16
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Program (i, s) stores BM rows of x @ w.T over split s of K: `partial` f32 [splits, M, E]."""
    split = tl.program_id(1)
    m, e = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, EXPERTS)
    k = split * STEPS * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, EXPERTS), tl.float32)
    for step in tl.static_range(STEPS):
        column = k + step * BK
        inside = (column < K)[None, :]
        b = tl.load(w + e[:, None] * K + column[None, :], mask=(e < E)[:, None] & inside, other=0.0)
        if step == 0:
            follow(CHAINED)
        rows = x + m.to(tl.int64)[:, None] * K + column[None, :]
        a = tl.load(rows, mask=(m < M)[:, None] & inside, other=0.0)
        acc = tl.dot(a, b.T, acc)
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
    # Of the tiles tried from 16 x 256 to 128 x 256, logits and choice together take 4.0 us for 256
    # rows with blocks of 32 (64: 4.4), and 7.5 for 1,024 with blocks of 64 (32: 10.0).
    rows, columns = launched_as(M), triton.cdiv(K, BK)
    block = 32 if rows <= 512 else 64
    programs = triton.cdiv(rows, block) * columns
    steps = min(MOST_STEPS, triton.next_power_of_2(triton.cdiv(programs, PROGRAMS)))
    splits = triton.cdiv(columns, steps)
    experts = max(16, triton.next_power_of_2(E))
    device = x.device
    partial = torch.empty(splits, M, E, dtype=torch.float32, device=device)
    ids = torch.empty(M, topk, dtype=torch.int32, device=device)
    weights = torch.empty(M, topk, dtype=torch.float32, device=device)
    logits_kernel[(triton.cdiv(M, block), splits)](
        x, router, partial, M, E, K,
        STEPS=steps, EXPERTS=experts, BM=block, BK=BK, num_warps=block // 8,
        **chained(device),
    )  # fmt: skip
    choose_kernel[(M,)](
        partial, per_expert_scale, ids, weights, M, E,
        SPLITS=splits, TOPK=topk, EXPERTS=experts, num_warps=1, **chained(device),
    )  # fmt: skip
    return ids, weights
