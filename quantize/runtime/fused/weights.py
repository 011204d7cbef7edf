"""Checkpoint -> the weights that the fused kernels read, on their device, still quantized.

Nothing is dequantized: codes and scales go to the device as they are on disk and are only laid out
anew there, q/k/v and gate/up as one matrix each, gate and up rows of experts interleaved, NVFP4 in
the fragments of Hopper's tensor cores (`fused_dequant.weights`). ModelOpt's names and scales lead to
the same weights. What is BF16 on disk stays BF16. A 17 GB checkpoint takes 17 GB of GPU memory.

Strict as `checkpoints.load`: names, dtypes and shapes must be what config.json calls for, every value
is finite. Input scales of NVFP4 are checked and then left out: below Blackwell activations are bf16.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from fused_dequant import Weight, formats, require, weights
from torch import Tensor

from quantize.checkpoints.layout import check_layout, module_tensors, stated_schemes
from quantize.checkpoints.reader import FIX, Checkpoint
from quantize.checkpoints.targets import DROPPED
from quantize.errors import InputError, ResourceError
from quantize.rounding import all_finite
from quantize.runtime.fused.tower import Tower
from quantize.schemes import GLOBAL_SCALES, TENSOR_SCALES, Scheme

READERS = 8
OLDEST_GPU = (8, 0)  # compute capability: bf16 tensor cores, which every scheme needs
NORMS = {
    "input": "input_layernorm",
    "post_attention": "post_attention_layernorm",
    "dense": "pre_feedforward_layernorm",
    "experts": "pre_feedforward_layernorm_2",
    "post_dense": "post_feedforward_layernorm_1",
    "post_experts": "post_feedforward_layernorm_2",
    "post": "post_feedforward_layernorm",
}
Rows = tuple[Weight, ...]  # one matrix, or several where their scales cannot be joined


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `norms` by the names of NORMS; router_scale [H] and the rest as on disk, bf16."""

    sliding: bool
    norms: dict[str, Tensor]
    qkv: Rows
    q_norm: Tensor
    k_norm: Tensor
    o: Weight
    gate_up: Rows
    down: Weight
    router: Tensor
    router_scale: Tensor
    per_expert_scale: Tensor
    experts_gate_up: Weight
    experts_down: Weight
    encoder_scalar: Tensor
    decoder_scalar: Tensor


@dataclass(frozen=True)
class SelfConditioning:
    """The decoder's feed-forward block over the soft embedding, bf16."""

    pre_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class TextWeights:
    """The text stack, on one device. `embedding` bf16 [V, H]; `head` is it, or it in FP8.

    `soft` is what the soft embedding multiplies with: the embedding, or it in FP8, transposed.
    `config` is transformers' configuration of the whole model.
    """

    config: Any
    embedding: Tensor
    head: Weight
    soft: Tensor | Weight
    norm: Tensor
    self_conditioning: SelfConditioning
    layers: tuple[LayerWeights, ...]
    tower: Tower | None = None  # random weights see no pictures

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def nbytes(self) -> int:
        """Bytes of the products' weights and the embedding."""
        total = self.embedding.numel() * 2
        if self.head.scheme != "bf16":
            total += self.head.bytes
        if isinstance(self.soft, Weight):
            total += self.soft.bytes
        for layer in self.layers:
            rows = (*layer.qkv, layer.o, *layer.gate_up, layer.down)
            total += sum(w.bytes for w in (*rows, layer.experts_gate_up, layer.experts_down))
        return total


def load_packed(
    folder: Path,
    device: str,
    *,
    head: str = "bf16",
    soft: str = "bf16",
    on_layer: Callable[[Iterator[int]], Iterator[int]] = iter,
) -> TextWeights:
    """Load the text stack of a BF16 or quantized checkpoint for the fused kernels.

    Args:
        folder: a checkpoint in Google's BF16 layout, in that of compressed-tensors or of ModelOpt.
        device: "cuda", "cuda:1", or "cpu" (the kernels' torch references).
        head: "bf16", or "fp8" to also round lm_head, which reads 0.7 GB less each step; not what the
            checkpoint's accuracy was measured with.
        soft: the same for the soft embedding, whose FP8 copy takes 0.7 GB more memory.
        on_layer: wraps the iteration over layers, to show progress.

    Raises:
        InputError: a missing, unexpected, misshapen or non-finite tensor.
        ResourceError: no GPU, one too old for a scheme, or one with too little memory.
    """
    checkpoint = Checkpoint.open(folder)
    check_layout(checkpoint)
    reader = _Reader(checkpoint, torch.device(device))
    used = reader.schemes.used if reader.schemes else ()
    check_gpu([head, soft, *(scheme.kernel for scheme in used)], reader.device)
    _check_memory(checkpoint, reader.device)
    config = model_config(checkpoint.config)
    text = config.text_config
    decoder = "model.decoder."
    embedding = reader.plain(f"{decoder}embed_tokens.weight")
    conditioning = f"{decoder}self_conditioning."
    indices = iter(range(text.num_hidden_layers))
    with ThreadPoolExecutor(READERS) as reader.pool:
        layers = tuple(_layer(reader, text, i) for i in on_layer(indices))
    return TextWeights(
        config,
        embedding,
        head_weight(embedding, head),
        soft_weight(embedding, soft),
        reader.plain(f"{decoder}norm.weight"),
        SelfConditioning(
            reader.plain(f"{conditioning}pre_norm.weight"),
            reader.rows([f"{conditioning}gate_proj", f"{conditioning}up_proj"])[0],
            reader.rows([f"{conditioning}down_proj"])[0],
        ),
        layers,
        Tower(checkpoint, config, reader.device),
    )


