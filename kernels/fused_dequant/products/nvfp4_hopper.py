"""NVFP4 W4A16 on Hopper: decode into the registers from which `wgmma` reads its operand A.

The plain Triton loop (`nvfp4.py`) reaches about 40 % of the memory bandwidth. There, weights are
decoded in the layout in which they were loaded. Then every bf16 value moves through shared memory to
the layout that the tensor core needs: a value loaded as 0.56 bytes is written and read as 2 bytes.
Here only the packed weights pass through shared memory:

  * Weights are stored in fragment order (`w4a16.to_fragments`). A thread copies 16 bytes with
    `cp.async`; they are the 32 values that this thread feeds to `wgmma`.
  * The kernel computes y.T = w @ x.T. Operand A is weights, in registers, 64 rows per warpgroup.
    Operand B is 16 to 256 tokens, in shared memory. A weight is decoded once for all its tokens.
  * Decoding (`nvfp4_decode`) is short: the whole loop issues 2.7 instructions per value, and at 4.3
    TB/s there is time for 3.9. tests/fused_dequant/test_compile.py counts instructions for sm_90.

The kernel is written in Gluon because the layouts are the algorithm. While products run, the next 64
columns of a step are decoded. A step ends by waiting for its products, or ptxas would serialise all
products (C7515). A dense product has about one block per processor. Two sets of warps share it, each
with half of K: one set decodes while the other multiplies. TMA copies a dense product's tokens.
`cp.async` gathers experts' tokens; each step then needs a fence before `wgmma` reads these tokens.
docs/kernels-log.md has other designs, with figures.

With E4M3 the kernel multiplies in FP8 (`w4a8`): experts only, 8-bit tokens, one scale per token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fused_dequant.launch.chain import chained
from fused_dequant.launch.hopper import BEFORE_3_8, follow, load_box, reinterpret, thread_barrier
from fused_dequant.launch.tiles import KEPT
from fused_dequant.products import experts_hopper
from fused_dequant.products.nvfp4_step import (
    copy_tokens,
    copy_weights,
    gated,
    per_thread,
    tokens_layout,
    weights_of,
)
from fused_dequant.products.routing import place_results


@gluon.constexpr_function
def stored_layout(num_warps):
    """Return the register layout in which results [rows, channels] are stored to device memory."""
    return gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])


@gluon.jit
def rows_of(
    slots, row_weight, first, total, COUNT: gl.constexpr, GROUPED: gl.constexpr,
    WEIGHTED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Return slots [COUNT] of the rows from `first`, and their routing weights, 0 unless WEIGHTED."""
    slot = first + gl.arange(0, COUNT, gl.SliceLayout(1, stored_layout(num_warps)))
    if GROUPED:
        slot = gl.load(slots + slot)
    weight = slot.to(gl.float32) * 0.0
    if WEIGHTED:
        weight = gl.load(row_weight + slot, mask=slot < total, other=0.0)
    return slot, weight


