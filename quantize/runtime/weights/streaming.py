"""Streams layers that do not fit: while one layer computes, the next arrives in the other of two slots.

    slot 0   layer 0 computes      layer 2 arrives       layer 2 computes ...
    slot 1   layer 1 arrives       layer 1 computes      layer 3 arrives  ...

Layers are copied on a thread and a CUDA stream of their own. The device computes with a layer only
after the layer has arrived. A slot is refilled as soon as the device has finished the work on its
layer. The order is a circle: while this pass' logits are made and read, the first two streamed layers
are copied for the next pass. One pass copies each streamed layer once. A slot's size is fixed, so the
memory of streaming is known beforehand: two slots, and the largest module that is being packed, once
as on disk and once as packed.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from fused_dequant import Weight
from torch import Tensor

from quantize.runtime.gpu.memory import rounded_up
from quantize.runtime.gpu.transfer import ALIGNED
from quantize.runtime.weights.packing import Entrance, Keep, LayerWeights

Event = Any  # torch.cuda.Event, which torch's stubs define twice
# A layer in a slot, and on a GPU the event after which it is complete.
Arrival = tuple[LayerWeights, Event | None]
Pack = Callable[[int, Keep], LayerWeights]  # packs a layer by index; `Keep` places its products


class StreamedLayers:
    """Iterates over all layers of a text stack in order; some are resident, the others streamed.

    A streamed layer's tensors are valid until the next layer is taken. Only one thread may iterate.
    `entrances` has each layer's input norm and the normed input's quantization; the preceding layer
    applies both. `pack` reads and packs a layer on another thread. An error of `pack` is raised when
    the iteration reaches that layer. `slot_bytes` is the largest streamed layer's `kept_bytes`.
    """

    def __init__(
        self,
        resident: Mapping[int, LayerWeights],
        entrances: tuple[Entrance, ...],
        pack: Pack,
        slot_bytes: int,
        device: torch.device,
    ) -> None:
        self.entrances = entrances
        self._resident, self._pack, self._device = resident, pack, device
        streamed = [i for i in range(len(entrances)) if i not in resident]
        self._after = dict(zip(streamed, streamed[1:] + streamed[:1], strict=True))
        self._slots = [_Slot(slot_bytes, device) for _ in range(2)]
        self._thread = ThreadPoolExecutor(1)
        self._stream: torch.cuda.Stream | None = None
        self._coming: deque[_Coming] = deque()
        self._in_use: _Coming | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False  # pyrefly: ignore[missing-attribute]

    def __len__(self) -> int:
        return len(self.entrances)

    def __iter__(self) -> Iterator[LayerWeights]:
        """Yield the layers in order."""
        for index in range(len(self)):
            kept = self._resident.get(index)
            if kept is not None:
                yield kept
            else:
                yield self._take(index)
                self._give_back()

    @property
    def nbytes(self) -> int:
        """Bytes of the resident layers' weights and of the slots."""
        resident = sum(w.bytes for layer in self._resident.values() for w in layer.products)
        return resident + sum(len(slot.memory) for slot in self._slots)

    def close(self) -> None:
        """Wait for the layers in flight and drop them; a later pass fetches them again."""
        for coming in self._coming:
            coming.arrival.exception()
        self._coming.clear()

    def _take(self, index: int) -> LayerWeights:
        """Wait for a streamed layer; if it is not in flight, as after a broken pass, fetch it anew."""
        if self._coming and self._coming[0].index == index:
            self._give_back()
        else:
            self.close()
            self._send_for(index, self._slots[0])
            self._send_for(self._after[index], self._slots[1])
        taken = self._coming.popleft()
        try:
            layer, arrived = taken.arrival.result()
        except BaseException:
            self.close()  # or an error of now would be raised later
            raise
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        self._in_use = taken
        return layer

    def _give_back(self) -> None:
        """Refill the slot of the layer in use, if any, with the streamed layer after the next one."""
        used, self._in_use = self._in_use, None
        if used is not None:
            self._send_for(self._after[self._after[used.index]], used.slot)

    def _send_for(self, index: int, slot: "_Slot") -> None:
        """Fill a slot with a layer as soon as all launched work is done."""
        launched: Event | None = None
        if self._stream is not None:
            launched = torch.cuda.current_stream(self._device).record_event()
        work = self._thread.submit(self._fill, index, slot, launched)
        self._coming.append(_Coming(index, slot, work))

    def _fill(self, index: int, slot: "_Slot", launched: Event | None) -> Arrival:
        slot.used = 0
        if self._stream is None or launched is None:
            return self._pack(index, slot.keep), None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            layer = self._pack(index, slot.keep)
            return layer, self._stream.record_event()


@dataclass(frozen=True)
class _Coming:
    index: int
    slot: "_Slot"
    arrival: Future[Arrival]


class _Slot:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.used = 0

    def keep(self, weight: Weight) -> Weight:
        """Copy a weight into the slot, after the weights that it already holds."""
        copies = {name: self._copied(tensor) for name, tensor in _tensors(weight).items()}
        return replace(weight, **copies, streamed=True)  # pyrefly: ignore[bad-argument-type]

    def _copied(self, tensor: Tensor) -> Tensor:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        room = self.memory[self.used : self.used + len(raw)]
        room.copy_(raw)
        self.used += rounded_up(len(raw), ALIGNED)
        return room.view(tensor.dtype).view(tensor.shape)


def kept_bytes(weights: Sequence[Weight]) -> int:
    """Return the bytes that a layer's `weights` take in a slot, where each tensor is aligned."""
    tensors = (tensor for weight in weights for tensor in _tensors(weight).values())
    return sum(rounded_up(tensor.nbytes, ALIGNED) for tensor in tensors)


def spread(count: int, chosen: int) -> list[int]:
    """Return the indices of `chosen` layers to stream, spread evenly over all `count` layers."""
    return [index * count // chosen for index in range(chosen)]


def _tensors(weight: Weight) -> dict[str, Tensor]:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
