"""Number formats: codes, their values, and how tensors are rounded to them.

E2M1 (FP4), codes 0..15 = sign, two exponent bits, one mantissa bit:
    0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; two codes per byte, even column in the low nibble.
E4M3 (FP8, `torch.float8_e4m3fn`): largest 448, smallest subnormal 2^-9, no infinity, NaN = 0x7f.
E8M0: byte b is 2^(b - 127), 255 is NaN.

NVFP4 on disk (compressed-tensors, `nvfp4-pack-quantized`), for a weight [N, K]:
    packed        uint8  [N, K/2]   codes: column 2i in the low nibble, column 2i+1 in the high nibble
    scale         e4m3   [N, K/16]  one per 16 columns
    global_scale  f32    [1]        a large divisor: 448 * 6 / amax of the tensor
    w[n, k] = e2m1[n, k] * scale[n, k // 16] / global_scale

MXFP4 (`mxfp4-pack-quantized`): NVFP4's codes, scale e8m0 uint8 [N, K/32]. If 2^k <= amax < 2^(k+1) in
a block, its scale is 2^k / 2 for amax >= 1.75 * 2^k, else 2^k / 4. Weights saturate at 6 * scale.

FP8: weight e4m3 [N, K], scale [N]; INT8: weight int8 [N, K], scale [N]; w = weight * scale.

Values are rounded to nearest, ties to the even code, in float32. The modules `w4a16`, `w4a8` and
`w4a4` define layouts that exist only in memory. `interleave_gate_up` makes one more: an expert's
gate and up rows alternate in runs of 8. So the thread that holds a gate value in a tensor-core
accumulator also holds its up value, and computes gelu_mul in registers.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0  # largest code of activations; -128 is not used
GROUP = 16  # columns of NVFP4 that share a scale
MX_GROUP = 32  # columns of MXFP4 that share a scale
E8M0_MAX = 254
SMALLEST_BLOCK_SCALE = 0.125  # in place of 0, as compressed-tensors does
# W4A8 makes blocks of smaller scales zero: 0.5 * scale / 8 would be below e4m3's normal numbers.
E4M3_LEAST_SCALE = 2.0**-2
# What a product reads, as a pair: bf16 rows [M, K] and None; e4m3 or int8 rows [M, K] and scales f32
# [M]; or NVFP4 codes uint8 [M, K/2] and scales e4m3 [M, K/16], global scale `Weight.shared`.
Activation = tuple[Tensor, Tensor | None]
EIGHT_BIT = {"fp8": FP8, "int8": torch.int8, "nvfp4_e4m3": FP8}  # dtypes of rows, by scheme
FOUR_BIT = "nvfp4_e2m1"  # the scheme whose rows (activations) are NVFP4 too
MOVED = ("nvfp4_e4m3",)  # schemes that read a row's columns in another order: `quantize.place`
LARGEST = {FP8: FP8_MAX, torch.int8: INT8_MAX}
GATE_UP_RUN = 8
# Values processed at a time. On a CPU, FP32 temporaries of 2 MB stay in the cache: one core of a
# Xeon makes NVFP4 codes at 2.3 GB/s of BF16 input in such blocks, at 0.39 GB/s in whole matrices.
# On a GPU, more launches cost more than the cache saves, so temporaries take 32 MB.
BLOCK_VALUES, GPU_BLOCK_VALUES = 1 << 19, 1 << 23


def blocks(weight: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices that cut a weight [..., out, in] into parts of about 2^19 values (GPU: 2^23)."""
    values = BLOCK_VALUES if weight.device.type == "cpu" else GPU_BLOCK_VALUES
    return _blocks(weight.shape, values)


def _blocks(shape: Sequence[int], values: int) -> Iterator[tuple[int | slice, ...]]:
    count = values // max(1, math.prod(shape[1:]))
    if not count and len(shape) > 2:
        yield from ((i, *rest) for i in range(shape[0]) for rest in _blocks(shape[1:], values))
        return
    step = max(1, count)
    yield from ((slice(start, start + step),) for start in range(0, shape[0], step))