@gluon.jit
def scales_of(
    x_scale, slots, first, total, COUNT: gl.constexpr, TOPK: gl.constexpr, E4M3: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """If E4M3, return token scales [COUNT], one per accumulator column (padding: 0); else 0.0."""
    K: gl.constexpr = 32 if E4M3 else 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COUNT, K])
    scale = 0.0
    if E4M3:
        slot = gl.load(slots + first + gl.arange(0, COUNT, gl.SliceLayout(0, mma)))
        scale = gl.load(x_scale + slot // TOPK, mask=slot < total, other=0.0)
    return scale


@gluon.jit
def store_rows(
    acc, y, gate_factor, up_factor, scale, slot, weight, tile, total, width,
    E4M3: gl.constexpr, COUNT: gl.constexpr, BN: gl.constexpr, GELU_MUL: gl.constexpr,
    WEIGHTED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Apply scales, gelu_mul and routing weights to acc [BN, COUNT]; store it in y [total, width]."""
    ROWS: gl.constexpr = BN // 2 if GELU_MUL else BN
    if E4M3:
        acc *= scale[None, :]
    result = gated(acc, gate_factor, up_factor, BN, COUNT) if GELU_MUL else acc * gate_factor
    stored: gl.constexpr = stored_layout(num_warps)
    result = gl.convert_layout(result.permute([1, 0]), stored)
    column = (tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, stored)))[None, :]
    if WEIGHTED:
        result *= weight[:, None]
    mask = (slot < total)[:, None] & (column < width)
    place = y + slot.to(gl.int64)[:, None] * width + column
    gl.store(place, result.to(y.dtype.element_ty), mask=mask, eviction_policy=KEPT)


@gluon.constexpr_function
def sum_layout(BN, BM):
    """Return a layout in shared memory, free of bank conflicts, for an accumulator f32 [BN, BM]."""
    columns, rows = BM.bit_length() - 1, BN.bit_length() - 1
    bases = [[0, 1], [0, 2], [0, 4]] + [[1 << i, 0] for i in range(rows)]
    return gl.SharedLinearLayout(bases + [[0, 1 << i] for i in range(3, columns)])


@gluon.jit
def sums_memory(tokens, BN: gl.constexpr, BM: gl.constexpr):
    """Return shared memory f32 [BN, BM] in place of the first `tokens` [STAGES, BM, BK].

    From Triton 3.8 on the whole memory must be reinterpreted; `whole_stages` sees to it that it can be.
    """
    COUNT: gl.constexpr = tokens.shape[0] * tokens.shape[2] // (2 * BN)
    if tokens.shape[0] * tokens.shape[2] == COUNT * 2 * BN:
        sums = reinterpret(tokens, gl.float32, [COUNT, BN, BM], sum_layout(BN, BM)).index(0)
    else:
        sums = reinterpret(tokens, gl.float32, [BN, BM], sum_layout(BN, BM))
    return sums


@gluon.jit
def allocate(
    E4M3: gl.constexpr, BM: gl.constexpr, MORE: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Return shared memory of all stages: words, scales, BM tokens, MORE tokens, TMA barriers."""
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = gl.float8e4nv if E4M3 else gl.bfloat16
    words = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 64, BK * 8], linear)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 64, BK], linear)
    tokens = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], tokens_layout(E4M3))
    more = tokens
    if MORE:
        more = gl.allocate_shared_memory(dtype, [STAGES, MORE, BK], tokens_layout(E4M3))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    return words, scales, tokens, more, ready


@gluon.jit
def fetch_tokens(
    x, x_more, tokens, more, ready, row, column, BM: gl.constexpr, MORE: gl.constexpr,
    BK: gl.constexpr,
):  # fmt: skip
    """Start copying BM + MORE rows x BK columns of tokens by TMA; outside x, they read as zero."""
    load_box(x, [row, column], ready, tokens)
    if MORE:
        load_box(x_more, [row + BM, column], ready, more)


