"""The arithmetic of all schemes: weights to codes and (block) scales and back, activations rounded.

Weights are [..., out, in] in BF16; leading dimensions (experts) are quantized together.

  codes        scale of a weight                                 weight =
  e4m3, int8   BF16 per output row = amax / 448 (/ 127.5)        code * scale
  e2m1, two    e4m3 per 16 inputs = global * amax / 6;           code * (scale / global)
  a byte       global FP32 = 448 * 6 / amax of the tensor

e2m1 codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign; the low nibble is the even input.
The global scale is a large number: the inverse of ModelOpt's `weight_scale_2`. Linears that a server
fuses into one matrix (q/k/v, gate/up) must share it.

Weights are bit-identical to compressed-tensors 0.19 with llm-compressor 0.14's observers, which
demands their dtypes step by step: scales are BF16 quotients, FP8 codes are rounded twice (BF16, then
e4m3), a global scale is rounded to BF16 before it is stored as FP32, NVFP4 codes come from FP32.
Activations are rounded as serving kernels do it, in FP32 throughout, INT8 with 127 and not 127.5.

Zeros: a row or block whose scale would be 0 gets compressed-tensors' smallest one (2^-7 per row,
0.125 per block) and codes of 0; an all-zero tensor gets the global scale 1. NaN and infinity have no
codes: `observe` passes them on in its result and the caller refuses the tensor.
Left out: asymmetric zero points and block-128 FP8 (704 and 2112 inputs are no multiples of 128).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import torch

Observer = Literal["memoryless_minmax", "memoryless_mse"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_MAX_BITS = 0x43E0  # 448 in BF16
INT8_MAX = 127.0  # largest code of activations; -128 is not used
E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 16
SMALLEST_BLOCK_SCALE = 0.125
LEAST_BLOCK_SCALE = 0.25  # of weights in e4m3: half of it over 8 is the least normal number
# Values worked on at a time: FP32 temporaries of 2 MB stay in the cache. One core of a Xeon makes
# NVFP4 codes at 0.39 GB/s of BF16 input in whole matrices, at 2.3 GB/s in such blocks.
BLOCK_VALUES = 1 << 19

# memoryless_mse of llm-compressor: ranges shrunk by up to a fifth in steps of 1 %.
MSE_STEPS = 20
MSE_GRID = 100.0
MSE_PATIENCE = 5
MSE_NORM = 2.4


@dataclass(frozen=True)
class Codes:
    """A number format of weights.

    Attributes:
        half_range: half the distance from the lowest to the highest code; an amax of 1 gets the
            scale 1 / half_range.
        group: the inputs that share a scale; None for all inputs of a row.
        fit: rounds BF16 weights over their scale, in place, so that `cast` changes nothing.
        cast: the dtype whose cast ends the rounding.
    """

    half_range: float
    group: int | None
    fit: Callable[[torch.Tensor], torch.Tensor]
    cast: torch.dtype


def observe(weight: torch.Tensor, codes: Codes, observer: Observer) -> torch.Tensor:
    """Return the range [..., out, groups] in BF16 that each scale must cover.

    `memoryless_minmax` covers the largest magnitude; `memoryless_mse` shrinks it where that lowers
    the error |W - W'|^2.4. A group that holds NaN or infinity has a range of NaN or infinity.
    """
    *leading, inputs = weight.shape
    groups = inputs // (codes.group or inputs)
    # Positive BF16 numbers sort like their bits, and int16 maxima run 3 times as fast as BF16 ones.
    bits = weight.view(torch.int16)
    amax = torch.empty((*leading, groups), dtype=torch.int16, device=weight.device)
    for block in blocks(weight):
        torch.amax((bits[block] & 0x7FFF).unflatten(-1, (groups, -1)), dim=-1, out=amax[block])
    ranges = amax.view(torch.bfloat16)
    if observer == "memoryless_mse":
        return _shrink(weight.unflatten(-1, (groups, -1)), ranges, codes)
    return ranges


def global_scale(ranges: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the FP32 global scale [..., 1] that Linears with these ranges [..., out, groups] share.

    448 * 6 / the largest, rounded to BF16 as compressed-tensors does; 1 where that overflows.
    """
    amax = torch.stack([r.flatten(-2).amax(-1) for r in ranges]).amax(0)
    amax = amax.clamp(min=torch.finfo(amax.dtype).tiny)
    scale = (FP8_MAX * E2M1_MAX) / amax
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).float().unsqueeze(-1)


