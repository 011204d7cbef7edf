"""Plans GPU memory before loading: layers that stay or are streamed, and how few canvases at once.

    fixed        embedding, norms, routers, self-conditioning: always on the GPU
    layers       the products' weights of layers that stay
    streaming    two slots of the largest streamed layer, and what packing a layer takes
    cache        keys and values of every slot
    vocabulary   bf16 logits and probabilities of a piece of the rows, partial soft embeddings
    activations  tensors of one pass' rows
    comparison   float32 logits of one canvas, where models are compared
    beside       what a stage holds beside the models: GPTQ's Hessians and factors
    CUDA         the context, compiled kernels, what the allocator cannot use

A batch is part of a result's conditions, so layers leave the GPU first; the batch is halved only where
that is not enough. Bytes are computed from shapes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantize.checkpoints.layout import stated_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import layout_bytes
from quantize.errors import ResourceError
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import CODES, OnDisk, Scheme

# The CUDA context, graphs and compiled kernels: a process that ran every stage still had 2.6 GB when it
# ended, its models gone (H200, torch 2.11), and 0.55 GB when it began.
CONTEXT_BYTES, BEGUN_BYTES = 2.6e9, 0.5e9
CHUNK = 1152  # prompt tokens of one encoder pass; a picture of 1,120 tokens must fit
SHORT = 256  # prompts up to here, or to a canvas, are encoded together in a pass of this length
DEFAULT_CONTEXT = 8192  # positions of a sample where nobody says how many
CANVASES_A_PIECE = 8  # whose logits are there at once
SPLITS = 16  # partial sums of the soft embedding, at most
EMBEDDING = "model.decoder.embed_tokens.weight"
PRODUCT = re.compile(r"model\.decoder\.layers\.(\d+)\.(experts|self_attn\.\w_proj|mlp)\b")
SCALE = ".weight_scale"  # behind the name of every quantized Linear
FLOAT_PASSES = 8  # float32 tensors of a canvas' logits that a comparison holds at once


@dataclass(frozen=True)
class Stack:
    """A text stack's bytes on a GPU: fixed ones, each layer's products, what packing one takes."""

    name: str
    fixed: float
    layers: tuple[float, ...]
    packing: float

    @classmethod
    def of(cls, name: str, sizes: Mapping[str, int], *, quantized: bool) -> "Stack":
        """Sum `sizes`, bytes by the on-disk name of a tensor or of the one that it was made from."""
        layers: dict[int, float] = {}
        experts: dict[int, float] = {}
        fixed = 0.0
        for tensor, nbytes in sizes.items():
            if (found := PRODUCT.match(tensor)) is None:
                fixed += nbytes if tensor.startswith("model.decoder.") else 0
                continue
            index = int(found[1])
            layers[index] = layers.get(index, 0) + nbytes
            if found[2] == "experts":
                experts[index] = experts.get(index, 0) + nbytes
        way = (8 if quantized else 4) / 3  # fetched, stacked and packed, or fetched and packed
        ordered = tuple(layers[index] for index in sorted(layers))
        return cls(name, fixed, ordered, way * max(experts.values()))

    @property
    def streaming(self) -> float:
        """Bytes that streaming takes, however many layers are streamed."""
        return 2 * max(self.layers) + self.packing


@dataclass(frozen=True)
class Need:
    """What a stage asks of a GPU at once.

    Attributes:
        stage: name of the stage.
        stack: the model that is on the GPU.
        batch: canvases denoised at once.
        context: positions a sample takes, prompt and answer.
        compares: whether its logits are compared with another model's.
        caches: engines of the model, each with keys and values of its own.
        beside: bytes that the stage itself holds.
        fixed_batch: whether a result depends on the batch, so that it is not halved where it does not
            fit.
        one_layer: whether passes go through a layer at a time: keys and values are those of one, and no
            logits are made.
    """

    stage: str
    stack: Stack
    batch: int
    context: int
    compares: bool = False
    caches: int = 1
    beside: float = 0.0
    fixed_batch: bool = False
    one_layer: bool = False


@dataclass(frozen=True)
class Plan:
    """How a stage fits a GPU: resident layers, canvases at once, bytes by part."""

    need: Need
    batch: int
    resident: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def streamed(self) -> float:
        """Bytes that one pass takes from the files."""
        layers = self.need.stack.layers
        return sum(layers) * (1 - self.resident / len(layers))


def packed_sizes(
    checkpoint: Checkpoint, mode: ActivationMode | None, *, hopper: bool
) -> dict[str, int]:
    """Return the bytes that a checkpoint's tensors take once packed for an activation mode, by name.

    Args:
        checkpoint: BF16 or quantized.
        mode: the activation mode; only `fp8` packs weights in its own way.
        hopper: whether the GPU is a Hopper, whose kernels keep the experts' weights in 4 bits.
    """
    tensors, schemes = checkpoint.tensors, stated_schemes(checkpoint.config)
    sizes = {name: info.nbytes for name, info in tensors.items()}
    for module in (name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)):
        scheme = schemes.of(module) if schemes else None
        if scheme and (layout := repacked(scheme, module, mode, hopper=hopper)):
            codes = next(name for name in (f"{module}.{c}" for c in CODES) if name in tensors)
            out, width = tensors[codes].shape
            nbytes = layout_bytes(layout, out, width * 8 // scheme.config_weights[1])
            sizes |= {codes: nbytes, f"{module}{SCALE}": 0}
    return sizes


def repacked(
    scheme: Scheme, module: str, mode: ActivationMode | None, *, hopper: bool
) -> OnDisk | None:
    """Return the layout that a mode packs a Linear's weights in, None where it is that of the disk."""
    multiplied = scheme if mode is None else scheme.as_multiplied(mode)
    if multiplied.packed is scheme.packed or (hopper and ".experts." in module):
        return None
    return multiplied.packed


