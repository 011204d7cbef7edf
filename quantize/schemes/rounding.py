"""The arithmetic of all schemes: quantizes and dequantizes weights, and rounds activations.

Weights are [..., out, in] in BF16; leading dimensions (experts) are quantized together.

  codes        scale                                             weight =
  e4m3, int8   BF16 per output row = amax / 448 (int8: 127.5)    code * scale
  e2m1, two    e8m0 per 32 inputs (MXFP4): a power of two        code * scale
  per byte
  e2m1, two    e4m3 per 16 inputs = global * amax / 6;           code * (scale / global)
  per byte     global FP32 = 448 * 6 / amax of the tensor

`formats` lists the codes. The global scale is a large number: the inverse of ModelOpt's
`weight_scale_2`. Linears that a server fuses into one matrix (q/k/v, gate/up) must share this scale.

Quantized weights have the bits that compressed-tensors 0.19 makes with llm-compressor 0.14's observers,
since every step uses their dtypes: scales are BF16 quotients; FP8 codes are rounded twice (to BF16,
then e4m3); a global scale is rounded to BF16 before it is stored as FP32; NVFP4 codes come from FP32.
Activations are rounded in FP32 throughout, as in serving kernels, with 127 instead of 127.5 for INT8.

Zeros: where a scale would be 0, the row or block gets compressed-tensors' least scale (2^-7 per row,
0.125 per block) and codes of 0. An all-zero tensor gets the global scale 1. NaN and infinity have no
codes: `observe` returns them as ranges, and the caller refuses the tensor.
Left out: asymmetric zero points and block-128 FP8 (704 and 2112 inputs are no multiples of 128).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
from fused_dequant import formats
from fused_dequant.formats import (
    BLOCK_VALUES,
    E2M1_MAX,
    FP8,
    FP8_MAX,
    GROUP,
    MX_GROUP,
    block_scale,
    blocks,
    e2m1_codes,
    pack,
    pack_e2m1,
    quotient,
    round_e2m1,
    unpack_e2m1,
)
from torch import Tensor

Observer = Literal["memoryless_minmax", "memoryless_mse"]

FP8_MAX_BITS = 0x43E0  # 448 in BF16

# memoryless_mse of llm-compressor: ranges shrunk by up to a fifth in steps of 1 %.
MSE_STEPS = 20
MSE_GRID = 100.0
MSE_PATIENCE = 5
MSE_NORM = 2.4


@dataclass(frozen=True)
class Codes:
    """A number format of weights: its codes, and how ranges of weights become scales."""

    name: str  # the format's name in the kernels
    scale: Callable[[Tensor], Tensor]  # ranges -> scales of the same dtype, never 0
    group: int | None  # how many inputs share a scale; None: all inputs of a row
    # Weights / scale -> clamped to the codes' range, and rounded unless `cast` rounds; may overwrite.
    fit: Callable[[Tensor], Tensor]
    cast: torch.dtype  # the dtype whose cast ends the rounding
    store: Callable[[Tensor], Tensor]  # FP32 values of codes -> codes as on disk
    neighbours: int = 0  # how many e4m3 codes GPTQ tries on each side of a block scale; 0: none

    def nearest(self, scaled: Tensor) -> Tensor:
        """Return FP32 values of the codes nearest to `scaled` (weights / scale); may overwrite it."""
        return self.fit(scaled).to(self.cast).float()


def observe(weight: Tensor, codes: Codes, observer: Observer) -> Tensor:
    """Return the range that the scale of each group of weights covers: BF16 [..., out, groups].

    `weight` is BF16 [..., out, in]. For `memoryless_minmax` a range is the largest magnitude of its
    group, NaN and infinity included. `memoryless_mse` shrinks it to lower the sum of |W - W'|^2.4.
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


def global_scale(ranges: Sequence[Tensor]) -> Tensor:
    """Return the FP32 global scale [..., 1] that Linears with these ranges [..., out, groups] share.

    It is 448 * 6 / the largest range, rounded to BF16 as in compressed-tensors; 1 if that overflows.
    """
    amax = torch.stack([r.flatten(-2).amax(-1) for r in ranges]).amax(0)
    amax = amax.clamp(min=torch.finfo(amax.dtype).tiny)
    scale = (FP8_MAX * E2M1_MAX) / amax
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).float().unsqueeze(-1)


