"""The cells of keys and values: whole for full layers, a ring of window and chunk for sliding ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fused_dequant import CELLS
from torch import Tensor


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer: bf16 [slots, capacity, key heads, head dim].

    Full layers hold `max_context` positions, sliding ones a ring of a window and a chunk.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    window: int

    @classmethod
    def allocate(
        cls,
        config: Any,
        slots: int,
        max_context: int,
        chunk: int,
        device: torch.device,
        *,
        one_layer: bool = False,
    ) -> "Cache":
        """Allocate zeros for `slots` sequences, to which at most `chunk` tokens are added at once.

        With `one_layer` layers of a kind share their cells: passes go through a layer at a time.
        """
        text = config.text_config
        full = _rounded_up(max_context, CELLS)
        ring = min(full, _rounded_up(text.sliding_window - 1 + chunk, CELLS))
        layers: list[Tensor] = []
        for i, kind in enumerate(text.layer_types):
            own = text.per_layer_config[i]
            cells = ring if kind == "sliding_attention" else full
            shape = (2, slots, cells, own.num_key_value_heads, own.head_dim)
            known = next((kv for kv in layers if one_layer and kv.shape == shape), None)
            new = (
                torch.zeros(shape, dtype=torch.bfloat16, device=device) if known is None else known
            )
            layers.append(new)
        keys, values = (tuple(kv[n] for kv in layers) for n in range(2))
        return cls(keys, values, text.sliding_window)

    def block(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Copy what further tokens need of positions `start` to `end`: see `restore`.

        Full layers give the positions themselves, sliding ones all that a ring holds behind them.
        """
        return [
            tensor[slot, self._cells(tensor, start, end)].clone()
            for tensor in (*self.keys, *self.values)
        ]

    def restore(self, slot: int, start: int, end: int, block: Sequence[Tensor]) -> None:
        """Write a block back; of sliding layers the last block's alone is read."""
        for tensor, kept in zip((*self.keys, *self.values), block, strict=True):
            tensor[slot, self._cells(tensor, start, end)] = kept

    def _cells(self, tensor: Tensor, start: int, end: int) -> Tensor:
        ring = tensor.shape[1]
        if ring < max(keys.shape[1] for keys in self.keys):
            start = max(0, end - self.window + 1)
        return torch.arange(start, end, device=tensor.device) % ring

    def clear(self, slot: int) -> None:
        """Forget a slot's values: no NaN of a broken sequence may meet a probability of 0."""
        for values in self.values:
            values[slot].zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))