def plan(need: Need, config: Mapping[str, Any], budget: float) -> Plan:
    """Fit a stage into `budget` bytes of a GPU.

    Args:
        need: what the stage asks for.
        config: config.json of the model.
        budget: bytes of GPU memory, CONTEXT_BYTES included.

    Raises:
        ResourceError: not even one canvas over streamed layers fits; the message says what would.
    """
    batch = need.batch
    while batch >= 1:
        found = _fit(replace(need, batch=batch), config, budget)
        if found is not None:
            return replace(found, need=need)
        if need.fixed_batch:
            break
        batch //= 2
    least, canvases, smaller = least_bytes(need, config), "one canvas", ""
    if need.fixed_batch and need.batch > 1:
        canvases = f"a batch of {need.batch} canvases"
        smaller = ", or a smaller `batch_size` in the recipe's calibration"
    raise ResourceError(
        f"{need.stage}: there are {budget / 1e9:.1f} GB of GPU memory, and {canvases} of "
        f"{need.context:,} positions over streamed layers needs {least / 1e9:.1f} GB; use a larger "
        f"GPU, free this one, or raise --gpu-memory{smaller}"
    )


def fitted(
    need: Need, config: Mapping[str, Any], budget: float, batches: int | None = None
) -> tuple[Plan, int]:
    """Fit a stage as `plan` does; return also how many of `batches` denoise in lockstep.

    That is one unless weights are streamed. Each has keys and values of its own, which leave less room
    for layers that stay. What counts is what all steps stream together: a pass for each round of
    batches. Of equal ones the fewest lanes are taken.

    Raises:
        ResourceError: as in `plan`.
    """
    found = plan(need, config, budget)
    if batches is None or not found.streamed:
        return found, 1
    choices = [
        (each.streamed * math.ceil(batches / lanes), lanes, each)
        for lanes in range(1, batches + 1)
        if (each := _fit(replace(need, caches=need.caches * lanes), config, budget))
    ]
    _, lanes, found = min(choices, key=lambda choice: choice[:2])
    return found, lanes


def least_bytes(need: Need, config: Mapping[str, Any]) -> float:
    """Return the bytes that a stage needs with one canvas, or its fixed batch, over streamed layers."""
    one = _parts(need if need.fixed_batch else replace(need, batch=1), config)
    return sum(one.values()) + need.stack.fixed + need.stack.streaming


def _fit(need: Need, config: Mapping[str, Any], budget: float) -> Plan | None:
    """Keep all layers, or as many as fit beside what streaming takes; None where none streams."""
    parts, stack = _parts(need, config), need.stack
    left = budget - sum(parts.values()) - stack.fixed
    weights = {"fixed": stack.fixed, "layers": float(sum(stack.layers)), "streaming": 0.0}
    if left >= weights["layers"]:
        return Plan(need, need.batch, len(stack.layers), weights | parts)
    left -= stack.streaming
    if left < 0:
        return None
    kept = min(len(stack.layers) - 1, int(left / max(stack.layers)))
    weights |= {"layers": kept * max(stack.layers), "streaming": stack.streaming}
    return Plan(need, need.batch, kept, weights | parts)


def _parts(need: Need, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of everything but weights."""
    text, L = config["text_config"], config["canvas_length"]
    V, H = text["vocab_size"], text["hidden_size"]
    rows = need.batch * max(L, min(SHORT, need.context))
    passed = max(2 * rows, min(max(CHUNK, L), need.context))  # a step may encode as many canvases
    heads = text["num_attention_heads"] * (text.get("global_head_dim") or text["head_dim"])
    experts = text["top_k_experts"] * (2 * H + 3 * text["moe_intermediate_size"])
    each = 2 * (10 * H + experts + 4 * text["intermediate_size"] + 4 * heads)
    cache = (max if need.one_layer else sum)(layer_cache_bytes(config, need.context))
    parts = {
        "cache": need.caches * need.batch * cache,
        "vocabulary": 0
        if need.one_layer
        else min(need.batch, CANVASES_A_PIECE) * L * (4 * V + 4 * SPLITS * H),
        "activations": passed * each,
        "CUDA": CONTEXT_BYTES,
    }
    if need.compares:
        parts["comparison"] = 4 * FLOAT_PASSES * L * V
    if need.beside:
        parts["beside"] = need.beside
    return {name: float(value) for name, value in parts.items()}


def cache_bytes(config: Mapping[str, Any], context: int) -> int:
    """Return the bytes of one slot's keys and values, as `fused.cells.Cache` allocates them."""
    return sum(layer_cache_bytes(config, context))


def layer_cache_bytes(config: Mapping[str, Any], context: int) -> list[int]:
    """Return those bytes by layer."""
    text = config["text_config"]
    full = _rounded_up(context)
    ring = min(
        full, _rounded_up(text["sliding_window"] - 1 + max(CHUNK, 2 * config["canvas_length"]))
    )
    sliding = 4 * ring * text["num_key_value_heads"] * text["head_dim"]
    heads = text.get("num_global_key_value_heads") or text["num_key_value_heads"]
    whole = 4 * full * heads * (text.get("global_head_dim") or text["head_dim"])
    return [sliding if kind == "sliding_attention" else whole for kind in text["layer_types"]]


def _rounded_up(cells: int) -> int:
    from fused_dequant import CELLS  # here: who only imports this module does not want triton

    return -(-cells // CELLS) * CELLS
