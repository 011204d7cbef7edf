"""Attention of a canvas or a prefill chunk over cached keys.

    heads    q = rope(rms_norm(q) * w_q)   k = rope(rms_norm(k) * w_k)   v = rms_norm(v)
             writes k and v to the cache, and q to a separate tensor
    attend   out[m] = softmax(1.0 * q[m] @ K.T) @ V over the positions first[m] .. last[m]

One kernel serves every mask of the model, because each row m sees one range of positions. A prompt
token at p sees 0 .. p, in a sliding layer p - 1023 .. p; inside an image it sees up to the image's
end. A canvas row sees its canvas of 256 positions and all earlier positions (sliding layer: 1,023).

The cache holds keys and values, bf16 [slots, capacity, kv_heads, D]. Position p of a sequence is
stored at p % capacity, so a sliding layer needs only a ring of window + chunk positions. `capacity`
is a multiple of 128, so no block of positions wraps around. Values that no row sees must be finite,
since they are multiplied by a probability of 0.

A program computes the query heads that share one key head: BQ queries of each head, against blocks
of BN positions. Softmax is online, in float32; probabilities are bf16 in the second product. If
programs would fill at most half of the GPU's processors, positions are split into parts s. A second
kernel combines the parts: sum_s w_s * out_s / sum_s w_s with w_s = total_s * exp(max_s - max).
Parts are stored in float16, which rounds eight times as finely as bf16: the error is 1.7e-3, not
2.3e-3. Float32 would take 3 us more to write (H200, 4 parts of 256 rows). Kernels read `first` and
`last` from device memory, so a captured CUDA graph can be replayed with other lengths.

If the next product reads quantized rows, the second kernel also quantizes, since it holds all heads
of a row. It rounds rows to bf16 first, so codes and scales equal those of `quantize.quantize_rows`.
If positions are not split, there is no second kernel, and `quantize.quantize_rows` quantizes.

On Hopper, heads of 256 and 512 have their own kernels: `attend_hopper` and `attend_wide`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_dequant.attention import attend_hopper, attend_wide
from fused_dequant.formats import E2M1_MAX, EIGHT_BIT, LARGEST, Activation
from fused_dequant.inputs.quantize import (
    codes,
    magnitude,
    quantize_rows,
    room,
    scale_of,
    store_blocks,
)
from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.dispatch import launched_as
from fused_dequant.launch.targets import has_boxes, is_hopper, processors
from fused_dequant.launch.tiles import FAR, LOG2_E

COMBINED = 8  # lines that a program of `combine_kernel` joins


@triton.jit
def halves(x, HEADS: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr):
    """Return HEADS heads at x, STRIDE apart, as their low and high halves [HEADS, D / 2].

    STRIDE is 0 for a weight of all heads: of [1, D / 2] numbers each thread would hold others than it
    needs, and heads of 512 were moved through shared memory.
    """
    at = x + tl.arange(0, HEADS)[:, None] * STRIDE + tl.arange(0, D // 2)[None, :]
    return tl.load(at), tl.load(at + D // 2)


@triton.jit
def normed(low, high, eps, D: tl.constexpr):
    """Return both halves of RMS-normalized heads without a weight, f32 [HEADS, D / 2]."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    return low * scale, high * scale