def model_config(config: dict[str, Any]) -> Any:
    """Return transformers' configuration of a config.json."""
    from transformers import DiffusionGemmaConfig

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return DiffusionGemmaConfig(**plain)


def head_weight(embedding: Tensor, head: str) -> Weight:
    """Return lm_head: the embedding itself, or the embedding in FP8, a scale a token."""
    if head == "fp8":
        return weights.eight_bit(*formats.quantize_rows(embedding, torch.float8_e4m3fn))
    return weights.bf16(embedding)


def soft_weight(embedding: Tensor, soft: str) -> Tensor | Weight:
    """Return what the soft embedding multiplies with; in FP8 it is [1, H, V], a scale a column."""
    if soft != "fp8":
        return embedding
    columns = [part.T.contiguous() for part in embedding.split(256, 1)]  # float32 of all is 3 GB
    codes, scales = zip(
        *(formats.quantize_rows(c, torch.float8_e4m3fn) for c in columns), strict=True
    )
    return weights.eight_bit(torch.cat(codes), torch.cat(scales))


def in_memory_of_its_own(weight: Weight) -> Weight:
    """Copy a large weight out of whatever freed block it was built in.

    On an H200 an FP8 layer's experts took 225 us inside a larger block and 210 us in one of their own.
    """
    if weight.data.is_cuda:
        torch.cuda.empty_cache()
        return weight.clone()
    return weight


def check_gpu(schemes: Iterable[str], device: torch.device) -> None:
    """Refuse a device that the kernels of `schemes` do not run on; a CPU runs all, on references.

    Raises:
        ResourceError: no such GPU, or one too old.
    """
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ResourceError("no CUDA device here: run on a machine with an NVIDIA GPU")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        has, need = (".".join(map(str, pair)) for pair in (capability, OLDEST_GPU))
        raise ResourceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {has} and the kernels need "
            f"{need} or newer; use such a GPU, or hide this one with CUDA_VISIBLE_DEVICES="
        )
    for scheme in sorted(set(schemes)):
        try:
            require(scheme, device)
        except ValueError as error:
            raise ResourceError(str(error)) from error


def _check_memory(checkpoint: Checkpoint, device: torch.device) -> None:
    """Refuse a device that lacks the memory before a byte is read."""
    needed = sum(
        info.nbytes for name, info in checkpoint.tensors.items() if not DROPPED.fullmatch(name)
    )
    free = psutil.virtual_memory().available
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ResourceError(
            f"{checkpoint.folder}: {needed / 1e9:.1f} GB of weights, and {device} has "
            f"{free / 1e9:.1f} GB free; use a device with more memory"
        )


