"""The soft embedding of rows whose probability is in few tokens; only their embeddings are read.

    S          the most probable tokens of a row, of equal ones the lower id first, until their mass
               is at least 1 - LEFT_OUT; a row that needs more than MOST tokens is multiplied whole
    sparse     sum over S of p_i * E_i,   p_i = softmax(logits / T)_i, not normalised anew

Let eps <= LEFT_OUT be the mass outside S, R the largest |E_i|. The sum of p_j E_j outside S is lost:

    |sparse - exact|  <=  eps R           with p_i / (1 - eps) the bound would be 2 eps R; besides,
                                          the norm after it removes any common factor
    |rounded - exact| <=  2^-8 |exact|    bf16's rounding of the result, 1.65e-3 |exact| as a rule

The loss is below the rounding's bound where |exact| > 0.26 R, and below the rounding's usual size
where |exact| > 0.61 R. No model promises either, so the sparse product is an option, off by default.

MOST is 64. One row that is multiplied whole reads all of E, 1.48 GB in 0.34 ms; 64 tokens of each
of 256 rows are 92 MB. A loop of at most 64 turns finds S; it ends once 64 tokens cannot suffice.

    1. `choose_kernel`    finds S of a row from the maxima and sums of tiles of 256 tokens, which
                          lm_head stores on Hopper. Each turn takes the most probable token left
    2. `list_kernel`      lists the rows to be multiplied whole, in order, and counts them
    3. `some_rows_kernel` multiplies listed rows, BM per program; programs beyond the list return
    4. `reduce_kernel`    of `vocabulary` combines all rows; kernel 5 overwrites the rows not listed
    5. `gather_kernel`    sums the sparse rows

A row's bits do not depend on other rows. Kernels 1 and 5 read only the row's own numbers. Kernel 3,
wherever the row is in the list, sums in the order of the dense product, and gives the same bits.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_dequant import reference, sampling, targets, tuning, vocabulary
from fused_dequant.canvas import TILE
from fused_dequant.chain import chained, follow
from fused_dequant.tiles import LOG2_E, LOWEST


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

    Tokens are taken by falling logit, equal ones by rising id, until they hold 1 - LEFT_OUT. `tops`
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
        left = (values < highest) | ((values == highest) & (token > taken))
        top_of = tl.where(tile == best, tl.max(tl.where(left, values, LOWEST)), top_of)
        following = tl.max(top_of)
        last = tl.where(following == highest, taken, -1)
        highest, weight = following, tl.exp2((following - top) * sharpness)
    tl.store(counts + row, tl.where(mass >= wanted, count, 0))


@triton.jit
def list_kernel(counts, rows, M, CHAINED: tl.constexpr, ROWS: tl.constexpr):
    """Write to `rows` [M + 1], in order, the rows whose count is 0; write their number to rows[M]."""
    follow(CHAINED)
    row = tl.arange(0, ROWS)
    whole = tl.load(counts + row, mask=row < M, other=1) == 0
    place = tl.cumsum(whole.to(tl.int32), 0)
    tl.store(rows + place - 1, row, mask=whole)
    tl.store(rows + M, tl.max(place))


@triton.jit
def some_rows_kernel(
    p,
    embedding,
    partial,
    rows,
    M,
    V,
    H,
    length,
    CHAINED: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Store only the listed rows of what `vocabulary.split_k_kernel` stores in `partial`.

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
        own = tl.load(line + k) if EVEN else tl.load(line + k, (column < V - k)[None, :], 0.0)
        acc = tl.dot(own, embedding.load([k, n]), acc)
    column = n + tl.arange(0, BN)
    place = partial + (split * M + row).to(tl.int64)[:, None] * H + column[None, :]
    tl.store(place, acc, mask=(column < H)[None, :])


@triton.jit
def gather_kernel(
    embedding,
    tokens,
    weights,
    counts,
    out,
    H,
    CHAINED: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block) stores BLOCK columns of sum(weight * embedding) over the row's tokens."""
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


def sparse_soft_embedding(logits, embedding, inverse_temperature, out=None, left=None):
    """Launch the five kernels for `operations.sparse_soft_embedding`, which describes the arguments."""
    (M, V), H, device = logits.shape, embedding.shape[1], logits.device
    config = tuning.choose("soft_embedding", "bf16", M, H, V, device)
    splits, length = vocabulary.split_lengths(V, config)
    # 4 warps would spill where no TMA reads; 8 sum in the same order.
    warps = {} if targets.has_boxes(device) else {"num_warps": 8}
    if left is not None and left.statistics is not None:
        p, anchors, total, statistics = left.p, None, left.total, left.statistics.view(4, M, -1)
    else:
        p, anchors, total = vocabulary.exponentials(logits, inverse_temperature, splits, length)
        own_step = torch.arange(1, M + 1, dtype=torch.int32, device=device)
        statistics = sampling.statistics(logits, 1 / inverse_temperature, own_step, 1, TILE)
    counts, rows, tokens, weights = choose(logits, statistics, inverse_temperature)
    partial = torch.empty(splits, M, H, dtype=torch.float32, device=device)
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    some_rows_kernel[(triton.cdiv(M, BM), triton.cdiv(H, BN), splits)](
        p, TensorDescriptor.from_tensor(embedding, [BK, BN]), partial, rows, M, V, H, length,
        EVEN=V % BK == 0, **chained(device),
        **{name: value for name, value in (config | warps).items() if name != "SPLITS"},
    )  # fmt: skip
    out = vocabulary.reduce(partial, anchors, total, inverse_temperature, out)
    gather_kernel[(M, triton.cdiv(H, 1024))](
        embedding, tokens, weights, counts, out, H, MOST=reference.MOST, BLOCK=1024,
        **chained(device),
    )  # fmt: skip
    return out


def choose(
    logits: torch.Tensor, statistics: torch.Tensor, inverse_temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the tokens S of each row of logits [M, V]; return (counts, list, tokens, probabilities).

    `statistics` f32 [2 or more, M, tiles of 256] begin with max l and sum 2^x
    (`vocabulary_hopper`). Counts int32 [M] are the sizes of S, 0 for a row to be multiplied whole.
    The list int32 [M + 1] begins with the rows of count 0, and ends with their number. Tokens are
    int32, probabilities f32, both [M, MOST].
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
