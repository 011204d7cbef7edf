"""Plans GPU memory before loading: bytes a slot takes, which layers stay, how many slots there are.

    fixed        embedding, norms, routers, self-conditioning: always on the GPU
    layers       weights of the Linears and experts of layers that stay
    streaming    two buffers, each as large as the largest layer, and temporary memory to pack a layer
    cache        keys and values of all slots; if on the host, of two batches in one layer of each kind
    lanes        rows that batches in lockstep hold between layers; a lane is one batch and its slots
    vocabulary   bf16 logits and probabilities of a few canvases, and partial soft embeddings
    activations  tensors of the rows of one pass
    comparison   float32 logits of one canvas, if models are compared
    beside       what a stage holds besides the models: GPTQ's Hessians and factors
    CUDA         the context, compiled kernels, memory that the allocator cannot use

Results depend on the batch size. So layers leave the GPU first; the batch is halved only if
streaming all layers is not enough. If weights are streamed for several batches, the number of lanes
is chosen so that the fewest bytes cross the link to the GPU. All sizes are computed from shapes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fused_dequant import CELLS
from fused_dequant.launch.targets import Capability
from fused_dequant.weights import layout_for

from quantize.checkpoints.layout import stated_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import layout_bytes
from quantize.errors import ResourceError
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import CODES, SCHEMES, OnDisk, Scheme

# The CUDA context, graphs and compiled kernels: a process that ran every stage held 0.55 GB when it
# began, and 2.6 GB when it ended, after its models were freed (H200, torch 2.11).
CONTEXT_BYTES, BEGUN_BYTES = 2.6e9, 0.5e9
CHUNK = 1152  # prompt tokens of one encoder pass; a picture of 1,120 tokens must fit
SHORT = 256  # prompts of up to this length, or a canvas, share passes of this length
DEFAULT_CONTEXT = 8192  # positions of a sample if the caller does not say how many
CANVASES_A_PIECE = 8  # canvases whose logits are in memory at once
SPLITS = 16  # partial sums of the soft embedding, at most
EMBEDDING = "model.decoder.embed_tokens.weight"
PRODUCT = re.compile(r"model\.decoder\.layers\.(\d+)\.(experts|self_attn\.\w_proj|mlp)\b")
SCALE = ".weight_scale"  # follows the name of every quantized Linear
LANE_ROWS = 5  # rows of hidden size that each canvas position of a lane holds between two layers
MOST_CANVASES = 128  # in lockstep; with more, computing takes longer than copying the weights
HOST_BYTES = 64e9  # of host memory that keys and values may take
MANY = 1000  # batches, if their number has no limit
FLOAT_PASSES = 8  # float32 tensors of a canvas' logits that a comparison holds at once


@dataclass(frozen=True)
class Stack:
    """The bytes that a model's text stack takes on a GPU."""

    name: str
    fixed: float  # of all that always stays: embedding, norms, routers, self-conditioning
    layers: tuple[float, ...]  # of the weights of each layer's products
    packing: float  # taken temporarily while a layer is packed

    @classmethod
    def of(cls, name: str, sizes: Mapping[str, int], *, quantized: bool) -> "Stack":
        """Return the stack of `sizes` (name on disk -> packed bytes); `quantized` doubles `packing`."""
        layers, experts, fixed = Counter[int](), Counter[int](), 0.0
        for tensor, nbytes in sizes.items():
            if part := PRODUCT.match(tensor):
                layers[int(part[1])] += nbytes
                experts[int(part[1])] += nbytes if part[2] == "experts" else 0
            elif tensor.startswith("model.decoder."):
                fixed += nbytes
        way = (8 if quantized else 4) / 3  # fetched, stacked and packed, or fetched and packed
        ordered = tuple(float(layers[index]) for index in sorted(layers))
        return cls(name, fixed, ordered, way * max(experts.values()))

    @property
    def streaming(self) -> float:
        """Bytes that streaming takes, whatever the number of streamed layers."""
        return 2 * max(self.layers) + self.packing


