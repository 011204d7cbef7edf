"""lm_head on Hopper: copies, products and softcap run at the same time, each in warps of its own.

Triton's loop (`vocabulary.lm_head_kernel`) leaves the tensor cores idle while a block caps and stores a
tile. Here a block has nine warps that work:

    one             copies tiles of x [128, BK] and w [256, BK] into a ring of STAGES places (TMA)
    two times four  multiply 64 rows each into accumulators of 64 x 256, then cap and store them

The two sets share only the ring: while one is busy with its results the other may multiply.

Programs are persistent, one an SM. A place of the ring is `ready` when its bytes have arrived, `free`
when both sets have read it. Results leave through two buffers of 64 x 64 a set; TMA clips them to y.
"""

# Kernels are compiled from their syntax.

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

from fused_dequant.chain import chained
from fused_dequant.hopper import follow, thread_barrier
from fused_dequant.tuning import processors

BM = gl.constexpr(128)
BN = gl.constexpr(256)
PIECE = gl.constexpr(64)  # columns of a store: 128 bytes, one swizzled row


@gluon.jit
def copy_tiles(x, w, x_tiles, w_tiles, ready, free, M, V, H, programs, STAGES: gl.constexpr):
    """Fill the ring with the steps of every tile of this program."""
    BK: gl.constexpr = x.block_shape[1]
    rows = gl.cdiv(M, BM)
    step = 0
    for tile in range(gl.program_id(0), rows * gl.cdiv(V, BN), programs):
        m, n = (tile % rows) * BM, (tile // rows) * BN
        for k in range(0, H, BK):
            place = step % STAGES
            mbarrier.wait(free.index(place), (step // STAGES + 1) & 1)
            mbarrier.expect(ready.index(place), x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [m, k], ready.index(place), x_tiles.index(place))
            tma.async_copy_global_to_shared(w, [n, k], ready.index(place), w_tiles.index(place))
            step += 1


@gluon.jit
def multiply_and_cap(
    y, x_tiles, w_tiles, results, ready, free, M, V, H, cap, programs,
    SET: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply and cap rows 64 * SET .. 64 * SET + 63 of every tile of this program."""
    BK: gl.constexpr = x_tiles.shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, BK // 4])
    rows, steps = gl.cdiv(M, BM), gl.cdiv(H, BK)
    step = 0
    for tile in range(gl.program_id(0), rows * gl.cdiv(V, BN), programs):
        m, n = (tile % rows) * BM + 64 * SET, (tile // rows) * BN
        acc = gl.zeros([64, BN], gl.float32, mma)
        for k in range(steps):
            place = step % STAGES
            mbarrier.wait(ready.index(place), (step // STAGES) & 1)
            left = x_tiles.index(place).slice(64 * SET, 64, dim=0)
            right = w_tiles.index(place).permute([1, 0])
            acc = warpgroup_mma(left, right, acc, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))
            # The product before this one has read its place.
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        acc *= 1.0 / cap
        store_capped(acc, y, results, m, n, cap)
    tma.store_wait(0)


@gluon.jit
def store_capped(acc, y, results, m, n, cap):
    """Store cap * tanh(acc [64, 256]) at rows m .., columns n .. of y, 64 columns at a time."""
    low, high = gl.split(acc.reshape([64, 2, BN // 2]).permute([0, 2, 1]))
    first, second = gl.split(low.reshape([64, 2, PIECE]).permute([0, 2, 1]))
    third, fourth = gl.split(high.reshape([64, 2, PIECE]).permute([0, 2, 1]))
    pieces = (first, second, third, fourth)
    for i in gl.static_range(4):
        capped = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [pieces[i]], dtype=gl.float32, is_pure=True, pack=1
        )
        buffer = results.index(i % 2)
        tma.store_wait(1)  # the store before the last has left the buffer
        thread_barrier()
        buffer.store((cap * capped).to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(y, [m, n + PIECE * i], buffer)


@gluon.jit
def lm_head_hopper_kernel(
    x,
    w,
    y,
    M,
    V,
    H,
    cap,
    programs,
    CHAINED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take descriptors of x [M, H], w [V, H], y [M, V], boxes [128, BK], [256, BK], [64, 64]."""
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
                y, x_tiles, w_tiles, results, ready, free, M, V, H, cap, programs, 0, STAGES,
            )),
            (multiply_and_cap, (
                y, x_tiles, w_tiles, more_results, ready, free, M, V, H, cap, programs, 1, STAGES,
            )),
            (copy_tiles, (x, w, x_tiles, w_tiles, ready, free, M, V, H, programs, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers a thread
    )  # fmt: skip


def lm_head(
    x: torch.Tensor,
    w: torch.Tensor,
    cap: float,
    config: dict[str, int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `vocabulary.lm_head`; config is STAGES, 4 at most."""
    (M, H), V = x.shape, len(w)
    y = torch.empty(M, V, dtype=torch.bfloat16, device=x.device) if out is None else out
    tiles = triton.cdiv(M, BM.value) * triton.cdiv(V, BN.value)
    programs = min(tiles, processors(x.device))
    BK, operand = 64, NVMMASharedLayout(128, 16, 2)
    lm_head_hopper_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [BM.value, BK], operand),
        TensorDescriptor.from_tensor(w, [BN.value, BK], operand),
        TensorDescriptor.from_tensor(y, [64, PIECE.value], NVMMASharedLayout(128, 16, 2)),
        M, V, H, cap, programs, num_warps=4, **chained(x.device), **config,
    )  # fmt: skip
    return y
