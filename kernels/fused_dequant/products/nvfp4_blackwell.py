"""NVFP4 W4A4 on Blackwell's FP4 units: e2m1 codes and e4m3 block scales on both sides of a product.

    y[m, n] = factor * sum over blocks of 16:  x_scale * w_scale * sum of x code * w code

The kernel computes y.T = w @ x.T: `tcgen05.mma` multiplies 128 rows, here the weight's, by 16 to
256 columns, here tokens. So an expert's 16 tokens need no padding to 128. For sm_120's `mma.sync`
either order would do. `factor` combines both global scales. The weight's scales are stored in tiles
(`w4a4`). The tokens' scales are stored row by row, since an expert's tokens are gathered.

No GPU with FP4 units has run this kernel; Triton's interpreter has. If NATIVE is false, only the
instruction differs: the kernel decodes code * scale to bf16, which is exact, and multiplies in bf16.
An H200 has run that form. tests/fused_dequant/test_compile.py names each target's instruction.
"""

import triton
import triton.language as tl

from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.targets import fp4_units, lowering
from fused_dequant.launch.tiles import block_rows, store_nvfp4
from fused_dequant.products.nvfp4 import decode_e2m1, decode_scale
from fused_dequant.products.routing import place_results

E2M1 = tl.constexpr("e2m1")


@triton.jit
def decode(codes, scales, ROWS: tl.constexpr, BK: tl.constexpr):
    """Return codes uint8 [ROWS, BK/2] times e4m3 scales [ROWS, BK/16] times 2^-7, bf16 [ROWS, BK]."""
    byte = scales.to(tl.uint8, bitcast=True)
    scales = tl.where(byte == 0x7F, float("nan"), decode_scale(byte).to(tl.float32)).to(tl.bfloat16)
    value_scales = tl.broadcast_to(scales[:, :, None], (ROWS, BK // 16, 16)).reshape(ROWS, BK)
    return decode_e2m1(codes, ROWS, BK) * value_scales


@triton.jit
def multiply(
    w, w_scale, x, x_scale, acc,
    NATIVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return acc f32 [BN, BM] + w @ x.T; if not NATIVE, acc and product are scaled by 2^-14."""
    if NATIVE:
        acc = tl.dot_scaled(w, w_scale, E2M1, x.T, x_scale, E2M1, acc)
    else:
        acc = tl.dot(decode(w, w_scale, BN, BK), decode(x, x_scale, BM, BK).T, acc)
    return acc


@triton.jit
def nvfp4_blackwell_kernel(
    x, x_scale, packed, scale, factor, y, slots, block_expert, block_count, row_weight, total, N, K,
    CHAINED: tl.constexpr, TOPK: tl.constexpr, GROUPED: tl.constexpr, GELU_MUL: tl.constexpr,
    WEIGHTED: tl.constexpr, NATIVE: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply x [rows, K/2] by `packed` [E, N, K/2]; write y [slots, N], or [slots, N/2] if GELU_MUL.

    x_scale is [rows, K/16], factor [E, 3], scale [E, ceil(N/128), ceil(K/64), 512] tiles, so BN is 128.
    """
    follow(CHAINED)
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.zeros((), tl.int64)
    if GROUPED:
        if block >= tl.load(block_count):
            return
        expert = tl.load(block_expert + block).to(tl.int64)
    slot, real = block_rows(slots, block * BM, total, BM, GROUPED)
    row = (slot // TOPK).to(tl.int64)
    half = tl.arange(0, BK // 2)
    group = tl.arange(0, BK // 16)
    # Channels past N repeat the first ones: they are computed and not stored, and need no mask.
    channel = expert * N + (tile * BN + tl.arange(0, BN)) % N
    columns = tl.cdiv(K, 64)
    piece = tl.arange(0, BN * BK // 16)
    weights = packed + channel[:, None] * (K // 2) + half[None, :]
    scales = scale + (expert * tl.cdiv(N, BN) + tile) * columns * (BN * 4) + piece
    tokens = x + row[:, None] * (K // 2) + half[None, :]
    token_scales = x_scale + row[:, None] * (K // 16) + group[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in range(0, K, BK):
        if EVEN_K:
            w = tl.load(weights + k0 // 2)
            s = tl.load(scales + k0 // 64 * (BN * 4))
            a = tl.load(tokens + k0 // 2, mask=real[:, None], other=0)
            t = tl.load(token_scales + k0 // 16, mask=real[:, None], other=0.0)
        else:
            columns_left = K - k0
            w = tl.load(weights + k0 // 2, mask=half[None, :] < columns_left // 2, other=0)
            inside = piece < (columns - k0 // 64) * (BN * 4)
            s = tl.load(scales + k0 // 64 * (BN * 4), mask=inside, other=0.0)
            mask = real[:, None] & (half[None, :] < columns_left // 2)
            a = tl.load(tokens + k0 // 2, mask=mask, other=0)
            mask = real[:, None] & (group[None, :] < columns_left // 16)
            t = tl.load(token_scales + k0 // 16, mask=mask, other=0.0)
        # row % 32, row // 32 and column of each tile, back in rows
        s = s.reshape(BK // 64, 32, 4, 4).permute(2, 1, 0, 3).reshape(BN, BK // 16)
        acc = multiply(w, s, a, t, acc, NATIVE, BM, BN, BK)
    if not NATIVE:
        acc *= 16384.0
    store_nvfp4(
        acc, y, factor + expert * 3, row_weight, slot, real, tile, N, BM, BN, GELU_MUL, WEIGHTED
    )


def launch(weight, x, x_scale, config, routing=None, share=None):
    """Do what `matmul.launch` does, for NVFP4 rows: x uint8 [rows, K/2], x_scale e4m3 [rows, K/16]."""
    y, mode, blocks = place_results(weight, len(x), config, routing, share)
    del mode["block_rows"]  # this kernel computes whole blocks only
    nvfp4_blackwell_kernel[(triton.cdiv(mode["N"], config["BN"]), blocks)](
        x=x, x_scale=x_scale, packed=weight.data, scale=weight.scale, factor=weight.factor,
        NATIVE=fp4_units(x.device), **mode, **config, **chained(x.device), **lowering(x.device),
    )  # fmt: skip
    return y
