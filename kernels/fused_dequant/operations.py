"""The package's operations: kernels compute them on a GPU, torch elsewhere (`reference`, `canvas`).

    linear              x @ w.T
    routed_experts      the outputs of each token's experts, not yet summed
    lm_head             bf16 logits
    soft_embedding      softmax(logits / T) @ embedding
    look                on Hopper: lm_head and `sample` in one; stores what `soft_embedding_of` reads

    begin               embeddings, and the first layer's input
    attention_heads     norms and rope of q, k, v; keys and values to the cache
    attend              attention over cached positions
    after_attention     the residual sum, and the inputs of dense MLP, experts and router
    choose_experts      the router: expert ids and routing weights
    after_experts       both branches joined, and the next layer's input
    scaled_norm, gelu_mul   self-conditioning's norm and activation; gelu_mul serves a bf16 MLP too

    sample, accept      one step of the sampler, on a `canvas.CanvasState`

A product reads an `Activation`: bf16 rows, or quantized rows with scales. Kernels and torch compute in
float32 and round results to bf16. On a CPU, `routed_experts` does not round its results. A scheme that
the device cannot run raises ValueError: nothing falls back silently to a slower path. Launches depend
only on shapes and can be captured in a CUDA graph. Triton and modules with kernels are imported when
needed. On a GPU, a function decorated with `with_kernels(module)` calls its namesake in `module`.

`routed_experts` on a GPU, for M tokens with topk choices each; a slot is one choice of one token:

    route                expert ids -> blocks of slots, sorted by expert          1 launch
    gate_up + gelu_mul   [slots, I] bf16, activation in the epilogue              1
    [quantize_rows]      hidden rows to 8 bits or NVFP4, if `down` needs them     1
    down * weight        [slots, H] bf16                                          1

Both products read the same blocks, so their launch configurations have equal rows per block.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fused_dequant import reference
from fused_dequant.formats import Activation
from fused_dequant.inputs.activations import in_torch
from fused_dequant.launch.dispatch import launches
from fused_dequant.launch.targets import is_hopper
from fused_dequant.sampler import canvas
from fused_dequant.sampler.canvas import CanvasState, Draw, Probabilities, Rules
from fused_dequant.weights import tuning
from fused_dequant.weights.kept import in_float32
from fused_dequant.weights.weight import Weight

CELLS = 128  # a cache's capacity is a multiple of this: no block of positions wraps around
Norms = tuple[Tensor, Tensor, Tensor, Tensor]
P = ParamSpec("P")
R = TypeVar("R")


def kernels_of(module: str, device: torch.device) -> Any:
    """Return the module of kernels named `module`, or None if torch computes on `device`."""
    return import_module(f"fused_dequant.{module}") if launches(device) else None


def with_kernels(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: on a GPU, `module`'s function of the same name replaces the decorated one."""

    def decorate(in_torch: Callable[P, R]) -> Callable[P, R]:
        @wraps(in_torch)
        def operation(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            device = (first[0] if isinstance(first, Draw) else first).device
            kernels = kernels_of(module, device)
            work = getattr(kernels, in_torch.__name__) if kernels else in_torch
            return work(*args, **kwargs)

        return operation

    return decorate


def linear(x: Tensor, weight: Weight, scale: Tensor | None = None) -> Tensor:
    """Return x @ weight.T, bf16 [..., N], for x [..., K] and a dense weight (E = 1).

    Without `scale`, x is quantized here if the scheme needs it. With `scale`, x is already quantized.
    """
    rows, scale = weight.reads(x.flatten(0, -2), scale)
    y = weight.multiply(rows, scale, weight.config("linear", len(rows)))
    return y.unflatten(0, x.shape[:-1])


def routed_experts(
    x: Tensor,
    scale: Tensor | None,
    expert_ids: Tensor,
    routing_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    between: Callable[[Tensor], Activation] | None = None,
) -> Tensor:
    """Return each chosen expert's output times its routing weight, [M, topk, H], not summed over topk.

    x and `scale` are as in `linear`; x is [M, H], or [M * topk, H] with one row per choice.
    `expert_ids` int and `routing_weights` are [M, topk]. gate_up [E, 2I, H] is interleaved, down is
    [E, H, I]. Raise ValueError if their schemes differ. `between` turns the hidden rows [M * topk, I]
    into the input of `down`; if None, `down.reads` does. Hidden rows and output are bf16 on a GPU,
    float32 elsewhere. If an id is not in 0..E-1, a GPU leaves its row unwritten, a CPU writes 0.
    """
    if gate_up.scheme != down.scheme:
        raise ValueError(f"gate_up is {gate_up.scheme} and down {down.scheme}: one scheme for both")
    rows, scale = gate_up.reads(x, scale)
    up, out = (weight.config("experts", len(expert_ids)) for weight in (gate_up, down))
    # A row for each choice makes each choice a token of its own; the slots stay the same.
    blocks = expert_ids.reshape(len(rows), -1)
    if routing := kernels_of("products.routing", x.device):
        blocks = routing.route(blocks.contiguous(), gate_up.shape[0], tuning.block_rows(up))
    hidden, scale = (between or down.reads)(gate_up.multiply(rows, scale, up, blocks))
    y = down.multiply(hidden, scale, out, blocks, routing_weights.float().flatten())
    return y.view(*expert_ids.shape, -1)


def lm_head(x: Tensor, embedding: Tensor, softcap: float, out: Tensor | None = None) -> Tensor:
    """Return softcap * tanh(x @ embedding.T / softcap), bf16 [M, V], for x [M, H], embedding [V, H].

    If given, `out` gets the logits; a CUDA graph then copies no 134 MB. Raise ValueError if H differs.
    """
    if x.shape[1] != embedding.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit an embedding {tuple(embedding.shape)}")
    if kernels := kernels_of("vocabulary.dense", x.device):
        return kernels.lm_head(x.contiguous(), embedding, softcap, out)
    logits = reference.lm_head(x, in_float32(embedding), softcap).to(torch.bfloat16)
    return logits if out is None else out.copy_(logits)


def soft_embedding(
    logits: Tensor, embedding: Tensor, inverse_temperature: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return softmax(logits / T) @ embedding, bf16 [M, H], in `out` if given.

    logits are bf16 or f32 [M, V], embedding bf16 [V, H]; raise ValueError if V differs.
    inverse_temperature f32 [M] is each row's 1 / T, and may change between replays of a CUDA graph.
    """
    if logits.shape[1] != len(embedding):
        raise ValueError(
            f"logits {tuple(logits.shape)} and embedding {tuple(embedding.shape)}: V differs"
        )
    if kernels := kernels_of("vocabulary.dense", logits.device):
        return kernels.soft_embedding(logits.contiguous(), embedding, inverse_temperature, out)
    soft = reference.soft_embedding(logits, in_float32(embedding), inverse_temperature)
    return soft.to(torch.bfloat16) if out is None else out.copy_(soft)


def look_runs(device: torch.device, softcap: float, coldest: float) -> bool:
    """Return whether `look` supports `device`, `softcap`, and all temperatures T >= `coldest`."""
    if not is_hopper(device):
        return False
    from fused_dequant.vocabulary import dense_hopper

    return dense_hopper.holds(softcap, coldest)


def look(
    x: Tensor,
    embedding: Tensor,
    softcap: float,
    state: CanvasState,
    schedule: Tensor,
    logits: Tensor,
    probabilities: Probabilities,
) -> Draw:
    """Run `lm_head` on x [B * L, H], then `sample`; fill `logits`, `probabilities`; return the draw.

    Call it only if `look_runs` is true. `look` and `sample` sum in different orders: draws may differ.
    """
    from fused_dequant.vocabulary import dense

    return dense.look(x.contiguous(), embedding, softcap, state, schedule, logits, probabilities)


def soft_embedding_of(
    probabilities: Probabilities, embedding: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return `soft_embedding`, bf16 [M, H], from the `probabilities` that `look` wrote."""
    from fused_dequant.vocabulary import dense

    return dense.soft_embedding_of(probabilities, embedding, out)


@with_kernels("layer.residual")
def begin(
    tokens: Tensor,
    embedding: Tensor,
    factor: float,
    update: Tensor | None,
    w_next: Tensor,
    decoded: int,
    scheme: str,
    eps: float = 1e-6,
    shared: Tensor | None = None,
) -> tuple[Tensor, Activation]:
    """Embed tokens [M]; return the residual h bf16 [M, H], and norm(h) as the first product's input.

    h is embedding[token] * factor. The first `decoded` rows are the decoder's. If given, `update` bf16
    [decoded, H] is added to them; then they are divided by their root mean square. w_next [H] is the
    norm's weight. `scheme` is the scheme of the product's weight. `shared` f32 [1] is the global
    scale if the product reads NVFP4 rows, else None.
    """
    h, x = reference.begin(tokens, embedding, factor, update, w_next, decoded, eps)
    return h, in_torch(x, scheme, shared)


def attention_heads(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    q_heads: int,
    eps: float = 1e-6,
) -> Tensor:
    """Apply norms and rope to the heads in qkv; return q bf16 [M, q_heads, D]; write k, v to the cache.

    qkv is bf16 [M, (q_heads + 2 kv_heads) * D]. If it has no v heads, v is made from k before k's
    norm. Weights are [D], cos and sin [M, D / 2]. The cache is keys and values, bf16 [slots,
    capacity, kv_heads, D]. slots int32 [B] has a slot for each sequence of M / B rows. Row m is
    written at positions[m] % capacity; positions is int32 [M]. Raise ValueError for other shapes,
    or if capacity is not a multiple of CELLS.
    """
    _, capacity, kv_heads, D = keys.shape
    if qkv.shape[1] not in ((q_heads + kv_heads) * D, (q_heads + 2 * kv_heads) * D):
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit {q_heads} + {kv_heads} heads of {D}")
    _check_cells(qkv, keys, slots)
    if kernels := kernels_of("attention.attend", qkv.device):
        return kernels.attention_heads(
            qkv.contiguous(), q_weight, k_weight, cos, sin, slots, positions, keys, values,
            q_heads, eps,
        )  # fmt: skip
    q, k, v = reference.attention_heads(qkv, q_weight, k_weight, cos, sin, q_heads, kv_heads, eps)
    place = slots.repeat_interleave(len(qkv) // len(slots)).long(), positions.long() % capacity
    keys[place], values[place] = k.to(keys.dtype), v.to(values.dtype)
    return q.to(qkv.dtype)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    last: Tensor,
    scheme: str,
    shared: Tensor | None = None,
) -> Activation:
    """Return softmax(q @ K.T) @ V of each row m over the cached positions first[m] .. last[m].

    q is bf16 [M, q_heads, D]. first and last are int32 [M], inclusive. If first > last, the row is
    zero. keys, values and slots are as in `attention_heads`, with the same ValueError. The result [M,
    q_heads * D] is rounded to bf16, then quantized if `scheme` reads quantized rows; `shared` is as in
    `begin`. Values must be below 65,504, because a row's partial results may be stored in float16.
    """
    _check_cells(q, keys, slots)
    if kernels := kernels_of("attention.attend", q.device):
        return kernels.attend(q.contiguous(), keys, values, slots, first, last, scheme, shared)
    rows = reference.attend(q.float(), keys, values, slots, first, last).to(q.dtype)
    return in_torch(rows.flatten(1), scheme, shared)


def _check_cells(rows: Tensor, keys: Tensor, slots: Tensor) -> None:
    if keys.shape[1] % CELLS or len(rows) % len(slots):
        raise ValueError(
            f"capacity {keys.shape[1]} is not a multiple of {CELLS}, or M not one of slots"
        )


@with_kernels("layer.residual")
def after_attention(
    h: Tensor,
    o: Tensor,
    norms: Norms,
    schemes: tuple[str, str],
    eps: float = 1e-6,
    shared: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Activation, Activation, Tensor]:
    """Return the new h = h + norm(o), and the inputs of dense MLP, experts and router made from it.

    h and attention's output o are bf16 [M, H]. `norms` are four weights [H]: for the norm of o, for
    the dense MLP's input, for the experts' input, and the router's scale. The pairs `schemes` and
    `shared` are for (dense MLP, experts), each value as in `begin`.
    """
    h, dense, experts, router = reference.after_attention(h, o, norms, eps)
    x_dense, x_experts = (
        in_torch(*branch) for branch in zip((dense, experts), schemes, shared, strict=True)
    )
    return h, x_dense, x_experts, router


@with_kernels("layer.router")
def choose_experts(
    x: Tensor, router: Tensor, per_expert_scale: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """Return each row's topk expert ids (int32, ascending) and routing weights (f32), both [M, topk].

    x is bf16 [M, H], router bf16 [E, H], per_expert_scale bf16 [E].
    """
    return reference.choose_experts(x, router, per_expert_scale, topk)


@with_kernels("layer.residual")
def after_experts(
    h: Tensor,
    dense: Tensor,
    routed: Tensor,
    norms: Norms,
    scalars: tuple[Tensor, Tensor],
    decoded: int,
    scheme: str,
    eps: float = 1e-6,
    shared: Tensor | None = None,
) -> tuple[Tensor, Activation]:
    """Add the outputs of dense MLP and experts to h, with norms; return h and the next layer's input.

    h and dense are bf16 [M, H]; routed [M, topk, H] is from `routed_experts`. `norms` are weights [H]
    of four norms: of `dense`, of the experts' sum, of the sum of both, and of the next layer's input.
    Before the last norm, each row of h is multiplied by a scalar [1]: scalars[0] in the first `decoded`
    rows (the decoder's), scalars[1] in the others (the encoder's). `scheme`, `shared`: see `begin`.
    """
    h, x = reference.after_experts(h, dense, routed, norms, scalars, decoded, eps)
    return h, in_torch(x, scheme, shared)


@with_kernels("layer.residual")
def scaled_norm(x: Tensor, factor: float, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the RMS norm of x * factor, times `weight` [H]; x and the result are bf16 [M, H]."""
    return reference.rms_norm((x * factor).float(), weight, eps).to(x.dtype)


@with_kernels("layer.residual")
def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return bf16(gelu_tanh(gate)) * up, bf16 [M, I]; gate_up bf16 [M, 2I] has gate, then up."""
    return reference.gelu_mul(*gate_up.chunk(2, -1))


def sample(logits: Tensor, state: CanvasState, schedule: Tensor) -> Draw:
    """Draw the tokens of a denoising step; logits bf16 or f32 [B, L, V] are not yet divided by T.

    `schedule` f32 [N] has the temperature T of each step, step 1 first. Raise ValueError if the
    canvas is not [B, L]. Kernels and torch sum the CDF in different orders. They may draw different
    tokens if a random number is within rounding of the boundary between two tokens.
    """
    if logits.dim() != 3 or logits.shape[:2] != state.canvas.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit a canvas {tuple(state.canvas.shape)}"
        )
    if kernels := kernels_of("sampler.sampling", logits.device):
        return kernels.sample(logits.contiguous(), state, schedule)
    return canvas.sample(logits, state, schedule)


@with_kernels("sampler.sampling")
def accept(draw: Draw, state: CanvasState, schedule: Tensor, rules: Rules) -> None:
    """Accept tokens of `draw` into `state`, except in sequences finished or past the last step."""
    canvas.accept(draw, state, schedule, rules)
