"""Programs of the experts' first product count themselves in, block by block, as they arrive.

A block's hidden rows are complete when the program of its last tile has stored them. That program
sees it from the count and, of 8-bit experts, quantizes the block's rows: it reads them back from the
L2, where they were stored a moment ago, so no launch stands between the two products. The second may
then begin while the first ends: its programs wait for their own block, not for the whole kernel
(`present`), and those of early blocks fill the processors that the last ones leave. They wait for the
kernel before they end, so whoever comes next knows that both are complete (`chain`).

The counts are `Routing.arrived`, zeroed when tokens are sorted: a routing serves one pair of products.
Who waits is only launched after every program it waits for has begun, so none waits for ever.
"""

# Kernels are compiled from their syntax: their parameters have no Python types, and a launch passes
# numbers for `constexpr`.

import triton
import triton.language as tl

from fused_dequant.quantize import codes, scale_of

PART = tl.constexpr(256)  # columns that a warp loads at once: a row's maximum stays within a warp


@triton.jit
def arrive(arrived):
    """Count this program in; return how many came before, whose results may then be read."""
    tl.debug_barrier()  # every thread has stored
    return tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")


@triton.jit
def present(arrived):
    """Return how many have arrived, whose results may then be read."""
    return tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")


@triton.jit
def quantize_columns(
    x, q, place, real, k, largest, K, LARGEST: tl.constexpr, MORE: tl.constexpr
):  # fmt: skip
    """Quantize columns k [PART] and MORE times as many behind them; return the scales of the rows.

    `largest` is the rows' magnitude before k.
    """
    inside = real[:, None] & (k < K)[None, :]
    h = tl.load(x + place + k[None, :], mask=inside, other=0.0)
    # The bits of `magnitude`, made of bf16's: the values stay packed until their scale is known.
    bits = (h.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) << 16
    largest = tl.maximum(largest, tl.max(bits, 1))
    if MORE:
        scale = quantize_columns(x, q, place, real, k + PART, largest, K, LARGEST, MORE - 1)
    else:
        scale = scale_of(largest, LARGEST)
    values = codes(h.to(tl.float32), scale[:, None], q.dtype.element_ty, LARGEST)
    tl.store(q + place + k[None, :], values, mask=inside)
    return scale


@triton.jit
def quantize_block(
    x, q, q_scale, slots, rows, K, LARGEST: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
):
    """Quantize rows `slots` [rows] of x [slots, K] as `quantize_rows` does, ROWS at a time.

    PARTS * PART is at least K.
    """
    for start in range(0, rows, ROWS):
        m = start + tl.arange(0, ROWS)
        real = m < rows
        slot = tl.load(slots + m, mask=real, other=0)
        place = slot.to(tl.int64)[:, None] * K
        none = tl.zeros((ROWS,), tl.int32)
        k = tl.arange(0, PART)
        scale = quantize_columns(x, q, place, real, k, none, K, LARGEST, PARTS - 1)
        tl.store(q_scale + slot, scale, mask=real)
