"""The cache of keys and values: full layers keep all positions, sliding layers a window and a chunk.

A cell holds one position. A chunk is the most tokens that a pass adds to a sequence. A lane has the
slots of one batch. Cells are on the device, or on the host if many lanes go in lockstep (`HostCells`).
For cells on the host, the device has two places, each with room for one lane's cells of one layer.
While the device works in one place, the next lane's cells arrive in the other:

    place 0   lane 0, layer 0 | lane 2, layer 0 | ...
    place 1                   | lane 1, layer 0 | lane 0, layer 1 | ...
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from fused_dequant import CELLS
from torch import Tensor

from quantize.host.progress import say
from quantize.runtime.gpu.memory import rounded_up
from quantize.runtime.gpu.transfer import pinned_until
from quantize.runtime.model.passes import Added

Event = Any  # torch.cuda.Event, which torch's stubs define twice
# (keys, values) of one lane's slots at one layer, lane after lane and layer after layer
Visits = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer: bf16 [slots, cells, key heads, head dim].

    A full layer has cells for `max_context` positions, a sliding layer has a ring for window and chunk.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    window: int
    lanes: int = 1  # slots are in the order of their lanes

    @classmethod
    def allocate(
        cls, config: Any, slots: int, max_context: int, chunk: int, device: torch.device, *,
        lanes: int = 1, one_layer: bool = False,
    ) -> "Cache":  # fmt: skip
        """Return a zeroed cache for `lanes` * `slots` sequences; a pass adds up to `chunk` tokens.

        With `one_layer`, layers of equal shape share cells, which hold one layer's data at a time.
        """
        text = config.text_config
        full = rounded_up(max_context, CELLS)
        ring = min(full, rounded_up(text.sliding_window - 1 + chunk, CELLS))
        layers: list[Tensor] = []
        for i, kind in enumerate(text.layer_types):
            layer = text.per_layer_config[i]
            cells = ring if kind == "sliding_attention" else full
            shape = (2, slots * lanes, cells, layer.num_key_value_heads, layer.head_dim)
            known = next((kv for kv in layers if one_layer and kv.shape == shape), None)
            if known is None:
                known = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            layers.append(known)
        keys, values = (tuple(kv[n] for kv in layers) for n in range(2))
        return cls(keys, values, text.sliding_window, lanes)

    def visits(self, layers: int, added: Mapping[int, Sequence[Added]]) -> Visits:
        """For each layer, yield (keys, values) of each lane in `added` (lane -> its new tokens)."""
        for index in range(layers):
            for lane in added:
                slots = len(self.keys[index]) // self.lanes
                lane_slots = slice(lane * slots, (lane + 1) * slots)
                yield self.keys[index][lane_slots], self.values[index][lane_slots]

    def runs(self, index: int, start: int, end: int) -> list[slice]:
        """Return slices of layer `index`'s cells: positions in [start, end) that later tokens see."""
        ring = self.keys[index].shape[1]
        if ring < max(keys.shape[1] for keys in self.keys):
            start = max(start, end - self.window + 1)
        if start >= end:
            return []
        first, last = start % ring, (end - 1) % ring + 1
        return [slice(first, last)] if first < last else [slice(first, ring), slice(0, last)]

    def block(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Return copied cells: [start, end) in full layers, the window before `end` in others."""
        tensors = (*self.keys, *self.values)
        return [tensor[slot, self._cells(tensor, start, end)].clone() for tensor in tensors]

    def restore(self, slot: int, start: int, end: int, block: Sequence[Tensor]) -> None:
        """Write the copies that `Cache.block` made of positions [start, end) into a slot."""
        for tensor, kept in zip((*self.keys, *self.values), block, strict=True):
            tensor[slot, self._cells(tensor, start, end)] = kept

    def _cells(self, tensor: Tensor, start: int, end: int) -> Tensor:
        ring = tensor.shape[1]
        if ring < max(keys.shape[1] for keys in self.keys):
            start = max(0, end - self.window + 1)
        return torch.arange(start, end, device=tensor.device) % ring

    def clear(self, slot: int) -> None:
        """Set a slot's values to 0. Attention multiplies unused cells by 0, but 0 * NaN is NaN."""
        for values in self.values:
            values[slot].zero_()


class HostCells:
    """Keys and values of `lanes` * `slots` sequences on the host; arguments as in `Cache.allocate`."""

    def __init__(
        self,
        config: Any,
        slots: int,
        max_context: int,
        chunk: int,
        device: torch.device,
        lanes: int,
    ) -> None:
        how = config, slots, max_context, chunk
        self._host = Cache.allocate(*how, torch.device("cpu"), lanes=lanes)
        self._places = [Cache.allocate(*how, device, one_layer=True) for _ in range(2)]
        self._slots, self._encoded = slots, [0] * (slots * lanes)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            both = self._host.keys  # and the values, in the same memory
            if [keys for keys in both if not pinned_until(self, keys, device)]:
                say("keys and values on the host could not be pinned: copies of them are slower")

    def clear(self, slot: int) -> None:
        """Mark a slot as empty: none of its tokens is encoded."""
        self._encoded[slot] = 0

    def visits(self, layers: int, added: Mapping[int, Sequence[Added]]) -> Visits:
        """For each layer, yield (keys, values) of each lane in `added` (lane -> its new tokens).

        A pair is valid until the next pair is taken. Then the new tokens' cells are copied to the host.
        """
        tokens = [(lane * self._slots + slot, *run) for lane in added for slot, *run in added[lane]]
        for slot, start, _ in tokens:
            self._encoded[slot] = start
        order = [(index, lane) for index in range(layers) for lane in added]
        visits = [(*at, place) for at, place in zip(order, cycle(self._places), strict=False)]
        if self._stream is not None:  # a pass that broke off may still work in a place
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        arrived = deque([self._fetch(*visits[0])])
        for number, (index, lane, place) in enumerate(visits):
            arrived.extend(self._fetch(*visit) for visit in visits[number + 1 : number + 2])
            event = arrived.popleft()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_event(event)
            yield place.keys[index], place.values[index]
            self._take_back(index, lane, place, added[lane])
        for slot, start, count in tokens:
            self._encoded[slot] = start + count

    def _fetch(self, index: int, lane: int, place: Cache) -> Event:
        """Copy a lane's encoded cells to a place; return the event of arrival, None on a CPU."""
        encoded = self._encoded[lane * self._slots :][: self._slots]
        with self._beside():
            place.values[index].zero_()  # no NaN of another lane may meet a probability of 0
            for slot, count in enumerate(encoded):
                for host, target in self._same(index, lane, place, (slot, 0, count)):
                    target.copy_(host, non_blocking=True)
        return None if self._stream is None else self._stream.record_event()

    def _take_back(self, index: int, lane: int, place: Cache, added: Sequence[Added]) -> None:
        """Copy the cells of `added` tokens to the host, once all launched work is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._beside():
            for run in added:
                for host, source in self._same(index, lane, place, run):
                    host.copy_(source, non_blocking=True)

    def _same(self, index: int, lane: int, place: Cache, added: Added) -> Visits:
        """Yield (cells on the host, the same cells in `place`) of `added` tokens at a layer."""
        slot, start, count = added
        for cells in self._host.runs(index, start, start + count):
            row = lane * self._slots + slot
            yield self._host.keys[index][row, cells], place.keys[index][slot, cells]
            yield self._host.values[index][row, cells], place.values[index][slot, cells]

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