@gluon.jit
def multiply(
    x, x_more, words, scales, slots, total, K, first_tile, first_row, begin, end, smem,
    CHAINED: gl.constexpr, TOPK: gl.constexpr, GROUPED: gl.constexpr, EVEN_K: gl.constexpr,
    E4M3: gl.constexpr, BM: gl.constexpr, MORE: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Return sums f32 [BN, BM] over K's steps `begin` to `end` - 1, and sums [BN, MORE] if MORE."""
    ROW_TILES: gl.constexpr = BN // 64
    COLUMN_TILES: gl.constexpr = BK // 64
    WARPGROUPS: gl.constexpr = num_warps // 4
    BYTES: gl.constexpr = 1 if E4M3 else 2  # of a token's value, or of a weight as it is multiplied
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 32 // BYTES])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4 // BYTES)
    words_copy: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPGROUPS, 4], [1, 0])
    scales_copy: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPGROUPS, 4], [1, 0])
    lanes: gl.constexpr = min(32, BK * BYTES // 16)
    tokens_copy: gl.constexpr = gl.BlockedLayout(
        [1, 16 // BYTES], [32 // lanes, lanes], [num_warps, 1], [1, 0]
    )
    words_smem, scales_smem, tokens_smem, more_smem, ready = smem

    column_tiles = K // 64
    row_tile = gl.arange(0, ROW_TILES, gl.SliceLayout(1, words_copy))
    word = gl.arange(0, COLUMN_TILES * 512, gl.SliceLayout(0, words_copy))[None, :]
    words_at = words + first_tile * 512 + (row_tile * (column_tiles * 512))[:, None] + word
    row_tile = gl.arange(0, ROW_TILES, gl.SliceLayout(1, scales_copy))
    scale = gl.arange(0, COLUMN_TILES * 64, gl.SliceLayout(0, scales_copy))[None, :]
    scales_at = scales + first_tile * 64 + (row_tile * (column_tiles * 64))[:, None] + scale
    if GROUPED:
        slot = gl.load(slots + first_row + gl.arange(0, BM, gl.SliceLayout(1, tokens_copy)))
    acc = gl.zeros([BN, BM], gl.float32, mma)
    acc_more = acc
    if MORE:
        mma_more: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [num_warps, 1], [16, MORE, 32 // BYTES]
        )
        operand_more: gl.constexpr = gl.DotOperandLayout(0, mma_more, 4 // BYTES)
        acc_more = gl.zeros([BN, MORE], gl.float32, mma_more)
        if GROUPED:
            slot_more = gl.arange(0, MORE, gl.SliceLayout(1, tokens_copy))
            slot_more = gl.load(slots + first_row + BM + slot_more)

    for stage in gl.static_range(STAGES - 1):
        if begin + stage < end:
            copy_weights(
                words_at, scales_at, word, scale, words_smem, scales_smem,
                stage, begin + stage, K, BK, EVEN_K,
            )  # fmt: skip
    if GROUPED:  # addresses wait for the slots: the weights' copies are on their way
        k = gl.arange(0, BK, gl.SliceLayout(0, tokens_copy))[None, :]
        tokens_at = x + (slot // TOPK).to(gl.int64)[:, None] * K + k
        real = (slot < total)[:, None] & (k < K)
        if MORE:
            more_at = x + (slot_more // TOPK).to(gl.int64)[:, None] * K + k
            real_more = (slot_more < total)[:, None] & (k < K)
    # Weights depend on nothing: they are on their way before the tokens exist.
    follow(CHAINED and not GROUPED)
    for stage in gl.static_range(STAGES - 1):
        step = begin + stage
        if step < end:
            if GROUPED:
                copy_tokens(tokens_at, tokens_smem.index(stage), real, k, step, K, BK, EVEN_K)
                if MORE:
                    copy_tokens(more_at, more_smem.index(stage), real_more, k, step, K, BK, EVEN_K)
            else:
                mbarrier.expect(ready.index(stage), 2 * (BM + MORE) * BK)
                fetch_tokens(
                    x, x_more, tokens_smem.index(stage), more_smem.index(stage),
                    ready.index(stage), first_row, step * BK, BM, MORE, BK,
                )  # fmt: skip
        async_copy.commit_group()
    for step in range(begin, end):
        current = (step - begin) % STAGES
        ahead = step + STAGES - 1
        into = (ahead - begin) % STAGES
        if not BEFORE_3_8:  # the same in fewer instructions; earlier ones were timed with the above
            into = gl.where(current > 0, current, STAGES) - 1
        if not GROUPED:
            mbarrier.expect(ready.index(into), 2 * (BM + MORE) * BK, pred=ahead < end)
        async_copy.wait_group(STAGES - 2)
        thread_barrier()  # copies have arrived, and no warp reads the last step's tokens
        if not GROUPED:
            if ahead < end:
                copy_weights(
                    words_at, scales_at, word, scale, words_smem, scales_smem,
                    into, ahead, K, BK, EVEN_K,
                )  # fmt: skip
                fetch_tokens(
                    x, x_more, tokens_smem.index(into), more_smem.index(into),
                    ready.index(into), first_row, ahead * BK, BM, MORE, BK,
                )  # fmt: skip
            mbarrier.wait(ready.index(current), (step - begin) // STAGES & 1)
        if GROUPED:
            fence_async_shared()  # cp.async wrote the tokens, wgmma reads through another proxy
        kept = ()  # operands of products in flight: their registers must not be reused
        for part in gl.static_range(COLUMN_TILES):
            weights = weights_of(
                words_smem.index(current), scales_smem.index(current), part, operand,
                E4M3, ROW_TILES, COLUMN_TILES, WARPGROUPS,
            )  # fmt: skip
            if not E4M3:  # Triton cannot name registers of 8-bit values there; ptxas keeps them
                kept = kept + (weights,)  # noqa: RUF005  (Gluon has no starred tuples)
            tokens = tokens_smem.index(current).slice(64 * part, 64, dim=1).permute([1, 0])
            acc = warpgroup_mma(weights, tokens, acc, is_async=True)
            if MORE:
                tokens = more_smem.index(current).slice(64 * part, 64, dim=1).permute([1, 0])
                same = gl.convert_layout(weights, operand_more, assert_trivial=True)
                acc_more = warpgroup_mma(same, tokens, acc_more, is_async=True)
        if GROUPED and ahead < end:  # addressed and issued under the last products
            ahead = per_thread(ahead)
            copy_weights(
                words_at, scales_at, word, scale, words_smem, scales_smem,
                into, ahead, K, BK, EVEN_K,
            )  # fmt: skip
            copy_tokens(tokens_at, tokens_smem.index(into), real, k, ahead, K, BK, EVEN_K)
            if MORE:
                copy_tokens(more_at, more_smem.index(into), real_more, k, ahead, K, BK, EVEN_K)
        async_copy.commit_group()
        if MORE:
            done = warpgroup_mma_wait(0, (acc, acc_more) + kept)  # noqa: RUF005
            acc_more = done[1]
            acc = done[0]
        elif E4M3:
            acc = warpgroup_mma_wait(0, (acc,))
        else:
            acc = warpgroup_mma_wait(0, (acc,) + kept)[0]  # noqa: RUF005
    return acc, acc_more


@gluon.jit
def multiply_aside(
    x, x_more, words, scales, slots, total, K, first_tile, first_row, begin, end, smem,
    CHAINED: gl.constexpr, TOPK: gl.constexpr, GROUPED: gl.constexpr, EVEN_K: gl.constexpr,
    BM: gl.constexpr, MORE: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Run `multiply` in a second set of warps; store its sums in `smem`, in place of the tokens."""
    acc, acc_more = multiply(
        x, x_more, words, scales, slots, total, K, first_tile, first_row, begin, end, smem,
        CHAINED, TOPK, GROUPED, EVEN_K, False, BM, MORE, BN, BK, STAGES, num_warps,
    )  # fmt: skip
    gl.static_assert(STAGES * BK >= 2 * BN)
    thread_barrier()  # every warp has read its last tokens
    sums_memory(smem[2], BN, BM).store(acc)
    if MORE:
        sums_memory(smem[3], BN, MORE).store(acc_more)


@gluon.jit
def compute_block(
    x, x_scale, words, scales, y, slots, row_weight, gate_factor, up_factor, total, width, K,
    first_tile, first_row, tile,
    TOPK: gl.constexpr, GELU_MUL: gl.constexpr, WEIGHTED: gl.constexpr, EVEN_K: gl.constexpr,
    E4M3: gl.constexpr, BM: gl.constexpr, MORE: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute and store one tile of BN channels of a block: BM + MORE tokens of one expert."""
    slot, weight = rows_of(slots, row_weight, first_row, total, BM, True, WEIGHTED, num_warps)
    scale = scales_of(x_scale, slots, first_row, total, BM, TOPK, E4M3, num_warps)
    if MORE:
        slot_more, weight_more = rows_of(
            slots, row_weight, first_row + BM, total, MORE, True, WEIGHTED, num_warps
        )
        scale_more = scales_of(x_scale, slots, first_row + BM, total, MORE, TOPK, E4M3, num_warps)
    smem = allocate(E4M3, BM, MORE, BN, BK, STAGES)
    thread_barrier()
    acc, acc_more = multiply(
        x, x, words, scales, slots, total, K, first_tile, first_row, 0, gl.cdiv(K, BK), smem,
        False, TOPK, True, EVEN_K, E4M3, BM, MORE, BN, BK, STAGES, num_warps,
    )  # fmt: skip
    store_rows(
        acc, y, gate_factor, up_factor, scale, slot, weight, tile, total, width,
        E4M3, BM, BN, GELU_MUL, WEIGHTED, num_warps,
    )  # fmt: skip
    if MORE:
        store_rows(
            acc_more, y, gate_factor, up_factor, scale_more, slot_more, weight_more, tile, total,
            width, E4M3, MORE, BN, GELU_MUL, WEIGHTED, num_warps,
        )  # fmt: skip


@gluon.jit
def compute_rows(
    x, x_scale, words, scales, y, slots, row_weight, gate_factor, up_factor, total, width, K,
    first_tile, first_row, tile, rows,
    TOPK: gl.constexpr, GELU_MUL: gl.constexpr, WEIGHTED: gl.constexpr, EVEN_K: gl.constexpr,
    E4M3: gl.constexpr, BM: gl.constexpr, MORE: gl.constexpr, NARROWER: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Run `compute_block` on BM + MORE rows, or on the smallest of NARROWER lower heights >= `rows`."""
    LESS: gl.constexpr = BM if MORE else BM // 2
    LESS_MORE: gl.constexpr = (MORE // 2 if MORE else BM // 4) // 16 * 16
    if NARROWER == 0 or rows > LESS + LESS_MORE:
        compute_block(
            x, x_scale, words, scales, y, slots, row_weight, gate_factor, up_factor, total, width, K,
            first_tile, first_row, tile, TOPK, GELU_MUL, WEIGHTED, EVEN_K, E4M3,
            BM, MORE, BN, BK, STAGES, num_warps,
        )  # fmt: skip
    else:
        compute_rows(
            x, x_scale, words, scales, y, slots, row_weight, gate_factor, up_factor, total, width, K,
            first_tile, first_row, tile, rows, TOPK, GELU_MUL, WEIGHTED, EVEN_K, E4M3,
            LESS, LESS_MORE, NARROWER - 1, BN, BK, STAGES, num_warps,
        )  # fmt: skip


@gluon.jit
def nvfp4_hopper_kernel(
    x, x_more, x_scale, words, scales, factor, y, slots, block_expert, block_rows, block_count,
    row_weight, total, N, K,
    CHAINED: gl.constexpr, TOPK: gl.constexpr, GROUPED: gl.constexpr, GELU_MUL: gl.constexpr,
    WEIGHTED: gl.constexpr, EVEN_K: gl.constexpr, E4M3: gl.constexpr, BM: gl.constexpr,
    MORE: gl.constexpr, NARROWER: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply x [rows, K] by weights in fragments (`words`, `scales`); write y [slots, N or N/2].

    x is bf16, or e4m3 if E4M3. A block has BM + MORE rows. If MORE > 0, it has two accumulators, so 96
    rows need not be computed as 128, and decodes weights once. With few tokens an expert's block takes
    one of NARROWER smaller heights. With BM = 64, MORE = 16 and NARROWER = 4 they are 64, 48, 32 and
    16 rows. In a dense product with PARTS = 2, a second set of warps multiplies K's second half.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    follow(CHAINED and GROUPED)  # the blocks may come from the previous kernel
    tile = gl.program_id(0)
    block = gl.program_id(1)
    expert, rows = 0, BM + MORE
    if GROUPED:
        # All three loads are issued before any wait. Blocks past the last one read unused entries.
        count = gl.load(block_count)
        expert = gl.load(block_expert + block)
        rows = gl.load(block_rows + block)
        if block >= count:
            return
    first_tile = gl.to_tensor(expert).to(gl.int64) * (N // 64) + tile * (BN // 64)
    first_tile *= K // 64
    first_row = block * (BM + MORE)
    gate_factor = gl.load(factor + expert * 2)
    up_factor = gl.load(factor + expert * 2 + 1)
    width = N // 2 if GELU_MUL else N
    if GROUPED:
        compute_rows(
            x, x_scale, words, scales, y, slots, row_weight, gate_factor, up_factor, total, width, K,
            first_tile, first_row, tile, rows, TOPK, GELU_MUL, WEIGHTED, EVEN_K, E4M3,
            BM, MORE, NARROWER, BN, BK, STAGES, num_warps,
        )  # fmt: skip
        return
    smem = allocate(False, BM, MORE, BN, BK, STAGES)
    steps = gl.cdiv(K, BK)
    if PARTS == 1:
        thread_barrier()
        acc, acc_more = multiply(
            x, x_more, words, scales, slots, total, K, first_tile, first_row, 0, steps, smem,
            CHAINED, TOPK, GROUPED, EVEN_K, False, BM, MORE, BN, BK, STAGES, num_warps,
        )  # fmt: skip
    else:
        aside = allocate(False, BM, MORE, BN, BK, STAGES)
        middle = (steps + 1) // 2
        acc, acc_more = gl.warp_specialize(
            [
                (multiply, (
                    x, x_more, words, scales, slots, total, K, first_tile, first_row, 0, middle, smem,
                    CHAINED, TOPK, GROUPED, EVEN_K, False, BM, MORE, BN, BK, STAGES, num_warps,
                )),
                (multiply_aside, (
                    x, x_more, words, scales, slots, total, K, first_tile, first_row, middle, steps,
                    aside, CHAINED, TOPK, GROUPED, EVEN_K, BM, MORE, BN, BK, STAGES, num_warps,
                )),
            ],
            [num_warps],
            [240 if num_warps == 4 else 128],  # registers per thread
        )  # fmt: skip
        acc += sums_memory(aside[2], BN, BM).load(mma)
        if MORE:
            mma_more: gl.constexpr = gl.NVMMADistributedLayout(
                [3, 0], [num_warps, 1], [16, MORE, 16]
            )
            acc_more += sums_memory(aside[3], BN, MORE).load(mma_more)
    slot, weight = rows_of(slots, y, first_row, total, BM, False, False, num_warps)
    store_rows(
        acc, y, gate_factor, up_factor, 0.0, slot, weight, tile, total, width,
        False, BM, BN, False, False, num_warps,
    )  # fmt: skip
    if MORE:
        slot, weight = rows_of(slots, y, first_row + BM, total, MORE, False, False, num_warps)
        store_rows(
            acc_more, y, gate_factor, up_factor, 0.0, slot, weight, tile, total, width,
            False, MORE, BN, False, False, num_warps,
        )  # fmt: skip


def whole_stages(config):
    """Return `config` with as many stages as hold whole sums, which Triton needs from 3.8 on.

    Parts of a dense product exchange sums f32 [BN, BM] in the memory of tokens [STAGES, BM, BK].
    """
    if BEFORE_3_8 or config["PARTS"] == 1:
        return config
    stages, steps = config["STAGES"], max(2 * config["BN"] // config["BK"], 1)
    return config | {"STAGES": stages // steps * steps}


def launch(weight, x, x_scale, config, routing=None, share=None):
    """Do what `matmul.launch` does, for a weight in fragments; x is bf16, or e4m3 for nvfp4_e4m3.

    Raise ValueError if `routing` is None with nvfp4_e4m3: dense weights are laid out as fp8 instead.
    Raise ValueError if N is no multiple of a tile's channels.
    """
    if routing is None and x_scale is not None:
        raise ValueError("a dense weight of NVFP4 is multiplied in FP8 as scheme fp8")
    if weight.shape[1] % (channels := config.get("BN", 128)):
        raise ValueError(f"{weight.shape[1]} channels are no multiple of a tile's {channels}")
    if "RING" in config:
        return experts_hopper.launch(weight, x, x_scale, config, routing, share)
    config = whole_stages(config)
    y, mode, blocks = place_results(weight, len(x), config, routing, share)
    tokens = [x, x]
    if routing is None:
        layout = NVMMASharedLayout(128, 16, 2)
        tokens = [
            TensorDescriptor.from_tensor(x, [box, config["BK"]], layout)
            for box in (config["BM"], config["MORE"] or config["BM"])
        ]
    # A dense product reads weights before it waits for the previous kernel; experts' wait first.
    early = weight.streamed and routing is None
    nvfp4_hopper_kernel[(mode["N"] // config["BN"], blocks)](
        x=tokens[0], x_more=tokens[1], x_scale=y if x_scale is None else x_scale,
        words=weight.data, scales=weight.scale, factor=weight.factor, E4M3=x_scale is not None,
        **mode, **({"CHAINED": False} if early else chained(x.device)), **{"NARROWER": 0, **config},
    )  # fmt: skip
    return y