@dataclass(frozen=True)
class Need:
    """What a stage must hold on a GPU; `plan` returns it with fitting `batch`, `lanes`, `on_host`."""

    stage: str  # name of the stage
    stack: Stack  # the model that is on the GPU
    batch: int  # canvases denoised at once
    context: int  # positions that a sample takes, prompt and answer
    compares: bool = False  # whether its logits are compared with another model's
    caches: int = 1  # number of engines that share the weights, each with its own keys and values
    beside: float = 0.0  # bytes that the stage itself holds on the GPU
    batches: int = 1  # number of batches to run, which may go in lockstep
    host: float = HOST_BYTES  # bytes of host memory that keys and values may take
    # Whether `plan` must not halve `batch`, because the stage's results depend on it.
    fixed_batch: bool = False
    # Whether all passes go through one layer before the next: only one layer's keys and values are
    # held, and no logits are made.
    one_layer: bool = False
    lanes: int = 1  # batches that go in lockstep
    on_host: bool = False  # whether keys and values are on the host


@dataclass(frozen=True)
class MemoryPlan:
    """How a stage fits a GPU: how many layers stay on it, and the bytes that each part takes."""

    need: Need  # with the `batch`, `lanes` and `on_host` that fit
    resident: int  # number of layers that stay
    parts: dict[str, float]  # bytes by part; see the module
    moved: float  # bytes of keys and values that one pass of all lanes copies from the host

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def streamed(self) -> float:
        """Bytes of streamed layers that one pass reads from the files."""
        layers = self.need.stack.layers
        return sum(layers) * (1 - self.resident / len(layers))

    @property
    def cost(self) -> tuple[float, int, bool]:
        """What `plan` minimizes: (bytes sent to the GPU per pass of all batches, lanes, `on_host`)."""
        rounds = math.ceil(self.need.batches / self.need.lanes)
        return rounds * (self.streamed + self.moved), self.need.lanes, self.need.on_host


