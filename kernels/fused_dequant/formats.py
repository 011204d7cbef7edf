"""Number formats and weight layouts that the kernels read.

E2M1 (FP4), codes 0..15 = sign, two exponent bits, one mantissa bit:
    0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
E4M3 (FP8, `torch.float8_e4m3fn`): largest 448, smallest subnormal 2^-9, no infinity, NaN = 0x7f.

NVFP4 on disk (compressed-tensors, `nvfp4-pack-quantized`), for a weight [N, K]:
    packed        uint8  [N, K/2]   code of column 2i in the low nibble, of column 2i+1 in the high one
    scale         e4m3   [N, K/16]  one per 16 columns
    global_scale  f32    [1]        448 * 6 / amax of the tensor: a LARGE number, it divides
    w[n, k] = e2m1[n, k] * scale[n, k // 16] / global_scale

FP8: weight e4m3 [N, K], scale [N]; INT8: weight int8 [N, K], scale [N]; w = weight * scale.

Two layouts exist only in memory and are made at load:

*Interleaved gate and up* (`interleave_gate_up`): rows of the two projections alternate in runs of 8, so
one thread of a tensor-core accumulator holds a gate value and the up value that belongs to it, and the
activation is applied in registers.

*Fragments* (`to_fragments`): NVFP4 weights in the order in which Hopper's `wgmma` wants operand A in
registers. A fragment is 64 rows x 64 columns = 4 warps x 32 lanes x 16 bytes; lane l of warp w holds
rows 16w + l//4 (+8) and, of each run of 16 columns, columns 2(l%4) + {0, 1, 8, 9}. Its 16 bytes are two
pairs of 32-bit words, each pair 16 codes = 8 registers of two bf16. The bits of a code are spread so
that `rotate, mask 0x81c081c0` leaves sign at bit 15 and exponent and mantissa at bits 8..6, which read
as bf16 is exactly e2m1 * 2^-126 (0.5 is a bf16 subnormal; tensor cores and HMUL2 honour those). Three
codes a half word tile 12 of its 16 bits under rotations; the 4 left over in each word of a pair
complement each other, so one bitwise select yields the last two: 16 instructions for 16 codes, found
by exhaustive search over rotations (`REGISTERS`, `SELECT_FIRST`).

Scales of fragments are one byte each, unsigned with 5 exponent and 3 mantissa bits (bias 15): every
finite non-negative e4m3 value, its subnormals included, maps exactly, and
`(byte << 4) + 0x7380` is the bf16 of scale * 2^119. A block whose scale is zero gets zero codes. The
product of the two bf16 numbers, e2m1 * scale * 2^-7, has 6 significant bits: the decode is exact.

Left out: MX formats (e8m0 scales), asymmetric integers, group sizes other than 16: no checkpoint of
this model uses them.
"""

from functools import cache

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_LEAST_SCALE = 2.0**-2  # of a block whose weights are rounded to e4m3 and are not zero
GROUP = 16
# Activations of the schemes that multiply in 8 bits.
EIGHT_BIT = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "nvfp4_e4m3": torch.float8_e4m3fn}
# Schemes whose kernel wants a row's columns in another order: `quantize.place`.
MOVED = ("nvfp4_e4m3",)
LARGEST = {torch.float8_e4m3fn: E4M3_MAX, torch.int8: 127.0}  # -128 is not used: symmetric
FRAGMENT = 64  # rows and columns of one fragment
GATE_UP_RUN = 8
FRAGMENTED_AT_ONCE = 1 << 24  # bytes of codes: enough for a GPU, and 128 MB of temporaries