def quotient(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once; torch on CUDA would multiply x by a rounded 1 / number."""
    return x / x.new_full((), number)  # made on x's device: nothing waits for a copy


def round_e2m1(x: Tensor) -> Tensor:
    """Round FP32 values in -6..6 to the nearest e2m1 values, ties to the even code; return FP32."""
    magnitude = x.abs()
    magic = _magic(magnitude)
    return magnitude.add_(magic).sub_(magic).copysign_(x)


def _magic(magnitude: Tensor) -> Tensor:
    """Return 2^22 * max(1, 2^floor(log2 x)), at which FP32 is spaced as e2m1 is at x."""
    exponent = magnitude.view(torch.int32) & 0x7F800000
    return exponent.clamp_(min=0x3F800000).add_(22 << 23).view(torch.float32)


def e2m1_codes(x: Tensor, room: Tensor) -> Tensor:
    """Return e2m1 codes uint8 of FP32 x in -6..6, 0 for -0; overwrite x and `room`, a tensor like x.

    A code without its sign is n + 2 e. 2^e is the largest power of two <= max(1, |x|). n is |x| in
    grid steps, rounded, and is the last byte of |x| + `_magic`. Here `magic` is larger by 214 steps,
    so that byte is n + 214. `magic` >> 22 is 2 (127 + 22 + e): its last byte equals 2 e - 214. The
    sum of the two bytes is n + 2 e. Since 214 is even, ties still go to the even code.
    """
    bits, other = x.add_(0.0).view(torch.int32), room.view(torch.int32)  # -0 has become 0
    sign = torch.bitwise_right_shift(bits, 28, out=other).to(torch.uint8).bitwise_and_(8)
    magic = torch.bitwise_and(bits, 0x7F800000, out=other).clamp_(min=0x3F800000)
    magic.add_((22 << 23) + 214)
    x.abs_().add_(room)
    return bits.add_(magic.bitwise_right_shift_(22)).to(torch.uint8).bitwise_or_(sign)


def pack(codes: Tensor) -> Tensor:
    """Pack codes uint8 [..., K], two per byte, even columns in the low nibble: uint8 [..., K/2]."""
    pairs = codes.view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def pack_e2m1(values: Tensor) -> Tensor:
    """Return packed codes uint8 [..., K/2] of e2m1 values FP32 [..., K]; -0 keeps its sign."""
    codes = e2m1_codes(values.clone(), torch.empty_like(values))
    return pack(codes | (values.signbit().view(torch.uint8) << 3))


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the FP32 values [..., K] of packed e2m1 codes uint8 [..., K/2]; -0 keeps its sign."""
    values = _pairs(packed.device).index_select(0, packed.flatten().int())
    return values.view(torch.float32).view(*packed.shape[:-1], -1)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two FP32 values of each byte as one int64: one look-up costs half as much as two."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    high, low = torch.meshgrid(values, values, indexing="ij")
    return torch.stack((low, high), -1).flatten().view(torch.int64).to(device)


def block_scale(ranges: Tensor, shared: Tensor) -> Tensor:
    """Return FP32 block scales, e4m3 values > 0, from amax `ranges` and global scale `shared`."""
    scale = (shared * quotient(ranges, E2M1_MAX)).clamp(max=FP8_MAX).to(FP8).float()
    return scale.masked_fill_(scale == 0, SMALLEST_BLOCK_SCALE)


def round_groups(x: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., K] to NVFP4; return e2m1 values [..., K/16, 16] and block scales [..., K/16].

    Both results are FP32. `shared`, the FP32 global scale, broadcasts over the block scales. Values
    too large for the global scale saturate; a block with NaN becomes NaN.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = block_scale(groups.abs().amax(-1), shared)
    step = (scale / shared)[..., None]
    return round_e2m1((groups / step).clamp_(-E2M1_MAX, E2M1_MAX)), scale


def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., K] in NVFP4: packed codes uint8 [..., K/2], block scales e4m3 [..., K/16]."""
    values, scale = round_groups(x, global_scale)
    return pack_e2m1(values.flatten(-2)), scale.to(FP8)


def dequantize_nvfp4(
    packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return values [..., K] from packed [..., K/2], scale [..., K/16] and global_scale [..., 1]."""
    values = unpack_e2m1(packed).to(dtype).unflatten(-1, (-1, GROUP))
    return (values * scale.to(dtype)[..., None]).flatten(-2) / global_scale.to(dtype)


