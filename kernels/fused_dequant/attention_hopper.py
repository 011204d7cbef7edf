"""Attention with wide heads (head_dim 512) on Hopper, for `attention.attend`.

64 rows x 512 results in float32 fill the registers of two warpgroups, and a tile of 64 positions is
64 KB, so shared memory holds the queries, one tile of keys and one of values. Tiles small enough for
the compiler's own pipeline leave the tensor cores idle most of the time. Here a tile is copied (TMA)
into its place as soon as every warp has read the one before, under the other product; and exponentials
are computed under the product of the block before:

    scores of block i + 1, results += p_i @ values_i       both in flight
    scores arrive: copy keys of i + 2; p_i+1
    results arrive: copy values of i + 1; results *= decay

Scores are split between the warpgroups by position, results by column.
"""

# Kernels are compiled from their syntax.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fused_dequant.nvfp4_hopper import thread_barrier

ROWS = gl.constexpr(64)
BN = gl.constexpr(64)
_LOG2E = gl.constexpr(1.4426950408889634)
_FAR = gl.constexpr(1 << 30)


@gluon.jit
def fetch(source, place, ready, base, position, capacity, column, wanted):
    """Start copying BN positions into `place`, which every warp has read."""
    mbarrier.expect(ready, source.block_type.nbytes, pred=wanted)
    thread_barrier()
    cell = base + position % capacity
    tma.async_copy_global_to_shared(source, [cell, column], ready, place, pred=wanted)


@gluon.jit
def weigh(score, top, sums, low, high, start, end, clear, blurred):
    """Scores [ROWS, BN] of positions start .. -> exponentials, decay of what came before, top, sums."""
    if (start < clear) | (start + BN > gl.minimum(blurred, end)):
        position = gl.arange(0, BN, gl.SliceLayout(0, score.type.layout))[None, :] + start
        seen = (position >= low) & (position <= high) & (position < end)
        score = gl.where(seen, score, float("-inf"))
    new = gl.maximum(top, gl.max(score, 1) * _LOG2E)
    shift = gl.where(new == float("-inf"), 0.0, new)  # a row that sees nothing in this block
    p = gl.exp2(score * _LOG2E - shift[:, None])
    decay = gl.exp2(top - shift)
    return p, decay, new, sums * decay + gl.sum(p, 1)


@gluon.jit
def attend_hopper_kernel(
    q,
    keys,
    values,
    slots,
    first,
    last,
    out,
    largest,
    total,
    rows,
    n,
    capacity,
    splits,
    CHAINED: gl.constexpr,
    Q_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    SPLIT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program (block of queries, batch row x key head, split), as `attention.attend_kernel`."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    GROUP: gl.constexpr = Q_HEADS // KV_HEADS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, results, 2)
    row_scores: gl.constexpr = gl.SliceLayout(1, scores)
    row_results: gl.constexpr = gl.SliceLayout(1, results)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    tiles: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    b, h = gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS
    column = h * D
    query = gl.program_id(0) * (ROWS // GROUP)

    r = gl.arange(0, ROWS, gl.SliceLayout(1, loaded))
    asked = query + r // GROUP
    line = (b * n + asked).to(gl.int64) * Q_HEADS + h * GROUP + r % GROUP
    d = gl.arange(0, D, gl.SliceLayout(0, loaded))[None, :]
    held = gl.load(q + line[:, None] * D + d, mask=(asked < n)[:, None], other=0.0)
    asked = query + gl.arange(0, ROWS, row_scores) // GROUP
    low = gl.load(first + b * n + asked, mask=asked < n, other=_FAR)
    high = gl.load(last + b * n + asked, mask=asked < n, other=-1)
    # From `clear` up to `blurred` every row sees every position: no mask there.
    clear = gl.max(gl.where(asked < n, low, 0), 0)
    blurred = gl.min(gl.where(asked < n, high, _FAR), 0) + 1
    begin, end = gl.min(low, 0) // BN * BN, gl.max(high, 0) + 1
    share = gl.cdiv(gl.cdiv(end - begin, BN), splits) * BN
    begin += gl.program_id(2) * share
    end = gl.minimum(end, begin + share)
    blocks = gl.maximum(gl.cdiv(end - begin, BN), 1)  # an empty range is one block that none sees
    low, high = low[:, None], high[:, None]
    base = gl.load(slots + b) * capacity

    queries = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], tiles, held)
    held_keys = gl.allocate_shared_memory(gl.bfloat16, [BN, D], tiles)
    held_values = gl.allocate_shared_memory(gl.bfloat16, [BN, D], tiles)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_ready, values_ready = barriers.index(0), barriers.index(1)
    mbarrier.init(keys_ready, count=1)
    mbarrier.init(values_ready, count=1)
    fence_async_shared()
    thread_barrier()
    fetch(keys, held_keys, keys_ready, base, begin, capacity, column, True)
    fetch(values, held_values, values_ready, base, begin, capacity, column, True)

    top = gl.full([ROWS], float("-inf"), gl.float32, row_scores)
    sums = gl.zeros([ROWS], gl.float32, row_scores)
    acc = gl.zeros([ROWS, D], gl.float32, results)
    blank = gl.zeros([ROWS, BN], gl.float32, scores)
    mbarrier.wait(keys_ready, 0)
    score = warpgroup_mma(queries, held_keys.permute([1, 0]), blank, use_acc=False)
    fetch(keys, held_keys, keys_ready, base, begin + BN, capacity, column, blocks > 1)
    p, decay, top, sums = weigh(score, top, sums, low, high, begin, end, clear, blurred)
    p = gl.convert_layout(p.to(gl.bfloat16), factor)
    for block in range(1, blocks):
        start = begin + block * BN
        mbarrier.wait(keys_ready, block & 1)
        score = warpgroup_mma(
            queries, held_keys.permute([1, 0]), blank, use_acc=False, is_async=True
        )
        mbarrier.wait(values_ready, (block - 1) & 1)
        acc = warpgroup_mma(p, held_values, acc, is_async=True)
        score = warpgroup_mma_wait(1, (score,))
        more = block + 1 < blocks
        fetch(keys, held_keys, keys_ready, base, start + BN, capacity, column, more)
        later, decay, top, sums = weigh(score, top, sums, low, high, start, end, clear, blurred)
        later = gl.convert_layout(later.to(gl.bfloat16), factor)
        # `later` passes through the wait, or the compiler moves the wait before the exponentials.
        acc, p, later = warpgroup_mma_wait(0, (acc, p, later))
        fetch(values, held_values, values_ready, base, start, capacity, column, True)
        acc *= gl.convert_layout(decay, row_results)[:, None]
        p = later
    mbarrier.wait(values_ready, (blocks - 1) & 1)
    acc = warpgroup_mma(p, held_values, acc)

    r = gl.arange(0, ROWS, row_results)
    inside = query + r // GROUP < n
    line = (b * n + query + r // GROUP).to(gl.int64) * Q_HEADS + h * GROUP + r % GROUP
    d = gl.arange(0, D, gl.SliceLayout(0, results))[None, :]
    top, sums = gl.convert_layout(top, row_results), gl.convert_layout(sums, row_results)
    if SPLIT:
        line += gl.program_id(2).to(gl.int64) * rows * Q_HEADS
        gl.store(largest + line, top, mask=inside)
        gl.store(total + line, sums, mask=inside)
        gl.store(out + line[:, None] * D + d, acc, mask=inside[:, None])
    else:
        acc /= gl.where(sums > 0.0, sums, 1.0)[:, None]
        gl.store(out + line[:, None] * D + d, acc.to(gl.bfloat16), mask=inside[:, None])