def quantize_rows(
    codes: Codes, weight: Tensor, ranges: Tensor, _: Tensor | None, out: Tensor | None
) -> dict[str, Tensor]:
    """Quantize BF16 weights [..., out, in] to e4m3 or int8, one scale per row; return suffix -> tensor.

    The weight is contiguous; `ranges` [..., out, 1] are what `observe` returned. `out`,
    of the weight's shape and any strides, receives the codes; if None, a new tensor receives them.
    """
    codes_out = torch.empty_like(weight, dtype=codes.cast) if out is None else out
    scale = codes.scale(ranges)
    for block in blocks(weight):
        codes_out[block] = codes.fit(weight[block] / scale[block])  # copying casts
    return {"weight": codes_out, "weight_scale": scale}


def quantize_groups(
    weight: Tensor, ranges: Tensor, shared: Tensor | None = None, out: Tensor | None = None
) -> dict[str, Tensor]:
    """Quantize BF16 weights [..., out, in] to NVFP4, in groups of 16; return suffix -> tensor.

    The weight is contiguous; `ranges` [..., out, in / 16] are what `observe` returned. `shared` is the
    global scale [..., 1], made from `ranges` if None. `out` receives the packed codes: uint8
    [..., out, in / 2] with any strides. If `out` is None, a new tensor receives them.
    """
    shared = global_scale([ranges]) if shared is None else shared
    scale = block_scale(ranges, shared.unsqueeze(-1))  # [..., out, in / 16] FP32
    return {
        "weight_packed": _packed(weight, scale / shared.unsqueeze(-1), GROUP, out),
        "weight_scale": scale.to(FP8),
        "weight_global_scale": shared.expand(*weight.shape[:-2], 1).contiguous(),
    }


