"""Loads a checkpoint as the weights that the fused kernels read, on their device, still quantized.

Nothing is dequantized: a 17 GB checkpoint takes 17 GB of GPU memory (`packing`). If that is too much,
some layers stay on the GPU, and the others are streamed from the files in every pass (`streaming`).
Loading is as strict as `checkpoints.load`: names, dtypes and shapes must be what config.json calls for,
and every value must be finite. To check this, loading reads streamed layers once.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fused_dequant import Weight, weights
from torch import Tensor

from quantize.checkpoints.layout import check_layout, model_config
from quantize.checkpoints.reader import Checkpoint
from quantize.runtime.gpu.gpus import check_gpu
from quantize.runtime.gpu.memory import Stack, rounded_up
from quantize.runtime.gpu.transfer import ALIGNED, Transfer
from quantize.runtime.weights.packing import BF16, Entrance, Keep, LayerWeights, Packer, Scales
from quantize.runtime.weights.streaming import StreamedLayers, kept_bytes, spread
from quantize.runtime.weights.tower import Tower

OnLayer = Callable[[Sequence[int]], Iterator[int]]  # wraps an iteration over layers, for progress


@dataclass(frozen=True)
class SelfConditioning:
    """The decoder's feed-forward block that takes the previous step's soft embedding, in bf16."""

    pre_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class TextWeights:
    """The weights of the text stack, on one device; layers that do not fit there are streamed."""

    config: Any  # transformers' configuration of the whole model
    embedding: Tensor  # bf16 [V, H], also the weight of lm_head
    norm: Tensor  # bf16 [H], applied after the last layer
    self_conditioning: SelfConditioning
    layers: tuple[LayerWeights, ...] | StreamedLayers
    tower: Tower | None = None  # None for random weights, which take no pictures
    in_fp8: bool = False  # whether NVFP4 weights are packed for FP8 products, the mode `fp8`
    in_fp4: bool = False  # whether NVFP4 weights are packed for FP4 units

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.embedding.device

    @property
    def streamed(self) -> bool:
        """Whether some layers are read from the files in every pass; then no pass is a CUDA graph."""
        return isinstance(self.layers, StreamedLayers)

    @cached_property
    def entrances(self) -> tuple[Entrance, ...]:
        """Each layer's input norm, and how the normed input is quantized."""
        if isinstance(self.layers, StreamedLayers):
            return self.layers.entrances
        return tuple(layer.entrance for layer in self.layers)

    def close(self) -> None:
        """Wait for streamed layers in flight and drop them; a later pass fetches them again."""
        if isinstance(self.layers, StreamedLayers):
            self.layers.close()

    @property
    def nbytes(self) -> int:
        """Bytes that the embedding and the products' weights take on the device."""
        total = self.embedding.numel() * 2
        if isinstance(self.layers, StreamedLayers):
            return total + self.layers.nbytes
        return total + sum(w.bytes for layer in self.layers for w in layer.products)


def load_packed(
    folder: Path,
    device: str,
    *,
    resident: int | None = None,
    in_fp8: bool = False,
    scales: Sequence[Scales] = (),
    on_layer: OnLayer = iter,
) -> TextWeights:
    """Return the text stack of a checkpoint, packed for the fused kernels and still quantized.

    The layout on disk may be Google's BF16, compressed-tensors' or ModelOpt's. On "cpu" the kernels are
    their torch references. `resident` is how many layers stay on the device; None keeps all. The others
    are streamed. `in_fp8` and `scales` are as in `Packer`. `on_layer` wraps the iteration over layers,
    to show progress. First call `trust`, to test that the device runs the schemes. Raise InputError if
    a tensor is missing, unexpected, misshapen or not finite.
    """
    checkpoint = Checkpoint.open(folder)
    check_layout(checkpoint)
    place, config = torch.device(device), model_config(checkpoint.config)
    packer = Packer(checkpoint, Transfer(place), config.text_config, in_fp8=in_fp8, scales=scales)
    layers = config.text_config.num_hidden_layers
    streamed = spread(layers, layers - min(layers, layers if resident is None else resident))
    decoder = "model.decoder."
    embedding, norm = (packer.plain(f"{decoder}{n}.weight") for n in ("embed_tokens", "norm"))
    conditioning = f"{decoder}self_conditioning."
    pre_norm = packer.plain(f"{conditioning}pre_norm.weight")
    gate_up = packer.rows([f"{conditioning}gate_proj", f"{conditioning}up_proj"])[0]
    down = packer.rows([f"{conditioning}down_proj"])[0]
    self_conditioning = SelfConditioning(pre_norm, gate_up, down)
    packed, tower = _layers(packer, layers, streamed, on_layer), Tower(checkpoint, config, place)
    return TextWeights(
        config, embedding, norm, self_conditioning, packed, tower, in_fp8, any(scales)
    )