# Which word (0, 1, or 2 = the select of both) and which left rotation yields register i of a pair
# of words: i = 4 * (k // 16 % 2) + 2 * (k // 8 % 2) + (row // 8 % 2); its halves are columns k, k+1.
REGISTERS = ((0, 0), (0, 4), (0, 10), (1, 2), (1, 6), (1, 12), (2, 8), (2, 14))
SELECT_FIRST = (0, 1, 9, 10)  # bits (mod 16) that the select takes from word 0
_CODE_BITS = (6, 7, 8, 15)  # where mantissa, exponent (2) and sign of a code lie in bf16


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of E2M1 codes 0..15 (any integer dtype); -0 keeps its sign."""
    values = (*E2M1_VALUES, *(-v for v in E2M1_VALUES))
    return torch.tensor(values, dtype=dtype, device=codes.device)[codes.long()]


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest E2M1 code of each value, uint8: ties to the even code, above 6 that of 6."""
    midpoints = torch.tensor(
        (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=x.device, dtype=x.dtype
    )
    magnitude = x.abs()
    below = torch.bucketize(magnitude, midpoints)  # a tie counts as below its midpoint ...
    tie = (midpoints[below.clamp(max=6)] == magnitude) & (below % 2 == 1)  # ... unless that is odd
    return ((below + tie) | (torch.signbit(x).to(torch.int64) << 3)).to(torch.uint8)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes uint8 [..., K] of uint8 [..., K/2], low nibble first."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [..., K] into uint8 [..., K/2], low nibble first."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., K] to packed codes uint8 [..., K/2] and block scales e4m3 [..., K/16].

    `global_scale` broadcasts over rows.

    scale = e4m3(amax / 6 * global_scale); codes are rounded from x * global_scale / scale; global_scale
    broadcasts over rows.
    """
    groups = (x.float() * global_scale).unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    scale = _divide(amax, E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = scale.float()[..., None]
    scaled = torch.where(divisor > 0, groups / divisor, groups * 0)
    return pack_nibbles(encode_e2m1(scaled).flatten(-2)), scale


def _divide(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divide and round once: on CUDA torch multiplies with the reciprocal of a plain number."""
    return x / torch.full_like(x, number)


def dequantize_nvfp4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return values [..., K] of codes uint8 [..., K/2], scales e4m3 [..., K/16], f32 to [..., 1]."""
    values = decode_e2m1(unpack_nibbles(packed), dtype).unflatten(-1, (-1, GROUP))
    return (values * scale.to(dtype)[..., None]).flatten(-2) / global_scale.to(dtype)


@cache
def e4m3_table() -> torch.Tensor:
    """Return the e4m3 byte of e2m1 * scale / 8 by byte of the scale and code: uint8 [128, 16]."""
    scale = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scale = torch.where(scale < E4M3_LEAST_SCALE, torch.zeros_like(scale), scale)
    values = decode_e2m1(torch.arange(16)) * scale[:, None] / 8
    values[scale == 0] = 0  # without a sign
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def nvfp4_as_e4m3(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round NVFP4 weights to e4m3 [..., K]: e2m1 * scale / 8, half to even; W4A8 multiplies these.

    packed uint8 [..., K/2], scale e4m3 [..., K/16], not negative; 6 * 448 / 8 is still in range.
    Blocks with a scale below 2^-2, of 448 at most, count as zero: they would be subnormal.
    """
    if packed.dim() > 2:  # matrix by matrix: the temporaries are nine bytes a weight
        each = zip(packed, scale, strict=True)
        found = torch.stack([nvfp4_as_e4m3(*own).view(torch.uint8) for own in each])
        return found.view(torch.float8_e4m3fn)
    codes = unpack_nibbles(packed).unflatten(-1, (-1, GROUP)).int()
    place = (scale.view(torch.uint8).int() & 0x7F)[..., None] * 16 + codes
    table = e4m3_table().to(packed.device).flatten()
    return table[place].flatten(-2).view(torch.float8_e4m3fn)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows x [..., K] symmetrically: values of `dtype` [..., K] and scales f32 [...].

    dtype float8_e4m3fn: scale = amax / 448; int8: amax / 127. q = x * (1 / scale), rounded half to
    even: one division a row, so the kernel agrees bit for bit at the price of a multiply. A zero
    row has scale 1; a row holding NaN or infinity has scale NaN, so whatever is computed from it
    is NaN.
    """
    largest = LARGEST[dtype]
    amax = x.float().abs().amax(-1)
    scale = torch.where(amax > 0, _divide(amax, largest), torch.ones_like(amax))
    scale = torch.where(amax.isfinite(), scale, torch.full_like(amax, float("nan")))
    scaled = x.float() * (1.0 / scale)[..., None]
    if dtype == torch.int8:
        scaled = scaled.round().nan_to_num(0.0)
    return scaled.clamp(-largest, largest).to(dtype), scale


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Join gate, up [..., I, C], I % 8 == 0, to [..., 2I, C]: runs of 8 gate and 8 up rows in turn."""
    if gate.shape != up.shape or gate.shape[-2] % GATE_UP_RUN:
        raise ValueError(
            f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be equal in shape, rows % 8 == 0"
        )
    runs = torch.stack(
        (gate.unflatten(-2, (-1, GATE_UP_RUN)), up.unflatten(-2, (-1, GATE_UP_RUN))), -3
    )
    return runs.flatten(-4, -2)


