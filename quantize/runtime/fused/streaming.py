"""Streams layers that do not fit: while one computes, the next arrives in the other of two slots.

    slot 0   layer 0 computes      layer 2 arrives       layer 2 computes ...
    slot 1   layer 1 arrives       layer 1 computes      layer 3 arrives  ...

Arriving happens on a thread and a stream of its own. A slot is filled again only when the device has
done all that was launched before the layer in the other slot was taken; a layer is taken only when the
device knows that it has arrived. The order is a circle: after the last streamed layer the first one
comes again, for the pass that follows. One pass over the layers is one pass over the streamed bytes.

A slot's memory is fixed, so what streaming takes is known beforehand: two slots, and what the largest
module needs on its way (its bytes as on disk and as packed).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from fused_dequant import Weight
from torch import Tensor

from quantize.runtime.fused.packing import Entrance, Keep, LayerWeights
from quantize.runtime.fused.transfer import ALIGNED

Event = Any  # torch.cuda.Event, of which torch's stubs have two
Pack = Callable[[int, Keep], LayerWeights]  # packs a layer by index, its products where `Keep` says


class StreamedLayers:
    """All layers of a text stack, in order, some resident and the others streamed.

    A streamed layer's tensors are valid until the next streamed layer is taken. One thread iterates.

    Args:
        resident: layers that stay, by index.
        entrances: each layer's input norm, and the scheme that the normed input is quantized with;
            the layer before applies them.
        pack: reads and packs a layer; called on a thread of its own.
        slot_bytes: bytes of the largest streamed layer, as `kept_bytes` counts.
        device: where layers go.

    Raises:
        Whatever `pack` raises, when the layer is taken.
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
        self._circle = [i for i in range(len(entrances)) if i not in resident]
        self._slots = [_Slot(slot_bytes, device) for _ in range(2)]
        self._thread = ThreadPoolExecutor(1)
        self._stream: torch.cuda.Stream | None = None
        self._coming: tuple[int, Future[_Arrival]] | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def __len__(self) -> int:
        return len(self.entrances)

    def __iter__(self) -> Iterator[LayerWeights]:
        """Yield the layers in order."""
        for index in range(len(self)):
            kept = self._resident.get(index)
            yield self._take(index) if kept is None else kept

    @property
    def nbytes(self) -> int:
        """Bytes of the resident layers' products and of the slots."""
        resident = sum(w.bytes for layer in self._resident.values() for w in layer.products)
        return resident + sum(len(slot.memory) for slot in self._slots)

    def _take(self, index: int) -> LayerWeights:
        """Wait for a streamed layer, and let the one after it come into the slot that is free now."""
        arrival = self._awaited(index)
        launched: Event | None = None
        if arrival.event is not None:
            main = torch.cuda.current_stream(self._device)
            launched = main.record_event()
            main.wait_event(arrival.event)
        self._slots.reverse()
        following = self._circle[(self._circle.index(index) + 1) % len(self._circle)]
        self._send_for(following, launched)
        return arrival.layer

    def _awaited(self, index: int) -> "_Arrival":
        """Return a layer once it is on its way; a pass that was broken off begins anew."""
        if self._coming is not None and self._coming[0] != index:
            self._coming[1].exception()  # it may still be filling the slot
            self._coming = None
        if self._coming is None:
            launched = None
            if self._stream is not None:
                launched = torch.cuda.current_stream(self._device).record_event()
            self._send_for(index, launched)
        assert self._coming is not None
        coming, self._coming = self._coming[1], None
        return coming.result()

    def _send_for(self, index: int, launched: Event | None) -> None:
        """Fill the first slot with a layer as soon as what was launched is done."""
        work = self._thread.submit(self._fill, index, self._slots[0], launched)
        self._coming = index, work

    def _fill(self, index: int, slot: "_Slot", launched: Event | None) -> "_Arrival":
        slot.used = 0
        if self._stream is None or launched is None:
            return _Arrival(self._pack(index, slot.keep), None)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            layer = self._pack(index, slot.keep)
            return _Arrival(layer, self._stream.record_event())


@dataclass(frozen=True)
class _Arrival:
    """A layer in a slot, and on a GPU the event after which it is complete."""

    layer: LayerWeights
    event: Event | None


class _Slot:
    """Memory for one layer's products."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.used = 0

    def keep(self, weight: Weight) -> Weight:
        """Copy a weight into the slot, behind those that it already holds."""
        return replace(
            weight, **{name: self._copied(tensor) for name, tensor in _tensors(weight).items()}
        )

    def _copied(self, tensor: Tensor) -> Tensor:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        own = self.memory[self.used : self.used + len(raw)]
        own.copy_(raw)
        self.used += _aligned(len(raw))
        return own.view(tensor.dtype).view(tensor.shape)


def kept_bytes(weights: Sequence[Weight]) -> int:
    """Return the bytes that `weights` take in a slot."""
    tensors = [tensor for weight in weights for tensor in _tensors(weight).values()]
    return sum(_aligned(t.numel() * t.element_size()) for t in tensors)


def spread(count: int, chosen: int) -> list[int]:
    """Return `chosen` of `count` indices, evenly spread, so that resident layers hide the copies."""
    return [index * count // chosen for index in range(chosen)]


def _tensors(weight: Weight) -> dict[str, Tensor]:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
