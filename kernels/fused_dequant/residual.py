"""Norms and residual sums between the products of a layer, one program a row.

    begin             h = embedding[token] * factor (+ update, normed: rows of the decoder)
                      x = norm(h) * w_next             (the first layer's input; bf16 or 8 bits)
    after_attention   h += norm(o) * w_post
                      x_dense = norm(h) * w_dense      (bf16, or 8 bits a token with a scale)
                      x_experts = norm(h) * w_experts
                      x_router = norm(h) * w_router * H^-0.5
    after_experts     routed = sum over a token's choices of experts
                      h = (h + norm(norm(dense) * w_1 + norm(routed) * w_2) * w) * scalar
                      x = norm(h) * w_next             (the next layer's input; bf16 or 8 bits)
    scaled_norm       norm(x * factor) * weight
    gelu_mul          gelu_tanh(gate) * up

norm(x) = x * rsqrt(mean(x^2) + eps) in float32. Every result that transformers' bf16 model holds in a
tensor is rounded to bf16 here too, so the two differ by the order of sums alone. As separate torch
operations a layer spends some thirty launches on this, here two.

One pass may have rows of the decoder and, behind them, rows of the encoder: the number of the former
decides what is normed, and by which of two scalars a layer ends.

A program issues all its loads early: the norms' weights before it waits for the kernel before it
(`chain`), the rest right after, since a load behind a reduction's barrier costs its whole latency.
"""

# Kernels are compiled from their syntax: their parameters have no Python types, and a launch passes
# numbers for `constexpr`.

import torch
import triton
import triton.language as tl

from fused_dequant.activations import Activation
from fused_dequant.chain import chained, follow
from fused_dequant.formats import EIGHT_BIT, LARGEST
from fused_dequant.quantize import codes, magnitude, scale_of
from fused_dequant.tiles import gelu_mul as gelu_mul_tile


@triton.jit
def rounded(x):
    """Round to bf16, as a tensor of that dtype would hold it."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def norm(x, H, eps):
    """Return the RMS norm without a weight; x is zero past H."""
    return x * tl.rsqrt(tl.sum(x * x) / H + eps)


@triton.jit
def weighted(x, weight):
    """Multiply by a weight and round to bf16."""
    return rounded(x * weight.to(tl.float32))


@triton.jit
def store_row(x, y, scale, m, place, inside, LARGEST: tl.constexpr):
    """Store a row as bf16 (LARGEST 0) or with 8 bits a value and one scale; NaN makes the scale NaN."""
    if LARGEST == 0.0:
        tl.store(y + place, x.to(y.dtype.element_ty), mask=inside)
    else:
        s = scale_of(tl.max(magnitude(x), 0), LARGEST)
        tl.store(y + place, codes(x, s, y.dtype.element_ty, LARGEST), mask=inside)
        tl.store(scale + m, s)


@triton.jit
def after_attention_kernel(
    h,
    o,
    w_post,
    w_dense,
    w_experts,
    w_router,
    h_out,
    x_dense,
    dense_scale,
    x_experts,
    experts_scale,
    x_router,
    H,
    eps,
    root,
    CHAINED: tl.constexpr,
    DENSE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a row; BLOCK >= H is a power of two; DENSE, EXPERTS: inputs' LARGEST."""
    m = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < H
    place = m.to(tl.int64) * H + k
    post = tl.load(w_post + k, mask=inside, other=0.0)
    dense = tl.load(w_dense + k, mask=inside, other=0.0)
    experts = tl.load(w_experts + k, mask=inside, other=0.0)
    router = tl.load(w_router + k, mask=inside, other=0.0)
    follow(CHAINED)
    update = tl.load(o + place, mask=inside, other=0.0)
    row = tl.load(h + place, mask=inside, other=0.0)
    update = weighted(norm(update.to(tl.float32), H, eps), post)
    row = rounded(row.to(tl.float32) + update)
    tl.store(h_out + place, row.to(h_out.dtype.element_ty), mask=inside)
    row = norm(row, H, eps)
    to_router = weighted(rounded(row), router) * root
    tl.store(x_router + place, to_router.to(x_router.dtype.element_ty), mask=inside)
    store_row(weighted(row, dense), x_dense, dense_scale, m, place, inside, DENSE)
    store_row(weighted(row, experts), x_experts, experts_scale, m, place, inside, EXPERTS)