def packed_sizes(
    checkpoint: Checkpoint, mode: ActivationMode | None, target: Capability | None
) -> dict[str, int]:
    """Return each tensor's bytes once packed for an activation mode, by the tensor's name on disk.

    Only `fp8` changes sizes, those of NVFP4 weights; which of them, the kernels for `target` decide.
    """
    tensors, schemes = checkpoint.tensors, stated_schemes(checkpoint.config)
    sizes = {name: info.nbytes for name, info in tensors.items()}
    for module in (name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)):
        scheme = schemes.of(module) if schemes else None
        if scheme and (layout := repacked(scheme, module, mode, target)):
            codes = next(name for name in (f"{module}.{c}" for c in CODES) if name in tensors)
            out, width = tensors[codes].shape
            nbytes = layout_bytes(layout, out, width * 8 // scheme.config_weights[1])
            sizes |= {codes: nbytes, f"{module}{SCALE}": 0}
    return sizes


def repacked(
    scheme: Scheme, module: str, mode: ActivationMode | None, target: Capability | None
) -> OnDisk | None:
    """Return the layout into which a mode packs a Linear's weights; None if their bytes stay.

    `target` is the capability of the GPU that multiplies, None for a CPU.
    """
    layout = layout_for(scheme.kernel, mode, target, dense=".experts." not in module)
    in_bytes = scheme.kernel == "nvfp4" and layout == "fp8"
    return SCHEMES["FP8_DYNAMIC"].compressed if in_bytes else None


def plan(need: Need, config: Mapping[str, Any], budget: float) -> MemoryPlan:
    """Return how a stage fits `budget` bytes of a GPU, which include CONTEXT_BYTES.

    `config` is config.json. Raise ResourceError, with advice, if `budget` is too small even with all
    layers streamed and one canvas at once (or the whole batch, if `fixed_batch`).
    """
    batch = need.batch
    while batch >= 1:
        fits = (_fit(way, config, budget) for way in _ways(replace(need, batch=batch), config))
        if plans := [fitting for fitting in fits if fitting is not None]:
            return min(plans, key=lambda fitting: fitting.cost)
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


def _ways(need: Need, config: Mapping[str, Any]) -> Iterator[Need]:
    """Yield `need` with every possible number of lanes, with its cache on the GPU and on the host."""
    cells = need.batch * cache_bytes(config, need.context)
    for lanes in range(1, max(1, min(need.batches, MOST_CANVASES // need.batch)) + 1):
        yield replace(need, lanes=lanes)
        if need.batches > 1 and lanes * cells <= need.host:
            yield replace(need, lanes=lanes, on_host=True)


def least_bytes(need: Need, config: Mapping[str, Any]) -> float:
    """Return the bytes of a stage with all layers streamed, for one canvas or the fixed batch."""
    one = need if need.fixed_batch else replace(need, batch=1)
    least = min(sum(_parts(way, config).values()) for way in _ways(one, config))
    return least + need.stack.fixed + need.stack.streaming


def _fit(need: Need, config: Mapping[str, Any], budget: float) -> MemoryPlan | None:
    """Plan to keep all layers, or as many as fit beside streaming; None if not even streaming fits."""
    parts, stack = _parts(need, config), need.stack
    free = budget - sum(parts.values()) - stack.fixed
    kept, layers, streaming = len(stack.layers), sum(stack.layers), 0.0
    if free < layers:
        streaming = stack.streaming
        if free < streaming:
            return None
        kept = min(kept - 1, int((free - streaming) / max(stack.layers)))
        layers = kept * max(stack.layers)
    weights = {"fixed": stack.fixed, "layers": layers, "streaming": streaming}
    moved = need.lanes * need.batch * _seen_bytes(config, need.context) if need.on_host else 0.0
    return MemoryPlan(need, kept, weights | parts, moved)


def _parts(need: Need, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of all parts except weights."""
    text, L = config["text_config"], config["canvas_length"]
    V, H = text["vocab_size"], text["hidden_size"]
    rows, pieces = need.batch * max(L, min(SHORT, need.context)), min(need.batch, CANVASES_A_PIECE)
    passed = max(2 * rows, min(max(CHUNK, L), need.context))  # a step may encode as many canvases
    heads = text["num_attention_heads"] * text["global_head_dim"]
    experts = text["top_k_experts"] * (2 * H + 3 * text["moe_intermediate_size"])
    row_bytes = 2 * (10 * H + experts + 4 * text["intermediate_size"] + 4 * heads)
    layers = layer_cache_bytes(config, need.context)
    cache = need.caches * need.lanes * (max if need.one_layer else sum)(layers)
    if need.on_host:
        cache = 2 * sum(set(layers))  # a sliding and a full layer
    parts = {
        "cache": need.batch * cache,
        "vocabulary": 0 if need.one_layer else pieces * L * (4 * V + 4 * SPLITS * H),
        "activations": passed * row_bytes,
        "CUDA": CONTEXT_BYTES,
        "lanes": need.lanes * rows * LANE_ROWS * 2 * H if need.lanes > 1 else 0,
        "comparison": 4 * FLOAT_PASSES * L * V if need.compares else 0,
        "beside": need.beside,
    }
    return {name: float(value) for name, value in parts.items()}


def cache_bytes(config: Mapping[str, Any], context: int) -> int:
    """Return the bytes of one slot's keys and values in all layers, as `Cache.allocate` makes them."""
    return sum(layer_cache_bytes(config, context))


def layer_cache_bytes(config: Mapping[str, Any], context: int) -> list[int]:
    """Return the bytes of one slot's keys and values in each layer."""
    full = rounded_up(context, CELLS)
    window: int = config["text_config"]["sliding_window"]
    ring = min(full, rounded_up(window - 1 + chunk_of(config["canvas_length"]), CELLS))
    return [position * (ring if sliding else full) for position, sliding in _position_bytes(config)]


def _seen_bytes(config: Mapping[str, Any], context: int) -> float:
    """Return the bytes of a slot that a pass reads, averaged while its sample grows to `context`."""
    window = min(config["text_config"]["sliding_window"], context)
    return sum(
        position * (window if sliding else context / 2)
        for position, sliding in _position_bytes(config)
    )


def _position_bytes(config: Mapping[str, Any]) -> list[tuple[int, bool]]:
    """Return, by layer, the bytes of a position's keys and values, and whether the layer slides."""
    text = config["text_config"]
    sliding_heads = text["num_key_value_heads"] * text["head_dim"]
    other = text["num_global_key_value_heads"] * text["global_head_dim"]
    sliding = [kind == "sliding_attention" for kind in text["layer_types"]]
    return [(4 * (sliding_heads if slides else other), slides) for slides in sliding]


def chunk_of(canvas_length: int) -> int:
    """Return the most tokens that one encoder pass adds to a sequence: at least two canvases."""
    return max(CHUNK, 2 * canvas_length)


def rounded_up(count: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
