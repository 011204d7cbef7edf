"""Norms and residual sums between the products of a layer, one program per row.

    begin             h = embedding[token] * factor    (in decoder rows, then h = norm(h + update))
                      x = norm(h) * w_next             (the first layer's input; bf16, 8 bits or NVFP4)
    after_attention   h += norm(o) * w_post
                      x_dense = norm(h) * w_dense      (bf16, 8 bits with one scale per token, or NVFP4)
                      x_experts = norm(h) * w_experts
                      x_router = norm(h) * w_router * H^-0.5
    after_experts     routed = sum of the outputs of a token's experts
                      h = (h + norm(norm(dense) * w_1 + norm(routed) * w_2) * w) * scalar
                      x = norm(h) * w_next             (the next layer's input; bf16, 8 bits or NVFP4)
    scaled_norm       norm(x * factor) * weight
    gelu_mul          gelu_tanh(gate) * up

norm(x) = x * rsqrt(mean(x^2) + eps) in float32. Where transformers' bf16 model stores a result in a
tensor, the kernels round it to bf16 too. So the two differ only in the order of sums.
Separate torch operations would take some thirty launches per layer; these kernels take two.

A pass may have rows of the decoder, followed by rows of the encoder. `begin` sets h to norm(h +
update) in the decoder's rows only. `after_experts` has a scalar for each kind of row.

A program issues all its loads early. It loads norms' weights before it waits for the previous kernel
(`chain`), and all else right after. A load after a reduction's barrier would cost its whole latency.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.formats import E2M1_MAX, EIGHT_BIT, FOUR_BIT, LARGEST, MOVED, Activation
from fused_dequant.inputs.quantize import codes, magnitude, place, room, scale_of, store_blocks
from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.dispatch import launched_as
from fused_dequant.launch.tiles import gelu_mul as gelu_mul_tile


@triton.jit
def rounded(x):
    """Return x rounded to bf16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def norm(x, H, eps):
    """Return the RMS norm of a row x without a weight; x is zero from column H on."""
    return x * tl.rsqrt(tl.sum(x * x) / H + eps)


@triton.jit
def weighted(x, weight):
    """Return x * weight, rounded to bf16, as float32."""
    return rounded(x * weight.to(tl.float32))


