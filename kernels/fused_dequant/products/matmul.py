"""One tile loop for operands of equal type: BF16, FP8 W8A8 and INT8 W8A8, dense and grouped.

    y[m, n] = x_scale[m] * w_scale[n] * sum_k x[m, k] * w[n, k]

Scales are per token and per output channel, so both are applied after the loop. FP8 accumulates in
float32. Hopper's FP8 tensor cores keep only about 14 bits between promotions to float32; at K = 2816
the error is below that of rounding the result to bf16. INT8 sums in int32, exact up to K = 133,000.

With SWAP, the kernel computes y.T = w @ x.T. On sm_90 an FP8 `tl.dot` with fewer than 64 rows is
converted to half precision. With SWAP, the rows are weights, at least 64. The columns are tokens, any
multiple of 8. So 16 tokens per expert also use FP8 tensor cores, in half the instructions.

A block is BM + MORE rows in two accumulators (MORE may be 0), so 64 + 16 rows read the weights once.
Of 1,024 tokens, evenly routed, an expert gets 64 +- 8: blocks of 64 would read the weights of half
the experts twice, and blocks of 128 would compute twice the rows. Real routing is never even, so
`compute_rows` picks the smallest of NARROWER + 1 block heights that holds the block's real rows.

The epilogue may apply `gelu_mul` to interleaved gate and up rows, or multiply by a routing weight.
Each saves a read and a write of the result. Results are stored so that they stay in the L2
(`tiles.KEPT`), since the next kernel reads them; weights are read only once.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.targets import lowering
from fused_dequant.launch.tiles import KEPT, block_rows, split_gate_up
from fused_dequant.launch.tiles import gelu_mul as gelu_mul_tile
from fused_dequant.products.routing import Routing, place_results
from fused_dequant.weights.tuning import Config
from fused_dequant.weights.weight import Weight


@triton.jit
def load_tokens(tokens, real, k, k0, K, EVEN_K: tl.constexpr):
    """Return the columns of one step for a block's tokens; padding rows and columns past K are zero."""
    mask = real[:, None] if EVEN_K else real[:, None] & (k < K - k0)[None, :]
    return tl.load(tokens + k0, mask=mask, other=0.0)