def _bit_table() -> torch.Tensor:
    """Return the bits a code sets in a word pair, int32 [8 registers, 2 halves, 16 codes, 2 words]."""
    table = torch.zeros(8, 2, 16, 2, dtype=torch.int64)
    for register, (source, rotation) in enumerate(REGISTERS):
        for half in range(2):
            for bit, place in enumerate(_CODE_BITS):
                position = (place + 16 * half - rotation) % 32
                word = source if source < 2 else int(position % 16 not in SELECT_FIRST)
                for code in range(16):
                    table[register, half, code, word] |= (code >> bit & 1) << position
    return torch.where(table >= 2**31, table - 2**32, table).to(torch.int32)


@cache
def scale_table() -> torch.Tensor:
    """Return the unsigned E5M3 byte of each non-negative finite e4m3 byte, uint8 [128]."""
    values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(values)  # mantissa in [0.5, 1)
    byte = ((exponent + 14) << 3) + ((mantissa * 2 - 1) * 8).nan_to_num(0.0).to(torch.int32)
    return torch.where(values > 0, byte, torch.zeros_like(byte)).to(torch.uint8)


def to_fragments(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay NVFP4 weights out in the order of `wgmma` registers.

    packed uint8 [E, N, K/2], scale e4m3 [E, N, K/16] -> (words int32 [E, N/64, K/64, 512], scale bytes
    int32 [E, N/64, K/64, 64]). Raises ValueError if N or K is no multiple of 64, or a scale is negative
    or NaN. Works on some experts at a time: the temporaries are about 4 bytes a weight. On a GPU
    `fragments` does the same.
    """
    experts, rows, half = packed.shape
    if rows % FRAGMENT or half % (FRAGMENT // 2):
        raise ValueError(f"fragments need N and K in multiples of 64, got N={rows}, K={2 * half}")
    scale_bytes = scale.view(torch.uint8)
    if int(scale_bytes.max()) >= 0x7F:
        raise ValueError("an NVFP4 block scale is negative or NaN: the checkpoint is damaged")
    words = torch.empty(
        experts, rows // 64, half // 32, 512, dtype=torch.int32, device=packed.device
    )
    scales = torch.empty(
        experts, rows // 64, half // 32, 256, dtype=torch.uint8, device=packed.device
    )
    recode = scale_table().to(packed.device)
    table = byte_table().to(packed.device)
    step = max(1, FRAGMENTED_AT_ONCE // (rows * half))
    for start in range(0, experts, step):
        part = slice(start, start + step)
        bytes_ = scale_bytes[part].flatten(0, 1)  # rows of one expert behind those of another
        codes = packed[part].flatten(0, 1).unflatten(-1, (-1, GROUP // 2))
        codes = torch.where(bytes_[..., None] > 0, codes, torch.zeros_like(codes)).flatten(-2)
        words[part] = _fragment_words(codes, table).view(words[part].shape)
        # rows -> tile, warp, row//8, row%8; groups -> tile, pair of steps, step
        runs = recode[bytes_.int()].reshape(-1, 4, 2, 8, half // 32, 2, 2)
        scales[part] = runs.permute(0, 4, 1, 3, 5, 6, 2).reshape(scales[part].shape)
    return words, scales.view(torch.int32)


def _fragment_words(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Spread bytes of two codes, uint8 [N, K/2], over words int32 [N/64, K/64, 512]."""
    rows, half = packed.shape
    # row = tile, warp, row//8, row%8;  byte = tile, pair of steps, step, k//8 of the step, lane%4
    axes = packed.reshape(rows // 64, 4, 2, 8, half // 32, 2, 2, 2, 4)
    # -> step, k//8, row//8 | tiles, warp, row%8, lane%4, pair of steps
    axes = axes.permute(6, 7, 2, 0, 4, 1, 3, 8, 5).reshape(8, -1)
    words = torch.zeros(axes.shape[1], dtype=torch.int64, device=packed.device)
    for own, bits in zip(axes, table, strict=True):
        words |= bits.index_select(0, own.int())
    return words.view(torch.int32).reshape(rows // 64, half // 32, 512)


@cache
def byte_table() -> torch.Tensor:
    """Return what a byte of two codes adds to a pair of words, as one int64: [8 places, 256]."""
    low, high = _bit_table().reshape(8, 2, 16, 2).unbind(1)  # the even and the odd input's code
    both = high[:, :, None] | low[:, None]  # [8, 16, 16, 2]
    return both.contiguous().view(torch.int64).reshape(8, 256)


def decode_fragments(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute in torch what the Hopper kernel makes of fragments: bf16 [E, N, K] of w * 2^-7.

    It is the reference for the kernel's inline assembly, instruction by instruction.
    """
    experts, row_tiles, column_tiles, _ = words.shape
    pairs = words.reshape(-1, 2).long() & 0xFFFFFFFF
    first = sum(1 << (bit + 16 * half) for bit in SELECT_FIRST for half in range(2))
    sources = (pairs[:, 0], pairs[:, 1], (pairs[:, 0] & first) | (pairs[:, 1] & ~first))
    bytes_ = scales.view(torch.uint8).reshape(experts, row_tiles, column_tiles, 4, 8, 1, 2, 4)
    bytes_ = bytes_.expand(-1, -1, -1, -1, -1, 4, -1, -1).reshape(-1, 2, 2)  # step, row//8
    scale = _bf16((bytes_.int() << 4) + 0x7380)
    shape = (len(pairs), 2, 2, 2, 2)  # step, k//8, row//8, k%2
    halves = torch.empty(shape, dtype=torch.bfloat16, device=words.device)
    for register, (source, rotation) in enumerate(REGISTERS):
        step, eighth, row = register >> 2, register >> 1 & 1, register & 1
        word = sources[source]
        rotated = (word << rotation | word >> (32 - rotation)) & 0x81C081C0
        for half in range(2):
            value = _bf16(rotated >> (16 * half) & 0xFFFF)
            halves[:, step, eighth, row, half] = value * scale[:, step, row]
    axes = halves.reshape(experts, row_tiles, column_tiles, 4, 8, 4, 2, 2, 2, 2, 2)
    # warp 3, row%8 4, lane%4 5, pair of steps 6, step 7, k//8 8, row//8 9, k%2 10
    axes = axes.permute(0, 1, 3, 9, 4, 2, 6, 7, 8, 5, 10)
    return axes.reshape(experts, row_tiles * 64, column_tiles * 64)


def _bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)
