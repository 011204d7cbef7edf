"""The operations: `torch.library` custom ops, dispatched by device, and the functions that call them.

    linear(x, weight)                                   x @ w.T
    experts(x, ids, routing_weights, gate_up, down)     routed gated experts
    routed_experts(...)                                 the same before a token's choices are added up
    quantize_rows(x, scheme)                            dynamic FP8 or INT8, gated first or not
    linear_quantized(q, scale, weight)                  x @ w.T of activations already quantized
    lm_head(x, embedding, softcap)                      bf16 logits
    soft_embedding(logits, embedding, 1 / T)            softmax(logits / T) @ embedding

On CUDA the Triton kernels run, elsewhere `reference` in float32, rounded to bf16 at the same
places. Each op has a fake kernel, so `torch.compile` and `opcheck` see shapes without running
anything. Outputs are bf16. A scheme the device cannot run raises ValueError naming both: nothing
falls back silently to a slower path.
"""

# torch.library's decorators carry no types.
# pyright: reportUntypedFunctionDecorator=false

import torch

from fused_dequant import formats, reference, weights
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.weights import Weight

# Lowest compute capability with the instructions of a scheme; fragments are for sm_90 alone.
_NEEDS = {
    "bf16": (8, 0),
    "int8": (8, 0),
    "nvfp4": (8, 0),
    "fp8": (8, 9),
    "nvfp4_fragments": (9, 0),
    "nvfp4_w4a4": (10, 0),
}

OptionalTensor = torch.Tensor | None


def require(scheme: str, device: torch.device) -> None:
    """Raise ValueError unless `device` can run `scheme`."""
    if scheme not in _NEEDS:
        raise ValueError(f"unknown scheme {scheme!r}; known: {', '.join(_NEEDS)}")
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    exact = scheme == "nvfp4_fragments"
    if capability < _NEEDS[scheme] or (exact and capability != _NEEDS[scheme]):
        need = ".".join(map(str, _NEEDS[scheme])) + ("" if exact else " or newer")
        has = ".".join(map(str, capability))
        raise ValueError(
            f"scheme {scheme} needs compute capability {need}; "
            f"{torch.cuda.get_device_name(device)} has {has}. Use another scheme for this device."
        )


def _check_width(x: torch.Tensor, weight: Weight) -> None:
    if x.shape[-1] != weight.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of K = {weight.shape[2]}")


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """X bf16 [..., K], dense weight (E = 1) -> bf16 [..., N]. Quantizes x if the scheme says so."""
    _check_width(x, weight)
    w = weight
    y = linear_op(x.flatten(0, -2), w.data, w.scale, w.factor, w.input_scale, w.scheme)
    return y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y


