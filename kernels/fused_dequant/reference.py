"""Every operation in plain torch: the reference for tests, and what a CPU runs.

`dtype` is the precision of the arithmetic and of results: float32 to serve, float64 to judge a
kernel. Weights are passed dequantized (`weights.dequantize`), so one reference serves every format:
[N, K], or [E, N, K] for experts. `operations` describes the arguments that have no type annotation
here. The sampler's reference is `canvas`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_dequant.launch.dispatch import sequence_rows


def matmul(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x @ weight.T, [M, N], for x [M, K] and weight [N, K]."""
    return x.to(dtype) @ weight.to(dtype).T


def matmul_each(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Return x @ weight.T, f32 [M, N], multiplying `rows` rows at a time; x [M, K], weight [N, K]."""
    matrix, y = weight.float().T, torch.empty(len(x), len(weight), device=x.device)
    for part, out in zip(x.float().split(rows), y.split(rows), strict=True):
        torch.mm(part, matrix, out=out)
    return y


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, gelu by its tanh approximation (Gemma's `gelu_pytorch_tanh`)."""
    return F.gelu(gate, approximate="tanh") * up


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * weight over the last dimension; a weight of None is 1."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight.to(x.dtype)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    dtype: torch.dtype = torch.float32,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the sum of each token's experts' outputs, each times its routing weight: [M, H].

    x is [M, H], gate_up [E, 2I, H] (interleaved as by `formats.interleave_gate_up`), down [E, H, I].
    expert_ids and routing_weights are [M, topk]; ids outside 0..E-1 are skipped. `activation` rounds
    the input of each product, as a scheme that quantizes activations does. If None, nothing is rounded.
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
    x: Tensor, embedding: Tensor, softcap: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return softcap * tanh(x @ embedding.T / softcap), [M, V], for x [M, H], embedding [V, H]."""
    return softcap * torch.tanh(matmul(x, embedding, dtype) / softcap)


def soft_embedding(
    logits: Tensor,
    embedding: Tensor,
    inverse_temperature: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return softmax(logits [M, V] / T) @ embedding [V, H]; inverse_temperature [M] has each 1 / T."""
    scaled = logits.to(dtype) * inverse_temperature.to(dtype)[:, None]
    return torch.softmax(scaled, -1) @ embedding.to(dtype)


def attention_heads(qkv, q_weight, k_weight, cos, sin, q_heads, kv_heads, eps, dtype=torch.float32):
    """Return q [M, q_heads, D], k and v [M, kv_heads, D] of `operations.attention_heads`, in `dtype`.

    The results of norms are rounded to the dtype of qkv before rope, as the model rounds them.
    """
    parts = qkv.to(dtype).unflatten(1, (-1, len(q_weight)))
    k_raw = parts[:, q_heads : q_heads + kv_heads]
    v_raw = parts[:, q_heads + kv_heads :] if parts.shape[1] > q_heads + kv_heads else k_raw

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, weight, eps).to(qkv.dtype).to(dtype)

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        c, s = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    q, k = normed(parts[:, :q_heads], q_weight), normed(k_raw, k_weight)
    return rotated(q), rotated(k), normed(v_raw, None)


def attend(q, keys, values, slots, first, last):
    """Compute `operations.attend`, one sequence at a time; return [M, q_heads, D] in q's dtype."""
    n, heads = len(q) // len(slots), keys.shape[2]
    out = torch.zeros_like(q)
    for b, slot in enumerate(slots.tolist()):
        rows = slice(b * n, (b + 1) * n)
        low, high = first[rows], last[rows]
        begin, end = int(low.min()), int(high.max())
        if begin > end:
            continue  # no row sees anything
        k, v = (
            _run(cache[slot], begin, end).to(q.dtype).transpose(0, 1) for cache in (keys, values)
        )
        queries = q[rows].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [heads, group, n, D]
        score = (queries.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, queries.shape[1:3])
        if begin < int(low.max()) or int(high.min()) < end:
            position = torch.arange(begin, end + 1, device=q.device)
            seen = (position >= low[:, None]) & (position <= high[:, None])
            score.masked_fill_(~seen, float("-inf"))
            probability = torch.nan_to_num(torch.softmax(score, -1))  # a row that sees nothing
        else:
            probability = torch.softmax(score, -1)
        mixed = (probability.flatten(1, 2) @ v).unflatten(1, queries.shape[1:3])
        out[rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _run(cells: Tensor, begin: int, end: int) -> Tensor:
    """Return a ring's cells [capacity, ...] of positions `begin` to `end`."""
    start, count = begin % len(cells), end + 1 - begin
    behind = start + count - len(cells)
    if behind <= 0:
        return cells[start : start + count]
    return torch.cat([cells[start:], cells[:behind]])


def after_attention(h, o, norms, eps):
    """Return the new h = h + norm(o) * w_post, and inputs of MLP, experts and router: bf16 [M, H]."""
    w_post, w_dense, w_experts, w_router = norms
    h = h + _norm(o, w_post, eps)
    normed = rms_norm(h.float(), None, eps)
    dense, experts = ((normed * weight.float()).to(h.dtype) for weight in (w_dense, w_experts))
    return h, dense, experts, normed.to(h.dtype) * w_router * h.shape[1] ** -0.5


def after_experts(h, dense, routed, norms, scalars, decoded, eps):
    """Return the new h and the next layer's input norm(new h) * w_next, both bf16 [M, H].

    The new h is (h + norm(both) * w) * scalar; both is norm(dense) * w_1 + norm(sum of routed) * w_2.
    `norms` is (w_1, w_2, w, w_next). scalar is scalars[0] in the first `decoded` rows, else scalars[1].
    """
    w_1, w_2, w, w_next = norms
    experts = routed.float().sum(1).to(h.dtype)
    both = _norm(dense, w_1, eps) + _norm(experts, w_2, eps)
    h = h + _norm(both, w, eps)
    h = torch.cat([h[:decoded] * scalars[0], h[decoded:] * scalars[1]])
    return h, _norm(h, w_next, eps)


def begin(tokens, embedding, factor, update, w_next, decoded, eps):
    """Return h and the first product's input, as `operations.begin` does, but quantize nothing."""
    h = embedding.index_select(0, tokens.long()) * factor
    first = h[:decoded] if update is None else h[:decoded] + update
    h = torch.cat([_norm(first, None, eps), h[decoded:]])
    return h, _norm(h, w_next, eps)


def choose_experts(
    x: Tensor, router: Tensor, per_expert_scale: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """Return ids (int32, ascending), routing weights (f32) [M, topk], for x [M, H], router [E, H]."""
    # in float32: torch's own bf16 products differ by CPU
    logits = matmul_each(x, router, sequence_rows(len(x))).to(x.dtype)
    p = torch.softmax(logits.float(), -1)
    ids = p.topk(topk, -1).indices.sort(-1).values
    weights = p.gather(1, ids)
    scaled = weights / weights.sum(-1, keepdim=True) * per_expert_scale.float()[ids]
    return ids.int(), scaled


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return rms_norm(x.float(), weight, eps).to(x.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error |actual - expected| / |expected| in float64, by Frobenius norms."""
    a, e = actual.double(), expected.double()
    return float((a - e).norm() / e.norm())
