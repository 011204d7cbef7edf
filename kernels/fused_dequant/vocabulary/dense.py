"""The two products with the embedding matrix: lm_head with softcap, and the soft embedding.

At one canvas of 256 tokens, arithmetic limits both. So both read their tiles with TMA (tensor
descriptors): addresses then take no registers, and no arithmetic in the loop. On GPUs older than
sm_90 Triton turns the descriptors into ordinary loads.

lm_head: programs are persistent, one per SM, and loop over tiles. The next tile's loads run while
the current tile is capped and stored. Logits are written once, as bf16 [M, V]: in float32 the 256 x
262,144 logits of one canvas would take 268 MB. For sm_90 `dense_hopper` has another kernel.

Soft embedding: softmax(logits / T) @ embedding, the input of self-conditioning. V is 262,144,
but the result [M, H] has only 22 tiles. So V is split into S ranges, to fill the GPU. In each row,
range s has an anchor a_s, a number near its maximum, and a sum t_s of its p:

    1. `exponential_kernel`  p = exp((l - a_s) / T) as bf16 [M, V]; a_s and t_s, each f32 [S, M]
    2. `split_k_kernel`      partial_s f32 [S, M, H] = p[:, range s] @ embedding[range s]
    3. `reduce_kernel`       sum_s(w_s partial_s) / sum_s(w_s t_s), with w_s = exp((a_s - max a) / T)

The anchor is the maximum of a range's first 2,048 logits. So a program reads logits once, and holds
only 2,048. Where a logit exceeds the anchor, p exceeds 1; bf16 holds it with float32's exponents.
There are no atomics, so two runs are equal bit for bit. p is rounded to bf16 before it is
normalised. t_s adds up the rounded p, so the weights of a row still add up to 1.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.targets import processors
from fused_dequant.launch.tiles import LOG2_E, LOWEST, tanh
from fused_dequant.sampler import sampling
from fused_dequant.vocabulary import dense_hopper
from fused_dequant.weights import tuning
from fused_dequant.weights.tuning import Config

# Base-2 logarithm of the largest p: 262,144 p of 2^96 times values of 1,000 sum to 2^124.
REACH = tl.constexpr(96.0)


@triton.jit
def lm_head_kernel(
    x, w, y, M, V, H, cap, programs,
    CHAINED: tl.constexpr, HARDWARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Write capped x [M, H] @ w [V, H].T to y [M, V]. Boxes: x [BM, BK], w [BN, BK], y [BM, BN/2]."""
    follow(CHAINED)
    rows = tl.cdiv(M, BM)
    for tile in tl.range(tl.program_id(0), rows * tl.cdiv(V, BN), programs, flatten=True):
        m, n = (tile % rows) * BM, (tile // rows) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, H, BK):
            acc = tl.dot(x.load([m, k]), w.load([n, k]).T, acc)
        acc *= 1.0 / cap
        # Stored in two halves, so that the staging buffer takes half the shared memory.
        first_half, second_half = tl.split(acc.reshape(BM, 2, BN // 2).permute(0, 2, 1))
        y.store([m, n], (cap * tanh(first_half, HARDWARE)).to(tl.bfloat16))
        y.store([m, n + BN // 2], (cap * tanh(second_half, HARDWARE)).to(tl.bfloat16))


def lm_head(
    x: torch.Tensor,
    w: torch.Tensor,
    cap: float,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Launch the kernel for `operations.lm_head`; a `config` with STAGES selects the sm_90 kernel.

    If `config` is None, the tables give it. V and H must be multiples of 8: TMA reads 16-byte units.
    """
    (M, H), V = x.shape, len(w)
    config = config or tuning.choose("lm_head", "bf16", M, V, H, x.device)
    if "STAGES" in config:
        return dense_hopper.lm_head(x, w, cap, config, out)
    y = torch.empty(M, V, dtype=torch.bfloat16, device=x.device) if out is None else out
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    tiles = triton.cdiv(M, BM) * triton.cdiv(V, BN)
    programs = min(tiles, processors(x.device))
    lm_head_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [BM, BK]), TensorDescriptor.from_tensor(w, [BN, BK]),
        TensorDescriptor.from_tensor(y, [BM, BN // 2]),
        M, V, H, cap, programs, HARDWARE=x.device.type != "cpu", **chained(x.device), **config,
    )  # fmt: skip
    return y


@triton.jit
def rounded_exponential(x, HARDWARE: tl.constexpr):
    """Return 2^x rounded to bf16, as bf16 and as float32; results below 2^-126 are zero.

    If HARDWARE is true, 5 instructions make two values. The compiler's own code would rescale subnormal
    results. It would also convert values to bf16 singly, which takes as long as the exponentials.
    """
    if HARDWARE:
        p, p_wide = tl.inline_asm_elementwise(
            "{ .reg .f32 e0, e1; ex2.approx.ftz.f32 e0, $3; ex2.approx.ftz.f32 e1, $4; "
            "cvt.rn.bf16x2.f32 $0, e1, e0; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000; }",
            "=r,=r,=r,r,r", [x], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        p = tl.where(x < -126.0, 0.0, tl.exp2(x)).to(tl.bfloat16)
        p_wide = p.to(tl.float32)
    return p, p_wide


@triton.jit
def range_exponentials(
    logits, p, count, anchor, sharpness, HARDWARE: tl.constexpr, EIGHTS: tl.constexpr
):
    """Store p = 2^((logits - anchor) * sharpness) of `count` columns; return sum(p), max(logits)."""
    # A thread holds whole rows of 8, 16 bytes: their sums and maxima need no other thread.
    column = tl.arange(0, EIGHTS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tops = tl.full((EIGHTS,), LOWEST, tl.float32)
    sums = tl.zeros((EIGHTS,), tl.float32)
    for start in range(0, count, 8 * EIGHTS):
        mask = column < count - start
        x = tl.load(logits + start + column, mask=mask, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, tl.max(x, 1))
        rounded, wide = rounded_exponential((x - anchor) * sharpness, HARDWARE)
        tl.store(p + start + column, rounded, mask=mask)
        sums += tl.sum(wide, 1)
    return tl.sum(sums), tl.max(tops)


@triton.jit
def exponential_kernel(
    logits, p, anchors, total, M, V, length, inverse_temperature,
    CHAINED: tl.constexpr, HARDWARE: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """Program (m, s) stores p of range s of row m, `length` columns, and the range's anchor and sum.

    The anchor (the logit where p is 1) is the maximum of the range's first 8 * EIGHTS columns. If a p
    exceeds 2^REACH, the program starts again, with the maximum of the whole range as anchor.
    """
    follow(CHAINED)
    m, split = tl.program_id(0), tl.program_id(1)
    first = split * length
    count = tl.minimum(first + length, V) - first
    logits += m.to(tl.int64) * V + first
    p += m.to(tl.int64) * V + first
    column = tl.arange(0, 8 * EIGHTS)
    piece = tl.load(logits + column, mask=column < count, other=float("-inf"))
    sharpness = tl.load(inverse_temperature + m) * LOG2_E
    anchor = tl.maximum(tl.max(piece.to(tl.float32)), LOWEST)
    sums, top = range_exponentials(logits, p, count, anchor, sharpness, HARDWARE, EIGHTS)
    if (top - anchor) * sharpness > REACH:
        anchor = top
        sums, top = range_exponentials(logits, p, count, anchor, sharpness, HARDWARE, EIGHTS)
    tl.store(anchors + split * M + m, anchor)
    tl.store(total + split * M + m, sums)


@triton.jit
def split_k_kernel(
    p, embedding, partial, M, V, H, length,
    CHAINED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store partial[s] = p[:, range s] @ embedding[range s] (`length` tokens, a multiple of BK).

    p [M, V] and embedding [V, H] are TMA descriptors of boxes [BM, BK], [BK, BN]; past V they read 0.
    """
    follow(CHAINED)
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    split = tl.program_id(2)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(split * length, tl.minimum((split + 1) * length, V), BK):
        acc = tl.dot(p.load([m, k]), embedding.load([k, n]), acc)
    row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
    place = partial + (split * M + row).to(tl.int64)[:, None] * H + column[None, :]
    tl.store(place, acc, mask=(row < M)[:, None] & (column < H)[None, :])


@triton.jit
def reduce_kernel(
    partial, anchors, total, out, M, H, inverse_temperature,
    CHAINED: tl.constexpr, ANCHORED: tl.constexpr, SPLITS: tl.constexpr,
    RANGES: tl.constexpr,  # SPLITS rounded up to a power of two
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum row m's splits, each weighted by exp((split's anchor - highest anchor) / T), and normalise.

    If ANCHORED is false, the splits of a row share one anchor: `anchors` is not read, `total` is [M].
    """
    follow(CHAINED)
    m = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ANCHORED:
        range_ = tl.arange(0, RANGES)
        anchor = tl.load(anchors + range_ * M + m, mask=range_ < SPLITS, other=LOWEST)
        highest = tl.max(anchor)
        sharpness = tl.load(inverse_temperature + m)
        sums = tl.load(total + range_ * M + m, mask=range_ < SPLITS, other=0.0)
        norm = tl.sum(tl.exp((anchor - highest) * sharpness) * sums)
    else:
        norm = tl.load(total + m)
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        values = tl.load(partial + (split * M + m) * H + column, mask=column < H, other=0.0)
        if ANCHORED:
            values *= tl.exp((tl.load(anchors + split * M + m) - highest) * sharpness)
        acc += values
    tl.store(out + m * H + column, (acc / norm).to(out.dtype.element_ty), mask=column < H)


def look(x, w, cap, state, schedule, logits, probabilities):
    """Launch the sm_90 kernels for `operations.look`, which describes the arguments."""
    (M, H), V = x.shape, len(w)
    config = tuning.choose("lm_head", "bf16", M, V, H, x.device)
    config, p = config if "STAGES" in config else {"STAGES": 4}, probabilities.p
    statistics = dense_hopper.survey(x, w, cap, schedule, state.step, logits, p, config)
    rows, width = logits.view(*state.canvas.shape, V), dense_hopper.BN.value
    return sampling.draw(rows, statistics, width, state, schedule, probabilities.total)


def soft_embedding(logits, embedding, inverse_temperature, out=None, config=None):
    """Launch the kernels for `operations.soft_embedding`; if `config` is None, the tables give it."""
    (M, V), H = logits.shape, embedding.shape[1]
    config = config or tuning.choose("soft_embedding", "bf16", M, H, V, logits.device)
    p, anchors, total = exponentials(logits, inverse_temperature, config)
    return reduce(_multiply(p, embedding, config), anchors, total, inverse_temperature, out)


def soft_embedding_of(probabilities, embedding, out=None):
    """Launch the kernels for `operations.soft_embedding_of`, which describes the arguments."""
    p, total = probabilities.p, probabilities.total
    config = tuning.choose("soft_embedding", "bf16", len(p), *embedding.T.shape, p.device)
    return reduce(_multiply(p, embedding, config), None, total, total, out)


def exponentials(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch kernel 1; return p bf16 [M, V], anchors and sums of p f32 [splits, M]."""
    (M, V), device = logits.shape, logits.device
    splits, length = split_lengths(V, config)
    p = torch.empty(M, V, dtype=torch.bfloat16, device=device)
    anchors, total = torch.empty(2, splits, M, dtype=torch.float32, device=device)
    exponential_kernel[(M, splits)](
        logits, p, anchors, total, M, V, length, inverse_temperature,
        HARDWARE=device.type != "cpu", EIGHTS=256, num_warps=8, **chained(device),
    )  # fmt: skip
    return p, anchors, total


def split_lengths(V: int, config: Config) -> tuple[int, int]:
    """Return the number of ranges that V tokens are split into, and the number of tokens per range."""
    length = -(-V // (config["SPLITS"] * config["BK"])) * config["BK"]
    return -(-V // length), length


def _multiply(p: torch.Tensor, embedding: torch.Tensor, config: Config) -> torch.Tensor:
    (M, V), H = p.shape, embedding.shape[1]
    splits, length = split_lengths(V, config)
    partial = torch.empty(splits, M, H, dtype=torch.float32, device=p.device)
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    split_k_kernel[(triton.cdiv(M, BM), triton.cdiv(H, BN), splits)](
        TensorDescriptor.from_tensor(p, [BM, BK]), TensorDescriptor.from_tensor(embedding, [BK, BN]),
        partial, M, V, H, length, **chained(p.device),
        **{name: value for name, value in config.items() if name != "SPLITS"},
    )  # fmt: skip
    return partial


def reduce(
    partial: torch.Tensor,
    anchors: torch.Tensor | None,
    total: torch.Tensor,
    inverse_temperature: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Combine `partial`; return bf16 [M, H], in `out` if given. If `anchors` is None, all are equal."""
    splits, M, H = partial.shape
    if out is None:
        out = torch.empty(M, H, dtype=torch.bfloat16, device=partial.device)
    reduce_kernel[(M, triton.cdiv(H, 1024))](
        partial, total if anchors is None else anchors, total, out, M, H, inverse_temperature,
        ANCHORED=anchors is not None, SPLITS=splits, RANGES=triton.next_power_of_2(splits),
        BLOCK=1024, **chained(out.device),
    )  # fmt: skip
    return out
