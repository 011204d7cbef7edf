"""The soft embedding of rows whose probability is in few tokens; only their embeddings are read.

    S          a row's most probable tokens, added one by one until their mass is at least 1 - LEFT_OUT;
               of equal tokens, the lower id first. A row that needs more than MOST tokens is *dense*
    sparse     sum over S of p_i * E_i,   p_i = softmax(logits / T)_i, not renormalised

A dense row sums all tokens. Let eps <= LEFT_OUT be the mass outside S, and R the largest |E_i|:

    |sparse - exact|  <=  eps R           renormalised, the bound would be 2 eps R; the norm after the
                                          soft embedding removes any common factor anyway
    |rounded - exact| <=  2^-8 |exact|    bf16's rounding of the result, usually 1.65e-3 |exact|

The sparse error is below the rounding's bound where |exact| > 0.26 R, and below its usual size where
|exact| > 0.61 R. No model guarantees either, so the sparse product is an option, off by default.

MOST is 64. One dense row reads all of E: 1.48 GB in 0.34 ms. 64 tokens of each of 256 rows are 92 MB.
A loop of at most 64 turns finds S. It ends early once 64 tokens cannot suffice.

    1. `choose_kernel`       finds S from maxima and sums of tiles of 256 tokens (lm_head's, on Hopper)
    2. `list_kernel`         lists the dense rows, in order, and counts them
    3. `exponential_kernel`  of `dense` stores p of the dense rows
    4. `some_rows_kernel`    multiplies the dense rows, BM per program; spare programs return at once
    5. `reduce_kernel`       of `dense` combines the ranges of the dense rows
    6. `gather_kernel`       sums the sparse rows

A row's bits do not depend on other rows. Kernels 1, 3 and 6 read only the row's own numbers. Kernel 4
sums in the order of the dense product, so a dense row gets the bits of `soft_embedding`.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_dequant import reference
from fused_dequant.launch import targets
from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.tiles import LOG2_E, LOWEST
from fused_dequant.sampler import sampling
from fused_dequant.sampler.canvas import TILE
from fused_dequant.vocabulary import dense
from fused_dequant.weights import tuning


@triton.jit
def choose_kernel(
    logits,
    tops,
    sums,
    inverse_temperature,
    tokens,
    weights,
    counts,
    V,
    tiles,
    CHAINED: tl.constexpr,
    LEFT_OUT: tl.constexpr,
    MOST: tl.constexpr,
    TILES: tl.constexpr,  # `tiles` rounded up to a power of two
    TILE: tl.constexpr,
):
    """Program `row` stores its likeliest tokens, their probabilities, and their count (0 if over MOST).

    Tokens are taken by falling logit, then rising id, until they hold 1 - LEFT_OUT of the mass. `tops`
    [rows, tiles] has each tile's largest logit, `sums` its sum of 2^((logit - top) log2(e) / T).
    """
    follow(CHAINED)
    row = tl.program_id(0)
    sharpness = tl.load(inverse_temperature + row) * LOG2_E
    tile, within = tl.arange(0, TILES), tl.arange(0, TILE)
    exists = tile < tiles
    top_of = tl.load(tops + row * tiles + tile, mask=exists, other=LOWEST)
    sum_of = tl.load(sums + row * tiles + tile, mask=exists, other=0.0)
    top = tl.max(top_of)
    total = tl.sum(tl.exp2((top_of - top) * sharpness) * sum_of)
    wanted = total * (1.0 - LEFT_OUT)
    mass, count, last = total * 0.0, row * 0, row * 0 - 1
    highest, weight = top, tl.exp2(top - top)
    while (mass < wanted) & (mass + (MOST - count) * weight >= wanted):
        best = tl.min(tl.where(top_of == highest, tile, TILES - 1))
        token = best * TILE + within
        place = logits + row.to(tl.int64) * V + token
        values = tl.load(place, mask=token < V, other=float("-inf")).to(tl.float32)
        taken = tl.min(tl.where((values == highest) & (token > last), token, V - 1))
        tl.store(tokens + row * MOST + count, taken)
        tl.store(weights + row * MOST + count, weight / total)
        mass += weight
        count += 1
        remaining = (values < highest) | ((values == highest) & (token > taken))
        top_of = tl.where(tile == best, tl.max(tl.where(remaining, values, LOWEST)), top_of)
        following = tl.max(top_of)
        last = tl.where(following == highest, taken, -1)
        highest, weight = following, tl.exp2((following - top) * sharpness)
    tl.store(counts + row, tl.where(mass >= wanted, count, 0))


@triton.jit
def list_kernel(counts, rows, M, CHAINED: tl.constexpr, ROWS: tl.constexpr):
    """Write the rows whose count is 0 to `rows` [M + 1], in order, and their number to rows[M]."""
    follow(CHAINED)
    row = tl.arange(0, ROWS)
    whole = tl.load(counts + row, mask=row < M, other=1) == 0
    place = tl.cumsum(whole.to(tl.int32), 0)
    tl.store(rows + place - 1, row, mask=whole)
    tl.store(rows + M, tl.max(place))


@triton.jit
def some_rows_kernel(
    p, embedding, partial, rows, M, V, H, length,
    CHAINED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store `partial` as `dense.split_k_kernel` does, but only the listed rows.

    p is [M, V], `embedding` a TMA descriptor. A tile that ends past the list repeats its first row.
    """
    follow(CHAINED)
    count, first = tl.load(rows + M), tl.program_id(0) * BM
    if first >= count:
        return
    n, split = tl.program_id(1) * BN, tl.program_id(2)
    listed = first + tl.arange(0, BM)
    listed = tl.where(listed < count, listed, first)
    row = tl.load(rows + listed)
    column = tl.arange(0, BK)
    line = p + row.to(tl.int64)[:, None] * V + column[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(split * length, tl.minimum((split + 1) * length, V), BK):
        exponentials = (
            tl.load(line + k) if EVEN else tl.load(line + k, (column < V - k)[None, :], 0.0)
        )
        acc = tl.dot(exponentials, embedding.load([k, n]), acc)
    column = n + tl.arange(0, BN)
    place = partial + (split * M + row).to(tl.int64)[:, None] * H + column[None, :]
    tl.store(place, acc, mask=(column < H)[None, :])


@triton.jit
def gather_kernel(
    embedding, tokens, weights, counts, out, H,
    CHAINED: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, i) stores BLOCK columns of sum(weight * embedding), unless the row's count is 0."""
    follow(CHAINED)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + row)
    if count == 0:
        return
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(count):
        token = tl.load(tokens + row * MOST + i).to(tl.int64)
        values = tl.load(embedding + token * H + column, mask=column < H, other=0.0)
        acc += tl.load(weights + row * MOST + i) * values.to(tl.float32)
    place = out + row.to(tl.int64) * H + column
    tl.store(place, acc.to(out.dtype.element_ty), mask=column < H)