def linear_quantized(q: torch.Tensor, scale: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Q e4m3 or int8 [M, K] and scale f32 [M] from `quantize_rows`, weight likewise -> bf16 [M, N]."""
    _check_width(q, weight)
    if weight.scale is None or EIGHT_BIT.get(weight.scheme) != q.dtype:
        raise ValueError(f"activations of {q.dtype} do not fit a weight of scheme {weight.scheme}")
    return linear_quantized_op(q, scale, weight.data, weight.scale, weight.scheme)


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
) -> torch.Tensor:
    """X bf16 [M, H], expert_ids int [M, topk], routing_weights [M, topk] -> bf16 [M, H].

    gate_up is [E, 2I, H], interleaved; down [E, H, I], of the same scheme. An id outside 0..E-1
    adds nothing. No host synchronisation: the launch depends on shapes alone and can be captured
    in a CUDA graph.
    """
    return _experts(x, None, expert_ids, routing_weights, gate_up, down, combine=True)


def routed_experts(
    x: torch.Tensor,
    x_scale: OptionalTensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
) -> torch.Tensor:
    """Like `experts`, but bf16 [M, C, H], addends that `layer.after_experts` sums over C.

    x may come quantized as the scheme wants it, e4m3 or int8 with its scales f32 [M].
    C is topk on a GPU, where an id outside 0..E-1 leaves its row unwritten; elsewhere 1, the sum.
    """
    return _experts(x, x_scale, expert_ids, routing_weights, gate_up, down, combine=False)


def _experts(
    x: torch.Tensor,
    x_scale: OptionalTensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Weight,
    down: Weight,
    *,
    combine: bool,
) -> torch.Tensor:
    _check_width(x, up)
    if up.scheme != down.scheme:
        raise ValueError(f"gate_up is {up.scheme} and down {down.scheme}: one scheme for both")
    if x_scale is not None and EIGHT_BIT.get(up.scheme) != x.dtype:
        raise ValueError(f"activations of {x.dtype} do not fit a weight of scheme {up.scheme}")
    return experts_op(
        x, x_scale, ids, weights, up.data, up.scale, up.factor, up.input_scale,
        down.data, down.scale, down.factor, down.input_scale, up.scheme, combine,
    )  # fmt: skip


def quantize_rows(
    x: torch.Tensor, scheme: str, *, gelu_mul: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """X bf16 [M, K] -> (e4m3 or int8 [M, K], f32 [M]).

    `gelu_mul`: x is [M, 2K], gate first, and gelu_tanh(gate) * up is quantized.
    """
    if scheme not in EIGHT_BIT:
        raise ValueError(f"activations are quantized to fp8 or int8, not {scheme}")
    return quantize_rows_op(x, gelu_mul, scheme)


def lm_head(
    x: torch.Tensor, embedding: torch.Tensor, softcap: float, out: OptionalTensor = None
) -> torch.Tensor:
    """X bf16 [M, H], embedding bf16 [V, H] -> softcap * tanh(x @ embedding.T / softcap), bf16 [M, V].

    `out` receives the logits: 134 MB that a captured step then does not have to copy.
    """
    if x.shape[1] != embedding.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit an embedding {tuple(embedding.shape)}")
    if not x.is_cuda:
        logits = reference.lm_head(x, embedding, softcap).to(torch.bfloat16)
        return logits if out is None else out.copy_(logits)
    from fused_dequant import launch

    return launch.lm_head(x.contiguous(), embedding, softcap, out)


def soft_embedding(
    logits: torch.Tensor,
    embedding: torch.Tensor,
    inverse_temperature: torch.Tensor | float,
) -> torch.Tensor:
    """Logits bf16 or f32 [M, V], embedding bf16 [V, H] -> softmax(logits / T) @ embedding, bf16 [M, H].

    A tensor f32 [M] holds 1 / T of each row, which a CUDA graph may find changed at each replay.
    """
    if not isinstance(inverse_temperature, torch.Tensor):
        inverse_temperature = torch.full((len(logits),), inverse_temperature, device=logits.device)
    if logits.shape[1] != len(embedding):
        raise ValueError(
            f"logits {tuple(logits.shape)} and embedding {tuple(embedding.shape)}: V differs"
        )
    if not logits.is_cuda:
        return reference.soft_embedding(logits, embedding, inverse_temperature).to(torch.bfloat16)
    from fused_dequant import launch

    return launch.soft_embedding(logits.contiguous(), embedding, inverse_temperature)


@torch.library.custom_op("fused_dequant::linear", mutates_args=(), device_types="cuda")
def linear_op(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: OptionalTensor,
    factor: OptionalTensor,
    input_scale: OptionalTensor,
    scheme: str,
) -> torch.Tensor:
    """CUDA implementation of `linear`."""
    from fused_dequant import launch

    require(scheme, x.device)
    return launch.linear(x.contiguous(), Weight(scheme, data, scale, factor, input_scale))


@linear_op.register_kernel("cpu")
def _(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: OptionalTensor,
    factor: OptionalTensor,
    input_scale: OptionalTensor,
    scheme: str,
) -> torch.Tensor:
    weight = Weight(scheme, data, scale, factor, input_scale)
    x = _round_activation(x, scheme, input_scale)
    return reference.matmul(x, weights.dequantize(weight)[0]).to(torch.bfloat16)


@linear_op.register_fake
def _(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: OptionalTensor,
    factor: OptionalTensor,
    input_scale: OptionalTensor,
    scheme: str,
) -> torch.Tensor:
    return x.new_empty(len(x), Weight(scheme, data).shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("fused_dequant::linear_quantized", mutates_args=(), device_types="cuda")
def linear_quantized_op(
    q: torch.Tensor, q_scale: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, scheme: str
) -> torch.Tensor:
    """CUDA implementation of `linear_quantized`."""
    from fused_dequant import launch

    require(scheme, q.device)
    return launch.linear_quantized(q.contiguous(), q_scale, Weight(scheme, data, scale))


@linear_quantized_op.register_kernel("cpu")
def _(
    q: torch.Tensor, q_scale: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, scheme: str
) -> torch.Tensor:
    weight = weights.dequantize(Weight(scheme, data, scale))[0]
    return reference.matmul(q.float() * q_scale[:, None], weight).to(torch.bfloat16)


@linear_quantized_op.register_fake
def _(
    q: torch.Tensor, q_scale: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, scheme: str
) -> torch.Tensor:
    return q.new_empty(len(q), data.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("fused_dequant::experts", mutates_args=(), device_types="cuda")
def experts_op(
    x: torch.Tensor,
    x_scale: OptionalTensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: OptionalTensor,
    gate_up_factor: OptionalTensor,
    gate_up_input_scale: OptionalTensor,
    down: torch.Tensor,
    down_scale: OptionalTensor,
    down_factor: OptionalTensor,
    down_input_scale: OptionalTensor,
    scheme: str,
    combine: bool = True,
) -> torch.Tensor:
    """CUDA implementation of `experts`."""
    from fused_dequant import launch

    require(scheme, x.device)
    return launch.experts(
        x.contiguous(), x_scale, expert_ids.contiguous(), routing_weights.float().contiguous(),
        Weight(scheme, gate_up, gate_up_scale, gate_up_factor, gate_up_input_scale),
        Weight(scheme, down, down_scale, down_factor, down_input_scale), combine=combine,
    )  # fmt: skip


@experts_op.register_kernel("cpu")
def _(
    x: torch.Tensor,
    x_scale: OptionalTensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: OptionalTensor,
    gate_up_factor: OptionalTensor,
    gate_up_input_scale: OptionalTensor,
    down: torch.Tensor,
    down_scale: OptionalTensor,
    down_factor: OptionalTensor,
    down_input_scale: OptionalTensor,
    scheme: str,
    combine: bool = True,
) -> torch.Tensor:
    up = Weight(scheme, gate_up, gate_up_scale, gate_up_factor)
    out = Weight(scheme, down, down_scale, down_factor)
    scales = iter((gate_up_input_scale, down_input_scale) * int(expert_ids.unique().numel()))
    y = reference.experts(
        x.float() if x_scale is None else x.float() * x_scale[:, None],
        weights.dequantize(up), weights.dequantize(out), expert_ids, routing_weights,
        # What is rounded already stays as it is: its largest value is the format's largest again.
        activation=lambda tokens: _round_activation(tokens, scheme, next(scales)),
    )  # fmt: skip
    y = y.to(torch.bfloat16)
    return y if combine else y[:, None]


@experts_op.register_fake
def _(
    x: torch.Tensor,
    x_scale: OptionalTensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: OptionalTensor,
    gate_up_factor: OptionalTensor,
    gate_up_input_scale: OptionalTensor,
    down: torch.Tensor,
    down_scale: OptionalTensor,
    down_factor: OptionalTensor,
    down_input_scale: OptionalTensor,
    scheme: str,
    combine: bool = True,
) -> torch.Tensor:
    if combine:
        return x.new_empty(x.shape, dtype=torch.bfloat16)
    choices = expert_ids.shape[1] if x.is_cuda else 1
    return x.new_empty(len(x), choices, x.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("fused_dequant::quantize_rows", mutates_args=(), device_types="cuda")
def quantize_rows_op(
    x: torch.Tensor, gelu_mul: bool, scheme: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA implementation of `quantize_rows`."""
    from fused_dequant import quantize

    require(scheme, x.device)
    return quantize.quantize_rows(x.contiguous(), EIGHT_BIT[scheme], gelu_mul=gelu_mul)


@quantize_rows_op.register_kernel("cpu")
def _(x: torch.Tensor, gelu_mul: bool, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    h = x.float()
    if gelu_mul:
        h = reference.gelu_mul(*h.chunk(2, -1))
    return formats.quantize_rows(h, EIGHT_BIT[scheme])


@quantize_rows_op.register_fake
def _(x: torch.Tensor, gelu_mul: bool, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    columns = x.shape[1] // 2 if gelu_mul else x.shape[1]
    q = x.new_empty(len(x), columns, dtype=EIGHT_BIT[scheme])
    return q, x.new_empty(len(x), dtype=torch.float32)


def _round_activation(x: torch.Tensor, scheme: str, input_scale: OptionalTensor) -> torch.Tensor:
    """What the scheme's kernel multiplies with, in float32."""
    if scheme in EIGHT_BIT:
        q, scale = formats.quantize_rows(x, EIGHT_BIT[scheme])
        return q.float() * scale[:, None]
    if input_scale is not None:
        return formats.dequantize_nvfp4(*formats.quantize_nvfp4(x, input_scale), input_scale)
    return x.to(torch.bfloat16).float()