@triton.jit
def multiply(tokens, weights, acc, SWAP: tl.constexpr):
    """Return acc [rows, BN] + tokens @ weights.T; if SWAP, acc and the sum are transposed."""
    if SWAP:
        acc = tl.dot(weights, tokens.T, acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(tokens, weights.T, acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def row_factors(
    x_scale, row_weight, slot, real, TOPK: tl.constexpr, SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Return per row its f32 scale (if SCALED) and routing weight (if WEIGHTED), else 0; padding: 0."""
    scale = tl.zeros(slot.shape, tl.float32)
    weight = scale
    if SCALED:
        scale = tl.load(x_scale + slot // TOPK, mask=real, other=0.0)
    if WEIGHTED:
        weight = tl.load(row_weight + slot, mask=real, other=0.0)
    return scale, weight


@triton.jit
def store_rows(
    result, y, channel_scale, scale, weight, slot, real, tile, N,
    COUNT: tl.constexpr, BN: tl.constexpr, SCALED: tl.constexpr, GELU_MUL: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Store `result` f32 [BN, COUNT] as rows of y; first apply scales, gelu_mul, routing weights."""
    if SCALED:
        result *= channel_scale[:, None]
        result *= scale[None, :]
    width = N
    columns: tl.constexpr = BN // 2 if GELU_MUL else BN
    if GELU_MUL:
        gate, up = split_gate_up(result, BN, COUNT)
        result = gelu_mul_tile(gate, up)
        width = N // 2
    if WEIGHTED:
        result *= weight[None, :]
    column = tile * columns + tl.arange(0, columns)
    place = y + slot.to(tl.int64)[:, None] * width + column[None, :]
    mask = real[:, None] & (column[None, :] < width)
    tl.store(place, result.T.to(y.dtype.element_ty), mask=mask, eviction_policy=KEPT)


@triton.jit
def compute_block(
    x, x_scale, weights, w_scale, y, slots, row_weight, total, N, K, expert, n, k, tile, first,
    TOPK: tl.constexpr, GROUPED: tl.constexpr, SCALED: tl.constexpr, GELU_MUL: tl.constexpr,
    WEIGHTED: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply the BM + MORE rows from `first` by the weights of channels n [BN]; store the results.

    `weights` points at columns k [BK] of these channels. Scales are loaded before the products start.
    """
    acc_type: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    slot, real = block_rows(slots, first, total, BM, GROUPED)
    tokens = x + (slot // TOPK).to(tl.int64)[:, None] * K + k[None, :]
    channel_scale = tl.load(w_scale + expert * N + n % N) if SCALED else 0.0
    scale, weight = row_factors(x_scale, row_weight, slot, real, TOPK, SCALED, WEIGHTED)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), acc_type)
    if MORE:
        slot_more, real_more = block_rows(slots, first + BM, total, MORE, GROUPED)
        tokens_more = x + (slot_more // TOPK).to(tl.int64)[:, None] * K + k[None, :]
        scale_more, weight_more = row_factors(
            x_scale, row_weight, slot_more, real_more, TOPK, SCALED, WEIGHTED
        )
        acc_more = tl.zeros((BN, MORE) if SWAP else (MORE, BN), acc_type)
    for k0 in range(0, K, BK):
        if EVEN_K:
            b = tl.load(weights + k0)
        else:
            b = tl.load(weights + k0, mask=(k < K - k0)[None, :], other=0.0)
        acc = multiply(load_tokens(tokens, real, k, k0, K, EVEN_K), b, acc, SWAP)
        if MORE:
            a = load_tokens(tokens_more, real_more, k, k0, K, EVEN_K)
            acc_more = multiply(a, b, acc_more, SWAP)
    result = (acc if SWAP else acc.T).to(tl.float32)
    store_rows(
        result, y, channel_scale, scale, weight, slot, real, tile, N,
        BM, BN, SCALED, GELU_MUL, WEIGHTED,
    )  # fmt: skip
    if MORE:
        result = (acc_more if SWAP else acc_more.T).to(tl.float32)
        store_rows(
            result, y, channel_scale, scale_more, weight_more, slot_more, real_more, tile, N,
            MORE, BN, SCALED, GELU_MUL, WEIGHTED,
        )  # fmt: skip


@triton.jit
def compute_rows(
    x, x_scale, weights, w_scale, y, slots, row_weight, total, N, K, expert, n, k, tile, first, rows,
    TOPK: tl.constexpr, GROUPED: tl.constexpr, SCALED: tl.constexpr, GELU_MUL: tl.constexpr,
    WEIGHTED: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, MORE: tl.constexpr, NARROWER: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Run `compute_block` on BM + MORE rows, or on the smallest of NARROWER lower heights >= `rows`."""
    LESS: tl.constexpr = BM if MORE else BM // 2
    LESS_MORE: tl.constexpr = (MORE // 2 if MORE else BM // 4) // 16 * 16
    if NARROWER == 0 or rows > LESS + LESS_MORE:
        compute_block(
            x, x_scale, weights, w_scale, y, slots, row_weight, total, N, K, expert, n, k, tile,
            first, TOPK, GROUPED, SCALED, GELU_MUL, WEIGHTED, SWAP, EVEN_K, BM, MORE, BN, BK,
        )  # fmt: skip
    else:
        compute_rows(
            x, x_scale, weights, w_scale, y, slots, row_weight, total, N, K, expert, n, k, tile,
            first, rows, TOPK, GROUPED, SCALED, GELU_MUL, WEIGHTED, SWAP, EVEN_K,
            LESS, LESS_MORE, NARROWER - 1, BN, BK,
        )  # fmt: skip


@triton.jit
def matmul_kernel(
    x, x_scale, w, w_scale, y, slots, block_expert, block_rows, block_count, row_weight, total, N,
    K,
    CHAINED: tl.constexpr, TOPK: tl.constexpr, GROUPED: tl.constexpr, SCALED: tl.constexpr,
    GELU_MUL: tl.constexpr, WEIGHTED: tl.constexpr, SWAP: tl.constexpr, BM: tl.constexpr,
    MORE: tl.constexpr, NARROWER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCKS_FIRST: tl.constexpr,
):  # fmt: skip
    """Multiply x [rows, K] by w [E, N, K] into y [slots, N or N/2]; slot s reads row s // TOPK of x."""
    follow(CHAINED)
    tile = tl.program_id(1 if BLOCKS_FIRST else 0)
    block = tl.program_id(0 if BLOCKS_FIRST else 1)
    expert, rows = tl.zeros((), tl.int64), BM + MORE
    if GROUPED:
        # All three loads are issued before any wait. Blocks past the last one read unused entries.
        count = tl.load(block_count)
        expert = tl.load(block_expert + block).to(tl.int64)
        rows = tl.load(block_rows + block)
        if block >= count:
            return
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Channels past N repeat the first ones: they are computed and not stored, and need no mask.
    weights = w + expert * N * K + (n % N).to(tl.int64)[:, None] * K + k[None, :]
    compute_rows(
        x, x_scale, weights, w_scale, y, slots, row_weight, total, N, K, expert, n, k, tile,
        block * (BM + MORE), rows, TOPK, GROUPED, SCALED, GELU_MUL, WEIGHTED, SWAP, EVEN_K,
        BM, MORE, NARROWER, BN, BK,
    )  # fmt: skip


def launch(
    weight: Weight,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    config: Config,
    routing: Routing | None = None,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x times a weight in bf16: a dense product or, with `routing`, experts' gate_up or down.

    x is [rows, K] of the weight's type: bf16, fp8 or int8. x_scale is f32 [rows], None for bf16.
    `config` is from `Weight.config`; with `routing`, its BM + MORE equals `routing.block`. `share`
    f32 [slots], only for `down`, has the routing weights. `place_results` says the result's shape.
    """
    y, mode, blocks = place_results(weight, len(x), config, routing, share)
    tiles = triton.cdiv(weight.shape[1], config["BN"])
    options = {"BLOCKS_FIRST": routing is None, "NARROWER": 0, **config}
    matmul_kernel[(blocks, tiles) if options["BLOCKS_FIRST"] else (tiles, blocks)](
        x=x, x_scale=y if x_scale is None else x_scale, w=weight.data,
        w_scale=y if weight.scale is None else weight.scale, SCALED=x_scale is not None,
        **mode, **chained(x.device), **lowering(x.device), **options,
    )  # fmt: skip
    return y
