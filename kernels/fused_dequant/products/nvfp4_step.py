"""Code that both NVFP4 kernels of Hopper share: a step's copies, its decoded weights, and gelu_mul.

`nvfp4_hopper` has a block for each tile of results; `experts_hopper` has persistent programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fused_dequant.launch.hopper import BEFORE_3_9, load_later, reinterpret
from fused_dequant.products.nvfp4_decode import decode, decode_e4m3, fragment_layout


@gluon.jit
def per_thread(step):
    """Return `step` in a register of each thread: so Triton 3.9 needs fewer instructions to address."""
    if not BEFORE_3_9:
        step = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [step], dtype=gl.int32, is_pure=True, pack=1
        )
    return step


@gluon.jit
def copy_weights(
    words, scales, word, scale, words_smem, scales_smem, place, step, K, BK: gl.constexpr,
    EVEN_K: gl.constexpr,
):  # fmt: skip
    """Start copying the words and scales of one step; past K they are 0, which decodes to 0."""
    words += step * (BK * 8)
    scales += step * BK
    if EVEN_K:
        load_later(words_smem.index(place), words)
        load_later(scales_smem.index(place), scales)
    else:
        tiles_left = (K - step * BK) // 64
        load_later(words_smem.index(place), words, mask=word < tiles_left * 512)
        load_later(scales_smem.index(place), scales, mask=scale < tiles_left * 64)


@gluon.jit
def copy_tokens(source, target, real, k, step, K, BK: gl.constexpr, EVEN_K: gl.constexpr):
    """Start copying the columns of one step for the block's tokens; padding rows read as zero."""
    mask = real if EVEN_K else real & (k < K - step * BK)
    load_later(target, source + step * BK, mask=mask)


@gluon.constexpr_function
def tokens_layout(E4M3):
    """Return the tokens' layout in shared memory, swizzled over the 64 columns of a fragment."""
    return gl.NVMMASharedLayout(64, 8, 2) if E4M3 else gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def weights_of(
    words, scales, part: gl.constexpr, operand: gl.constexpr, E4M3: gl.constexpr,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Return column tile `part` (64 columns) of a step's weights, decoded as operand A of `wgmma`."""
    placed: gl.constexpr = fragment_layout(ROW_TILES, WARPGROUPS)
    codes = words.reshape([ROW_TILES, COLUMN_TILES, 4, 8, 4, 2, 2]).slice(part, 1, dim=1)
    if E4M3:
        linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scales = reinterpret(scales, gl.int16, [ROW_TILES, COLUMN_TILES * 128], linear)
        scales = scales.reshape([ROW_TILES, COLUMN_TILES, 4, 8, 4]).slice(part, 1, dim=1)
        scales = scales.load(gl.SliceLayout(5, gl.SliceLayout(6, placed)))
        weights = decode_e4m3(codes.load(placed), scales, operand, ROW_TILES)
    else:
        scales = scales.reshape([ROW_TILES, COLUMN_TILES, 4, 8, 2]).slice(part, 1, dim=1)
        scales = scales.load(gl.SliceLayout(4, gl.SliceLayout(6, placed)))
        weights = decode(codes.load(placed), scales, operand, ROW_TILES)
    return weights


@gluon.jit
def gated(acc, gate_factor, up_factor, BN: gl.constexpr, COUNT: gl.constexpr):
    """Return gelu_tanh(gate) * up of acc [BN, COUNT], whose runs of 8 gate and 8 up rows alternate."""
    gate, up = gl.split(acc.reshape([BN // 16, 2, 8, COUNT]).permute([0, 2, 3, 1]))
    gate *= gate_factor
    z = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
    result = gate * (1.0 - 1.0 / (gl.exp(2.0 * z) + 1.0)) * (up * up_factor)
    return result.reshape([BN // 2, COUNT])