def nvfp4_as_e4m3(packed: Tensor, scale: Tensor) -> Tensor:
    """Return NVFP4 weights as W4A8 multiplies them: e2m1 * scale / 8, rounded to e4m3 [..., K].

    `packed` is uint8 [..., K/2], `scale` e4m3 [..., K/16], >= 0. The largest result is 336, in range.
    If a scale is below E4M3_LEAST_SCALE, 0.5 * scale / 8 is subnormal, and its block becomes zeros.
    """
    scale = scale.float()
    zero = (scale < E4M3_LEAST_SCALE).unsqueeze(-1)
    codes_in_e4m3 = torch.empty(
        (*packed.shape[:-1], 2 * packed.shape[-1]), dtype=FP8, device=packed.device
    )
    for block in blocks(codes_in_e4m3):
        codes = packed[block].unflatten(-1, (-1, GROUP // 2)).masked_fill(zero[block], 0)
        values = unpack_e2m1(codes).mul_(scale[block].unsqueeze(-1) / 8)
        codes_in_e4m3[block] = values.flatten(-2)  # copying casts
    return codes_in_e4m3


def e8m0_scale(ranges: Tensor) -> Tensor:
    """Return e8m0 scales uint8 of MXFP4 blocks; first their amax `ranges` are rounded to BF16."""
    bits = ranges.to(torch.bfloat16).view(torch.int16).int()
    return ((bits + 32 >> 7) - 2).clamp(0, E8M0_MAX).to(torch.uint8)


def e8m0_values(scale: Tensor) -> Tensor:
    """Return the BF16 values of e8m0 bytes uint8, NaN for 255; 2^-127 is subnormal in BF16."""
    bits = scale.int() << 7
    values = torch.where(scale == 0, 0x40, bits).to(torch.int16).view(torch.bfloat16)
    return values.masked_fill(scale == 0xFF, torch.nan)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., K] in MXFP4: packed codes uint8 [..., K/2], block scales e8m0 [..., K/32]."""
    groups = x.float().unflatten(-1, (-1, MX_GROUP))
    scale = e8m0_scale(groups.abs().amax(-1))
    scaled = (groups / e8m0_values(scale)[..., None]).clamp_(-E2M1_MAX, E2M1_MAX)
    return pack_e2m1(round_e2m1(scaled).flatten(-2)), scale


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [..., K] from MXFP4 codes uint8 [..., K/2] and scales e8m0 uint8 [..., K/32]."""
    values = unpack_e2m1(packed).to(dtype).unflatten(-1, (-1, MX_GROUP))
    return values.mul_(e8m0_values(scale).to(dtype)[..., None]).flatten(-2)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows x [..., K] symmetrically to `dtype`; return codes [..., K] and scales f32 [...].

    scale = amax / 448 for float8_e4m3fn, amax / 127 for int8; codes are x * (1 / scale), half to
    even. The kernel also computes 1 / scale once per row, so kernel and torch agree bit for bit. A
    zero row has scale 1. A row with NaN or infinity has scale NaN: products with the row are NaN.
    """
    largest, wide = LARGEST[dtype], x.float()
    amax = wide.abs().amax(-1)
    scale = quotient(amax, largest).masked_fill_(amax == 0, 1.0)
    scale.masked_fill_(~amax.isfinite(), torch.nan)
    scaled = wide * (1.0 / scale)[..., None]
    if dtype == torch.int8:
        scaled = scaled.round_().nan_to_num_(0.0)
    return scaled.clamp_(-largest, largest).to(dtype), scale


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave gate, up [..., I, C] by 8 rows: [..., 2I, C]; ValueError if shapes differ or I % 8."""
    if gate.shape != up.shape or gate.shape[-2] % GATE_UP_RUN:
        raise ValueError(
            f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be equal in shape, rows % 8 == 0"
        )
    runs = torch.stack(
        (gate.unflatten(-2, (-1, GATE_UP_RUN)), up.unflatten(-2, (-1, GATE_UP_RUN))), -3
    )
    return runs.flatten(-4, -2)
