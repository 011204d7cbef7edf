"""Attention with heads of 256 on Hopper, for `attend.attend`.

The L2 cache limits this kernel: a tile of 64 positions has 64 KB of keys and values. At the tensor
cores' full rate, a program with 64 rows of queries would read 64 bytes per cycle, twice what the L2
delivers. So a program has 128 rows; results of more rows do not fit into registers. The products of
a tile then take 2,048 cycles. Moving their operands through shared memory also takes 2,048 cycles.

Three sets of warps (`warp_specialize`) synchronize at barriers in shared memory:

    attend_rows (two sets)   computes 64 rows: scores, exponentials, results. The sets do not wait for
                             each other: one can multiply while the other computes exponentials
    refill (one warp)        when both sets have read tile i, copies tile i + 2 (by TMA) to its place

Within a set the products of two tiles are in flight at once:

    in flight               scores of tile i + 1; results += p_i @ values_i
    when scores arrive      compute the exponentials p_i+1
    when results arrive     results *= decay

docs/kernels-log.md has other designs that were measured, with figures.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fused_dequant.launch.hopper import follow, load_box, thread_barrier
from fused_dequant.launch.tiles import FAR, LOG2_E

ROWS = gl.constexpr(128)
BN = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def visible_run(
    first, last, row, query, n, splits, SHARE: gl.constexpr, BN: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Return begin, end, blocks, clear and blurred, which say what positions a program reads.

    It reads the positions [begin, end), in `blocks` blocks, at least one. Every row sees positions
    [clear, blurred), so scores there need no mask. The program computes SHARE of a sequence's n
    queries, from number `query` on, and none past the last. `row` is the sequence's first row.
    """
    # Every warp holds all queries: nothing passes between warps.
    query_layout: gl.constexpr = gl.BlockedLayout([(SHARE + 31) // 32], [32], [num_warps], [0])
    asked = query + gl.arange(0, SHARE, query_layout)
    inside = asked < n
    low = gl.load(first + row + asked, mask=inside, other=FAR)
    high = gl.load(last + row + asked, mask=inside, other=-1)
    clear = gl.max(gl.where(inside, low, 0), 0)
    blurred = gl.min(gl.where(inside, high, FAR), 0) + 1
    begin, end = gl.min(low, 0) // BN * BN, gl.max(high, 0) + 1
    share = gl.cdiv(gl.cdiv(end - begin, BN), splits) * BN
    begin += gl.program_id(2) * share
    end = gl.minimum(end, begin + share)
    return begin, end, gl.maximum(gl.cdiv(end - begin, BN), 1), clear, blurred


@gluon.jit
def weigh(score, top, sums, low, high, start, end, clear, blurred):
    """Return a block's exponentials, a factor for earlier results, and the new `top` and `sums`."""
    positions: gl.constexpr = score.shape[1]
    if (start < clear) | (start + positions > gl.minimum(blurred, end)):
        position = gl.arange(0, positions, gl.SliceLayout(0, score.type.layout))[None, :] + start
        seen = (position >= low) & (position <= high) & (position < end)
        score = gl.where(seen, score, float("-inf"))
    new = gl.maximum(top, gl.max(score, 1) * LOG2_E)
    shift = gl.where(new == float("-inf"), 0.0, new)  # a row that sees nothing in this block
    p = gl.exp2(score * LOG2_E - shift[:, None])
    decay = gl.exp2(top - shift)
    return p, decay, new, sums * decay + gl.sum(p, 1)


@gluon.jit
def copy_tile(source, ring, ready, block, begin, base, capacity, column, wanted):
    """If `wanted`, start copying block `block` to its place in `ring`; the place must be free."""
    stage = block % STAGES
    mbarrier.expect(ready.index(stage), source.block_type.nbytes, pred=wanted)
    place, cell = ring.index(stage), base + (begin + block * BN) % capacity
    load_box(source, [cell, column], ready.index(stage), place, pred=wanted)


@gluon.jit
def refill(keys, values, smem, begin, blocks, base, capacity, column):
    """Copy keys and values of blocks STAGES, STAGES + 1, ...; each waits until its place is free."""
    _, held_keys, held_values, _, keys_ready, values_ready, keys_free, values_free = smem
    for block in range(STAGES, blocks):
        stage = block % STAGES
        before = (block // STAGES - 1) & 1
        mbarrier.wait(keys_free.index(stage), before)
        copy_tile(keys, held_keys, keys_ready, block, begin, base, capacity, column, True)
        mbarrier.wait(values_free.index(stage), before)
        copy_tile(values, held_values, values_ready, block, begin, base, capacity, column, True)


@gluon.jit
def attend_rows(
    part: gl.constexpr, smem, first, last, out, largest, total, rows, n, row, query, h,
    begin, end, blocks, clear, blurred,
    GROUP: gl.constexpr, Q_HEADS: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute and store the 64 rows from 64 * part; row r is query r % SHARE of head r // SHARE."""
    queries, held_keys, held_values, q_ready, keys_ready, values_ready, keys_free, values_free = (
        smem
    )
    SHARE: gl.constexpr = ROWS // GROUP
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, results, 2)
    row_scores: gl.constexpr = gl.SliceLayout(1, scores)
    row_results: gl.constexpr = gl.SliceLayout(1, results)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])

    r = 64 * part + gl.arange(0, 64, row_scores)
    asked = query + r % SHARE
    low = gl.load(first + row + asked, mask=asked < n, other=FAR)[:, None]
    high = gl.load(last + row + asked, mask=asked < n, other=-1)[:, None]
    part_queries = queries.slice(64 * part, 64)
    top = gl.full([64], float("-inf"), gl.float32, row_scores)
    sums = gl.zeros([64], gl.float32, row_scores)
    acc = gl.zeros([64, D], gl.float32, results)
    blank = gl.zeros([64, BN], gl.float32, scores)

    mbarrier.wait(q_ready, 0)
    mbarrier.wait(keys_ready.index(0), 0)
    score = warpgroup_mma(part_queries, held_keys.index(0).permute([1, 0]), blank, use_acc=False)
    mbarrier.arrive(keys_free.index(0), count=1)
    p, decay, top, sums = weigh(score, top, sums, low, high, begin, end, clear, blurred)
    p = gl.convert_layout(p.to(gl.bfloat16), factor, assert_trivial=True)
    mbarrier.wait(keys_ready.index(1), 0, pred=blocks > 1)
    for block in range(1, blocks):
        stage = block % STAGES
        score = warpgroup_mma(
            part_queries,
            held_keys.index(stage).permute([1, 0]),
            blank,
            use_acc=False,
            is_async=True,
        )
        before = (block - 1) % STAGES
        mbarrier.wait(values_ready.index(before), (block - 1) // STAGES & 1)
        acc = warpgroup_mma(p, held_values.index(before), acc, is_async=True)
        score = warpgroup_mma_wait(1, (score,))
        mbarrier.arrive(keys_free.index(stage), count=1)
        start = begin + block * BN
        later, decay, top, sums = weigh(score, top, sums, low, high, start, end, clear, blurred)
        later = gl.convert_layout(later.to(gl.bfloat16), factor, assert_trivial=True)
        # Wait for the keys here, not where they are read: unless a branch comes between, the
        # assembler moves the wait for the results before the exponentials.
        after = block + 1
        mbarrier.wait(keys_ready.index(after % STAGES), after // STAGES & 1, pred=after < blocks)
        acc, p, later = warpgroup_mma_wait(0, (acc, p, later))
        mbarrier.arrive(values_free.index(before), count=1)
        acc *= gl.convert_layout(decay, row_results)[:, None]
        p = later
    final = blocks - 1
    mbarrier.wait(values_ready.index(final % STAGES), final // STAGES & 1)
    acc = warpgroup_mma(p, held_values.index(final % STAGES), acc)

    split_row = gl.program_id(2) * rows + row + query
    if SPLIT:
        line = (split_row + r % SHARE).to(gl.int64) * Q_HEADS + h * GROUP + r // SHARE
        gl.store(largest + line, top, mask=asked < n)
        gl.store(total + line, sums, mask=asked < n)
    inverse = 1.0 / gl.where(sums > 0.0, sums, 1.0)
    acc *= gl.convert_layout(inverse, row_results)[:, None]
    # Through shared memory, so that a thread stores 16 bytes; 16-bit floats of either kind.
    part_queries.store(acc.to(out.dtype.element_ty).to(gl.bfloat16, bitcast=True))
    thread_barrier()
    r = 64 * part + gl.arange(0, 64, gl.SliceLayout(1, stored))
    line = (split_row + r % SHARE).to(gl.int64) * Q_HEADS + h * GROUP + r // SHARE
    to = out + line[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, stored))[None, :]
    held = part_queries.load(stored).to(out.dtype.element_ty, bitcast=True)
    gl.store(to, held, mask=(query + r % SHARE < n)[:, None])


@gluon.jit
def attend_hopper_kernel(
    q, keys, values, slots, first, last, out, largest, total, rows, n, capacity, splits,
    CHAINED: gl.constexpr, Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    SPLIT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Each program computes what the same program of `attend.attend_kernel` computes.

    q, keys and values are TMA descriptors. q is [rows, q_heads * D], copied in boxes [SHARE, D].
    """
    GROUP: gl.constexpr = Q_HEADS // KV_HEADS
    SHARE: gl.constexpr = ROWS // GROUP
    tiles: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    b, h = gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS
    row, query = b * n, gl.program_id(0) * SHARE

    queries = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], tiles)
    held_keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], tiles)
    held_values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], tiles)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], barrier)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    thread_barrier()
    follow(CHAINED)
    mbarrier.expect(q_ready, 2 * ROWS * D)
    for g in gl.static_range(GROUP):  # rows past the sequence's end are another's; not stored
        load_box(q, [row + query, (h * GROUP + g) * D], q_ready, queries.slice(g * SHARE, SHARE))
    begin, end, blocks, clear, blurred = visible_run(
        first, last, row, query, n, splits, SHARE, BN, num_warps
    )
    base = gl.load(slots + b) * capacity
    column = h * D
    for block in gl.static_range(STAGES):
        wanted = block < blocks
        copy_tile(keys, held_keys, keys_ready, block, begin, base, capacity, column, wanted)
        copy_tile(values, held_values, values_ready, block, begin, base, capacity, column, wanted)
    smem = (
        queries, held_keys, held_values, q_ready, keys_ready, values_ready, keys_free, values_free,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (attend_rows, (
                0, smem, first, last, out, largest, total, rows, n, row, query, h,
                begin, end, blocks, clear, blurred, GROUP, Q_HEADS, D, SPLIT,
            )),
            (attend_rows, (
                1, smem, first, last, out, largest, total, rows, n, row, query, h,
                begin, end, blocks, clear, blurred, GROUP, Q_HEADS, D, SPLIT,
            )),
            (refill, (keys, values, smem, begin, blocks, base, capacity, column)),
        ],
        [4, 1],
        [240, 24],  # registers per thread
    )  # fmt: skip
