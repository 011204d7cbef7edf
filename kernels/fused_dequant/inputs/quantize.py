"""Quantizes activations dynamically; a kernel may first apply the activation function, gelu_mul.

FP8 and INT8: token m has scale[m] = amax(|h[m]|) / 448 (FP8) or / 127 (INT8), and codes h[m] *
(1 / scale[m]). h is x; with GELU_MUL, it is made from x [M, 2K], whose first half is the gate:

    h[m] = gelu_tanh(x[m, :K]) * x[m, K:]

NVFP4 (W4A4): h is first rounded to bf16. Blocks of 16 have e4m3 scales under a global scale, by the
formulas of `rounding`.

A row stays in registers between the reduction and the division, so x is read once. FP8 and INT8 write
one byte per value, NVFP4 half a byte. `layer` and `attention` quantize their rows by the same
functions. Rows for weights of `nvfp4_e4m3` have their columns in the order that `w4a8` describes.

In FP8 and INT8 a token with NaN or infinity gets scale NaN, so only its own outputs become NaN. In
NVFP4 a block with NaN gets scale NaN, and infinity becomes the largest code.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.formats import EIGHT_BIT, FOUR_BIT, FP8, GROUP, LARGEST, MOVED
from fused_dequant.inputs.rounding import scaled_blocks
from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.tiles import gelu_mul as gelu_mul_tile


@triton.jit
def magnitude(h):
    """Return the bits of |h| as int32: they sort like |h|, NaN last. A warp's max is 1 instruction."""
    return h.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Return a row's scale from its largest `magnitude`: 1 for a zero row, NaN for a non-finite one."""
    s = tl.where(largest > 0, tl.div_rn(largest.to(tl.float32, bitcast=True), LARGEST), 1.0)
    return tl.where(largest < 0x7F800000, s, float("nan"))


@triton.jit
def codes(h, scale, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Return h * (1 / scale) rounded to `dtype`, int8 or e4m3, and limited to +-LARGEST."""
    v = h * tl.div_rn(1.0, scale)
    v = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)  # NaN too gets a code
    if dtype == tl.int8:
        # Round half to even: adding 1.5 * 2^23 leaves no fraction bits.
        v = (v + 12582912.0) - 12582912.0
    return v.to(dtype)


@triton.jit
def store_blocks(h, g, x, scale, block, inside, COUNT: tl.constexpr):
    """Store h f32 [COUNT * 16] as NVFP4 with global scale g: block i at index block[i] if there[i]."""
    h = h.reshape(COUNT, 16)
    s, v = scaled_blocks(h, g)
    s = tl.where(tl.max(magnitude(h), 1) > 0x7F800000, float("nan"), s)
    a = tl.abs(v)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5) + (a > 5.0)
    code |= (h.to(tl.int32, bitcast=True) >> 28) & 8  # -0 keeps its sign
    low, high = tl.split(code.reshape(COUNT, 8, 2))
    to = x + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(to, (low | high << 4).to(tl.uint8), mask=inside[:, None])
    tl.store(scale + block, s.to(tl.float8e4nv), mask=inside)


@triton.jit
def place(k):
    """Return where `w4a8` stores column k: in each run of 64, 16t + 4q + j moves to 16q + 4t + j."""
    moved = (k & -64) | (k & 48) >> 2 | (k & 12) << 2 | (k & 3)
    return tl.max_contiguous(tl.multiple_of(moved, 4), 4)


@triton.jit
def quantize_rows_kernel(
    x, q, scale, M, K,
    CHAINED: tl.constexpr, GELU_MUL: tl.constexpr, MOVED: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program quantizes ROWS rows to 8 bits; BLOCK is a power of two, at least K."""
    follow(CHAINED)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    k = column[None, :]
    inside = (m < M)[:, None] & (k < K)
    row = m[:, None] * K
    if GELU_MUL:
        gate = tl.load(x + 2 * row + k, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + 2 * row + K + k, mask=inside, other=0.0).to(tl.float32)
        h = gelu_mul_tile(gate, up)
    else:
        h = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    s = scale_of(tl.max(magnitude(h), 1), LARGEST)
    if MOVED:
        k = place(column)[None, :]
    tl.store(q + row + k, codes(h, s[:, None], q.dtype.element_ty, LARGEST), mask=inside)
    tl.store(scale + m, s, mask=m < M)


@triton.jit
def quantize_blocks_kernel(
    x, shared, q, scale, blocks, K,
    CHAINED: tl.constexpr, GELU_MUL: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Each program quantizes COUNT blocks of 16 values to NVFP4; blocks may belong to several rows."""
    follow(CHAINED)
    block = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = block < blocks
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    if GELU_MUL:
        gate = at + (block // (K // 16))[:, None] * K
        up = tl.load(x + gate + K, mask=inside[:, None], other=0.0).to(tl.float32)
        gate = tl.load(x + gate, mask=inside[:, None], other=0.0).to(tl.float32)
        h = gelu_mul_tile(gate, 1.0).to(tl.bfloat16).to(tl.float32) * up
        h = h.to(tl.bfloat16).to(tl.float32)
    else:
        h = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    store_blocks(h.reshape(COUNT * 16), tl.load(shared), q, scale, block, inside, COUNT)


def room(
    M: int, K: int, scheme: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return uninitialised rows [M, K] in `scheme`'s format, and their scales (None for bf16 rows)."""
    if scheme == FOUR_BIT:
        scale = torch.empty(M, K // GROUP, dtype=FP8, device=device)
        return torch.empty(M, K // 2, dtype=torch.uint8, device=device), scale
    dtype = EIGHT_BIT.get(scheme, torch.bfloat16)
    scale = torch.empty(M, device=device) if scheme in EIGHT_BIT else None
    return torch.empty(M, K, dtype=dtype, device=device), scale


def quantize_rows(x, scheme, shared=None, *, gelu_mul=False):
    """Launch the kernels for `activations.quantize_rows`, which describes the arguments."""
    M, width = x.shape
    K = width // 2 if gelu_mul else width
    q, scale = room(M, K, scheme, x.device)
    if scheme == FOUR_BIT:
        blocks = M * K // GROUP
        quantize_blocks_kernel[(triton.cdiv(blocks, 128),)](
            x, shared, q, scale, blocks, K, GELU_MUL=gelu_mul, COUNT=128, num_warps=8,
            **chained(x.device),
        )  # fmt: skip
        return q, scale
    block = triton.next_power_of_2(K)
    # A program takes several short rows (experts' hidden rows): 8,192 of 704 take 5.1 us, singly 10.3.
    rows = max(1, 4096 // block) if M >= 1024 else 1
    loaded = rows * block * (width // K)
    quantize_rows_kernel[(triton.cdiv(M, rows),)](
        x, q, scale, M, K, GELU_MUL=gelu_mul, MOVED=scheme in MOVED, LARGEST=LARGEST[q.dtype],
        ROWS=rows, BLOCK=block,
        num_warps=max(1, min(8, loaded // 1024)), **chained(x.device),
    )  # fmt: skip
    return q, scale
