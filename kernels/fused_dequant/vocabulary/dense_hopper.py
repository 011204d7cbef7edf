"""lm_head on Hopper: copies, products and softcap run at the same time, in different warps.

Triton's loop (`dense.lm_head_kernel`) leaves the tensor cores idle while a block caps and stores a
tile. Here a block has one warp that copies, and two sets of four warps that multiply:

    one warp        copies tiles of x [128, BK] and w [256, BK] into a ring of STAGES places (TMA)
    each of 2 sets  multiplies 64 rows into accumulators of 64 x 256, then caps and stores them

The two sets share only the ring: while one caps and stores, the other may multiply.

`survey` also stores numbers for the sampler and the soft embedding, so that neither reads all logits
again. Let l be a row's logits in a tile, and x = (l - max l) log2(e) / T. Per row and tile it stores:

    statistics   max l, sum 2^x, sum 2^x x / log2(e), sum of p
    p            2^((l - cap) log2(e) / T + REACH) as bf16

All p are relative to `cap`, so the soft embedding is one product. As |l| <= cap, p spans 2 cap log2(e)
/ T powers of two. For cap = 30, bf16's exponents allow T down to 0.39 (`holds`).

Programs are persistent, one per SM. A place of the ring is `ready` once its bytes have arrived, and
`free` once both sets have read it. A set stores results through two buffers of 64 x 64; TMA clips to y.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fused_dequant.launch.chain import chained
from fused_dequant.launch.hopper import BEFORE_3_8, follow, load_box, store_box, thread_barrier
from fused_dequant.launch.targets import processors
from fused_dequant.launch.tiles import LOG2_E, LOWEST

BM = gl.constexpr(128)
BN = gl.constexpr(256)
PIECE = gl.constexpr(64)  # columns of a store: 128 bytes, one swizzled row
# log2 of the largest p (262,144 of 2^96 times values of 1,000 are 2^124) and of the least normal bf16.
REACH, LEAST = gl.constexpr(96.0), -126.0


@gluon.jit
def copy_tiles(x, w, x_tiles, w_tiles, ready, free, M, V, H, programs, STAGES: gl.constexpr):
    """Copy x and w of this program's tiles into the ring, BK columns per step."""
    BK: gl.constexpr = x.block_shape[1]
    rows = gl.cdiv(M, BM)
    step = 0
    for tile in range(gl.program_id(0), rows * gl.cdiv(V, BN), programs):
        m, n = (tile % rows) * BM, (tile // rows) * BN
        for k in range(0, H, BK):
            place = step % STAGES
            mbarrier.wait(free.index(place), (step // STAGES + 1) & 1)
            mbarrier.expect(ready.index(place), x.block_type.nbytes + w.block_type.nbytes)
            load_box(x, [m, k], ready.index(place), x_tiles.index(place))
            load_box(w, [n, k], ready.index(place), w_tiles.index(place))
            step += 1


@gluon.jit
def multiply_and_cap(
    y, p, statistics, schedule, steps_taken, x_tiles, w_tiles, results, ready, free,
    M, V, H, L, N, cap, programs,
    SET: gl.constexpr, STAGES: gl.constexpr, SURVEYED: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """For each tile of this program, multiply, cap and store 64 rows, from row 64 * SET on."""
    BK: gl.constexpr = x_tiles.shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, BK // 4])
    rows, steps = gl.cdiv(M, BM), gl.cdiv(H, BK)
    step = 0
    for tile in range(gl.program_id(0), rows * gl.cdiv(V, BN), programs):
        m, n = (tile % rows) * BM + 64 * SET, (tile // rows) * BN
        sharpness = 0.0
        if SURVEYED:  # requested before the products, arrives while they run
            row = m + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
            now = gl.load(steps_taken + row // L, mask=row < M, other=1)
            sharpness = LOG2_E / gl.load(schedule + gl.minimum(now, N) - 1)
        acc = gl.zeros([64, BN], gl.float32, mma)
        for k in range(steps):
            place = step % STAGES
            mbarrier.wait(ready.index(place), (step // STAGES) & 1)
            rows_tile = x_tiles.index(place).slice(64 * SET, 64, dim=0)
            embedding_tile = w_tiles.index(place).permute([1, 0])
            acc = warpgroup_mma(rows_tile, embedding_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))
            # The product before this one has read its place.
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        acc *= 1.0 / cap
        if SURVEYED:
            survey_and_store(acc, y, p, statistics, results, m, n, M, V, cap, sharpness, EVEN)
        else:
            store_capped(acc, y, results, m, n, cap)
    tma.store_wait(0)


@gluon.jit
def quarters(acc):
    """Split acc [64, 256] by columns into four blocks [64, 64], in order."""
    low, high = gl.split(acc.reshape([64, 2, BN // 2]).permute([0, 2, 1]))
    first, second = gl.split(low.reshape([64, 2, PIECE]).permute([0, 2, 1]))
    third, fourth = gl.split(high.reshape([64, 2, PIECE]).permute([0, 2, 1]))
    return first, second, third, fourth


@gluon.jit
def rounded(x):
    """Return x rounded to bf16, and the same values in float32; one instruction rounds two values."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
        "=&r,=r,=r,f,f", [x], dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def capped(x, cap):
    """Return cap * tanh(x)."""
    return cap * gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def send(values, to, results, m, n, BUFFER: gl.constexpr):
    """Copy bf16 `values` [64, 64] to shared memory results[BUFFER], and on to `to` at (m, n) by TMA."""
    buffer = results.index(BUFFER)
    tma.store_wait(1)  # the store before the last has left the buffer
    thread_barrier()
    buffer.store(values)
    fence_async_shared()
    thread_barrier()
    store_box(to, [m, n], buffer)


@gluon.jit
def store_capped(acc, y, results, m, n, cap):
    """Store cap * tanh(acc [64, 256]) to y at row m, column n, 64 columns at a time."""
    pieces = quarters(acc)
    for i in gl.static_range(4):
        send(capped(pieces[i], cap).to(gl.bfloat16), y, results, m, n + PIECE * i, i % 2)


@gluon.jit
def capped_inside(x, cap, n, V, EVEN: gl.constexpr):
    """Return logits cap * tanh(x) in bf16 (LOWEST from V on), and row maxima before rounding."""
    logits = capped(x, cap)
    if not EVEN:
        column = n + gl.arange(0, PIECE, layout=gl.SliceLayout(0, x.type.layout))
        logits = gl.where((column < V)[None, :], logits, LOWEST)
    packed = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [logits], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    return packed, gl.max(logits, 1)


@gluon.jit
def survey_and_store(
    acc, y, p, statistics, results, m, n, M, V, cap, sharpness, EVEN: gl.constexpr
):
    """Store a tile's logits cap * tanh(acc), its column of `statistics`, and its p."""
    first, second, third, fourth = quarters(acc)
    first, top = capped_inside(first, cap, n, V, EVEN)
    second, second_top = capped_inside(second, cap, n + PIECE, V, EVEN)
    third, third_top = capped_inside(third, cap, n + 2 * PIECE, V, EVEN)
    fourth, fourth_top = capped_inside(fourth, cap, n + 3 * PIECE, V, EVEN)
    pieces = (first, second, third, fourth)
    top = gl.maximum(gl.maximum(top, second_top), gl.maximum(third_top, fourth_top))
    top = top.to(gl.bfloat16).to(gl.float32)  # rounding keeps the order
    row_layout: gl.constexpr = top.type.layout
    sharpness = gl.convert_layout(sharpness, row_layout)
    scale = gl.exp2((top - cap) * sharpness + REACH)
    sums = gl.zeros([64], gl.float32, row_layout)
    moments, rounded_sums = sums, sums
    for i in gl.static_range(4):
        x = (pieces[i].to(gl.float32) - top[:, None]) * sharpness[:, None]
        e = gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
        )
        narrow, wide = rounded(e * scale[:, None])
        sums += gl.sum(e, 1)
        moments += gl.sum(e * x, 1)
        rounded_sums += gl.sum(wide, 1)
        if not BEFORE_3_8:  # piece after piece: ptxas 12.9 would begin all of them, and spill
            top += 0.0 * sums
        send(pieces[i], y, results, m, n + PIECE * i, 0)
        send(narrow, p, results, m, n + PIECE * i, 1)
    row = m + gl.arange(0, 64, layout=row_layout)
    tiles = gl.cdiv(V, BN)
    at, inside = statistics + row * tiles + n // BN, row < M
    gl.store(at, top, mask=inside)
    gl.store(at + M * tiles, sums, mask=inside)
    gl.store(at + 2 * M * tiles, moments / LOG2_E, mask=inside)
    gl.store(at + 3 * M * tiles, rounded_sums, mask=inside)


@gluon.jit
def lm_head_hopper_kernel(
    x, w, y, p, statistics, schedule, steps_taken, M, V, H, L, N, cap, programs,
    CHAINED: gl.constexpr, STAGES: gl.constexpr, SURVEYED: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Write logits of x [M, H], w [V, H] to y [M, V]; TMA boxes: x [128, BK], w [256, BK], y [64, 64].

    If SURVEYED, also write `statistics`, and p [M, V] in boxes like y's; else p is None. Row m is of
    sequence m // L, at step `steps_taken`[m // L], counted from 1; `schedule` [N] has each step's T.
    """
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BM, x.block_shape[1]], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, BN, w.block_shape[1]], w.layout)
    results = gl.allocate_shared_memory(gl.bfloat16, [2, 64, PIECE], y.layout)
    more_results = gl.allocate_shared_memory(gl.bfloat16, [2, 64, PIECE], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    follow(CHAINED)
    thread_barrier()
    gl.warp_specialize(
        [
            (multiply_and_cap, (
                y, p, statistics, schedule, steps_taken, x_tiles, w_tiles, results, ready, free,
                M, V, H, L, N, cap, programs, 0, STAGES, SURVEYED, EVEN,
            )),
            (multiply_and_cap, (
                y, p, statistics, schedule, steps_taken, x_tiles, w_tiles, more_results, ready,
                free, M, V, H, L, N, cap, programs, 1, STAGES, SURVEYED, EVEN,
            )),
            (copy_tiles, (x, w, x_tiles, w_tiles, ready, free, M, V, H, programs, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers per thread
    )  # fmt: skip


def lm_head(x, w, cap, config, out=None):
    """Launch the kernel for `dense.lm_head`, with SURVEYED off; `config` has STAGES, at most 4."""
    y = torch.empty(len(x), len(w), dtype=torch.bfloat16, device=x.device) if out is None else out
    _launch(x, w, y, None, None, 1, cap, config)
    return y


def survey(
    x: torch.Tensor,
    w: torch.Tensor,
    cap: float,
    schedule: torch.Tensor,
    step: torch.Tensor,
    y: torch.Tensor,
    p: torch.Tensor,
    config: dict[str, int],
) -> torch.Tensor:
    """Write logits of x [M, H] to y, and p to `p`, both bf16 [M, V]; return statistics.

    Statistics are f32 [4, M, V / 256 rounded up]. The module's docstring defines them and p. A row's T
    is the entry of `schedule` f32 [N] for its sequence's `step`, int32 [B].
    """
    M = len(y)
    statistics = torch.empty(4, M, triton.cdiv(y.shape[1], BN.value), device=x.device)
    _launch(x, w, y, p, (statistics, schedule, step), M // len(step), cap, config)
    return statistics


def holds(cap: float, coldest: float) -> bool:
    """Return whether every p of `survey` is normal in bf16 if |logits| <= cap and T >= `coldest`."""
    return 2 * cap * LOG2_E.value / coldest <= REACH.value - LEAST


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    p: torch.Tensor | None,
    survey: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    length: int,
    cap: float,
    config: dict[str, int],
) -> None:
    (M, H), V = x.shape, len(w)
    statistics, schedule, step = survey or (y, y, y)
    tiles = triton.cdiv(M, BM.value) * triton.cdiv(V, BN.value)
    programs = min(tiles, processors(x.device))
    BK, operand = 64, NVMMASharedLayout(128, 16, 2)
    lm_head_hopper_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [BM.value, BK], operand),
        TensorDescriptor.from_tensor(w, [BN.value, BK], operand),
        TensorDescriptor.from_tensor(y, [64, PIECE.value], operand),
        None if p is None else TensorDescriptor.from_tensor(p, [64, PIECE.value], operand),
        statistics, schedule, step, M, V, H, length, len(schedule), cap, programs,
        SURVEYED=survey is not None, EVEN=V % BN.value == 0, num_warps=4, **chained(x.device), **config,
    )  # fmt: skip
