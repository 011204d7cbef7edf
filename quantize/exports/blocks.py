"""Packs one tensor's rows into the bytes of GGUF's blocks. Rows are contiguous, [..., out, in].

    type    block of inputs  bytes                                          weight =
    F32     1                4                                              itself
    BF16    1                2                                              itself
    Q8_0    32               d F16, 32 x int8                               d * q
    NVFP4   64               4 x d e4m3, 4 x 8 bytes of two e2m1 codes      d * code

Q8_0 has d = amax / 127 and q = x / d rounded, halves away from zero, in float32.

An NVFP4 block holds four groups of 16 values, each with a block scale of its own. The codes and block
scales are those of our checkpoints, bit for bit, in another order: the byte at j of a group's eight
holds the codes of values j (low nibble) and j + 8, where the checkpoint pairs values 2 j and 2 j + 1.
e4m3 scales are read without their sign, so they must not have one. The scale of the whole Linear has
no place in the block: it is a tensor of its own (`quantize.exports.tensors`).

Source: the `gguf` package's quantizers and dequantizers, which tests compare every byte with.
"""

import torch

from quantize.schemes.rounding import GROUP

Q8_0_BLOCK = 32
NVFP4_BLOCK = 64


def q8_0_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes [n] of BF16 rows [..., in] in Q8_0; `in` is a multiple of 32."""
    values = rows.reshape(-1, Q8_0_BLOCK).float()
    d = values.abs().amax(-1, keepdim=True) / values.new_tensor(127.0)
    inverse = torch.where(d == 0, d, 1 / d)
    scaled = values * inverse
    codes = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8)
    return torch.cat([d.half().view(torch.uint8), codes.view(torch.uint8)], dim=-1).flatten()


def nvfp4_blocks(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the bytes [n] of codes [..., in / 2] U8 and block scales [..., in / 16] e4m3.

    `in` is a multiple of 64; the scales have no sign.
    """
    pairs = packed.reshape(-1, GROUP // 2)  # a group of 16: codes 0 1, 2 3, ... 14 15
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
    low, high = codes.split(GROUP // 2, dim=-1)
    groups = NVFP4_BLOCK // GROUP
    d = scales.view(torch.uint8).reshape(-1, groups)
    return torch.cat([d, (low | (high << 4)).view(len(d), -1)], dim=-1).flatten()
