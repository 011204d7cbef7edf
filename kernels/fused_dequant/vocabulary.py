"""The two products with the embedding matrix: lm_head with softcap, and the soft embedding.

lm_head: `matmul` with the softcap in its epilogue; logits leave as bf16 [M, V], once. In float32 the
256 x 262,144 logits of one canvas are 268 MB a copy.

Soft embedding, softmax(logits / T) @ embedding, the input of self-conditioning:

K = V is 262,144 long and M x H only 22 tiles, so K is split into S ranges to fill the machine, each with
a maximum of its own:

    1. `exponential_kernel`  p = exp((l - max_s) / T) as bf16 [M, V], max_s and sum_s(p) [S, M]; a range
                             of a row is small enough that its second reading comes from L2
    2. `split_k_kernel`      partial_s f32 [S, M, H] = p[:, range s] @ embedding[range s]
    3. `reduce_kernel`       sum_s w_s * partial_s / sum_s w_s * sum_s(p), w_s = exp((max_s - max) / T)

No atomics: two runs are equal bit for bit. p is in [0, 1] and unnormalised, so rounding it to bf16 costs
2^-9 of itself; the sums are of the rounded values, so the weights of a row add up to 1.

FP8 (`lm_head` alone): with a per-row scale of the embedding the head is an ordinary FP8 matmul. The soft
embedding stays bf16: Hopper's FP8 tensor cores want both operands contiguous along K, here V, which
would need a second, transposed copy of the embedding (738 MB), and e4m3 has no room for the tail of a
distribution over 262,144 tokens.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def exponential_kernel(
    logits, p, largest, total, M, V, length, inverse_temperature, BLOCK: tl.constexpr
):
    """Program (m, s): range s of row m, columns s * length to (s + 1) * length."""
    m, split = tl.program_id(0), tl.program_id(1)
    row = m.to(tl.int64) * V
    first = split * length
    last = tl.minimum(first + length, V)
    k = tl.arange(0, BLOCK)
    running = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        value = tl.load(logits + row + start + k, mask=k < last - start, other=float("-inf"))
        running = tl.maximum(running, value.to(tl.float32))
    top = tl.max(running)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        value = tl.load(logits + row + start + k, mask=k < last - start, other=float("-inf"))
        value = tl.exp((value.to(tl.float32) - top) * inverse_temperature).to(tl.bfloat16)
        sums += value.to(tl.float32)
        tl.store(p + row + start + k, value, mask=k < last - start)
    tl.store(largest + split * M + m, top)
    tl.store(total + split * M + m, tl.sum(sums))


@triton.jit
def split_k_kernel(
    p,
    embedding,
    partial,
    M,
    V,
    H,
    length,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """partial[s] = p[:, range s] @ embedding[range s]; `length` is a multiple of BK."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    k = tl.arange(0, BK)
    first = split * length
    last = tl.minimum(first + length, V)
    a_at = p + (m % M).to(tl.int64)[:, None] * V + (first + k)[None, :]
    b_at = embedding + (first + k).to(tl.int64)[:, None] * H + (n % H)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(first, last, BK):
        a = tl.load(a_at, mask=k[None, :] < last - k0, other=0.0)
        b = tl.load(b_at, mask=k[:, None] < last - k0, other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BK
        b_at += BK * H
    place = partial + (split * M + m).to(tl.int64)[:, None] * H + n[None, :]
    tl.store(place, acc, mask=(m < M)[:, None] & (n < H)[None, :])


@triton.jit
def reduce_kernel(
    partial,
    largest,
    total,
    out,
    M,
    H,
    inverse_temperature,
    SPLITS: tl.constexpr,
    RANGES: tl.constexpr,  # SPLITS rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Combine the splits of row m, each weighted by exp((its maximum - the maximum) / T)."""
    m = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    range_ = tl.arange(0, RANGES)
    tops = tl.load(largest + range_ * M + m, mask=range_ < SPLITS, other=float("-inf"))
    top = tl.max(tops)
    sums = tl.load(total + range_ * M + m, mask=range_ < SPLITS, other=0.0)
    norm = tl.sum(tl.exp((tops - top) * inverse_temperature) * sums)
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        weight = tl.exp((tl.load(largest + split * M + m) - top) * inverse_temperature) / norm
        values = tl.load(partial + (split * M + m) * H + column, mask=column < H, other=0.0)
        acc += weight * values
    tl.store(out + m * H + column, acc.to(out.dtype.element_ty), mask=column < H)


def soft_embedding(
    logits: torch.Tensor,
    embedding: torch.Tensor,
    inverse_temperature: float,
    config: dict[str, int],
) -> torch.Tensor:
    """Logits bf16 or f32 [M, V], embedding bf16 [V, H] -> bf16 [M, H]; see the module's docstring."""
    (M, V), H = logits.shape, embedding.shape[1]
    config = dict(config)
    length = triton.cdiv(triton.cdiv(V, config.pop("SPLITS")), config["BK"]) * config["BK"]
    splits = triton.cdiv(V, length)
    device = logits.device
    p = torch.empty(M, V, dtype=torch.bfloat16, device=device)
    largest, total = torch.empty(2, splits, M, dtype=torch.float32, device=device)
    partial = torch.empty(splits, M, H, dtype=torch.float32, device=device)
    out = torch.empty(M, H, dtype=torch.bfloat16, device=device)
    exponential_kernel[(M, splits)](
        logits, p, largest, total, M, V, length, inverse_temperature,
        BLOCK=min(4096, triton.next_power_of_2(length)), num_warps=8,
    )  # fmt: skip
    grid = (triton.cdiv(M, config["BM"]), triton.cdiv(H, config["BN"]), splits)
    split_k_kernel[grid](p, embedding, partial, M, V, H, length, **config)
    reduce_kernel[(M, triton.cdiv(H, 1024))](
        partial, largest, total, out, M, H, inverse_temperature,
        SPLITS=splits, RANGES=triton.next_power_of_2(splits), BLOCK=1024,
    )  # fmt: skip
    return out