@triton.jit
def rotated(x, w_low, w_high, cos, sin, m, eps, HEADS: tl.constexpr, D: tl.constexpr):
    """Return row m's heads at x with norm, weight and rope: two halves f32 [HEADS, D / 2]."""
    at = m * (D // 2) + tl.arange(0, HEADS)[:, None] * 0 + tl.arange(0, D // 2)[None, :]
    c, s = tl.load(cos + at), tl.load(sin + at)
    low, high = halves(x, HEADS, D, D)
    c, s = c.to(tl.float32), s.to(tl.float32)
    low, high = normed(low, high, eps, D)
    a = (low * w_low.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    b = (high * w_high.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit
def store_heads(to, low, high, HEADS: tl.constexpr, D: tl.constexpr):
    """Store both halves of HEADS heads at `to` in bf16."""
    to += tl.arange(0, HEADS)[:, None] * D + tl.arange(0, D // 2)[None, :]
    tl.store(to, low.to(tl.bfloat16))
    tl.store(to + D // 2, high.to(tl.bfloat16))


@triton.jit
def heads_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    positions,
    q,
    keys,
    values,
    n,
    capacity,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,  # no v_proj: v is the raw k
    CHAINED: tl.constexpr,
):
    """Program (m, kind) stores row m's heads: queries if kind is 0, keys if 1, values if 2."""
    m = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    width: tl.constexpr = (Q_HEADS + KV_HEADS * (1 if SHARED else 2)) * D
    row = qkv + m * width
    if kind == 0:
        # Names of its own: a name that both branches set must have one shape.
        q_low, q_high = halves(q_weight, Q_HEADS, D, 0)
        follow(CHAINED)
        q_low, q_high = rotated(row, q_low, q_high, cos, sin, m, eps, Q_HEADS, D)
        store_heads(q + m * Q_HEADS * D, q_low, q_high, Q_HEADS, D)
    else:
        w_low, w_high = halves(k_weight, KV_HEADS, D, 0)
        follow(CHAINED)
        slot = tl.load(slots + tl.program_id(0) // n).to(tl.int64)
        cell = (slot * capacity + tl.load(positions + m) % capacity) * KV_HEADS * D
        if kind == 1:
            low, high = rotated(row + Q_HEADS * D, w_low, w_high, cos, sin, m, eps, KV_HEADS, D)
            store_heads(keys + cell, low, high, KV_HEADS, D)
        else:
            source: tl.constexpr = (Q_HEADS if SHARED else Q_HEADS + KV_HEADS) * D
            low, high = halves(row + source, KV_HEADS, D, D)
            low, high = normed(low, high, eps, D)
            store_heads(values + cell, low, high, KV_HEADS, D)


@triton.jit
def positions_of(
    cache, cell, h, j, d, KV_HEADS: tl.constexpr, D: tl.constexpr, BOXED: tl.constexpr
):
    """Return the keys or values [BN, D] of key head h in the cells `cell + j` of the cache.

    `cache` is a TMA descriptor if BOXED, else a pointer: without TMA, Triton 3.6 turns a descriptor
    into pointers, all kept in registers. On sm_80 a thread then spilled 296 bytes (heads of 256)
    and 1,192 bytes (heads of 512). With offsets from a pointer it spills nothing.
    """
    width: tl.constexpr = KV_HEADS * D
    if BOXED:
        block = cache.load([cell, h * D])
    else:
        block = tl.load(
            cache + cell.to(tl.int64) * width + h * D + (j[:, None] * width + d[None, :])
        )
    return block


@triton.jit
def attend_kernel(
    q, keys, values, slots, first, last, out, largest, total, rows, n, capacity, splits,
    CHAINED: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Program (i, b * KV_HEADS + h, split): sequence b's i-th BQ queries over key head h, part `split`.

    `rows` = B * n. keys, values [slots * capacity, kv_heads * D]: descriptors if BOXED, else pointers.
    """
    follow(CHAINED)
    b, h = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    r = tl.arange(0, BQ * GROUP)
    d = tl.arange(0, D)
    query = tl.program_id(0) * BQ + r // GROUP
    inside = query < n
    row = b * n + query
    low = tl.load(first + row, mask=inside, other=FAR)
    high = tl.load(last + row, mask=inside, other=-1)
    begin, end = tl.min(low) // BN * BN, tl.max(high) + 1
    # Every row sees every position from `clear` up to `blurred`: these need no mask.
    clear, blurred = tl.max(tl.where(inside, low, 0)), tl.min(tl.where(inside, high, FAR)) + 1
    share = tl.cdiv(tl.cdiv(end - begin, BN), splits) * BN
    begin += split * share
    end = tl.minimum(end, begin + share)
    line = row.to(tl.int64) * Q_HEADS + h * GROUP + r % GROUP
    queries = tl.load(q + line[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    base = tl.load(slots + b) * capacity
    top = tl.full((BQ * GROUP,), float("-inf"), tl.float32)
    sums = tl.zeros((BQ * GROUP,), tl.float32)
    acc = tl.zeros((BQ * GROUP, D), tl.float32)
    j = tl.arange(0, BN)
    for start in range(begin, end, BN):
        cell = base + start % capacity
        key = positions_of(keys, cell, h, j, d, KV_HEADS, D, BOXED)
        score = tl.dot(queries, key.T) * LOG2_E
        if (start < clear) | (start + BN > tl.minimum(blurred, end)):
            position = (start + j)[None, :]
            seen = (position >= low[:, None]) & (position <= high[:, None]) & (position < end)
            score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # a row that sees nothing in this block
        p = tl.exp2(score - shift[:, None])
        decay = tl.exp2(top - shift)
        sums = sums * decay + tl.sum(p, 1)
        value = positions_of(values, cell, h, j, d, KV_HEADS, D, BOXED)
        acc = tl.dot(p.to(tl.bfloat16), value, acc * decay[:, None])
        top = new
    line += split.to(tl.int64) * rows * Q_HEADS
    if SPLIT:
        tl.store(largest + line, top, mask=inside)
        tl.store(total + line, sums, mask=inside)
    acc /= tl.where(sums > 0.0, sums, 1.0)[:, None]
    to = out + line[:, None] * D + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def combined(
    parts, largest, total, line, lines, SPLITS: tl.constexpr, D: tl.constexpr, LINES: tl.constexpr
):
    """Join the parts of LINES lines, each one query head of one row; return them, f32 [LINES, D]."""
    inside = line < lines
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    loaded = ()
    for split in tl.static_range(SPLITS):
        loaded += (tl.load(parts + split * lines * D + at, mask=inside[:, None], other=0.0),)
    top = tl.full((LINES,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        part_largest = tl.load(largest + split * lines + line, mask=inside, other=float("-inf"))
        top = tl.maximum(top, part_largest)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.zeros((LINES,), tl.float32)
    acc = tl.zeros((LINES, D), tl.float32)
    for split in tl.static_range(SPLITS):
        part_largest = tl.load(largest + split * lines + line, mask=inside, other=float("-inf"))
        weight = tl.load(total + split * lines + line, mask=inside, other=0.0)
        weight *= tl.exp2(part_largest - shift)
        weights += weight
        acc += weight[:, None] * loaded[split].to(tl.float32)
    return acc / tl.where(weights > 0.0, weights, 1.0)[:, None]


@triton.jit
def combine_kernel(
    parts, largest, total, out, lines,
    CHAINED: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Each program joins the parts of LINES lines, and stores the lines in bf16."""
    follow(CHAINED)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    acc = combined(parts, largest, total, line, lines, SPLITS, D, LINES)
    to = out + line[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(line < lines)[:, None])


@triton.jit
def combine_quantized_kernel(
    parts, largest, total, out, scale, shared, lines,
    CHAINED: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Program m joins the parts of all heads of row m; stores NVFP4 if LARGEST is 6, else 8 bits."""
    follow(CHAINED)
    m = tl.program_id(0).to(tl.int64)
    line = m * HEADS + tl.arange(0, HEADS)
    h = combined(parts, largest, total, line, lines, SPLITS, D, HEADS)
    h = h.to(tl.bfloat16).to(tl.float32)
    if LARGEST == 6.0:
        COUNT: tl.constexpr = HEADS * D // 16
        block = tl.arange(0, COUNT)
        row = h.reshape(HEADS * D)
        store_blocks(row, tl.load(shared), out, scale, m * COUNT + block, block >= 0, COUNT)
    else:
        s = scale_of(tl.max(tl.max(magnitude(h), 1), 0), LARGEST)
        to = out + line[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(to, codes(h, s, out.dtype.element_ty, LARGEST))
        tl.store(scale + m, s)


def attention_heads(
    qkv, q_weight, k_weight, cos, sin, slots, positions, keys, values, q_heads, eps
):
    """Launch `heads_kernel` for `operations.attention_heads`, which describes the arguments."""
    rows, width = qkv.shape
    _, capacity, kv_heads, D = keys.shape
    q = torch.empty(rows, q_heads, D, dtype=qkv.dtype, device=qkv.device)
    heads_kernel[(rows, 3)](
        qkv, q_weight, k_weight, cos, sin, slots, positions, q, keys, values,
        rows // len(slots), capacity, eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, D=D, SHARED=width == (q_heads + kv_heads) * D,
        num_warps=8 if launched_as(rows) <= 512 else 4, **chained(qkv.device),
    )  # fmt: skip
    return q


def attend(q, keys, values, slots, first, last, scheme, shared):
    """Launch the attention kernels for `operations.attend`, which describes the arguments."""
    rows, q_heads, D = q.shape
    config = configure(
        launched_as(rows), launched_as(len(slots)), q_heads, keys.shape[2], D,
        processors(q.device), hopper=is_hopper(q.device),
    )  # fmt: skip
    return combine(attend_parts(q, keys, values, slots, first, last, config), scheme, shared)


@dataclass(frozen=True)
class Parts:
    """Results of attention over each part of the positions, and what `combine` needs to join them."""

    # bf16 [M, q_heads, D] if positions are not split, else f16 [splits, M, q_heads, D]
    results: torch.Tensor
    largest: torch.Tensor  # maxima of scores * log2(e), f32 [splits, M, q_heads], if split
    total: torch.Tensor  # sums of exponentials, f32 [splits, M, q_heads], if split

    @property
    def splits(self) -> int:
        """Return the number of parts that the positions are split into."""
        return 1 if self.results.dim() == 3 else len(self.results)


def attend_parts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    config: dict[str, int],
) -> Parts:
    """Return the results of each of config["SPLITS"] parts; `config` comes from `configure`."""
    rows, q_heads, D = q.shape
    count, capacity, kv_heads, _ = keys.shape
    n = rows // len(slots)
    options = dict(config)
    splits, hopper = options.pop("SPLITS"), options.pop("HOPPER", 0)
    grid = (triton.cdiv(n, options["BQ"]), len(slots) * kv_heads, splits)
    caches = [t.view(count * capacity, kv_heads * D) for t in (keys, values)]
    queries = q
    cells: list[Any] = caches
    if not hopper:
        kernel = attend_kernel
        options["BOXED"] = has_boxes(q.device)
        if options["BOXED"]:
            cells = [TensorDescriptor.from_tensor(t, [options["BN"], D]) for t in caches]
    else:
        kernel = attend_wide.attend_wide_kernel
        layout = NVMMASharedLayout(128, 16, 2)
        cells = [GluonDescriptor.from_tensor(t, [64, D], layout) for t in caches]
        share = options.pop("BQ")
        if D == 256:
            kernel = attend_hopper.attend_hopper_kernel
            queries = GluonDescriptor.from_tensor(q.view(rows, q_heads * D), [share, D], layout)
    results = largest = total = torch.empty_like(q)
    if splits > 1:
        results = torch.empty(splits, *q.shape, dtype=torch.float16, device=q.device)
        largest, total = torch.empty(2, splits, rows, q_heads, dtype=torch.float32, device=q.device)
    kernel[grid](
        queries, *cells, slots, first, last, results, largest, total, rows, n, capacity, splits,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, D=D, SPLIT=splits > 1, **chained(q.device), **options,
    )  # fmt: skip
    return Parts(results, largest, total)


def combine(parts: Parts, scheme: str, shared: torch.Tensor | None) -> Activation:
    """Join `parts`; return the rows that `scheme` reads: NVFP4 (needs `shared`), 8-bit or bf16."""
    quantized = scheme in EIGHT_BIT or shared is not None
    if parts.splits == 1:
        rows = parts.results.flatten(1)
        return quantize_rows(rows, scheme, shared) if quantized else (rows, None)
    M, q_heads, D = parts.results.shape[1:]
    lines, device = M * q_heads, parts.results.device
    out, scale = room(M, q_heads * D, scheme, device)
    given = parts.results, parts.largest, parts.total, out
    if not quantized:
        combine_kernel[(triton.cdiv(lines, COMBINED),)](
            *given, lines, SPLITS=parts.splits, D=D, LINES=COMBINED, num_warps=4, **chained(device)
        )
    else:
        combine_quantized_kernel[(M,)](
            *given, scale, scale if shared is None else shared, lines,
            SPLITS=parts.splits, HEADS=q_heads, D=D, LARGEST=LARGEST.get(out.dtype, E2M1_MAX),
            num_warps=8, **chained(device),
        )  # fmt: skip
    return out, scale


def configure(
    rows: int, batch: int, q_heads: int, kv_heads: int, D: int, processors: int, *, hopper: bool
) -> dict[str, int]:
    """Return tile sizes and SPLITS: how many parts positions are split into, to fill `processors`.

    SPLITS is 1 to 8. `rows` counts rows of all `batch` sequences; `hopper` means sm_90. On other
    GPUs a tile is 64 rows x 32 positions, or 32 x 32 for heads over 256. It takes 52 to 98 KiB of
    shared memory; an RTX 4090 or 5090 has 99. No target spills more than one register.
    """
    group = q_heads // kv_heads
    # A copy takes at least 8 queries of a head: shared memory repeats its pattern every 8 rows.
    hopper = hopper and D in (256, 512) and 64 % (8 * group) == 0
    wide = D > 256
    lines = (128 if D == 256 else 64) if hopper else (32 if wide else 64)
    BQ = max(1, lines // group)
    programs = -(-(rows // batch) // BQ) * batch * kv_heads
    config = {"BQ": BQ, "SPLITS": max(1, min(8, processors // programs))}
    if hopper:
        return config | {"HOPPER": 1, "num_warps": 4 if D == 256 else 8}
    return config | {"BN": 32, "num_warps": 8, "num_stages": 2}