@triton.jit
def store_row(x, y, scale, shared, m, place, inside, H, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Store row m in bf16 (LARGEST 0), NVFP4 (6) or 8 bits; NaN or inf makes an 8-bit scale NaN."""
    if LARGEST == 0.0:
        tl.store(y + place, x.to(y.dtype.element_ty), mask=inside)
    elif LARGEST == 6.0:
        block = tl.arange(0, BLOCK // 16)
        first = m.to(tl.int64) * (H // 16)
        inside_blocks = block < H // 16
        store_blocks(x, tl.load(shared), y, scale, first + block, inside_blocks, BLOCK // 16)
    else:
        s = scale_of(tl.max(magnitude(x), 0), LARGEST)
        tl.store(y + place, codes(x, s, y.dtype.element_ty, LARGEST), mask=inside)
        tl.store(scale + m, s)


@triton.jit
def load_halves(x, low, high, H):
    """Return a row's columns `low` (all below H) and its columns `high` (zero from column H on)."""
    return tl.load(x + low), tl.load(x + high, mask=high < H, other=0.0)


@triton.jit
def store_halves(x, y, low, high, values_low, values_high, H):
    """Store a row's halves to x in the dtype of y; columns `high` that are not below H are left out."""
    tl.store(x + low, values_low.to(y.dtype.element_ty))
    tl.store(x + high, values_high.to(y.dtype.element_ty), mask=high < H)


@triton.jit
def norm_halves(low, high, H, eps, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return both halves of a row's RMS norm without a weight; `high` is zero from column H on."""
    squares = tl.sum((low * low).reshape(HIGH, LOW // HIGH), 1) + high * high
    scale = tl.rsqrt(tl.sum(squares) / H + eps)
    return low * scale, high * scale


@triton.jit
def store_scaled(
    x, scale, shared, m, low, high, values_low, values_high, H,
    LARGEST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Store row m, given in halves, to x and `scale`; LARGEST chooses the format as in `store_row`."""
    if LARGEST == 0.0:
        store_halves(x + m * H, x, low, high, values_low, values_high, H)
    elif LARGEST == 6.0:
        g = tl.load(shared)
        block, last = tl.arange(0, LOW // 16), LOW // 16 + tl.arange(0, HIGH // 16)
        first, whole = m * (H // 16), block >= 0
        store_blocks(values_low, g, x, scale, first + block, whole, LOW // 16)
        store_blocks(values_high, g, x, scale, first + last, last < H // 16, HIGH // 16)
    else:
        most = tl.max(magnitude(values_low).reshape(HIGH, LOW // HIGH), 1)
        s = scale_of(tl.max(tl.maximum(most, magnitude(values_high))), LARGEST)
        values_low = codes(values_low, s, x.dtype.element_ty, LARGEST)
        values_high = codes(values_high, s, x.dtype.element_ty, LARGEST)
        store_halves(x + m * H, x, low, high, values_low, values_high, H)
        tl.store(scale + m, s)


@triton.jit
def after_attention_kernel(
    h, o, w_post, w_dense, w_experts, w_router, h_out, x_dense, dense_scale, dense_shared,
    x_experts, experts_scale, experts_shared, x_router, H, eps, root,
    CHAINED: tl.constexpr, DENSE: tl.constexpr, EXPERTS: tl.constexpr, MOVED: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Program m handles row m in two parts, as in `after_experts_kernel`.

    DENSE and EXPERTS choose the formats of x_dense and x_experts, as LARGEST does in `store_row`.
    If MOVED, the columns of x_experts are stored in the order of `quantize.place`.
    """
    m = tl.program_id(0).to(tl.int64)
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    post_low, post_high = load_halves(w_post, low, high, H)
    dense_low, dense_high = load_halves(w_dense, low, high, H)
    experts_low, experts_high = load_halves(w_experts, low, high, H)
    router_low, router_high = load_halves(w_router, low, high, H)
    follow(CHAINED)
    o_low, o_high = load_halves(o + m * H, low, high, H)
    row_low, row_high = load_halves(h + m * H, low, high, H)
    o_low, o_high = o_low.to(tl.float32), o_high.to(tl.float32)
    o_low, o_high = norm_halves(o_low, o_high, H, eps, LOW, HIGH)
    h_low = rounded(row_low.to(tl.float32) + weighted(o_low, post_low))
    h_high = rounded(row_high.to(tl.float32) + weighted(o_high, post_high))
    store_halves(h_out + m * H, h_out, low, high, h_low, h_high, H)
    h_low, h_high = norm_halves(h_low, h_high, H, eps, LOW, HIGH)
    y_low = weighted(rounded(h_low), router_low) * root
    y_high = weighted(rounded(h_high), router_high) * root
    store_halves(x_router + m * H, x_router, low, high, y_low, y_high, H)
    y_low, y_high = weighted(h_low, dense_low), weighted(h_high, dense_high)
    store_scaled(
        x_dense, dense_scale, dense_shared, m, low, high, y_low, y_high, H, DENSE, LOW, HIGH
    )
    y_low, y_high = weighted(h_low, experts_low), weighted(h_high, experts_high)
    if MOVED:
        low, high = place(low), place(high)
    store_scaled(
        x_experts, experts_scale, experts_shared, m, low, high, y_low, y_high, H, EXPERTS, LOW, HIGH
    )


@triton.jit
def after_experts_kernel(
    h, dense, experts, w_1, w_2, w, decoder_scalar, encoder_scalar, w_next, h_out, x, x_scale,
    shared, decoded, H, eps,
    CHAINED: tl.constexpr, CHOICES: tl.constexpr, LARGEST: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr,
):  # fmt: skip
    """Program m handles row m in two parts, of LOW and of HIGH columns: LOW <= H <= LOW + HIGH.

    LOW and HIGH are powers of two. As one vector, 2,816 columns would take the registers of 4,096.
    """
    m = tl.program_id(0).to(tl.int64)
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    w_1_low, w_1_high = load_halves(w_1, low, high, H)
    w_2_low, w_2_high = load_halves(w_2, low, high, H)
    w_low, w_high = load_halves(w, low, high, H)
    next_low, next_high = load_halves(w_next, low, high, H)
    factor = tl.where(m < decoded, tl.load(decoder_scalar), tl.load(encoder_scalar)).to(tl.float32)
    follow(CHAINED)
    a_low, a_high = load_halves(dense + m * H, low, high, H)
    row_low, row_high = load_halves(h + m * H, low, high, H)
    b_low = tl.zeros((LOW,), tl.float32)
    b_high = tl.zeros((HIGH,), tl.float32)
    for choice in tl.static_range(CHOICES):
        one_low, one_high = load_halves(experts + (m * CHOICES + choice) * H, low, high, H)
        b_low += one_low.to(tl.float32)
        b_high += one_high.to(tl.float32)
    a_low, a_high = a_low.to(tl.float32), a_high.to(tl.float32)
    a_low, a_high = norm_halves(a_low, a_high, H, eps, LOW, HIGH)
    b_low, b_high = norm_halves(rounded(b_low), rounded(b_high), H, eps, LOW, HIGH)
    sum_low = rounded(weighted(a_low, w_1_low) + weighted(b_low, w_2_low))
    sum_high = rounded(weighted(a_high, w_1_high) + weighted(b_high, w_2_high))
    sum_low, sum_high = norm_halves(sum_low, sum_high, H, eps, LOW, HIGH)
    h_low = rounded(rounded(row_low.to(tl.float32) + weighted(sum_low, w_low)) * factor)
    h_high = rounded(rounded(row_high.to(tl.float32) + weighted(sum_high, w_high)) * factor)
    store_halves(h_out + m * H, h_out, low, high, h_low, h_high, H)
    y_low, y_high = norm_halves(h_low, h_high, H, eps, LOW, HIGH)
    y_low, y_high = weighted(y_low, next_low), weighted(y_high, next_high)
    store_scaled(x, x_scale, shared, m, low, high, y_low, y_high, H, LARGEST, LOW, HIGH)


@triton.jit
def begin_kernel(
    tokens, embedding, update, w_next, h_out, x, x_scale, shared, decoded, H, eps, factor,
    CHAINED: tl.constexpr, UPDATED: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program m handles row m; BLOCK is a power of two, at least H."""
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
        # Triton 3.9's interpreter makes no mask of a block and a scalar, unless it is compared with 0.
        updated = (inside & (m < decoded)) != 0
        row = rounded(row + tl.load(update + place, mask=updated, other=0.0).to(tl.float32))
    row = tl.where(m < decoded, rounded(norm(row, H, eps)), row)
    tl.store(h_out + place, row.to(h_out.dtype.element_ty), mask=inside)
    row = weighted(norm(row, H, eps), weight)
    store_row(row, x, x_scale, shared, m, place, inside, H, LARGEST, BLOCK)


@triton.jit
def scaled_norm_kernel(x, weight, y, H, eps, factor, CHAINED: tl.constexpr, BLOCK: tl.constexpr):
    """Program m writes row m of y, norm(x * factor) * weight; BLOCK is a power of two, at least H."""
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
    """Program (m, i) writes BLOCK columns of row m of y, from column i * BLOCK on."""
    follow(CHAINED)
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + m * 2 * K + k, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(gate_up + m * 2 * K + K + k, mask=k < K, other=0.0).to(tl.float32)
    active = rounded(gelu_mul_tile(gate, 1.0))
    tl.store(y + m * K + k, (active * up).to(y.dtype.element_ty), mask=k < K)


def _stored(x: Activation, shared: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return rows, scales and global scale as a kernel's arguments; the rows replace a missing one."""
    rows, scale = x
    return rows, rows if scale is None else scale, rows if shared is None else shared


def _largest(scheme: str) -> float:
    if scheme == FOUR_BIT:
        return E2M1_MAX
    return LARGEST[EIGHT_BIT[scheme]] if scheme in EIGHT_BIT else 0.0


def _halves(H: int) -> dict[str, int]:
    """Return LOW, the largest power of two up to H, and HIGH, a power of two >= H - LOW."""
    low = 1 << (H.bit_length() - 1)
    return {"LOW": low, "HIGH": min(low, max(16, 1 << (H - low - 1).bit_length()))}


def after_attention(h, o, norms, schemes, eps=1e-6, shared=(None, None)):
    """Launch the kernel for `operations.after_attention`, which describes the arguments."""
    M, H = h.shape
    h_out, x_router = torch.empty_like(h), torch.empty_like(h)
    dense, experts = (room(M, H, scheme, h.device) for scheme in schemes)
    stored = *_stored(dense, shared[0]), *_stored(experts, shared[1])
    after_attention_kernel[(M,)](
        h, o, *norms, h_out, *stored, x_router, H, eps, H**-0.5,
        DENSE=_largest(schemes[0]), EXPERTS=_largest(schemes[1]), MOVED=schemes[1] in MOVED,
        **_halves(H), num_warps=8, **chained(h.device),
    )  # fmt: skip
    return h_out, dense, experts, x_router


def after_experts(h, dense, experts, norms, scalars, decoded, scheme, eps=1e-6, shared=None):
    """Launch the kernel for `operations.after_experts`, which describes the arguments."""
    M, H = h.shape
    h_out, x = torch.empty_like(h), room(M, H, scheme, h.device)
    w_1, w_2, w, w_next = norms
    after_experts_kernel[(M,)](
        h, dense, experts, w_1, w_2, w, *scalars, w_next, h_out, *_stored(x, shared), decoded, H, eps,
        CHOICES=experts.shape[1], LARGEST=_largest(scheme), **_halves(H),
        num_warps=16 if launched_as(M) <= 512 else 8,  # instructions limit many rows, memory limits few
        **chained(h.device),
    )  # fmt: skip
    return h_out, x


def begin(tokens, embedding, factor, update, w_next, decoded, scheme, eps=1e-6, shared=None):
    """Launch the kernel for `operations.begin`, which describes the arguments."""
    M, H = len(tokens), embedding.shape[1]
    h_out = torch.empty(M, H, dtype=embedding.dtype, device=embedding.device)
    x = room(M, H, scheme, embedding.device)
    begin_kernel[(M,)](
        tokens, embedding, h_out if update is None else update, w_next, h_out, *_stored(x, shared),
        decoded, H, eps, factor, UPDATED=update is not None, LARGEST=_largest(scheme),
        BLOCK=triton.next_power_of_2(H), num_warps=8,
        **chained(embedding.device),
    )  # fmt: skip
    return h_out, x


def scaled_norm(x, factor, weight, eps=1e-6):
    """Launch the kernel for `operations.scaled_norm`: the RMS norm of x * factor with a weight."""
    M, H = x.shape
    y = torch.empty_like(x)
    scaled_norm_kernel[(M,)](
        x, weight, y, H, eps, factor, BLOCK=triton.next_power_of_2(H), num_warps=8,
        **chained(x.device),
    )  # fmt: skip
    return y


def gelu_mul(gate_up):
    """Launch the kernel for `operations.gelu_mul`: gelu_tanh(gate) * up of bf16 [M, 2I]."""
    M, K = len(gate_up), gate_up.shape[1] // 2
    y = torch.empty(M, K, dtype=gate_up.dtype, device=gate_up.device)
    gelu_mul_kernel[(M, triton.cdiv(K, 1024))](
        gate_up.contiguous(), y, K, BLOCK=1024, num_warps=4, **chained(y.device)
    )
    return y
