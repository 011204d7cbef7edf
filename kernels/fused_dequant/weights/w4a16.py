"""Lays out the NVFP4 weights that Hopper multiplies in bf16; decodes them in torch as the kernel does.

*Fragments* are NVFP4 weights in the order in which Hopper's `wgmma` reads operand A from registers.
A fragment is 64 rows x 64 columns = 4 warps x 32 lanes x 16 bytes. Lane l of warp w holds rows r =
16w + l//4 and r + 8. In each run of 16 columns, it holds columns 2(l%4) + {0, 1, 8, 9}. A lane's 16
bytes are two pairs of 32-bit words. Each pair has 16 codes, which decode to 8 registers of two
bf16. A code's bits are spread so that `rotate, mask 0x81c081c0` leaves the sign at bit 15, exponent
and mantissa at bits 8..6. Read as bf16, these bits are exactly e2m1 * 2^-126 (0.5 is subnormal,
which tensor cores and HMUL2 honour). In each half word, three codes take 12 of the 16 bits, each
code at its own rotation. The other 4 bits belong to two more codes, which have 4 more bits in the
pair's other word; one bitwise select joins them. Before scaling, 16 codes take 16 instructions. An
exhaustive search over rotations found this layout (`REGISTERS`, `SELECT_FIRST`).

A scale is one unsigned byte with 5 exponent and 3 mantissa bits (bias 15). Such bytes represent
every finite non-negative e4m3 value, subnormals included. `(byte << 4) + 0x7380` is scale * 2^119
as bf16. A block whose scale is zero gets zero codes. The two bf16 numbers multiply to e2m1 * scale *
2^-7, which has 6 significant bits. So the decode is exact.
"""

from functools import cache

import torch

from fused_dequant.formats import GROUP

FRAGMENT = 64  # rows and columns of one fragment
FRAGMENTED_AT_ONCE = 1 << 24  # bytes of codes: enough for a GPU, and 128 MB of temporaries

# For each register i of a pair of words: the word it comes from (0, 1, or 2 = the select of both),
# and the left rotation. i = 4 * (k // 16 % 2) + 2 * (k // 8 % 2) + (row // 8 % 2) has columns k, k+1.
REGISTERS = ((0, 0), (0, 4), (0, 10), (1, 2), (1, 6), (1, 12), (2, 8), (2, 14))
SELECT_FIRST = (0, 1, 9, 10)  # bits (mod 16) that the select takes from word 0
_CODE_BITS = (6, 7, 8, 15)  # bits of bf16 that hold a code's mantissa, exponent (2) and sign


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
    """Return the fragments' scale byte (unsigned E5M3) for each e4m3 byte 0 to 127: uint8 [128]."""
    values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(values)  # mantissa in [0.5, 1)
    byte = ((exponent + 14) << 3) + ((mantissa * 2 - 1) * 8).nan_to_num(0.0).to(torch.int32)
    return torch.where(values > 0, byte, torch.zeros_like(byte)).to(torch.uint8)


def to_fragments(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay NVFP4 weights out in fragments, in torch; on a GPU `fragments.to_fragments` does the same.

    `packed` is uint8 [E, N, K/2], `scale` e4m3 [E, N, K/16]. Return words int32 [E, N/64, K/64, 512],
    and scale bytes as int32 [E, N/64, K/64, 64]. Raise ValueError if N or K is no multiple of 64, or a
    scale is negative or NaN. Temporaries take 4 bytes per weight, so few experts are done at a time.
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
        bytes_ = scale_bytes[part].flatten(0, 1)  # rows of one expert after those of another
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
    for axis_size, bits in zip(axes, table, strict=True):
        words |= bits.index_select(0, axis_size.int())
    return words.view(torch.int32).reshape(rows // 64, half // 32, 512)


@cache
def byte_table() -> torch.Tensor:
    """Return the bits that each byte (two codes) sets in a word pair, by register: int64 [8, 256]."""
    low, high = _bit_table().reshape(8, 2, 16, 2).unbind(1)  # the even and the odd input's code
    both = high[:, :, None] | low[:, None]  # [8, 16, 16, 2]
    return both.contiguous().view(torch.int64).reshape(8, 256)


def decode_fragments(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode fragments in torch as the kernel does; return e2m1 * scale * 2^-7, bf16 [E, N, K]."""
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