class _Reader:
    """Reads modules of a checkpoint to a device, checked."""

    pool: ThreadPoolExecutor

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.schemes = stated_schemes(checkpoint.config)

    def plain(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._checked(name, self.checkpoint.read(name).to(self.device))

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a Linear."""
        return self.schemes.of(module) if self.schemes else None

    def rows(self, modules: Sequence[str]) -> Rows:
        """Read Linears that share an input, as one matrix if their scales allow it."""
        schemes = {self.scheme(module) for module in modules}
        parts = [self._linear(module) for module in modules]
        joined = len(schemes) == 1 and _joinable(parts)
        groups = [parts] if joined else [[part] for part in parts]
        return tuple(
            _weight(group, self.scheme(m)) for group, m in zip(groups, modules, strict=False)
        )

    def experts(self, prefix: str, count: int) -> tuple[Weight, Weight]:
        """Read the experts of one layer: gate_up interleaved, and down."""
        if self.scheme(f"{prefix}.0.gate_proj") is None:
            gate, up = self.plain(f"{prefix}.gate_up_proj").chunk(2, 1)
            both = weights.bf16(formats.interleave_gate_up(gate, up))
            return both, weights.bf16(self.plain(f"{prefix}.down_proj"))
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (self._stacked([f"{prefix}.{e}.{n}" for e in range(count)]) for n in names)
        scheme = self.scheme(f"{prefix}.0.gate_proj")
        both = {
            suffix: torch.cat([gate[suffix], up[suffix]], 1)
            if suffix in GLOBAL_SCALES
            else _interleaved(gate[suffix], up[suffix])
            for suffix in gate
        }
        return _weight([both], scheme), _weight([down], scheme)

    def _linear(self, module: str) -> dict[str, Tensor]:
        found = {name.removeprefix(f"{module}."): self.plain(name) for name in self._names(module)}
        return _as_kernels_read(found, 2)

    def _names(self, module: str) -> list[str]:
        """Return the tensors of a module that a kernel reads."""
        names = module_tensors(self.checkpoint, module)
        return [name for name in names if not name.startswith(f"{module}.input_")]

    def _stacked(self, modules: Sequence[str]) -> dict[str, Tensor]:
        """Read the same Linear of every expert: suffix -> [E, ...] on the device."""
        stacked: dict[str, Tensor] = {}
        for first in self._names(modules[0]):
            suffix = first.removeprefix(f"{modules[0]}.")
            parts = self.pool.map(self.checkpoint.read, [f"{m}.{suffix}" for m in modules])
            stacked[suffix] = self._checked(first, torch.stack(tuple(parts)).to(self.device))
        return _as_kernels_read(stacked, 3)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        bad = not all_finite(tensor)
        if bad or (name.endswith(TENSOR_SCALES) and not bool((tensor > 0).all())):
            raise InputError(
                f"{self.checkpoint.tensors[name].file}: {name!r}, or the same tensor of another "
                f"expert, holds NaN, infinity or a scale that is not above 0; {FIX}"
            )
        return tensor


def _as_kernels_read(tensors: dict[str, Tensor], dims: int) -> dict[str, Tensor]:
    """Give ModelOpt's scales of whole matrices their dimensions: [..., 1], and one a row for FP8."""
    shaped = dict(tensors)
    if "weight_scale_2" in tensors:
        shaped["weight_packed"] = shaped.pop("weight")
        shaped["weight_scale_2"] = tensors["weight_scale_2"].unsqueeze(-1)
    elif "weight_scale" in tensors and tensors["weight_scale"].dim() < dims:
        rows = tensors["weight"].shape[:-1]
        shaped["weight_scale"] = tensors["weight_scale"][..., None, None].expand(*rows, 1)
    return shaped


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave rows; 1-byte dtypes as bytes, since not every operation takes them."""
    as_bytes = gate.element_size() == 1
    pair = (t.view(torch.uint8) if as_bytes else t for t in (gate, up))
    return formats.interleave_gate_up(*pair).view(gate.dtype)


def _joinable(parts: Sequence[dict[str, Tensor]]) -> bool:
    """Whether rows of several Linears make one matrix: NVFP4 needs one global scale."""
    scales = [part[name] for part in parts for name in GLOBAL_SCALES if name in part]
    return all(torch.equal(scale, scales[0]) for scale in scales)


def _weight(parts: Sequence[dict[str, Tensor]], scheme: Scheme | None) -> Weight:
    """Build the kernels' weight from the rows of one or several Linears, or of stacked experts."""

    def rows(suffix: str) -> Tensor:
        tensors = [part[suffix] for part in parts]
        if len(tensors) == 1:
            return tensors[0]
        if tensors[0].element_size() == 1:
            return torch.cat([t.view(torch.uint8) for t in tensors], -2).view(tensors[0].dtype)
        return torch.cat(tensors, -2)

    if scheme is None:
        return weights.bf16(rows("weight"))
    if scheme.kernel in formats.EIGHT_BIT:
        return weights.eight_bit(rows("weight"), rows("weight_scale"))
    packed, blocks = rows("weight_packed"), rows("weight_scale")
    if "weight_scale_2" not in parts[0]:
        return weights.nvfp4(packed, blocks, parts[0]["weight_global_scale"])
    small = parts[0]["weight_scale_2"]  # multiplies: 1 / it would be rounded once more
    factor = 128 * small.reshape(-1, small.shape[-1]).expand(-1, 2)  # of `fused_dequant.weights`
    return replace(
        weights.nvfp4(packed, blocks, torch.ones_like(small)), factor=factor.contiguous()
    )


def _layer(reader: _Reader, config: Any, index: int) -> LayerWeights:
    layer = f"model.decoder.layers.{index}."
    sliding = config.layer_types[index] == "sliding_attention"
    attention = f"{layer}self_attn."
    gate_up, down = reader.experts(f"{layer}experts", config.num_experts)
    heads = ["q_proj", "k_proj", "v_proj"] if sliding else ["q_proj", "k_proj"]
    return LayerWeights(
        sliding=sliding,
        norms={key: reader.plain(f"{layer}{name}.weight") for key, name in NORMS.items()},
        qkv=reader.rows([attention + head for head in heads]),
        q_norm=reader.plain(f"{attention}q_norm.weight"),
        k_norm=reader.plain(f"{attention}k_norm.weight"),
        o=reader.rows([f"{attention}o_proj"])[0],
        gate_up=reader.rows([f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"]),
        down=reader.rows([f"{layer}mlp.down_proj"])[0],
        router=reader.plain(f"{layer}router.proj.weight"),
        router_scale=reader.plain(f"{layer}router.scale"),
        per_expert_scale=reader.plain(f"{layer}router.per_expert_scale"),
        experts_gate_up=in_memory_of_its_own(gate_up),
        experts_down=in_memory_of_its_own(down),
        encoder_scalar=reader.plain(f"model.encoder.language_model.layers.{index}.layer_scalar"),
        decoder_scalar=reader.plain(f"{layer}layer_scalar"),
    )
