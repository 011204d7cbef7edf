"""NVFP4 experts of many rows on Hopper, multiplied in FP8 (`w4a8`), in blocks of 256 tokens.

Of 4,096 tokens, an expert gets 256 on average. In a step of `nvfp4_hopper`, a tile of 128 tokens x 128
channels fetches 25 KB for 512 cycles of products, and decodes its weights. A tile of 256 tokens fetches
41 KB for 1,024 cycles, and decodes no more. A processor holds one such tile, on which three sets of
four warps work:

    fill                    gathers a step's tokens and weights into a ring (cp.async)
    multiply_rows (two)     each decodes its 64 channels' weights, and multiplies all tokens by them

The sets that multiply do not wait for each other: one decodes or stores while the other multiplies.
Programs are persistent, one per processor. `fill` goes on to the next tile while results are stored.
Sums have the bits of `nvfp4_hopper`'s. FP8 weights gain nothing so (docs/kernels-log.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fused_dequant.launch.chain import chained
from fused_dequant.launch.hopper import follow, thread_barrier
from fused_dequant.launch.targets import processors
from fused_dequant.launch.tiles import KEPT
from fused_dequant.products.nvfp4_step import (
    copy_tokens,
    copy_weights,
    gated,
    tokens_layout,
    weights_of,
)
from fused_dequant.products.routing import place_results

PIECE = gl.constexpr(64)  # tokens of a store


@gluon.jit
def held(offsets):
    """Return int64 `offsets`; each stays in registers of its own and is not computed anew in each step.

    A copy holds its address registers for tens of cycles, in which they could not be written again.
    """
    copies = gl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [offsets], dtype=gl.int64, is_pure=False, pack=1
    )
    return gl.max_contiguous(gl.multiple_of(copies, [16, 16]), [1, 16])


@gluon.jit
def fill(
    x, words, scales, slots, blocks, total, N, K, programs, smem,
    TOPK: gl.constexpr, EVEN_K: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Copy the steps of this program's tiles into the ring, each when its place is free."""
    block_expert, _, block_count = blocks
    words_smem, scales_smem, tokens_smem, ready, free = smem
    lanes: gl.constexpr = BK // 16
    tokens_copy: gl.constexpr = gl.BlockedLayout([1, 16], [32 // lanes, lanes], [4, 1], [1, 0])
    words_copy: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    scales_copy: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    word = gl.arange(0, BK * 8, gl.SliceLayout(0, words_copy))[None, :]
    scale = gl.arange(0, BK, gl.SliceLayout(0, scales_copy))[None, :]
    k = gl.arange(0, BK, gl.SliceLayout(0, tokens_copy))[None, :]
    tiles, column_tiles = N // 128, K // 64
    index = 0
    for work in range(gl.program_id(0), gl.load(block_count) * tiles, programs):
        block = work // tiles
        expert = gl.load(block_expert + block).to(gl.int64)
        slot = gl.load(slots + block * BM + gl.arange(0, BM, gl.SliceLayout(1, tokens_copy)))
        tokens_at = x + held((slot // TOPK).to(gl.int64)[:, None] * K + k)
        real = (slot < total)[:, None] & (k < K)
        first = (expert * (N // 64) + work % tiles * 2) * column_tiles
        for step in range(gl.cdiv(K, BK)):
            place = index % RING
            mbarrier.wait(free.index(place), (index // RING + 1) & 1)
            for part in gl.static_range(2):
                at = first + part * column_tiles
                copy_weights(
                    words + at * 512 + word, scales + at * 64 + scale, word, scale,
                    words_smem, scales_smem, 2 * place + part, step, K, BK, EVEN_K,
                )  # fmt: skip
            copy_tokens(tokens_at, tokens_smem.index(place), real, k, step, K, BK, EVEN_K)
            async_copy.mbarrier_arrive(ready.index(place), increment_count=False)
            index += 1


@gluon.jit
def rows_memory(BM: gl.constexpr):
    """Return shared memory for the slots, scales and routing weights of BM tokens."""
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [BM], linear)
    scales = gl.allocate_shared_memory(gl.float32, [BM], linear)
    weights = gl.allocate_shared_memory(gl.float32, [BM], linear)
    return slots, scales, weights


@gluon.jit
def store_pieces(acc, rows_smem, factors, first, place, total, width, GELU_MUL: gl.constexpr):
    """Apply scales, gelu_mul and routing weights to acc [64, tokens]; store 64 tokens at a time.

    The tokens begin at `first` in `rows_smem`; `place` points at the results' column in y's first row.
    """
    COUNT: gl.constexpr = acc.shape[1]
    if COUNT > PIECE:
        low, high = gl.split(acc.reshape([64, 2, COUNT // 2]).permute([0, 2, 1]))
        store_pieces(low, rows_smem, factors, first, place, total, width, GELU_MUL)
        store_pieces(high, rows_smem, factors, first + COUNT // 2, place, total, width, GELU_MUL)
    else:
        slots_smem, scales_smem, weights_smem = rows_smem
        ROWS: gl.constexpr = 32 if GELU_MUL else 64
        columns_layout: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
        acc *= scales_smem.slice(first, COUNT).load(columns_layout)[None, :]
        if GELU_MUL:
            result = gated(acc, factors[0], factors[1], 64, COUNT)
        else:
            result = (
                acc * factors[0] * weights_smem.slice(first, COUNT).load(columns_layout)[None, :]
            )
        stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [4, 1], [1, 0])
        result = gl.convert_layout(result.to(gl.bfloat16).permute([1, 0]), stored)
        slot = slots_smem.slice(first, COUNT).load(gl.SliceLayout(1, stored))
        column = gl.arange(0, ROWS, gl.SliceLayout(0, stored))[None, :]
        place += slot.to(gl.int64)[:, None] * width + column
        gl.store(place, result, mask=(slot < total)[:, None], eviction_policy=KEPT)


@gluon.jit
def compute_rows(
    part: gl.constexpr, smem, rows_smem, given, factors, rows, index, first_row, place, total, width,
    K, TOPK: gl.constexpr, GELU_MUL: gl.constexpr, BM: gl.constexpr, MORE: gl.constexpr,
    NARROWER: gl.constexpr, BK: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Compute 64 channels of BM + MORE rows, or of the least of NARROWER lower heights >= `rows`.

    The heights below 256 are 128 + 64, 128, 64 + 32 and 64, in one or two accumulators.
    """
    LESS: gl.constexpr = BM if MORE else BM // 2
    LESS_MORE: gl.constexpr = 0 if MORE else BM // 4
    if NARROWER > 0 and rows <= LESS + LESS_MORE:
        compute_rows(
            part, smem, rows_smem, given, factors, rows, index, first_row, place, total, width, K,
            TOPK, GELU_MUL, LESS, LESS_MORE, NARROWER - 1, BK, RING,
        )  # fmt: skip
    else:
        words_smem, scales_smem, tokens_smem, ready, free = smem
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
        mma_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or BM, 32])
        operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
        operand_more: gl.constexpr = gl.DotOperandLayout(0, mma_more, 4)
        # What the results need is requested before the products, and arrives while they run.
        SPAN: gl.constexpr = 2 * BM if MORE else BM
        flat: gl.constexpr = gl.BlockedLayout([max(SPAN // 128, 1)], [32], [4], [0])
        slots, x_scale, row_weight = given
        slot = gl.load(slots + first_row + gl.arange(0, SPAN, flat))
        scale = gl.load(x_scale + slot // TOPK, mask=slot < total, other=0.0)
        weight = scale
        if not GELU_MUL:
            weight = gl.load(row_weight + slot, mask=slot < total, other=0.0)
        acc = gl.zeros([64, BM], gl.float32, mma)
        acc_more = gl.zeros([64, MORE or BM], gl.float32, mma_more)
        for step in range(gl.cdiv(K, BK)):
            at = (index + step) % RING
            mbarrier.wait(ready.index(at), (index + step) // RING & 1)
            fence_async_shared()  # cp.async wrote the tokens, wgmma reads through another proxy
            for tile in gl.static_range(BK // 64):
                tokens = tokens_smem.index(at).slice(64 * tile, 64, dim=1)
                weights = weights_of(
                    words_smem.index(2 * at + part), scales_smem.index(2 * at + part), tile, operand,
                    True, 1, BK // 64, 1,
                )  # fmt: skip
                acc = warpgroup_mma(
                    weights, tokens.slice(0, BM).permute([1, 0]), acc, is_async=True
                )
                if MORE:
                    weights = gl.convert_layout(weights, operand_more, assert_trivial=True)
                    tokens = tokens.slice(BM, MORE).permute([1, 0])
                    acc_more = warpgroup_mma(weights, tokens, acc_more, is_async=True)
            if MORE:
                acc, acc_more = warpgroup_mma_wait(0, (acc, acc_more))
            else:
                acc = warpgroup_mma_wait(0, (acc,))
            mbarrier.arrive(free.index(at), count=1)
        for i in gl.static_range(3):
            rows_smem[i].slice(0, SPAN).store((slot, scale, weight)[i])
        store_pieces(acc, rows_smem, factors, 0, place, total, width, GELU_MUL)
        if MORE:
            store_pieces(acc_more, rows_smem, factors, BM, place, total, width, GELU_MUL)


@gluon.jit
def multiply_rows(
    part: gl.constexpr, smem, rows_smem, given, blocks, factor, y, total, N, K, programs,
    TOPK: gl.constexpr, GELU_MUL: gl.constexpr, BM: gl.constexpr, NARROWER: gl.constexpr,
    BK: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Compute 64 channels, from 64 * part on, of each tile of this program."""
    block_expert, block_rows, block_count = blocks
    tiles, width = N // 128, N // 2 if GELU_MUL else N
    count, block, index = gl.load(block_count), gl.program_id(0) // tiles, 0
    expert, rows = gl.load(block_expert + block), gl.load(block_rows + block)
    for work in range(gl.program_id(0), count * tiles, programs):
        ahead = gl.minimum((work + programs) // tiles, count - 1)  # the next tile's block
        next_expert, next_rows = gl.load(block_expert + ahead), gl.load(block_rows + ahead)
        factors = gl.load(factor + expert * 2), gl.load(factor + expert * 2 + 1)
        place = y + (work % tiles * 2 + part) * (32 if GELU_MUL else 64)
        compute_rows(
            part, smem, rows_smem, given, factors, rows, index, work // tiles * BM, place, total,
            width, K, TOPK, GELU_MUL, BM, 0, NARROWER, BK, RING,
        )  # fmt: skip
        index += gl.cdiv(K, BK)
        expert, rows = next_expert, next_rows


@gluon.jit
def experts_hopper_kernel(
    x, x_scale, words, scales, factor, y, slots, block_expert, block_rows, block_count, row_weight,
    total, N, K, programs,
    CHAINED: gl.constexpr, TOPK: gl.constexpr, GROUPED: gl.constexpr, GELU_MUL: gl.constexpr,
    WEIGHTED: gl.constexpr, EVEN_K: gl.constexpr, BM: gl.constexpr, NARROWER: gl.constexpr,
    BK: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Multiply e4m3 x [rows, K] by weights in fragments; write y bf16 [slots, N or N/2].

    A block has BM rows, and is computed as the least of NARROWER + 1 heights that holds its slots.
    """
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words_smem = gl.allocate_shared_memory(gl.int32, [2 * RING, 1, BK * 8], linear)
    scales_smem = gl.allocate_shared_memory(gl.int32, [2 * RING, 1, BK], linear)
    tokens_smem = gl.allocate_shared_memory(gl.float8e4nv, [RING, BM, BK], tokens_layout(True))
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(RING):
        mbarrier.init(ready.index(place), count=128)  # every thread of `fill`
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    follow(CHAINED)
    thread_barrier()
    smem = words_smem, scales_smem, tokens_smem, ready, free
    given, blocks = (slots, x_scale, row_weight), (block_expert, block_rows, block_count)
    gl.warp_specialize(
        [
            (multiply_rows, (
                0, smem, rows_memory(BM), given, blocks, factor, y, total, N, K, programs,
                TOPK, GELU_MUL, BM, NARROWER, BK, RING,
            )),
            (multiply_rows, (
                1, smem, rows_memory(BM), given, blocks, factor, y, total, N, K, programs,
                TOPK, GELU_MUL, BM, NARROWER, BK, RING,
            )),
            (fill, (
                x, words, scales, slots, blocks, total, N, K, programs, smem,
                TOPK, EVEN_K, BM, BK, RING,
            )),
        ],
        [4, 4],
        [200, 104],  # registers per thread
    )  # fmt: skip


def launch(weight, x, x_scale, config, routing, share=None):
    """Do what `matmul.launch` does, for experts of scheme nvfp4_e4m3; `config` has no MORE."""
    y, mode, blocks = place_results(weight, len(x), config, routing, share)
    programs = min(blocks * (mode["N"] // 128), processors(x.device))
    experts_hopper_kernel[(programs,)](
        x=x, x_scale=x_scale, words=weight.data, scales=weight.scale, factor=weight.factor,
        programs=programs, num_warps=4, **mode, **chained(x.device), **config,
    )  # fmt: skip
    return y
