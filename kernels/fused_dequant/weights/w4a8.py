"""Lays out the NVFP4 weights that Hopper multiplies in FP8; decodes them in torch as the kernel does.

`wgmma` multiplies FP8 operands twice as fast as bf16, and reads half the bytes of tokens. A weight
becomes the e4m3 number nearest to e2m1 * scale / 8 (`formats.nvfp4_as_e4m3`). The 16 weights of a block
share a table of eight magnitudes in two registers, in which one PRMT instruction looks up four weights:

    code (magnitude)   0  1 (0.5)  2 (1)  3 (1.5)   4 (2)   5 (3)       6 (4)   7 (6)
    byte of the table  0  b        b + 8  b + 12+d  b + 16  b + 20 + d  b + 24  b + 28 + d

b is the e4m3 code of scale / 16. A factor of 2 adds 8 to a code, and a factor of 1.5 adds 4 + d. As
halves round to even, d is 1 for mantissas 1 to 5, else 0. Nothing is subnormal, because a block with
a scale below E4M3_LEAST_SCALE is set to zero. A scale is stored as one byte: d is the top bit, then b.

A *fragment* is 64 rows x 64 columns in the order of `wgmma`'s operand A, for two steps of 32
columns. In this order, lane l of a warp holds columns 4(l%4) + {0..3, 16..19} of a step: four of
each block of 16. Columns are reordered so that a thread needs only one block's scale per row: column
16t + 4q + j of the weight, in block t, becomes column 16q + 4t + j of the product. The tokens'
columns are stored in the same order (`quantize.place`), so the product is the same.

The 16 bytes of a lane are two words of row g = l//4 and two of row g + 8, all of block t = l%4. A word
has 8 codes, code c for column c. Bits 4c .. 4c + 2 hold code c's magnitude, as on disk. Its sign is bit
8c + 7 if c < 4, else bit 8(c - 4) + 3: a decoded byte's top bit, for c >= 4 after a shift by 4.
"""

import torch

from fused_dequant.formats import E4M3_LEAST_SCALE
from fused_dequant.weights.w4a16 import FRAGMENT, FRAGMENTED_AT_ONCE


def to_fragments(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay NVFP4 weights out in fragments for FP8 products; N and K are multiples of 64.

    `packed` is uint8 [E, N, K/2], `scale` e4m3 [E, N, K/16]. Return codes, as words int32
    [E, N/64, K/64, 512], and scale bytes, as int32 [E, N/64, K/64, 64].
    """
    experts, rows, half = packed.shape
    tiles, columns = rows // FRAGMENT, half // (FRAGMENT // 2)
    words = packed.new_empty(experts, tiles, columns, 512, dtype=torch.int32)
    scales = packed.new_empty(experts, tiles, columns, 64, dtype=torch.int32)
    step = max(1, FRAGMENTED_AT_ONCE // (rows * half))
    for start in range(0, experts, step):
        part = slice(start, start + step)
        scale_bytes = scale[part].view(torch.uint8) & 0x7F
        zero = scale_bytes.view(torch.float8_e4m3fn).float() < E4M3_LEAST_SCALE
        mantissa = scale_bytes & 7
        odd = ((mantissa >= 1) & (mantissa <= 5)).to(torch.uint8) << 7
        stored = torch.where(zero, torch.full_like(scale_bytes, 8), scale_bytes - 32 | odd)
        codes = packed[part].unflatten(-1, (-1, 2, 4))  # block, word, byte
        codes = codes.masked_fill(zero[..., None, None], 0)
        # row -> tile, warp, row//8, row%8; block -> column tile, t
        shape = (-1, tiles, 4, 2, 8, columns, 4)
        placed = _signs_placed(codes).reshape(*shape, 8).permute(0, 1, 5, 2, 4, 6, 3, 7)
        words[part] = placed.contiguous().view(torch.int32).reshape(words[part].shape)
        stored = stored.reshape(shape).permute(0, 1, 5, 2, 4, 6, 3)
        scales[part] = stored.reshape(*scales[part].shape[:-1], 256).view(torch.int32)
    return words, scales


def _signs_placed(codes: torch.Tensor) -> torch.Tensor:
    """Move the signs of words of eight codes, uint8 [..., 4], as the module's docstring says."""
    first, second = codes[..., :2], codes[..., 2:]
    high = torch.stack((first << 4 & 0x80, first & 0x80), -1).flatten(-2)
    low = torch.stack((second & 0x08, second >> 4 & 0x08), -1).flatten(-2)
    return codes & 0x77 | high | low


def decode_fragments(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode fragments in torch as the kernel does: e4m3 [E, N, K], with columns as on disk."""
    experts, tiles, columns, _ = words.shape
    # warp, row%8, t, row//8, word, byte
    pairs = words.contiguous().view(torch.uint8).reshape(experts, tiles, columns, 4, 8, 4, 2, 2, 4)
    stored = scales.contiguous().view(torch.uint8).reshape(experts, tiles, columns, 4, 8, 4, 2)
    b, d = (stored & 0x7F)[..., None], (stored >> 7)[..., None]
    steps = torch.tensor((0, 0, 8, 12, 16, 20, 24, 28), dtype=torch.uint8, device=words.device)
    odd = torch.tensor((0, 0, 0, 1, 0, 1, 0, 1), dtype=torch.uint8, device=words.device)
    table = b + steps + d * odd
    table[..., 0] = 0
    magnitude = torch.stack((pairs & 7, pairs >> 4 & 7), -1).flatten(-3)  # 16 codes
    signs = torch.cat((pairs & 0x80, pairs << 4 & 0x80), -1).flatten(-2)
    values = table.gather(-1, magnitude.long()) | signs
    # -> rows: tile, warp, row//8, row%8; columns: tile, t, code
    values = values.permute(0, 1, 3, 6, 4, 2, 5, 7)
    return values.reshape(experts, tiles * 64, columns * 64).view(torch.float8_e4m3fn)
