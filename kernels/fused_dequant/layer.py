"""What stands between the products of a layer: attention over a cache, norms, residual sums, routing.

    begin               embeddings, and the first layer's input
    attention_heads     norms and rope of q, k, v; keys and values to the cache
    attend              attention over cached positions; attend_quantized: to 8 bits
    after_attention     the residual sum, and the inputs of dense MLP, experts and router
    choose_experts      the router: expert ids and routing weights
    after_experts       both branches joined, and the next layer's input
    scaled_norm, gelu_mul   those of self-conditioning, and of a dense MLP in bf16

On CUDA the Triton kernels run (`attention`, `residual`, `router`), elsewhere `reference`. They write
into caches and hand out quantized activations with their scales.
"""

import torch

from fused_dequant import formats, reference
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.ops import OptionalTensor

CELLS = 128  # a cache's capacity is a multiple of this: no block of positions wraps around
Norms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Activation = tuple[torch.Tensor, OptionalTensor]  # bf16 and None, or 8-bit codes and their scales


def attention_heads(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_heads: int,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Normalise and rotate the heads of qkv; return q bf16 [M, q_heads, D], store k and v.

    qkv bf16 [M, (q_heads + 2 kv_heads) * D], or without the v heads where v is the raw k; weights
    [D]; cos and sin [M, D / 2]; slots int32 [B], M = B * n; positions int32 [M]; keys and values bf16
    [slots, capacity, kv_heads, D], written at positions % capacity.
    """
    _, capacity, kv_heads, D = keys.shape
    if qkv.shape[1] not in ((q_heads + kv_heads) * D, (q_heads + 2 * kv_heads) * D):
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit {q_heads} + {kv_heads} heads of {D}")
    _check_cells(qkv, keys, slots)
    if qkv.is_cuda:
        from fused_dequant import attention

        return attention.heads(
            qkv.contiguous(), q_weight, k_weight, cos, sin, slots, positions, keys, values,
            q_heads, eps,
        )  # fmt: skip
    q, k, v = reference.attention_heads(qkv, q_weight, k_weight, cos, sin, q_heads, kv_heads, eps)
    place = slots.repeat_interleave(len(qkv) // len(slots)).long(), positions.long() % capacity
    keys[place], values[place] = k.to(keys.dtype), v.to(values.dtype)
    return q.to(qkv.dtype)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """softmax(q @ K.T) @ V over positions first[m] .. last[m]: bf16 [M, q_heads, D].

    q bf16 [M, q_heads, D]; first, last int32 [M], inclusive; the rest as in `attention_heads`. A row
    with first > last gets zeros. Values are below 65,504 (parts of a split are float16).
    """
    _check_cells(q, keys, slots)
    if q.is_cuda:
        from fused_dequant import attention, launch

        return attention.combine(
            launch.attend_parts(q.contiguous(), keys, values, slots, first, last)
        )
    return reference.attend(q.float(), keys, values, slots, first, last).to(q.dtype)


def attend_quantized(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scheme: str,
) -> Activation:
    """`attend`, all heads of a row as the input [M, q_heads * D] of a product of `scheme`.

    The same numbers as `attend` and `quantize_rows` one after the other.
    """
    if scheme not in EIGHT_BIT:
        return attend(q, keys, values, slots, first, last).flatten(1), None
    dtype = EIGHT_BIT[scheme]
    if not q.is_cuda:
        rows = attend(q, keys, values, slots, first, last).flatten(1)
        return formats.quantize_rows(rows, dtype)
    from fused_dequant import attention, launch

    _check_cells(q, keys, slots)
    parts = launch.attend_parts(q.contiguous(), keys, values, slots, first, last)
    return attention.combine_quantized(parts, dtype)


def _check_cells(rows: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    if keys.shape[1] % CELLS or len(rows) % len(slots):
        raise ValueError(
            f"capacity {keys.shape[1]} is not a multiple of {CELLS}, or M not one of slots"
        )


def after_attention(
    h: torch.Tensor, o: torch.Tensor, norms: Norms, schemes: tuple[str, str], eps: float = 1e-6
) -> tuple[torch.Tensor, Activation, Activation, torch.Tensor]:
    """Add the attention's output and normalise for what follows.

    h, o bf16 [M, H]; norms [H]: after attention, before the dense MLP, before the experts, the router's
    scale; `schemes` of the dense MLP and of the experts. Returns h, the MLP's input, the experts' and
    the router's.
    """
    if not h.is_cuda:
        h, dense, experts, router = reference.after_attention(h, o, norms, eps)
        return h, _as_activation(dense, schemes[0]), _as_activation(experts, schemes[1]), router
    from fused_dequant import residual

    dtypes = _dtype(schemes[0]), _dtype(schemes[1])
    h, dense, experts, router = residual.after_attention(h, o, norms, dtypes, eps)
    return h, _activation(dense, schemes[0]), _activation(experts, schemes[1]), router


def after_experts(
    h: torch.Tensor,
    dense: torch.Tensor,
    routed: torch.Tensor,
    norms: Norms,
    scalar: torch.Tensor,
    scheme: str,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, Activation]:
    """Join the two branches, end the layer, and normalise for the next product.

    h, dense bf16 [M, H]; routed bf16 [M, C, H] of `ops.routed_experts`; norms [H]: of the dense branch,
    of the experts, of their sum, and the next input norm, whose product has `scheme`; scalar [1].
    Returns h and the next input.
    """
    if not h.is_cuda:
        h, x = reference.after_experts(h, dense, routed, norms, scalar, eps)
        return h, _as_activation(x, scheme)
    from fused_dequant import residual

    h, x = residual.after_experts(h, dense, routed, norms, scalar, _dtype(scheme), eps)
    return h, _activation(x, scheme)


def choose_experts(
    x: torch.Tensor, router: torch.Tensor, per_expert_scale: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """X bf16 [M, H], router bf16 [E, H] -> ids int32, ascending, and weights f32, both [M, topk]."""
    if not x.is_cuda:
        return reference.choose_experts(x, router, per_expert_scale, topk)
    from fused_dequant import router as kernels

    return kernels.choose_experts(x, router, per_expert_scale, topk)


def begin(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    factor: float,
    update: OptionalTensor,
    w_next: torch.Tensor,
    scheme: str,
    eps: float = 1e-6,
    *,
    normed: bool,
) -> tuple[torch.Tensor, Activation]:
    """Embed tokens [M] and normalise for the first product; return h bf16 [M, H] and its input.

    h is embedding[token] * factor, plus `update` bf16 [M, H] if given, and then if `normed` divided by
    its root mean square. `scheme` is the first product's, w_next [H] its norm.
    """
    if not embedding.is_cuda:
        h, x = reference.begin(tokens, embedding, factor, update, w_next, eps, normed=normed)
        return h, _as_activation(x, scheme)
    from fused_dequant import residual

    h, x = residual.begin(
        tokens, embedding, factor, update, w_next, _dtype(scheme), eps, normed=normed
    )
    return h, _activation(x, scheme)


def scaled_norm(
    x: torch.Tensor, factor: float, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """RMS norm of x * factor, times weight: bf16 [M, H]."""
    if not x.is_cuda:
        return reference.rms_norm((x * factor).float(), weight, eps).to(x.dtype)
    from fused_dequant import residual

    return residual.scaled_norm(x, factor, weight, eps)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up of bf16 [M, 2I], gate first; rounded after each, as transformers does."""
    if not gate_up.is_cuda:
        return reference.gelu_mul(*gate_up.chunk(2, -1))
    from fused_dequant import residual

    return residual.gelu_mul(gate_up.contiguous())


def _dtype(scheme: str) -> torch.dtype:
    return EIGHT_BIT.get(scheme, torch.bfloat16)


def _activation(x: tuple[torch.Tensor, torch.Tensor], scheme: str) -> Activation:
    """Of a kernel's row and its scales, which nothing wrote where the row is bf16."""
    return x if scheme in EIGHT_BIT else (x[0], None)


def _as_activation(x: torch.Tensor, scheme: str) -> Activation:
    return formats.quantize_rows(x, EIGHT_BIT[scheme]) if scheme in EIGHT_BIT else (x, None)
