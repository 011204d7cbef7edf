"""Attention with heads of 512 on Hopper, for `attend.attend`.

The results of 64 rows, 64 x 512 in float32, fill the registers of two warpgroups. The keys of a
block of 64 positions take 64 KB. Shared memory holds only the queries, and one block's keys and
values. With smaller blocks and the compiler's own pipeline, tensor cores idle most of the time. So
here copies, products and exponentials overlap. When every warp has read a block's keys, TMA copies the
next block's keys in their place, while values are multiplied. TMA copies the next values while scores
are computed. The exponentials of block i + 1 are computed while block i's values are multiplied:

    in flight              scores of block i + 1; results *= decay; results += p_i @ values_i
    when scores arrive     copy the keys of block i + 2; compute the decay, then p_i+1
    when results arrive    copy the values of block i + 1

A warpgroup computes the scores of half the positions, and half the columns of the results. The keys
and values of a block, 128 KB, serve only 64 rows, so the L2 limits the kernel (docs/kernels-log.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fused_dequant.attention.attend_hopper import visible_run, weigh
from fused_dequant.launch.hopper import BEFORE_3_8, BEFORE_3_9, follow, load_box, thread_barrier
from fused_dequant.launch.tiles import FAR

ROWS = gl.constexpr(64)
BN = gl.constexpr(64)


@gluon.jit
def fetch(source, place, ready, base, position, capacity, column, wanted):
    """Wait for all warps; if `wanted`, start copying BN positions, from `position` on, to `place`."""
    mbarrier.expect(ready, source.block_type.nbytes, pred=wanted)
    thread_barrier()
    cell = base + position % capacity
    load_box(source, [cell, column], ready, place, pred=wanted)


@gluon.jit
def operand(p, layout: gl.constexpr, NOW: gl.constexpr):
    """Return p [ROWS, BN] in bf16, in the layout of an operand; unchanged if not NOW.

    Usually p waits for its product so. ptxas 12.9 would spill p in 16 bits, so there it is in float32.
    """
    if NOW:
        p = gl.convert_layout(p.to(gl.bfloat16), layout)
    return p


@gluon.jit
def tile(memory, block):
    """Return the one tile of `memory`; from Triton 3.9 on, at an address that seems to hang on `block`.

    Else 3.9 would compute the addresses of all parts of a product before the loop, and spill them.
    """
    place = 0
    if not BEFORE_3_9:
        place = gl.inline_asm_elementwise(
            "and.b32 $0, $1, 0;", "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1
        )
    return memory.index(place)


@gluon.jit
def attend_wide_kernel(
    q, keys, values, slots, first, last, out, largest, total, rows, n, capacity, splits,
    CHAINED: gl.constexpr, Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    SPLIT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Each program computes what the same program of `attend.attend_kernel` computes."""
    GROUP: gl.constexpr = Q_HEADS // KV_HEADS
    SHARE: gl.constexpr = ROWS // GROUP
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, results, 2)
    row_scores: gl.constexpr = gl.SliceLayout(1, scores)
    row_results: gl.constexpr = gl.SliceLayout(1, results)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    # Not the layout of the loads: else the loads' addresses would live as long as the kernel.
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    tiles: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    b, h = gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS
    column = h * D
    row, query = b * n, gl.program_id(0) * SHARE

    key_memory = gl.allocate_shared_memory(gl.bfloat16, [1, BN, D], tiles)
    held_keys = key_memory.index(0)
    held_values = gl.allocate_shared_memory(gl.bfloat16, [BN, D], tiles)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_ready, values_ready = barriers.index(0), barriers.index(1)
    mbarrier.init(keys_ready, count=1)
    mbarrier.init(values_ready, count=1)
    fence_async_shared()
    follow(CHAINED)
    begin, end, blocks, clear, blurred = visible_run(
        first, last, row, query, n, splits, SHARE, BN, num_warps
    )
    base = gl.load(slots + b) * capacity
    asked = query + gl.arange(0, ROWS, row_scores) // GROUP
    low = gl.load(first + row + asked, mask=asked < n, other=FAR)[:, None]
    high = gl.load(last + row + asked, mask=asked < n, other=-1)[:, None]
    thread_barrier()
    fetch(keys, held_keys, keys_ready, base, begin, capacity, column, True)
    fetch(values, held_values, values_ready, base, begin, capacity, column, True)

    r = gl.arange(0, ROWS, gl.SliceLayout(1, loaded))
    line = (row + query + r // GROUP).to(gl.int64) * Q_HEADS + h * GROUP + r % GROUP
    d = gl.arange(0, D, gl.SliceLayout(0, loaded))[None, :]
    inside = query + r // GROUP < n
    held = gl.load(q + line[:, None] * D + d, mask=inside[:, None], other=0.0)
    query_memory = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, D], tiles)
    queries = query_memory.index(0)
    queries.store(held)
    fence_async_shared()
    thread_barrier()

    top = gl.full([ROWS], float("-inf"), gl.float32, row_scores)
    sums = gl.zeros([ROWS], gl.float32, row_scores)
    acc = gl.zeros([ROWS, D], gl.float32, results)
    blank = gl.zeros([ROWS, BN], gl.float32, scores)
    mbarrier.wait(keys_ready, 0)
    score = warpgroup_mma(queries, held_keys.permute([1, 0]), blank, use_acc=False)
    fetch(keys, held_keys, keys_ready, base, begin + BN, capacity, column, blocks > 1)
    p, decay, top, sums = weigh(score, top, sums, low, high, begin, end, clear, blurred)
    p = operand(p, factor, BEFORE_3_8)
    mbarrier.wait(keys_ready, 1, pred=blocks > 1)
    for block in range(1, blocks):
        start = begin + block * BN
        block_keys = tile(key_memory, block).permute([1, 0])
        score = warpgroup_mma(
            tile(query_memory, block), block_keys, blank, use_acc=False, is_async=True
        )
        acc *= gl.convert_layout(decay, row_results)[:, None]
        mbarrier.wait(values_ready, (block - 1) & 1)
        p = operand(p, factor, not BEFORE_3_8)
        acc = warpgroup_mma(p, held_values, acc, is_async=True)
        score = warpgroup_mma_wait(1, (score,))
        more = block + 1 < blocks
        fetch(keys, held_keys, keys_ready, base, start + BN, capacity, column, more)
        later, decay, top, sums = weigh(score, top, sums, low, high, start, end, clear, blurred)
        later = operand(later, factor, BEFORE_3_8)
        # Here as in `attend_hopper`; the next wait takes `later`, or the compiler would move it.
        mbarrier.wait(keys_ready, (block + 1) & 1, pred=more)
        acc, p, later = warpgroup_mma_wait(0, (acc, p, later))
        fetch(values, held_values, values_ready, base, start, capacity, column, True)
        p = later
    acc *= gl.convert_layout(decay, row_results)[:, None]
    mbarrier.wait(values_ready, (blocks - 1) & 1)
    acc = warpgroup_mma(operand(p, factor, not BEFORE_3_8), held_values, acc)

    split_row = gl.program_id(2) * rows + row + query
    top, sums = gl.convert_layout(top, row_results), gl.convert_layout(sums, row_results)
    if SPLIT:
        r = gl.arange(0, ROWS, row_results)
        line = (split_row + r // GROUP).to(gl.int64) * Q_HEADS + h * GROUP + r % GROUP
        gl.store(largest + line, top, mask=query + r // GROUP < n)
        gl.store(total + line, sums, mask=query + r // GROUP < n)
    acc *= (1.0 / gl.where(sums > 0.0, sums, 1.0))[:, None]
    # Through shared memory, so that a thread stores 16 bytes; 16-bit floats of either kind.
    queries.store(acc.to(out.dtype.element_ty).to(gl.bfloat16, bitcast=True))
    thread_barrier()
    r = gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    line = (split_row + r // GROUP).to(gl.int64) * Q_HEADS + h * GROUP + r % GROUP
    to = out + line[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, stored))[None, :]
    held = queries.load(stored).to(out.dtype.element_ty, bitcast=True)
    gl.store(to, held, mask=(query + r // GROUP < n)[:, None])
