"""NVFP4 and MXFP4 W4A16 in plain Triton: the readable kernel, for every GPU from Ampere on.

It reads the layout on disk (low nibble = even column, one e4m3 scale per 16 columns) unchanged:

    bits  = (code & 8) << 12 | (code & 7) << 6        as bf16: e2m1 * 2^-126, exact
    scale = bf16(e4m3 * 2^119)                        exact
    w     = bits * scale                              e2m1 * scale * 2^-7: 6 significant bits, exact

The epilogue multiplies sums by 2^7 / global_scale. MXFP4 has an e8m0 byte per 32 columns, which is
a bf16 exponent: w = (bits * 2^126) * scale. Both products are exact, and the factor is 1. Integer
operations decode e4m3 scales, because sm_80 has no such type. Nibbles are interleaved, and the layout
is changed before the dot, through shared memory. This limits the loop to about 40 % of an H200's
bandwidth. `nvfp4_hopper.py` avoids this limit on Hopper.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.launch.tiles import block_rows, store_nvfp4
from fused_dequant.products.routing import place_results


@triton.jit
def decode_e2m1(packed, ROWS: tl.constexpr, BK: tl.constexpr):
    """Return e2m1 * 2^-126 as bf16 [ROWS, BK], decoded from packed codes uint8 [ROWS, BK/2]."""
    codes = tl.join(packed & 0xF, packed >> 4).reshape(ROWS, BK).to(tl.uint16)
    return (((codes & 8) << 12) | ((codes & 7) << 6)).to(tl.bfloat16, bitcast=True)


@triton.jit
def decode_scale(byte):
    """Return, in bf16, the value of a non-negative, finite e4m3 byte times 2^119."""
    # byte << 20 is the float32 of value * 2^-120, subnormals included; times 2^239 in two steps.
    tiny = (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True)
    return (tiny * 1.329227995784916e36 * 6.646139978924579e35).to(tl.bfloat16)


@triton.jit
def decode_e8m0(byte):
    """Return the value 2^(byte - 127) of an e8m0 byte in bf16; byte 0 gives a subnormal number."""
    bits = tl.where(byte == 0, 0x40, byte.to(tl.int32) << 7)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def nvfp4_kernel(
    x, packed, scale, factor, y, slots, block_expert, block_count, row_weight, total, N, K,
    GROUP: tl.constexpr, TOPK: tl.constexpr, GROUPED: tl.constexpr, GELU_MUL: tl.constexpr,
    WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Multiply x bf16 [rows, K] by packed [E, N, K/2] into y [slots, N], or [slots, N/2] if GELU_MUL.

    The bytes of `scale` [E, N, K/GROUP] are e4m3 if GROUP is 16, e8m0 if 32. `factor` is f32 [E, 2].
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.zeros((), tl.int64)
    if GROUPED:
        if block >= tl.load(block_count):
            return
        expert = tl.load(block_expert + block).to(tl.int64)
    slot, real = block_rows(slots, block * BM, total, BM, GROUPED)
    row = (slot // TOPK).to(tl.int64)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    half = tl.arange(0, BK // 2)
    group = tl.arange(0, BK // GROUP)
    channel = expert * N + (n % N)
    weights = packed + channel[:, None] * (K // 2) + half[None, :]
    scales = scale + channel[:, None] * (K // GROUP) + group[None, :]
    tokens = x + row[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        if EVEN_K:
            codes = tl.load(weights + k0 // 2)
            s = tl.load(scales + k0 // GROUP)
            a = tl.load(tokens + k0, mask=real[:, None], other=0.0)
        else:
            columns_left = K - k0
            codes = tl.load(weights + k0 // 2, mask=half[None, :] < columns_left // 2, other=0)
            s = tl.load(scales + k0 // GROUP, mask=group[None, :] < columns_left // GROUP, other=0)
            a = tl.load(tokens + k0, mask=real[:, None] & (k[None, :] < columns_left), other=0.0)
        values = decode_e2m1(codes, BN, BK)
        if GROUP == 16:
            s = decode_scale(s)
        else:
            unit = values.to(tl.float32) * 8.507059173023462e37  # e2m1 itself
            values, s = unit.to(tl.bfloat16), decode_e8m0(s)
        per_value = tl.broadcast_to(s[:, :, None], (BN, BK // GROUP, GROUP)).reshape(BN, BK)
        acc = tl.dot(a, (values * per_value).T, acc)
    store_nvfp4(
        acc.T, y, factor + expert * 2, row_weight, slot, real, tile, N, BM, BN, GELU_MUL, WEIGHTED
    )


def launch(weight, x, x_scale, config, routing=None, share=None):
    """Do what `matmul.launch` does, for bf16 rows (x_scale None) and a weight of nvfp4 or mxfp4."""
    y, mode, blocks = place_results(weight, len(x), config, routing, share)
    del mode["block_rows"]  # this kernel computes whole blocks only
    nvfp4_kernel[(triton.cdiv(mode["N"], config["BN"]), blocks)](
        x=x, packed=weight.data, scale=weight.scale.view(torch.uint8), factor=weight.factor,
        GROUP=mode["K"] // weight.scale.shape[-1], **mode, **config,
    )  # fmt: skip
    return y
