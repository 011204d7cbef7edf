"""Every operation in plain torch: dequantize, then multiply. The truth for tests and the CPU path.

`dtype` is the precision of the arithmetic: float32 to serve, float64 to judge a kernel.
Results come back in that dtype. Weights are given dequantized ([N, K], or [E, N, K] for experts), so
that one reference serves every format; `formats` dequantizes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def matmul(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return x @ weight.T [M, N] of x [M, K] and weight [N, K]."""
    return x.to(dtype) @ weight.to(dtype).T


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up with the tanh approximation, as Gemma's `gelu_pytorch_tanh`."""
    return F.gelu(gate, approximate="tanh") * up


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * weight along the last dimension."""
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
    """Run routed experts, one at a time.

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
    """Return softcap * tanh(x @ embedding.T / softcap) [M, V] of x [M, H] and embedding [V, H]."""
    return softcap * torch.tanh(matmul(x, embedding, dtype) / softcap)


def soft_embedding(
    logits: torch.Tensor,
    embedding: torch.Tensor,
    inverse_temperature: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return softmax(logits / T) @ embedding [M, H] of logits [M, V], embedding [V, H], 1 / T [M]."""
    scaled = logits.to(dtype) * inverse_temperature.to(dtype)[:, None]
    return torch.softmax(scaled, -1) @ embedding.to(dtype)


def attention_heads(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [M, q_heads, D], k and v [M, kv_heads, D] of `operations.attention_heads`.

    The norms' results are rounded to the dtype of qkv, as the model does between norm and rope.
    """
    parts = qkv.to(dtype).unflatten(1, (-1, len(q_weight)))
    k_raw = parts[:, q_heads : q_heads + kv_heads]
    v_raw = parts[:, q_heads + kv_heads :] if parts.shape[1] > q_heads + kv_heads else k_raw

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(x, weight, eps).to(qkv.dtype).to(dtype)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        c, s = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    q, k = normed(parts[:, :q_heads], q_weight), normed(k_raw, k_weight)
    return rotated(q), rotated(k), normed(v_raw, None)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Attend as `operations.attend`, in the dtype of q, one sequence at a time."""
    n, capacity, group = len(q) // len(slots), keys.shape[1], q.shape[1] // keys.shape[2]
    out = torch.zeros_like(q)
    for b, slot in enumerate(slots.tolist()):
        rows = slice(b * n, (b + 1) * n)
        low, high = first[rows], last[rows]
        position = torch.arange(int(low.min()), int(high.max()) + 1, device=q.device)
        k, v = (
            cache[slot, position % capacity].to(q.dtype).repeat_interleave(group, 1)
            for cache in (keys, values)
        )
        seen = (position >= low[:, None]) & (position <= high[:, None])
        score = torch.einsum("mhd,phd->hmp", q[rows], k).masked_fill(~seen, float("-inf"))
        probability = torch.nan_to_num(torch.softmax(score, -1))  # a row that sees nothing
        out[rows] = torch.einsum("hmp,phd->mhd", probability, v)
    return out


def after_attention(
    h: torch.Tensor,
    o: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return h + norm(o) * w_post, and its norms for dense MLP, experts and router, all bf16 [M, H]."""
    w_post, w_dense, w_experts, w_router = norms
    h = h + _norm(o, w_post, eps)
    router = _norm(h, None, eps) * w_router * h.shape[1] ** -0.5
    return h, _norm(h, w_dense, eps), _norm(h, w_experts, eps), router


def after_experts(
    h: torch.Tensor,
    dense: torch.Tensor,
    routed: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scalars: tuple[torch.Tensor, torch.Tensor],
    decoded: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the joined h, and the next input norm(h) * w_next.

    h = (h + norm(norm(dense) * w_1 + norm(sum of routed) * w_2) * w) * scalar of the row; routed
    [M, C, H] is summed over C in float32.
    """
    w_1, w_2, w, w_next = norms
    experts = routed.float().sum(1).to(h.dtype)
    both = _norm(dense, w_1, eps) + _norm(experts, w_2, eps)
    h = h + _norm(both, w, eps)
    h = torch.cat([h[:decoded] * scalars[0], h[decoded:] * scalars[1]])
    return h, _norm(h, w_next, eps)


def begin(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    factor: float,
    update: torch.Tensor | None,
    w_next: torch.Tensor,
    decoded: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `operations.begin`; the input is not quantized."""
    h = torch.nn.functional.embedding(tokens.long(), embedding) * factor
    first = h[:decoded] if update is None else h[:decoded] + update
    h = torch.cat([_norm(first, None, eps), h[decoded:]])
    return h, _norm(h, w_next, eps)


def choose_experts(
    x: torch.Tensor, router: torch.Tensor, per_expert_scale: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32, ascending, and routing weights f32, [M, topk], of x [M, H], router [E, H]."""
    p = torch.softmax((x @ router.T).float(), -1)
    ids = p.topk(topk, -1).indices.sort(-1).values
    weights = p.gather(1, ids)
    scaled = weights / weights.sum(-1, keepdim=True) * per_expert_scale.float()[ids]
    return ids.int(), scaled


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the RMS norm, computed in float32, in the dtype of x."""
    return rms_norm(x.float(), weight, eps).to(x.dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative Frobenius error |actual - expected| / |expected| in float64."""
    a, e = actual.double(), expected.double()
    return float((a - e).norm() / e.norm())