def sparse_soft_embedding(logits, embedding, inverse_temperature, out=None, probabilities=None):
    """Launch the kernels for `operations.sparse_soft_embedding`, which describes the arguments."""
    (M, V), H, device = logits.shape, embedding.shape[1], logits.device
    config = tuning.choose("soft_embedding", "bf16", M, H, V, device)
    splits, length = dense.split_lengths(V, config)
    # 4 warps would spill where no TMA reads; 8 sum in the same order.
    warps = {} if targets.has_boxes(device) else {"num_warps": 8}
    if probabilities is not None and probabilities.statistics is not None:
        p, statistics = probabilities.p, probabilities.statistics.view(3, M, -1)
    else:
        p, step = None, torch.arange(1, M + 1, dtype=torch.int32, device=device)
        statistics = sampling.statistics(logits, 1 / inverse_temperature, step, 1, TILE)
    counts, rows, tokens, weights = choose(logits, statistics, inverse_temperature)
    p, anchors, total = dense.exponentials(logits, inverse_temperature, config, counts, p)
    partial = torch.empty(splits, M, H, dtype=torch.float32, device=device)
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    some_rows_kernel[(triton.cdiv(M, BM), triton.cdiv(H, BN), splits)](
        p, TensorDescriptor.from_tensor(embedding, [BK, BN]), partial, rows, M, V, H, length,
        EVEN=V % BK == 0, **chained(device),
        **{name: value for name, value in (config | warps).items() if name != "SPLITS"},
    )  # fmt: skip
    out = dense.reduce(partial, anchors, total, inverse_temperature, out, counts)
    gather_kernel[(M, triton.cdiv(H, 1024))](
        embedding, tokens, weights, counts, out, H, MOST=reference.MOST, BLOCK=1024,
        **chained(device),
    )  # fmt: skip
    return out


def choose(
    logits: torch.Tensor, statistics: torch.Tensor, inverse_temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find each row's S in logits [M, V]; return four tensors.

    counts          int32 [M], the size of S; 0 for a dense row
    list            int32 [M + 1], the dense rows in order; its last entry is their number
    tokens          int32 [M, MOST], the tokens of S, most probable first
    probabilities   f32 [M, MOST], the probabilities of `tokens`

    `statistics` f32 [>= 2, M, V / 256 rounded up]: planes 0 and 1 are `choose_kernel`'s tops and sums.
    """
    (M, V), device, MOST = logits.shape, logits.device, reference.MOST
    counts, tokens = (torch.empty(M, n, dtype=torch.int32, device=device) for n in (1, MOST))
    weights = torch.empty(M, MOST, device=device)
    rows = torch.empty(M + 1, dtype=torch.int32, device=device)
    tiles = statistics.shape[2]
    choose_kernel[(M,)](
        logits, *statistics[:2], inverse_temperature, tokens, weights, counts, V, tiles,
        LEFT_OUT=reference.LEFT_OUT, MOST=MOST, TILES=triton.next_power_of_2(tiles), TILE=TILE,
        num_warps=1, **chained(device),
    )  # fmt: skip
    list_kernel[(1,)](
        counts, rows, M, ROWS=triton.next_power_of_2(M), num_warps=8, **chained(device)
    )
    return counts[:, 0], rows, tokens, weights
