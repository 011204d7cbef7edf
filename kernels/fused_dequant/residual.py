"""What stands between the products of a layer: norms, residual sums, routing; a row in one program.

    after_attention   h += norm(o) * w_post
                      x_dense = norm(h) * w_dense      (bf16, or 8 bits a token with a scale)
                      x_experts = norm(h) * w_experts
                      x_router = norm(h) * w_router * H^-0.5
    after_experts     h = (h + norm(norm(dense) * w_1 + norm(experts) * w_2) * w) * scalar
                      x = norm(h) * w_next             (the next layer's input; bf16 or 8 bits)
    choose            ids, weights of the topk experts: softmax over experts, renormalised over the
                      chosen, times per_expert_scale

norm(x) = x * rsqrt(mean(x^2) + eps) in float32. Every result that transformers' bf16 model holds in a
tensor is rounded to bf16 here too, so the two differ by the order of sums alone. As separate torch
operations a layer spends some thirty launches on this, here three.
"""

# Kernels are compiled from their syntax: their parameters have no Python types, and a launch passes
# numbers for `constexpr`.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

from fused_dequant.chain import chained, follow
from fused_dequant.quantize import LARGEST, store_quantized


@triton.jit
def rounded(x):
    """Round to bf16, as a tensor of that dtype would hold it."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def norm(x, H, eps):
    """RMS norm without a weight; x is zero past H."""
    return x * tl.rsqrt(tl.sum(x * x) / H + eps)


@triton.jit
def weighted(x, weight, k, inside):
    """Multiply by a weight and round to bf16."""
    return rounded(x * tl.load(weight + k, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def store_row(x, y, scale, m, place, inside, LARGEST: tl.constexpr):
    """Store a row as bf16 (LARGEST 0) or with 8 bits a value and one scale; NaN makes the scale NaN."""
    if LARGEST == 0.0:
        tl.store(y + place, x.to(y.dtype.element_ty), mask=inside)
    else:
        store_quantized(x, y, scale, m, place, inside, LARGEST)


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
    x_router,
    H,
    eps,
    root,
    CHAINED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row; BLOCK >= H is a power of two."""
    follow(CHAINED)
    m = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < H
    place = m.to(tl.int64) * H + k
    update = norm(tl.load(o + place, mask=inside, other=0.0).to(tl.float32), H, eps)
    row = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
    row = rounded(row + weighted(update, w_post, k, inside))
    tl.store(h_out + place, row.to(h_out.dtype.element_ty), mask=inside)
    row = norm(row, H, eps)
    store_row(weighted(row, w_dense, k, inside), x_dense, dense_scale, m, place, inside, LARGEST)
    experts = weighted(row, w_experts, k, inside)
    tl.store(x_experts + place, experts.to(x_experts.dtype.element_ty), mask=inside)
    router = weighted(rounded(row), w_router, k, inside) * root
    tl.store(x_router + place, router.to(x_router.dtype.element_ty), mask=inside)


@triton.jit
def after_experts_kernel(
    h,
    dense,
    experts,
    w_1,
    w_2,
    w,
    scalar,
    w_next,
    h_out,
    x,
    x_scale,
    H,
    eps,
    CHAINED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row; BLOCK >= H is a power of two."""
    follow(CHAINED)
    m = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < H
    place = m.to(tl.int64) * H + k
    a = norm(tl.load(dense + place, mask=inside, other=0.0).to(tl.float32), H, eps)
    b = norm(tl.load(experts + place, mask=inside, other=0.0).to(tl.float32), H, eps)
    both = rounded(weighted(a, w_1, k, inside) + weighted(b, w_2, k, inside))
    row = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
    row = rounded(row + weighted(norm(both, H, eps), w, k, inside))
    row = rounded(row * tl.load(scalar).to(tl.float32))
    tl.store(h_out + place, row.to(h_out.dtype.element_ty), mask=inside)
    next_ = weighted(norm(row, H, eps), w_next, k, inside)
    store_row(next_, x, x_scale, m, place, inside, LARGEST)


@triton.jit
def choose_kernel(
    logits,
    per_expert_scale,
    ids,
    weights,
    E,
    CHAINED: tl.constexpr,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One program a row: TOPK rounds of the largest that is left, the lowest index first on a tie."""
    follow(CHAINED)
    m = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    score = tl.load(logits + m * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    p = tl.exp(score - tl.max(score))
    left = tl.where(e < E, p, -1.0)
    chosen = tl.zeros((EXPERTS,), tl.float32)
    total = 0.0
    for _ in tl.static_range(TOPK):
        best = tl.argmax(left, 0, tie_break_left=True)
        hit = e == best
        total += tl.max(left)
        chosen = tl.where(hit, 1.0, chosen)
        left = tl.where(hit, -1.0, left)
    # Slots of a token are its chosen experts in order of index: a sum in another order, that is all.
    taken = chosen > 0.0
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    scale = tl.load(per_expert_scale + e, mask=taken, other=0.0).to(tl.float32)
    tl.store(ids + m * TOPK + rank, e, mask=taken)
    tl.store(weights + m * TOPK + rank, p / total * scale, mask=taken)


def after_attention(
    h: torch.Tensor,
    o: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `layer.after_attention`."""
    M, H = h.shape
    h_out, x_experts, x_router = (torch.empty_like(h) for _ in range(3))
    x_dense = torch.empty(M, H, dtype=dtype, device=h.device)
    scale = torch.empty(M, dtype=torch.float32, device=h.device)
    after_attention_kernel[(M,)](
        h, o, *norms, h_out, x_dense, scale, x_experts, x_router, H, eps, H**-0.5,
        LARGEST=LARGEST.get(dtype, 0.0), BLOCK=triton.next_power_of_2(H), num_warps=8,
        **chained(h.device),
    )  # fmt: skip
    return h_out, x_dense, scale, x_experts, x_router


def after_experts(
    h: torch.Tensor,
    dense: torch.Tensor,
    experts: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scalar: torch.Tensor,
    dtype: torch.dtype,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `layer.after_experts`."""
    M, H = h.shape
    h_out = torch.empty_like(h)
    x = torch.empty(M, H, dtype=dtype, device=h.device)
    scale = torch.empty(M, dtype=torch.float32, device=h.device)
    w_1, w_2, w, w_next = norms
    after_experts_kernel[(M,)](
        h, dense, experts, w_1, w_2, w, scalar, w_next, h_out, x, scale, H, eps,
        LARGEST=LARGEST.get(dtype, 0.0), BLOCK=triton.next_power_of_2(H), num_warps=8,
        **chained(h.device),
    )  # fmt: skip
    return h_out, x, scale


def choose(
    logits: torch.Tensor, per_expert_scale: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `layer.choose_experts`."""
    M, E = logits.shape
    ids = torch.empty(M, topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty(M, topk, dtype=torch.float32, device=logits.device)
    choose_kernel[(M,)](
        logits, per_expert_scale, ids, weights, E,
        TOPK=topk, EXPERTS=triton.next_power_of_2(E), num_warps=1, **chained(logits.device),
    )  # fmt: skip
    return ids, weights