def quantize_rows(
    codes: Codes, weight: torch.Tensor, ranges: torch.Tensor, out: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Quantize BF16 weights [..., out, in] to 8 bits with a scale a row, by on-disk suffix.

    Args:
        codes: the format, e4m3 or int8.
        weight: must be contiguous.
        ranges: what `observe` found, [..., out, 1].
        out: memory for the codes, of `weight`'s shape and any strides; None allocates it.
    """
    found = torch.empty_like(weight, dtype=codes.cast) if out is None else out
    scale = _row_scale(ranges, codes)
    for block in blocks(weight):
        found[block] = codes.fit(weight[block] / scale[block])  # copying casts
    return {"weight": found, "weight_scale": scale}


def quantize_groups(
    weight: torch.Tensor,
    ranges: torch.Tensor,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Quantize BF16 weights [..., out, in] to e2m1 in groups of 16, by on-disk suffix.

    Args:
        weight: must be contiguous; `in` is a multiple of 16.
        ranges: what `observe` found, [..., out, in / 16].
        shared: the global scale [..., 1]; from `ranges` alone when not given.
        out: memory for the codes, uint8 [..., out, in / 2] of any strides; None allocates it.
    """
    shared = global_scale([ranges]) if shared is None else shared
    *leading, inputs = weight.shape
    packed = weight.new_empty((*leading, inputs // 2), dtype=torch.uint8) if out is None else out
    scale = block_scale(ranges, shared.unsqueeze(-1))  # [..., out, in / 16] FP32
    divisor = (scale / shared.unsqueeze(-1)).unsqueeze(-1)
    groups = weight.unflatten(-1, (-1, GROUP))
    rooms: tuple[torch.Tensor, ...] = ()  # FP32 memory of a block, used again: new pages cost time
    for block in blocks(weight):
        own = groups[block]
        rooms = rooms or tuple(torch.empty_like(own, dtype=torch.float32) for _ in range(2))
        scaled, room = (each[: len(own)] for each in rooms)
        torch.div(own, divisor[block], out=scaled).clamp_(-E2M1_MAX, E2M1_MAX)
        packed[block] = _pack(_e2m1_codes(scaled, room).flatten(-2))
    return {
        "weight_packed": packed,
        "weight_scale": scale.to(FP8),
        "weight_global_scale": shared.expand(*weight.shape[:-2], 1).contiguous(),
    }


def dequantize_rows(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the BF16 weights [..., out, in] of 8-bit codes, by on-disk suffix."""
    codes, scale = tensors["weight"], tensors["weight_scale"]
    scale = scale.expand(*codes.shape[:-1], 1)  # ModelOpt has one for the whole matrix
    table = _values(codes.dtype, scale.dtype, codes.device)
    weight = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    for block in blocks(codes):
        own = codes[block]
        found = table.index_select(0, own.view(torch.uint8).flatten().int())
        weight[block] = found.view(own.shape).mul_(scale[block])
    return weight


@lru_cache
def _values(codes: torch.dtype, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the value of each byte: looking it up takes a CPU a fifth of casting e4m3."""
    return torch.arange(256, dtype=torch.uint8).view(codes).to(dtype).to(device)


def dequantize_groups(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the BF16 weights [..., out, in] of e2m1 codes, by on-disk suffix."""
    scale = tensors["weight_scale"].float()
    if "weight_scale_2" in tensors:  # ModelOpt's: a small number that is multiplied with
        packed, scale = tensors["weight"], scale * tensors["weight_scale_2"]
    else:  # [..., out, in / 16] over [..., 1, 1]
        shared = tensors["weight_global_scale"].unsqueeze(-1)
        packed, scale = tensors["weight_packed"], scale / shared
    *leading, half = packed.shape
    weight = torch.empty((*leading, 2 * half), dtype=torch.bfloat16, device=packed.device)
    for block in blocks(weight):
        values = unpack_e2m1(packed[block]).unflatten(-1, (-1, GROUP))
        weight[block] = values.mul_(scale[block].unsqueeze(-1)).flatten(-2)
    return weight


def dequantize_in_e4m3(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the BF16 weights [..., out, in] of e2m1 codes as FP8 products read them.

    e4m3(e2m1 * block scale / 8) * 8 / global scale, rounded to nearest, ties to even; a block whose
    scale is below LEAST_BLOCK_SCALE counts as zero. The others are normal numbers, off by 1/17 at most.
    """
    if "weight_scale_2" in tensors:  # ModelOpt's, as in `dequantize_groups`
        packed, shared = tensors["weight"], 8 * tensors["weight_scale_2"]
    else:
        packed, shared = tensors["weight_packed"], 8 / tensors["weight_global_scale"].unsqueeze(-1)
    scale = tensors["weight_scale"].float()
    eighth = scale.masked_fill(scale < LEAST_BLOCK_SCALE, 0) / 8
    *leading, half = packed.shape
    codes = torch.empty((*leading, 2 * half), dtype=FP8, device=packed.device)
    for block in blocks(codes):
        values = unpack_e2m1(packed[block]).unflatten(-1, (-1, GROUP))
        codes[block] = values.mul_(eighth[block].unsqueeze(-1)).flatten(-2)  # copying casts
    return codes.float().mul_(shared).bfloat16()


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the FP32 values [..., in] of packed codes [..., in / 2]."""
    found = _pairs(packed.device).index_select(0, packed.flatten().int())
    return found.view(torch.float32).view(*packed.shape[:-1], -1)


@lru_cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Return the two FP32 values of each byte as one int64, since one look-up costs half of two."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    high, low = torch.meshgrid(values, values, indexing="ij")
    return torch.stack((low, high), -1).flatten().view(torch.int64).to(device)


def round_tokens(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round activations [..., K] to e4m3 or int8 with one scale a token, in x's dtype.

    The codes and scales are those of the kernels' `quantize_rows`, bit for bit: FP32 scale =
    amax / 448 or / 127, code = x * (1 / scale). A token with NaN or infinity becomes NaN.
    """
    largest = FP8_MAX if dtype == FP8 else INT8_MAX
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = _quotient(amax, largest).masked_fill_(amax == 0, 1.0)
    scale.masked_fill_(~amax.isfinite(), torch.nan)
    scaled = wide * (1.0 / scale)
    if dtype == torch.int8:
        scaled = scaled.round_().nan_to_num_(0.0)
    return (scaled.clamp_(-largest, largest).to(dtype).float() * scale).to(x.dtype)


def round_groups(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Round activations [..., K] to e2m1, in x's dtype, with an e4m3 scale for each 16 values.

    `global_scale` = 448 * 6 / the calibrated amax. Values beyond it saturate. Arithmetic is FP32.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    shared = torch.tensor([global_scale], dtype=torch.float32, device=x.device)
    scale = block_scale(groups.abs().amax(-1), shared) / shared
    rounded = round_e2m1((groups / scale.unsqueeze(-1)).clamp_(-E2M1_MAX, E2M1_MAX))
    return (rounded * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round FP32 values in -6..6 to the nearest e2m1 value, ties to the even code."""
    magnitude = x.abs()
    magic = _magic(magnitude)
    return magnitude.add_(magic).sub_(magic).copysign_(x)


def _magic(magnitude: torch.Tensor) -> torch.Tensor:
    """Return 2^22 * max(1, 2^floor(log2 x)): adding it rounds x to e2m1's grid there.

    Below 2 the grid is 0.5, FP32's spacing at 2^22; it doubles from one power of two to the next.
    """
    exponent = magnitude.view(torch.int32) & 0x7F800000
    return exponent.clamp_(min=0x3F800000).add_(22 << 23).view(torch.float32)


def _e2m1_codes(x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Return the codes 0..15 (uint8) of FP32 values in -6..6; x, and `room` for as many, are used up.

    Adding `_magic` leaves the number of grid steps from 0 in the last byte. Each power of two above 1
    adds two codes, and magic >> 22 is 2 * (127 + 22 + exponent) = 2 * exponent - 214 in a byte. The 214
    are added to magic itself, an even number of steps, so that ties still go to the even code.
    """
    bits, other = x.add_(0.0).view(torch.int32), room.view(torch.int32)  # -0 has become 0
    sign = torch.bitwise_right_shift(bits, 28, out=other).to(torch.uint8).bitwise_and_(8)
    magic = torch.bitwise_and(bits, 0x7F800000, out=other).clamp_(min=0x3F800000)
    magic.add_((22 << 23) + 214)
    x.abs_().add_(room)
    return bits.add_(magic.bitwise_right_shift_(22)).to(torch.uint8).bitwise_or_(sign)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [..., in] two a byte, the even input in the low nibble (little-endian)."""
    pairs = codes.view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Pack e2m1 values [..., in] FP32 two codes a byte: uint8 [..., in / 2]. -0 keeps its sign."""
    codes = _e2m1_codes(values.clone(), torch.empty_like(values))
    return _pack(codes | (values.signbit().view(torch.uint8) << 3))


def block_scale(ranges: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return the scales of groups of 16: e4m3 numbers, held in FP32, never 0."""
    scale = (shared * _quotient(ranges, E2M1_MAX)).clamp(max=FP8_MAX).to(FP8).float()
    return scale.masked_fill_(scale == 0, SMALLEST_BLOCK_SCALE)


def _row_scale(ranges: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Return the scales range / half range in the dtype of `ranges`, never 0."""
    scale = _quotient(ranges, codes.half_range)
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def _quotient(ranges: torch.Tensor, half_range: float) -> torch.Tensor:
    """Divide by a tensor, since CUDA turns division by a Python number into an inexact product."""
    return ranges / ranges.new_full((), half_range)  # made there: nothing waits for a copy


def _fit_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    magnitude = scaled.abs()  # int16 bits are clamped in half the time of BF16 numbers
    magnitude.view(torch.int16).clamp_(max=FP8_MAX_BITS)
    return magnitude.copysign_(scaled)


def _fit_int8(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp_(-128, 127).round_()


def _fit_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    return round_e2m1(scaled.clamp_(-E2M1_MAX, E2M1_MAX).float())


E4M3_ROWS = Codes(FP8_MAX, None, _fit_e4m3, FP8)
INT8_ROWS = Codes(127.5, None, _fit_int8, torch.int8)
E2M1_GROUPS = Codes(E2M1_MAX, GROUP, _fit_e2m1, torch.float32)  # rounded values, not yet packed


def _shrink(groups: torch.Tensor, ranges: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Return the shrunk ranges [..., out, groups] of least error: llm-compressor's memoryless_mse.

    It tries 1.00, 0.99, ... 0.81 of every range, and gives a Linear up after 5 steps that improved
    no group of it; errors are BF16 sums. The block scale stays BF16 during its search for NVFP4.
    """
    best, least = ranges.clone(), torch.full_like(ranges, torch.finfo(ranges.dtype).max)
    stale = torch.zeros(ranges.shape[:-2], dtype=torch.int32, device=ranges.device)  # per Linear
    for step in range(MSE_STEPS):
        shrunk = ranges * (1 - step / MSE_GRID)
        error = _error(groups, shrunk, codes)
        better = (error < least) & (stale < MSE_PATIENCE)[..., None, None]
        least = torch.where(better, error, least)
        best = torch.where(better, shrunk, best)
        improved = better.flatten(-2).any(-1)
        stale = torch.where(improved, torch.where(stale < MSE_PATIENCE, 0, stale), stale + 1)
        if (stale >= MSE_PATIENCE).all():
            break
    return best


def _error(groups: torch.Tensor, ranges: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Return the sum of |W - W'|^2.4 of each group [..., out, groups], W' under `ranges`."""
    result = torch.empty_like(ranges)
    scale = _row_scale(ranges, codes).unsqueeze(-1)
    for block in blocks(groups.flatten(-2)):
        rounded = codes.fit(groups[block] / scale[block]).to(codes.cast).to(groups.dtype)
        rounded *= scale[block]
        result[block] = rounded.sub_(groups[block]).abs_().pow_(MSE_NORM).sum(-1)
    return result


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite; comparing bits is 10 times as fast as isfinite."""
    if tensor.dtype == torch.bfloat16:
        step = BLOCK_VALUES if tensor.device.type == "cpu" else 64 * BLOCK_VALUES  # each waits
        bits = tensor.view(torch.int16).flatten().split(step)
        return all(bool((block & 0x7F80).amax() < 0x7F80) for block in bits if block.numel())
    if tensor.dtype == FP8:  # its only NaN has all bits set; it has no infinity
        return not tensor.numel() or bool((tensor.view(torch.uint8) & 0x7F).amax() < 0x7F)
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def blocks(weight: torch.Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices of rows of [..., out, in], about BLOCK_VALUES values of one Linear each.

    On a GPU, which has less to gain from its cache than to lose by launches, they are 4 times as many.
    """
    *leading, out, inputs = weight.shape
    values = BLOCK_VALUES if weight.device.type == "cpu" else 4 * BLOCK_VALUES
    step = max(1, values // inputs)
    for linear in product(*map(range, leading)):
        for start in range(0, out, step):
            yield (*linear, slice(start, start + step))
