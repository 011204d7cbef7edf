"""Sums of x x^T over the rows of every expert, in tiles; GPTQ's Hessians are made of them.

    tiles[e, t] += sum of x[r, i] x[r, j]^T over the rows r of expert e,   t = j (j + 1) / 2 + i

x[r, i] is block i of row r, 128 inputs wide; i <= j. Tiles below the diagonal are transposes of tiles
above it, and are neither computed nor stored. Products of bf16 numbers are exact in float32; tensor
cores sum them. The host never waits. `quantize/schemes/hessians.py` sums in torch.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.launch.targets import is_hopper

TILE = 128
TOKENS = 64  # per step of the loop: two tiles of x are 32 KB, and every target holds two stages
# For eight passes of 2,048 tokens an H200 takes 6.2 ms with USUAL, and 3.9 ms with HOPPER.
USUAL, HOPPER = {"num_warps": 8, "num_stages": 2}, {"num_warps": 4, "num_stages": 3}


@triton.jit
def gram_kernel(
    x, order, starts, tiles, K, COUNT,
    TOPK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (i, j, e) adds to tile (i, j) of expert e; choice c in `order` is row c // TOPK of x."""
    i, j = tl.program_id(0), tl.program_id(1)
    e = tl.program_id(2).to(tl.int64)
    begin, end = tl.load(starts + e), tl.load(starts + e + 1)
    if (i > j) | (begin >= end):
        return
    lhs_columns = i * BM + tl.arange(0, BM)[None, :]
    rhs_columns = j * BM + tl.arange(0, BM)[None, :]
    tile = tl.zeros((BM, BM), tl.float32)
    for at in range(begin, end, BK):
        choice = at + tl.arange(0, BK)
        inside = choice < end
        row = x + (tl.load(order + choice, mask=inside, other=0) // TOPK * K)[:, None]
        a = tl.load(row + lhs_columns, mask=inside[:, None] & (lhs_columns < K), other=0.0)
        b = tl.load(row + rhs_columns, mask=inside[:, None] & (rhs_columns < K), other=0.0)
        tile = tl.dot(tl.trans(a), b, tile)
    # In halves: with four warps, registers do not hold the sums and the stored tile at once.
    tiles += (e * COUNT + j * (j + 1) // 2 + i) * BM * BM
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BM // 2)[None, :]
    place = tiles + (m * BM + n)
    low, high = tl.split(tl.permute(tl.reshape(tile, (BM, 2, BM // 2)), (0, 2, 1)))
    tl.store(place, tl.load(place) + low)
    tl.store(place + BM // 2, tl.load(place + BM // 2) + high)


def add(
    tiles: torch.Tensor, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, topk: int
) -> None:
    """Add the sum of x x^T over an expert's rows of x bf16 [M, K] to the expert's `tiles`, in place.

    `tiles` f32 [E, T, 128, 128] and x are contiguous. Choice c is an expert of row c // topk.
    `order` int64 [M * topk] has the choices sorted by expert; `starts` int64 [E + 1] has the place in
    `order` where each expert's choices start.
    """
    K = x.shape[1]
    blocks = triton.cdiv(K, TILE)
    gram_kernel[(blocks, blocks, len(tiles))](
        x, order, starts, tiles, K, tiles.shape[1], TOPK=topk, BM=TILE, BK=TOKENS,
        **(HOPPER if is_hopper(x.device) else USUAL),
    )  # fmt: skip
