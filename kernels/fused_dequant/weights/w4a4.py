"""The layout of NVFP4 weights' block scales on Blackwell, for products with NVFP4 rows (W4A4).

The tensor cores read codes as they are on disk. They read the scales of 128 rows x 64 columns
together, as 512 bytes. Byte 16 (r % 32) + 4 (r // 32) + c is the scale of row r in columns 16 c to
16 c + 15 (PTX, tcgen05.mma, scale_vec::4X). A *tile* is 128 x 4 scales in this order, which a
thread block reads as consecutive bytes. Scales of 0 fill up the last tiles.
"""

import torch
import torch.nn.functional as F

from fused_dequant.formats import GROUP

ROWS = 128  # rows of the weight per tile
COLUMNS = 64  # columns of the weight per tile
TILE = ROWS * COLUMNS // GROUP  # scales per tile


def tiles(N: int, K: int) -> tuple[int, int]:
    """Return how many tiles hold the scales of a weight [N, K], along N and along K."""
    return -(-N // ROWS), -(-K // COLUMNS)


def to_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Lay scales e4m3 [E, N, K/16] out in tiles: e4m3 [E, tiles along N, tiles along K, 512]."""
    experts, rows, groups = scale.shape
    down, along = tiles(rows, groups * GROUP)
    missing = (0, along * 4 - groups, 0, down * ROWS - rows)
    padded = F.pad(scale.view(torch.uint8), missing)
    placed = padded.view(experts, down, 4, 32, along, 4).permute(0, 1, 4, 3, 2, 5)
    return placed.reshape(experts, down, along, TILE).view(scale.dtype)


def from_tiles(scale: torch.Tensor, N: int, K: int) -> torch.Tensor:
    """Return the scales e4m3 [E, N, K/16] from which `to_tiles` made the tiles `scale`."""
    experts, down, along, _ = scale.shape
    placed = scale.view(torch.uint8).view(experts, down, along, 32, 4, 4)
    rows = placed.permute(0, 1, 4, 3, 2, 5).reshape(experts, down * ROWS, along * 4)
    return rows[:, :N, : K // GROUP].contiguous().view(scale.dtype)