def load_in_turns(folder: Path, device: str) -> TextWeights:
    """Return a BF16 text stack of only layers and final norm; the device holds two layers at a time.

    Errors are as in `load_packed`, but layers are not read beforehand. So a value that is not finite is
    an error only when its layer is taken. Raise ResourceError if the GPU is missing or too old.
    """
    checkpoint = Checkpoint.open(folder)
    check_layout(checkpoint)
    place, config = torch.device(device), model_config(checkpoint.config)
    check_gpu(set(), place)
    packer = Packer(checkpoint, Transfer(place, register=True), config.text_config)
    small = [packer.small(index) for index in range(config.text_config.num_hidden_layers)]
    aligned = {name: rounded_up(info.nbytes, ALIGNED) for name, info in checkpoint.tensors.items()}
    sizes = Stack.of(folder.name, aligned, quantized=False)
    entrances = [(tensors["norms"]["input"], BF16) for tensors in small]
    layers = _streamed(packer, {}, small, entrances, int(max(sizes.layers)))
    norm = packer.plain("model.decoder.norm.weight")
    none = weights.bf16(norm.new_empty(1, 0, 0))
    conditioning = SelfConditioning(norm, none, none)
    return TextWeights(config, norm.new_empty(0, len(norm)), norm, conditioning, layers)


def with_layers_of(
    base: TextWeights, checkpoint: Checkpoint, layers: Collection[int], *, in_fp8: bool = False
) -> TextWeights:
    """Return resident `base` with its `layers` (indices) replaced by `checkpoint`'s; see `Packer`."""
    packer = Packer(checkpoint, Transfer(base.device), base.config.text_config, in_fp8=in_fp8)
    stack = list(base.layers)
    for index in layers:
        products = packer.products(index, in_memory_of_its_own)
        stack[index] = LayerWeights(**packer.small(index), **products)
    return replace(base, layers=tuple(stack), in_fp8=in_fp8)


def _layers(
    packer: Packer, count: int, streamed: list[int], on_layer: OnLayer
) -> tuple[LayerWeights, ...] | StreamedLayers:
    """Load the layers that stay; read streamed layers once, to check them and learn their sizes."""
    kept: dict[int, LayerWeights] = {}
    small: list[dict[str, Any]] = []
    entrances: list[Entrance] = []
    slot_bytes = 0
    for index in on_layer(range(count)):
        small.append(packer.small(index))
        layer = LayerWeights(**small[index], **packer.products(index, in_memory_of_its_own))
        entrances.append(layer.entrance)
        if index in streamed:
            slot_bytes = max(slot_bytes, kept_bytes(layer.products))
        else:
            kept[index] = layer
        del layer
    if not streamed:
        return tuple(kept.values())
    packer.transfer = Transfer(packer.transfer.device, register=True)
    return _streamed(packer, kept, small, entrances, slot_bytes)


def _streamed(
    packer: Packer,
    kept: dict[int, LayerWeights],
    small: Sequence[dict[str, Any]],
    entrances: Sequence[Entrance],
    slot_bytes: int,
) -> StreamedLayers:
    def pack(index: int, keep: Keep) -> LayerWeights:
        return LayerWeights(**small[index], **packer.products(index, keep))

    return StreamedLayers(kept, tuple(entrances), pack, slot_bytes, packer.transfer.device)


def in_memory_of_its_own(weight: Weight) -> Weight:
    """Return experts' weights on a GPU in a memory block of their own, and other weights as they are.

    On an H200 an FP8 layer's experts took 225 us inside a larger block, and 210 us in their own block.
    """
    if weight.data.is_cuda and weight.shape[0] > 1:
        torch.cuda.empty_cache()
        return weight.clone()
    return weight
