"""The products, dispatched by device: kernels on CUDA, `reference` elsewhere.

    linear(x, weight)                                   x @ w.T
    routed_experts(...)                                 gated experts, before their sum
    quantize_rows(x, scheme)                            dynamic FP8 or INT8, gated first or not
    linear_quantized(q, scale, weight)                  x @ w.T of activations already quantized
    lm_head(x, embedding, softcap)                      bf16 logits
    soft_embedding(logits, embedding, 1 / T)            softmax(logits / T) @ embedding

The reference computes in float32 and rounds to bf16 at the same places. Outputs are bf16. A scheme the
device cannot run raises ValueError naming both: nothing falls back silently to a slower path.
"""

import torch

from fused_dequant import formats, reference, weights
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.targets import capability
from fused_dequant.weights import Weight

# Lowest compute capability with the instructions of a scheme; fragments are for sm_90 alone.
_NEEDS = {
    "bf16": (8, 0),
    "int8": (8, 0),
    "nvfp4": (8, 0),
    "fp8": (8, 9),
    "nvfp4_fragments": (9, 0),
}

OptionalTensor = torch.Tensor | None


def require(scheme: str, device: torch.device) -> None:
    """Raise ValueError unless `device` can run `scheme`."""
    if scheme not in _NEEDS:
        raise ValueError(f"unknown scheme {scheme!r}; known: {', '.join(_NEEDS)}")
    if device.type != "cuda":
        return
    own = capability(device)
    exact = scheme == "nvfp4_fragments"
    if own < _NEEDS[scheme] or (exact and own != _NEEDS[scheme]):
        need = ".".join(map(str, _NEEDS[scheme])) + ("" if exact else " or newer")
        has = ".".join(map(str, own))
        raise ValueError(
            f"scheme {scheme} needs compute capability {need}; "
            f"{torch.cuda.get_device_name(device)} has {has}. Use another scheme for this device."
        )


def _check_width(x: torch.Tensor, weight: Weight) -> None:
    if x.shape[-1] != weight.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of K = {weight.shape[2]}")


def _check_codes(q: torch.Tensor, weight: Weight) -> None:
    if EIGHT_BIT.get(weight.scheme) != q.dtype:
        raise ValueError(f"activations of {q.dtype} do not fit a weight of scheme {weight.scheme}")


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Multiply x bf16 [..., K] by a dense weight (E = 1): bf16 [..., N]; 8-bit schemes quantize x."""
    _check_width(x, weight)
    rows = x.flatten(0, -2)
    if x.is_cuda:
        from fused_dequant import launch

        require(weight.scheme, x.device)
        y = launch.linear(rows.contiguous(), weight)
    else:
        values = weights.dequantize(weight)[0]
        y = reference.matmul(_round_activation(rows, weight.scheme), values).to(torch.bfloat16)
    return y.unflatten(0, x.shape[:-1])


def linear_quantized(q: torch.Tensor, scale: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Multiply 8-bit q [M, K] with scale f32 [M] of `quantize_rows` by a like weight: bf16 [M, N]."""
    _check_width(q, weight)
    _check_codes(q, weight)
    if q.is_cuda:
        from fused_dequant import launch

        require(weight.scheme, q.device)
        return launch.linear_quantized(q.contiguous(), scale, weight)
    values = weights.dequantize(weight)[0]
    return reference.matmul(q.float() * scale[:, None], values).to(torch.bfloat16)


def routed_experts(
    x: torch.Tensor,
    x_scale: OptionalTensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
) -> torch.Tensor:
    """Run each token through its experts; return bf16 [M, C, H], which `after_experts` sums over C.

    No host synchronisation: the launch depends on shapes alone and can be captured in a CUDA graph.

    Args:
        x: bf16 [M, H], or quantized as the scheme wants it, e4m3 or int8, with its scales.
        x_scale: f32 [M] of quantized tokens, else None.
        expert_ids: int [M, topk].
        routing_weights: [M, topk].
        gate_up: [E, 2I, H], interleaved.
        down: [E, H, I], of the same scheme.

    C is topk on a GPU, where an id outside 0..E-1 leaves its row unwritten; elsewhere 1, the sum, to
    which such an id adds nothing.
    """
    _check_width(x, gate_up)
    if gate_up.scheme != down.scheme:
        raise ValueError(f"gate_up is {gate_up.scheme} and down {down.scheme}: one scheme for both")
    if x_scale is not None:
        _check_codes(x, gate_up)
    if x.is_cuda:
        from fused_dequant import launch

        require(gate_up.scheme, x.device)
        ids, share = expert_ids.contiguous(), routing_weights.float().contiguous()
        return launch.experts(x.contiguous(), x_scale, ids, share, gate_up, down)
    y = reference.experts(
        x.float() if x_scale is None else x.float() * x_scale[:, None],
        weights.dequantize(gate_up), weights.dequantize(down), expert_ids, routing_weights,
        # Rounding again what is rounded changes nothing: the same value is the largest of its row.
        activation=lambda tokens: _round_activation(tokens, gate_up.scheme),
    )  # fmt: skip
    return y.to(torch.bfloat16)[:, None]


def quantize_rows(
    x: torch.Tensor, scheme: str, *, gelu_mul: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """X bf16 [M, K] -> (e4m3 or int8 [M, K], f32 [M]).

    `gelu_mul`: x is [M, 2K], gate first, and gelu_tanh(gate) * up is quantized.
    """
    if scheme not in EIGHT_BIT:
        raise ValueError(f"activations are quantized to fp8 or int8, not {scheme}")
    if x.is_cuda:
        from fused_dequant import quantize

        require(scheme, x.device)
        return quantize.quantize_rows(x.contiguous(), EIGHT_BIT[scheme], gelu_mul=gelu_mul)
    h = x.float()
    if gelu_mul:
        h = reference.gelu_mul(*h.chunk(2, -1))
    return formats.quantize_rows(h, EIGHT_BIT[scheme])


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


def _round_activation(x: torch.Tensor, scheme: str) -> torch.Tensor:
    """What the scheme's kernel multiplies with, in float32."""
    if scheme in EIGHT_BIT:
        q, scale = formats.quantize_rows(x, EIGHT_BIT[scheme])
        return q.float() * scale[:, None]
    return x.to(torch.bfloat16).float()
