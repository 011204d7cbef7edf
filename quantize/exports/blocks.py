"""Packs NVFP4 codes and block scales into the bytes of GGUF's blocks: 4 x e4m3, 4 x 8 bytes of codes.

A block holds four groups of 16 values, each with a block scale of its own. The codes and block
scales are those of our checkpoints, bit for bit, in another order: the byte at j of a group's eight
holds the codes of values j (low nibble) and j + 8, where the checkpoint pairs values 2 j and 2 j + 1.
e4m3 scales are read without their sign, so they must not have one. The scale of the whole Linear has
no place in the block: it is a tensor of its own (`quantize.exports.tensors`).

Source: the `gguf` package, which makes the other types' blocks and only reads these: tests do so.
"""

import torch

from quantize.schemes.rounding import GROUP

GROUPS = 4  # of a block


def nvfp4_blocks(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the bytes [n] of codes [..., in / 2] U8 and block scales [..., in / 16] e4m3.

    `in` is a multiple of 64; the scales have no sign.
    """
    pairs = packed.reshape(-1, GROUP // 2)  # a group of 16: codes 0 1, 2 3, ... 14 15
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
    low, high = codes.split(GROUP // 2, dim=-1)
    d = scales.view(torch.uint8).reshape(-1, GROUPS)
    return torch.cat([d, (low | (high << 4)).view(len(d), -1)], dim=-1).flatten()
