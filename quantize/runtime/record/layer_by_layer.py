"""Takes recorded passes through one layer after the other: each layer's weights are read once.

    recording --h of layer 0--> [layer 0: pass 0, pass 1, ...] --h of layer 1--> [layer 1: ...] -->

Every pass keeps its recorded rows, launches and order, so observers see the same bits as in the
recorded run. Keys and values are held for only one batch and one layer. No logits are computed.
Between two layers, the rows of all batches are in host memory, or in scratch files if memory is short.
While a GPU computes, rows of other passes and the next layer's weights are copied.

Only h is stored, the rows that layers add to. Products read x, the normed rows, which are made again
from h: for layer 0 by `begin`, for later layers by `after_experts` with both branches zero. Denoising
uses the same kernels, and h + 0 is h, so x has the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fused_dequant import Activation, after_experts
from torch import Tensor

from quantize.runtime.gpu.memory import chunk_of
from quantize.runtime.model.cells import Cache
from quantize.runtime.model.inputs import ProductInputs
from quantize.runtime.model.passes import Pass, PassRows
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.model.watching import Observer
from quantize.runtime.record.recording import RecordedPass, Recording
from quantize.runtime.record.shuttle import (
    RowsPiece,
    Shuttle,
    pieces_of,
    recorded_rows,
    room_for_rows,
)
from quantize.runtime.weights.load import load_in_turns
from quantize.runtime.weights.packing import LayerWeights


class LayerByLayer:
    """Runs recorded passes through a BF16 checkpoint on `device`, one layer after the other.

    `scratch` is a folder for rows, used if host memory is too small. A layer has `experts` experts.
    """

    def __init__(self, checkpoint: Path, recording: Recording, device: str, scratch: Path) -> None:
        self._weights = load_in_turns(checkpoint, device)
        self._recording, self._scratch = recording, scratch
        self._device = self._weights.device
        text: Any = self._weights.config.text_config
        self._hidden: int = text.hidden_size
        self.experts: int = text.num_experts
        self._inputs = ProductInputs(text, None, bf16=True)
        self._cache = Cache.allocate(
            self._weights.config, recording.shape.capacity, recording.shape.max_length,
            chunk_of(self._weights.config.canvas_length), self._device, one_layer=True,
        )  # fmt: skip
        self._model = FusedModel(self._weights, self._cache, self._inputs)
        most = max(recorded.count for batch in recording.batches for recorded in batch.passes)
        like: Any = {"dtype": torch.bfloat16, "device": self._device}
        self._dense = torch.zeros(most, self._hidden, **like)
        self._routed = torch.zeros(most, text.top_k_experts, self._hidden, **like)
        self._ones = torch.ones(self._hidden, **like)
        self._last: tuple[RecordedPass, PassRows] | None = None

    def run(self, observers: Callable[[int], Sequence[Observer]], until: int) -> Iterator[int]:
        """Yield each layer's index, 0 to `until` inclusive, after all passes went through that layer.

        `observers(index)` returns the layer's observers, which are shown the inputs of its Linears.
        Raise ResourceError if rows fit neither host memory nor scratch.
        """
        pieces = pieces_of(self._recording, self._hidden)
        sources = recorded_rows(self._recording, self._hidden)
        targets = room_for_rows(self._recording, self._hidden, self._scratch)
        shuttle = Shuttle(max(piece.count for piece in pieces), self._hidden, self._device)
        try:
            for index, layer in enumerate(self._weights.layers):
                with self._inputs.shown_to(observers(index)):
                    shuttle.run(
                        pieces, sources, targets if index < until else None,
                        partial(self._through, index, layer),
                    )  # fmt: skip
                sources = targets
                yield index
                if index == until:
                    break
        finally:
            self._weights.close()

    def _through(self, index: int, layer: LayerWeights, piece: RowsPiece, rows: Tensor) -> None:
        """Take a piece's passes through a layer, in place; on a CPU on one core, as when recorded."""
        self._model.compute.one(partial(self._take, index, layer, piece, rows))

    def _take(self, index: int, layer: LayerWeights, piece: RowsPiece, rows: Tensor) -> None:
        if piece.rows.start == 0:  # a batch begins: no value of another one may meet a 0
            self._cache.values[index].zero_()
            self._last = None
        for recorded in piece.passes:
            at = slice(
                recorded.rows.start - piece.rows.start, recorded.rows.stop - piece.rows.start
            )
            real = None if recorded.real is None else recorded.real.to(self._device)
            x, where = self._entered(index, rows[at]), self._placement(recorded)
            entering = Pass(rows[at], x, where, recorded.decoded, self._inputs, True, real)
            entering.cells = self._cache.keys[index], self._cache.values[index]
            self._model.through(index, layer, entering)
            rows[at] = entering.h

    def _entered(self, index: int, h: Tensor) -> Activation:
        """Return the normed rows that enter a layer, with the same bits as in denoising."""
        if index == 0:
            return self._model.entered(h)[1]
        norm, (scheme, _) = self._weights.entrances[index]
        none, one = (self._dense[: len(h)], self._routed[: len(h)]), self._ones[:1]
        norms = (self._ones, self._ones, self._ones, norm)
        return after_experts(h, *none, norms, (one, one), len(h), scheme, self._model.eps)[1]

    def _placement(self, recorded: RecordedPass) -> PassRows:
        """Return the placement of a pass' rows; most steps share that of the step before."""
        if self._last is None or not recorded.stands_as(self._last[0]):
            device = self._device
            visible = {
                kind: (first.to(device), last.to(device))
                for kind, (first, last) in recorded.visible.items()
            }
            placed = self._model.placed(
                recorded.slots.to(device), recorded.positions.to(device), visible
            )
            self._last = recorded, placed
        return self._last[1]
