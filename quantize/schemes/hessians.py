"""Hessians of Linears: sums of x x^T over their inputs x; only the upper triangle is stored.

A Hessian is cut into tiles of 128 x 128. The tile in tile row i and tile column j is stored at index
j (j + 1) / 2 + i if i <= j. Tiles below the diagonal are transposes of stored tiles, so they are left
out. The Hessians of one layer of the 26B model then take 2.4 GB. On a GPU a kernel adds bf16 rows to
the tiles (`fused_dequant/gptq/gram.py`). The kernel takes the rows of several forward passes at once,
since reading and writing 2.4 GB takes as long as summing the 2,048 rows of one pass.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from fused_dequant.gptq.gram import TILE
from fused_dequant.launch.dispatch import launches
from torch import Tensor
from torch.nn.functional import pad

from quantize.schemes.gptq import shrunk

PASSES, PASSES_BYTES = 8, 256 << 20  # most passes, and bytes of rows, that a kernel adds at once


def tiles_of(inputs: int) -> int:
    """Return the number of tiles that hold the Hessian of a Linear with `inputs` inputs."""
    blocks = -(-inputs // TILE)
    return blocks * (blocks + 1) // 2


class Hessians:
    """For each input in `names` and each expert, sums x x^T over the rows x, and counts the rows."""

    def __init__(self, names: Sequence[str], experts: int) -> None:
        self.names, self._experts = frozenset(names), experts
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._inputs: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
        self._choices: tuple[Sequence[Tensor], Tensor, Tensor] | None = None

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Add rows [..., in] of input `name`, if listed; `experts` is [rows, topk], None if dense."""
        if name not in self.names:
            return
        x = rows.flatten(0, -2).contiguous()
        waiting = self._waiting.setdefault(name, [])
        waiting.append((x, experts))
        many = len(waiting) == PASSES or sum(rows.nbytes for rows, _ in waiting) >= PASSES_BYTES
        if many or not _in_kernels(x):
            self._settle(name)

    def sums(self, name: str) -> Tensor:
        """Return tiles of input `name`'s sums of x x^T: f32 [E, tiles, 128, 128]; E = 1 if dense."""
        self._settle(name)
        return self._sums[name]

    def tokens(self, name: str) -> Tensor:
        """Return how many tokens each expert read from input `name`: int64 [E]."""
        self._settle(name)
        return self._tokens[name]

    def _settle(self, name: str) -> None:
        if not (waiting := self._waiting.pop(name, None)):
            return
        x = torch.cat([rows for rows, _ in waiting])
        chosen = [ids for _, ids in waiting if ids is not None]
        count = self._experts if chosen else 1
        if name not in self._sums:
            shape = (count, tiles_of(x.shape[1]), TILE, TILE)
            self._sums[name] = torch.zeros(shape, dtype=torch.float32, device=x.device)
            self._tokens[name] = torch.zeros(count, dtype=torch.int64, device=x.device)
            self._inputs[name] = x.shape[1]
        order, starts = self._sorted(chosen) if chosen else _alone(len(x), x.device)
        self._tokens[name] += starts.diff()
        _add(self._sums[name], x, order, starts, chosen[0].shape[1] if chosen else 1)

    def _sorted(self, chosen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the choices of some passes sorted by expert, and where those of each expert begin."""
        # The experts' two inputs have the same choices, in the same memory: they are sorted once.
        if self._choices is None or _places_of(self._choices[0]) != _places_of(chosen):
            # A byte is sorted in one pass.
            narrow = torch.uint8 if self._experts <= 256 else torch.int64
            flat = torch.cat([ids.flatten() for ids in chosen]).to(narrow)
            ids, order = flat.sort(stable=True)
            expert_ids = torch.arange(self._experts + 1, device=ids.device)
            self._choices = chosen, order, torch.searchsorted(ids.long(), expert_ids)
        return self._choices[1], self._choices[2]

    def mean(self, name: str, at: slice = slice(None)) -> Tensor:
        """Return input `name`'s mean Hessians [E', in, in] of the experts `at`, by `gptq.shrunk`.

        Raise KeyError if the input was never seen, QuantizeError if it had no rows or a non-finite row.
        """
        sums, tokens, inputs = self.sums(name), self.tokens(name), self._inputs[name]
        return whole(shrunk(sums, tokens, at, inputs), inputs)


def _places_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


@lru_cache(4)
def _alone(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what `_sorted` would return if all rows were of one expert."""
    return torch.arange(rows, device=device), torch.tensor([0, rows], device=device)


def _in_kernels(x: Tensor) -> bool:
    return launches(x.device) and x.dtype == torch.bfloat16


def _add(tiles: Tensor, x: Tensor, order: Tensor, starts: Tensor, topk: int) -> None:
    if _in_kernels(x):
        from fused_dequant.gptq import gram

        gram.add(tiles, x, order, starts, topk)
        return
    begin, *ends = starts.tolist()
    i, j = _places(x.shape[1], x.device)
    for expert, end in enumerate(ends):
        rows = x[order[begin:end] // topk].float()
        rows = pad(rows, (0, -rows.shape[1] % TILE))
        blocks = (rows.T @ rows).unflatten(0, (-1, TILE)).unflatten(-1, (-1, TILE))
        tiles[expert] += blocks.transpose(1, 2)[i, j]  # [blocks, blocks, 128, 128], the upper ones
        begin = end


def _places(inputs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    j, i = torch.tril_indices(-(-inputs // TILE), -(-inputs // TILE), device=device)
    return i, j


def whole(tiles: Tensor, inputs: int) -> Tensor:
    """Return whole matrices [E, in, in], symmetric to the bit, from their tiles [E, tiles, 128, 128].

    Only the upper half of a diagonal tile is used: BLAS may sum (i, j) and (j, i) in two orders.
    """
    i, j = _places(inputs, tiles.device)
    blocks = -(-inputs // TILE)
    square = tiles.new_empty(len(tiles), blocks, blocks, TILE, TILE)
    square[:, j, i] = tiles.mT
    upper = tiles[:, i == j].triu()
    square[:, i, j] = tiles
    square[:, i[i == j], j[i == j]] = upper + upper.triu(1).mT
    return square.transpose(2, 3).reshape(len(tiles), blocks * TILE, -1)[:, :inputs, :inputs]