@triton.jit
def after_experts_kernel(
    h,
    dense,
    experts,
    w_1,
    w_2,
    w,
    decoder_scalar,
    encoder_scalar,
    w_next,
    h_out,
    x,
    x_scale,
    decoded,
    H,
    eps,
    CHAINED: tl.constexpr,
    CHOICES: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a row; BLOCK >= H is a power of two."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < H
    place = m * H + k
    weight_1 = tl.load(w_1 + k, mask=inside, other=0.0)
    weight_2 = tl.load(w_2 + k, mask=inside, other=0.0)
    weight = tl.load(w + k, mask=inside, other=0.0)
    next_weight = tl.load(w_next + k, mask=inside, other=0.0)
    factor = tl.where(m < decoded, tl.load(decoder_scalar), tl.load(encoder_scalar)).to(tl.float32)
    follow(CHAINED)
    a = tl.load(dense + place, mask=inside, other=0.0)
    row = tl.load(h + place, mask=inside, other=0.0)
    routed = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        line = experts + (m * CHOICES + choice) * H + k
        routed += tl.load(line, mask=inside, other=0.0).to(tl.float32)
    a = weighted(norm(a.to(tl.float32), H, eps), weight_1)
    b = weighted(norm(rounded(routed), H, eps), weight_2)
    both = norm(rounded(a + b), H, eps)
    row = rounded(row.to(tl.float32) + weighted(both, weight))
    row = rounded(row * factor)
    tl.store(h_out + place, row.to(h_out.dtype.element_ty), mask=inside)
    next_ = weighted(norm(row, H, eps), next_weight)
    store_row(next_, x, x_scale, m, place, inside, LARGEST)


@triton.jit
def begin_kernel(
    tokens,
    embedding,
    update,
    w_next,
    h_out,
    x,
    x_scale,
    decoded,
    H,
    eps,
    factor,
    CHAINED: tl.constexpr,
    UPDATED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a row; BLOCK >= H is a power of two."""
    m = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < H
    place = m.to(tl.int64) * H + k
    weight = tl.load(w_next + k, mask=inside, other=0.0)
    follow(CHAINED)
    token = tl.load(tokens + m).to(tl.int64)
    row = tl.load(embedding + token * H + k, mask=inside, other=0.0).to(tl.float32)
    row = rounded(row * factor)
    if UPDATED:
        updated = inside & (m < decoded)
        row = rounded(row + tl.load(update + place, mask=updated, other=0.0).to(tl.float32))
    row = tl.where(m < decoded, rounded(norm(row, H, eps)), row)
    tl.store(h_out + place, row.to(h_out.dtype.element_ty), mask=inside)
    store_row(weighted(norm(row, H, eps), weight), x, x_scale, m, place, inside, LARGEST)


@triton.jit
def scaled_norm_kernel(x, weight, y, H, eps, factor, CHAINED: tl.constexpr, BLOCK: tl.constexpr):
    """Each program handles a row."""
    place = tl.program_id(0).to(tl.int64) * H
    k = tl.arange(0, BLOCK)
    inside = k < H
    w = tl.load(weight + k, mask=inside, other=0.0)
    follow(CHAINED)
    row = rounded(tl.load(x + place + k, mask=inside, other=0.0).to(tl.float32) * factor)
    row = weighted(norm(row, H, eps), w)
    tl.store(y + place + k, row.to(y.dtype.element_ty), mask=inside)


@triton.jit
def gelu_mul_kernel(gate_up, y, K, CHAINED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (m, i) handles columns from i * BLOCK on of row m."""
    follow(CHAINED)
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + m * 2 * K + k, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(gate_up + m * 2 * K + K + k, mask=k < K, other=0.0).to(tl.float32)
    active = rounded(gelu_mul_tile(gate, 1.0))
    tl.store(y + m * K + k, (active * up).to(y.dtype.element_ty), mask=k < K)


def _room(M: int, H: int, scheme: str, like: torch.Tensor) -> Activation:
    """Make room for an activation of `scheme`."""
    values = torch.empty(M, H, dtype=EIGHT_BIT.get(scheme, like.dtype), device=like.device)
    if scheme not in EIGHT_BIT:
        return values, None
    return values, torch.empty(M, dtype=torch.float32, device=like.device)


def _stored(x: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors a kernel stores to; bf16 rows have no scales, and it writes none."""
    return x[0], x[0] if x[1] is None else x[1]


def _largest(scheme: str) -> float:
    return LARGEST[EIGHT_BIT[scheme]] if scheme in EIGHT_BIT else 0.0


def after_attention(
    h: torch.Tensor,
    o: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    schemes: tuple[str, str],
    eps: float,
) -> tuple[torch.Tensor, Activation, Activation, torch.Tensor]:
    """See `operations.after_attention`."""
    M, H = h.shape
    h_out, x_router = torch.empty_like(h), torch.empty_like(h)
    dense, experts = (_room(M, H, scheme, h) for scheme in schemes)
    # Few rows wait for memory, many for instructions: 3.7 us for 256 rows (4 warps: 4.0), 10.3 for
    # 1,024 (16 warps: 12.8).
    warps = 16 if M <= 512 else 4
    after_attention_kernel[(M,)](
        h, o, *norms, h_out, *_stored(dense), *_stored(experts), x_router, H, eps, H**-0.5,
        DENSE=_largest(schemes[0]), EXPERTS=_largest(schemes[1]),
        BLOCK=triton.next_power_of_2(H), num_warps=warps, **chained(h.device),
    )  # fmt: skip
    return h_out, dense, experts, x_router


def after_experts(
    h: torch.Tensor,
    dense: torch.Tensor,
    experts: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scalars: tuple[torch.Tensor, torch.Tensor],
    decoded: int,
    scheme: str,
    eps: float,
) -> tuple[torch.Tensor, Activation]:
    """See `operations.after_experts`."""
    M, H = h.shape
    h_out, x = torch.empty_like(h), _room(M, H, scheme, h)
    w_1, w_2, w, w_next = norms
    after_experts_kernel[(M,)](
        h, dense, experts, w_1, w_2, w, *scalars, w_next, h_out, *_stored(x), decoded, H, eps,
        CHOICES=experts.shape[1], LARGEST=_largest(scheme),
        BLOCK=triton.next_power_of_2(H), num_warps=8, **chained(h.device),
    )  # fmt: skip
    return h_out, x


def begin(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    factor: float,
    update: torch.Tensor | None,
    w_next: torch.Tensor,
    decoded: int,
    scheme: str,
    eps: float,
) -> tuple[torch.Tensor, Activation]:
    """See `operations.begin`."""
    M, H = len(tokens), embedding.shape[1]
    h_out = torch.empty(M, H, dtype=embedding.dtype, device=embedding.device)
    x = _room(M, H, scheme, embedding)
    begin_kernel[(M,)](
        tokens, embedding, h_out if update is None else update, w_next, h_out, *_stored(x), decoded,
        H, eps, factor, UPDATED=update is not None, LARGEST=_largest(scheme),
        BLOCK=triton.next_power_of_2(H), num_warps=8,
        **chained(embedding.device),
    )  # fmt: skip
    return h_out, x


def scaled_norm(x: torch.Tensor, factor: float, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `operations.scaled_norm`."""
    M, H = x.shape
    y = torch.empty_like(x)
    scaled_norm_kernel[(M,)](
        x, weight, y, H, eps, factor, BLOCK=triton.next_power_of_2(H), num_warps=8,
        **chained(x.device),
    )  # fmt: skip
    return y


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `operations.gelu_mul`."""
    M, K = len(gate_up), gate_up.shape[1] // 2
    y = torch.empty(M, K, dtype=gate_up.dtype, device=gate_up.device)
    gelu_mul_kernel[(M, triton.cdiv(K, 1024))](
        gate_up, y, K, BLOCK=1024, num_warps=4, **chained(y.device)
    )
    return y