def _packed(weight: Tensor, steps: Tensor, group: int, out: Tensor | None) -> Tensor:
    """Return the packed codes of weights divided by their group's step [..., out, in / group]."""
    *leading, inputs = weight.shape
    packed = weight.new_empty((*leading, inputs // 2), dtype=torch.uint8) if out is None else out
    divisor, groups = steps.unsqueeze(-1), weight.unflatten(-1, (-1, group))
    rooms: tuple[Tensor, ...] = ()  # FP32 memory of a block, reused: new pages cost time
    for block in blocks(weight):
        rows = groups[block]
        rooms = rooms or tuple(torch.empty_like(rows, dtype=torch.float32) for _ in range(2))
        scaled, room = (buffer[: len(rows)] for buffer in rooms)
        torch.div(rows, divisor[block], out=scaled).clamp_(-E2M1_MAX, E2M1_MAX)
        packed[block] = pack(e2m1_codes(scaled, room).flatten(-2))
    return packed


def quantize_mx(
    weight: Tensor, ranges: Tensor, _: Tensor | None, out: Tensor | None
) -> dict[str, Tensor]:
    """Quantize to MXFP4, in groups of 32, without a global scale; else like `quantize_groups`."""
    scale = formats.e8m0_scale(ranges)
    packed = _packed(weight, formats.e8m0_values(scale), MX_GROUP, out)
    return {"weight_packed": packed, "weight_scale": scale}


def dequantize_rows(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return BF16 weights [..., out, in] from FP8 or INT8; `tensors` maps on-disk suffix -> tensor."""
    codes, scale = tensors["weight"], tensors["weight_scale"]
    scale = scale.expand(*codes.shape[:-1], 1)  # ModelOpt has one scale for the whole matrix
    table = _values(codes.dtype, scale.dtype, codes.device)
    weight = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    for block in blocks(codes):
        rows = codes[block]
        values = table.index_select(0, rows.view(torch.uint8).flatten().int())
        weight[block] = values.view(rows.shape).mul_(scale[block])
    return weight


@lru_cache
def _values(codes: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the value of each byte: on a CPU a look-up takes a fifth of the time of casting e4m3."""
    return torch.arange(256, dtype=torch.uint8).view(codes).to(dtype).to(device)


def dequantize_groups(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return BF16 weights [..., out, in] from NVFP4 or MXFP4; `tensors` maps suffix -> tensor."""
    if tensors["weight_scale"].dtype == torch.uint8:
        return _values_of(tensors["weight_packed"], formats.e8m0_values(tensors["weight_scale"]))
    scale = tensors["weight_scale"].float()
    if "weight_scale_2" in tensors:  # ModelOpt's: a small number, a factor
        packed, scale = tensors["weight"], scale * tensors["weight_scale_2"]
    else:  # [..., out, in / 16] over [..., 1, 1]
        shared = tensors["weight_global_scale"].unsqueeze(-1)
        packed, scale = tensors["weight_packed"], scale / shared
    return _values_of(packed, scale)


def _values_of(packed: Tensor, steps: Tensor) -> Tensor:
    """Return the BF16 weights [..., out, in] of packed codes and the steps of their groups."""
    *leading, half = packed.shape
    weight = torch.empty((*leading, 2 * half), dtype=torch.bfloat16, device=packed.device)
    for block in blocks(weight):
        values = unpack_e2m1(packed[block]).unflatten(-1, (steps.shape[-1], -1))
        weight[block] = values.mul_(steps[block].unsqueeze(-1)).flatten(-2)
    return weight


def _quotients(half_range: float, ranges: Tensor) -> Tensor:
    """Return ranges / half_range (half the distance from the lowest to the highest code), never 0."""
    scale = quotient(ranges, half_range)
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def _fit_e4m3(scaled: Tensor) -> Tensor:
    if scaled.dtype != torch.bfloat16:
        return scaled.clamp_(-FP8_MAX, FP8_MAX)
    magnitude = scaled.abs()  # int16 bits are clamped in half the time of BF16 numbers
    magnitude.view(torch.int16).clamp_(max=FP8_MAX_BITS)
    return magnitude.copysign_(scaled)


def _fit_e2m1(scaled: Tensor) -> Tensor:
    return round_e2m1(scaled.clamp_(-E2M1_MAX, E2M1_MAX).float())


def _rows(name: str, half_range: float, fit: Callable[[Tensor], Tensor], cast: torch.dtype):
    return Codes(name, partial(_quotients, half_range), None, fit, cast, lambda x: x.to(cast))


E4M3_ROWS = _rows("e4m3", FP8_MAX, _fit_e4m3, FP8)
INT8_ROWS = _rows("int8", 127.5, lambda x: x.clamp_(-128, 127).round_(), torch.int8)
# Rounded values, not yet packed. GPTQ tries six e4m3 codes below amax / 6 and six above.
E2M1_GROUPS = Codes(
    "e2m1", partial(_quotients, E2M1_MAX), GROUP, _fit_e2m1, torch.float32, pack_e2m1, neighbours=6
)
MX_GROUPS = Codes(
    "e2m1", lambda ranges: formats.e8m0_values(formats.e8m0_scale(ranges)), MX_GROUP,
    _fit_e2m1, torch.float32, pack_e2m1,
)  # fmt: skip


def _shrink(groups: Tensor, ranges: Tensor, codes: Codes) -> Tensor:
    """Return the shrunk ranges [..., out, groups] of least error: llm-compressor's memoryless_mse.

    It tries 1.00, 0.99, ... 0.81 of every range, and stops for a Linear after 5 steps in a row that
    improved none of its groups. Errors are BF16 sums. For NVFP4 the block scale is BF16 in the search.
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


def _error(groups: Tensor, ranges: Tensor, codes: Codes) -> Tensor:
    """Return the sum of |W - W'|^2.4 of each group [..., out, groups], W' under `ranges`."""
    result = torch.empty_like(ranges)
    scale = codes.scale(ranges).unsqueeze(-1)
    for block in blocks(groups.flatten(-2)):
        rounded = codes.fit(groups[block] / scale[block]).to(codes.cast).to(groups.dtype)
        rounded *= scale[block]
        result[block] = rounded.sub_(groups[block]).abs_().pow_(MSE_NORM).sum(-1)
    return result


def all_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite; BF16 bits are compared, 10 times as fast as isfinite."""
    if tensor.dtype == torch.bfloat16:
        step = BLOCK_VALUES if tensor.device.type == "cpu" else 64 * BLOCK_VALUES  # each waits
        bits = tensor.view(torch.int16).flatten().split(step)
        return all(bool((block & 0x7F80).amax() < 0x7F80) for block in bits if block.numel())
    return not tensor.numel() or bool(finite_each(tensor[None]))


def finite_each(tensor: Tensor, *, scale: bool = False) -> Tensor:
    """Return bool [n]: whether each of n stacked tensors is finite; if `scale`, uint8 holds e8m0."""
    flat = tensor.reshape(len(tensor), -1)
    if tensor.dtype == FP8:  # its only NaN has all bits set; it has no infinity
        return (flat.view(torch.uint8) & 0x7F).amax(1) < 0x7F
    if tensor.dtype == torch.uint8 and scale:  # 255 is e8m0's NaN
        return flat.amax(1) < 0xFF
    if not tensor.is_floating_point():
        return torch.ones(len(tensor), dtype=torch.bool, device=tensor.device)
    return flat.isfinite().all(1)


def sound_scales(scale: Tensor) -> bool:
    """Return whether scales are finite and, if e4m3, not negative: packed layouts hold no sign bit."""
    if scale.dtype == FP8 and scale.numel() and bool(scale.view(torch.uint8).amax() > 0x7F):
        return False
    return bool(finite_each(scale[None], scale=True).all())
