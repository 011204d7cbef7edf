"""Every operation in plain torch: dequantize, then multiply. The truth for tests and the CPU path.

All take `dtype`, the precision of the arithmetic: float32 to serve, float64 to judge a kernel.
Results come back in that dtype. Weights are given dequantized ([N, K], or [E, N, K] for experts), so
that one reference serves every format; `formats` dequantizes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def matmul(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """X [M, K], weight [N, K] -> x @ weight.T [M, N]."""
    return x.to(dtype) @ weight.to(dtype).T


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation, as Gemma's `gelu_pytorch_tanh`."""
    return F.gelu(gate, approximate="tanh") * up


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """X * rsqrt(mean(x^2) + eps) * weight along the last dimension."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight.to(x.dtype)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Routed experts, one at a time.

    x [M, H], gate_up [E, 2I, H] (interleaved as `formats.interleave_gate_up`), down [E, H, I],
    expert_ids [M, topk] (an id outside 0..E-1 is skipped), routing_weights [M, topk] -> [M, H].
    `activation` is applied to the input of each product: the rounding of a scheme that quantizes
    activations.
    """
    rounded = activation or (lambda tokens: tokens)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for expert in expert_ids.unique().tolist():
        if not 0 <= expert < len(gate_up):
            continue
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        runs = matmul(rounded(x[token]), gate_up[expert], dtype).unflatten(-1, (-1, 2, 8))
        hidden = gelu_mul(runs[..., 0, :], runs[..., 1, :]).flatten(-2)
        y = matmul(rounded(hidden), down[expert], dtype)
        out.index_add_(0, token, y * routing_weights[token, choice, None].to(dtype))
    return out


def lm_head(
    x: torch.Tensor, embedding: torch.Tensor, softcap: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """X [M, H], embedding [V, H] -> softcap * tanh(x @ embedding.T / softcap) [M, V]."""
    return softcap * torch.tanh(matmul(x, embedding, dtype) / softcap)


def soft_embedding(
    logits: torch.Tensor,
    embedding: torch.Tensor,
    inverse_temperature: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [M, V], embedding [V, H] -> softmax(logits * inverse_temperature) @ embedding [M, H]."""
    return torch.softmax(logits.to(dtype) * inverse_temperature, -1) @ embedding.to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error |actual - expected| / |expected| in float64."""
    a, e = actual.double(), expected.double()
    return float((a - e).norm() / e.norm())


def dissimilarity(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """1 - 2<x, y> / (|x|^2 + |y|^2) in float64: 0 when equal; half the squared relative error if
    small.
    """
    a, e = actual.double(), expected.double()
    return float(1 - 2 * (a * e).sum() / (a.square().sum() + e.square().sum()))
