"""Hessians of Linears: sums of x x^T over their inputs, held as the tiles of one triangle.

Inputs are cut into blocks of 128. Tile t = j (j + 1) / 2 + i holds the products of inputs of the
blocks i <= j; the other tiles are these, transposed. So the Hessians of a layer of the 26B model take
2.4 GB, and bf16 rows on a GPU are added by a kernel that computes no more (`fused_dequant/gram.py`).
The kernel adds several passes at once: to read and write 2.4 GB takes as long as the sums of a pass
of 2,048 rows.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from fused_dequant.dispatch import launches
from fused_dequant.gram import TILE
from torch import Tensor
from torch.nn.functional import pad

from quantize.schemes.gptq import shrunk

PASSES, PASSES_BYTES = 8, 256 << 20  # whose rows a kernel adds at once, as many as both allow


def tiles_of(inputs: int) -> int:
    """Return how many tiles a Hessian of `inputs` inputs has."""
    blocks = -(-inputs // TILE)
    return blocks * (blocks + 1) // 2


class Hessians:
    """Sums of x x^T and token counts of the inputs `names` of Linears, on the inputs' device."""

    def __init__(self, names: Sequence[str], experts: int) -> None:
        self.names, self._experts = frozenset(names), experts
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._inputs: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
        self._choices: tuple[Sequence[Tensor], Tensor, Tensor] | None = None

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Add rows [..., in] to the sums of the input `name`; `experts` are the experts of each row."""
        if name not in self.names:
            return
        x = rows.flatten(0, -2).contiguous()
        waiting = self._waiting.setdefault(name, [])
        waiting.append((x, experts))
        many = len(waiting) == PASSES or sum(own.nbytes for own, _ in waiting) >= PASSES_BYTES
        if many or not _in_kernels(x):
            self._settle(name)

    def sums(self, name: str) -> Tensor:
        """Return an input's sums by tile: [E, tiles, 128, 128] float32; E is 1 for a dense Linear."""
        self._settle(name)
        return self._sums[name]

    def tokens(self, name: str) -> Tensor:
        """Return how many tokens each expert saw: [E] int64."""
        self._settle(name)
        return self._tokens[name]

    def _settle(self, name: str) -> None:
        if not (waiting := self._waiting.pop(name, None)):
            return
        x = torch.cat([own for own, _ in waiting])
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
        """Return the choices of some passes sorted by experts, and where each expert's begin."""
        # The experts' two inputs have the same choices, in the same memory: they are sorted once.
        if self._choices is None or _places_of(self._choices[0]) != _places_of(chosen):
            # A byte is sorted in one pass.
            narrow = torch.uint8 if self._experts <= 256 else torch.int64
            flat = torch.cat([ids.flatten() for ids in chosen]).to(narrow)
            ids, order = flat.sort(stable=True)
            each = torch.arange(self._experts + 1, device=ids.device)
            self._choices = chosen, order, torch.searchsorted(ids.long(), each)
        return self._choices[1], self._choices[2]

    def mean(self, name: str, at: slice = slice(None)) -> Tensor:
        """Return an input's mean Hessians [E', in, in] by `gptq.shrunk`, of the experts `at`.

        Raise QuantizeError if no token was seen at that input, or one that was not finite.
        """
        sums, tokens = self.sums(name), self.tokens(name)
        inputs = self._inputs[name]
        return whole(shrunk(sums, tokens, at, inputs), inputs)


def _places_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(own.data_ptr(), own.numel()) for own in tensors]


@lru_cache(4)
def _alone(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what `_sorted` does for one expert that all rows are of."""
    return torch.arange(rows, device=device), torch.tensor([0, rows], device=device)


def _in_kernels(x: Tensor) -> bool:
    return launches(x.device) and x.dtype == torch.bfloat16


def _add(tiles: Tensor, x: Tensor, order: Tensor, starts: Tensor, topk: int) -> None:
    if _in_kernels(x):
        from fused_dequant import gram

        gram.add(tiles, x, order, starts, topk)
        return
    begin, *ends = starts.tolist()
    i, j = _places(x.shape[1], x.device)
    for expert, end in enumerate(ends):
        own = x[order[begin:end] // topk].float()
        own = pad(own, (0, -own.shape[1] % TILE))
        blocks = (own.T @ own).unflatten(0, (-1, TILE)).unflatten(-1, (-1, TILE))
        tiles[expert] += blocks.transpose(1, 2)[i, j]  # [blocks, blocks, 128, 128], the upper ones
        begin = end


def _places(inputs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    j, i = torch.tril_indices(-(-inputs // TILE), -(-inputs // TILE), device=device)
    return i, j


def whole(tiles: Tensor, inputs: int) -> Tensor:
    """Return the matrices [E, in, in] that tiles [E, tiles, 128, 128] hold, symmetric to the bit.

    Of tiles on the diagonal the upper half is read: a BLAS may sum a product and its mirror image in
    different orders.
    """
    i, j = _places(inputs, tiles.device)
    blocks = -(-inputs // TILE)
    found = tiles.new_empty(len(tiles), blocks, blocks, TILE, TILE)
    found[:, j, i] = tiles.mT
    upper = tiles[:, i == j].triu()
    found[:, i, j] = tiles
    found[:, i[i == j], j[i == j]] = upper + upper.triu(1).mT
    return found.transpose(2, 3).reshape(len(tiles), blocks * TILE, -1)[:, :inputs, :inputs]
