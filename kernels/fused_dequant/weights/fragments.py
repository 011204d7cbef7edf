"""Lays NVFP4 weights out in fragments on the GPU, in one read and one write of their bytes.

`w4a16` describes fragments. The torch reference is `w4a16.to_fragments`. It passes over the data thirty
times, which takes longer than copying a streamed layer. A fragment is 256 pairs of words. A table
(`places`) maps 8 bytes to a pair's bits; 4 of the bytes are in one row, 4 in another.

Block scales must not be negative or NaN. `runtime.weights.packing` checks this at their first read.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fused_dequant.weights import w4a16

TILES = 4


@triton.jit(do_not_specialize=["columns"])
def fragments_kernel(
    packed, scale, places, recode, words, scales, columns, HALF, TILES: tl.constexpr
):
    """Program (i, j) makes fragments of row tile i: those of TILES column tiles from j * TILES on.

    Row tiles have 64 rows, column tiles 64 columns; `columns` counts column tiles. Inputs: packed uint8
    [rows, HALF], scale uint8 [rows, HALF / 8], and tables: places int64 [8, 256], recode uint8 [128]
    (`w4a16`). Outputs: words int64 [row tiles, columns, 256], scales int32 [row tiles, columns, 64].
    """
    pair = tl.arange(0, TILES * 256)
    column = tl.program_id(1) * TILES + pair // 256
    inside = column < columns
    # of a fragment: warp, row % 8, lane % 4, pair of steps
    run, lane, row, warp = pair % 2, pair // 2 % 4, pair // 8 % 8, pair // 64 % 4
    tile = tl.program_id(0).to(tl.int64)
    first = tile * 64 + warp * 16 + row
    word = tl.zeros([TILES * 256], tl.int64)
    block_scales = tl.zeros([TILES * 256], tl.int32)
    for upper in tl.static_range(2):
        source_row = first + 8 * upper
        for step in tl.static_range(2):
            place = source_row * (HALF // 8) + column * 4 + run * 2 + step
            block = tl.load(scale + place, mask=inside, other=0).to(tl.int32) & 0x7F
            byte = tl.load(recode + block).to(tl.int32)
            block_scales |= byte << (8 * (2 * step + upper))
            for eighth in tl.static_range(2):
                place = source_row * HALF + column * 32 + run * 16 + step * 8 + eighth * 4 + lane
                codes = tl.load(packed + place, mask=inside, other=0).to(tl.int32)
                codes = tl.where(block > 0, codes, 0)
                word |= tl.load(places + (step * 4 + eighth * 2 + upper) * 256 + codes)
    at = tile * columns + column
    tl.store(words + at * 256 + pair % 256, word, mask=inside)
    tl.store(scales + at * 64 + pair % 256 // 8 * 2 + run, block_scales, mask=inside & (lane == 0))


def to_fragments(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `w4a16.to_fragments` returns; shapes and scales are not checked."""
    experts, rows, half = packed.shape
    tiles, columns = rows // w4a16.FRAGMENT, half // (w4a16.FRAGMENT // 2)
    words = packed.new_empty(experts, tiles, columns, 512, dtype=torch.int32)
    scales = packed.new_empty(experts, tiles, columns, 64, dtype=torch.int32)
    fragments_kernel[experts * tiles, triton.cdiv(columns, TILES)](
        packed.contiguous(), scale.contiguous().view(torch.uint8), *_tables(packed.device),
        words.view(torch.int64), scales, columns, half, TILES=TILES,
    )  # fmt: skip
    return words, scales


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return on `device` the bits that a byte of codes sets, by its place, and the scales' bytes."""
    return w4a16.byte_table().to(device), w4a16.scale_table().to(device)
