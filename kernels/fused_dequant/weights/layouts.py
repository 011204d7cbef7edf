"""Schemes of weights in memory: each scheme's layout, and the kernel that multiplies with it.

    scheme            data                        scale                      factor
    bf16              bf16 [E, N, K]              none                       none
    fp8, int8         e4m3 or int8 [E, N, K]      f32 [E, N]                 none
    nvfp4             uint8 [E, N, K/2]           e4m3 [E, N, K/16]          f32 [E, 2]
    mxfp4             uint8 [E, N, K/2]           e8m0 uint8 [E, N, K/32]    f32 [E, 2] of ones
    nvfp4_fragments   int32 [E, N/64, K/64, 512]  int32 [E, N/64, K/64, 64]  f32 [E, 2]
    nvfp4_e4m3        int32 [E, N/64, K/64, 512]  int32 [E, N/64, K/64, 64]  f32 [E, 2]
    nvfp4_e2m1        uint8 [E, N, K/2]           e4m3 [E, N/128, K/64, 512] f32 [E, 3]

A dense weight has E = 1. gate_up weights of experts are interleaved (`formats.interleave_gate_up`).
`factor` has a number for gate rows and one for up rows (equal in weights without gate and up):

    nvfp4             128 / global_scale; 128 undoes the powers of two of the exact decode
    nvfp4_fragments   128 / global_scale; laid out for Hopper, activations in bf16 (`w4a16`)
    nvfp4_e4m3        8 / global_scale; laid out for Hopper, experts' activations in FP8 (`w4a8`).
                      Dense weights, and all weights on other GPUs, are laid out as fp8 instead
    nvfp4_e2m1        1 / (global_scale * r); r, the global scale of activations, is a third number;
                      laid out for Blackwell, activations in NVFP4 (`w4a4`)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fused_dequant import formats
from fused_dequant.formats import E2M1_MAX, FP8, FP8_MAX, GROUP, MX_GROUP
from fused_dequant.launch.targets import TARGETS, Capability
from fused_dequant.weights import w4a4, w4a8, w4a16

Spec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of one expert's tensor


@dataclass(frozen=True)
class Kernel:
    """The layout of a scheme's weights in memory, and the kernel that multiplies with them."""

    module: str  # module of `products` whose `launch` has the arguments of `matmul.launch`
    least: Capability  # the lowest compute capability that has the instructions
    # (N, K) -> the `Spec` of data, and of scale and factor if the scheme has them.
    layout: Callable[[int, int], tuple[Spec, ...]]
    # (data, scale, dtype) -> values [E, N, K], not yet multiplied by the factor.
    decode: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    # f32 [N, K] -> arguments of `weights.build`; None if `build` converts another scheme to this.
    rounded: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    # Tensors of NVFP4 on disk: codes, block scales, factor f32 [E, 2] -> tensors of a weight.
    lay_out: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] | None = None
    spans: tuple[int, int] = (1, 1)  # rows and columns per index of data's axes 1 and 2
    alone: bool = False  # whether no other capability has the instructions
    fp4: bool = False  # whether it needs FP4 units, which not every newer capability has
    experts_only: bool = False  # whether Linears are laid out in another way

    @property
    def in_fragments(self) -> bool:
        """Whether weights are stored in whole fragments of tensor cores, 64 x 64."""
        return self.spans == (w4a16.FRAGMENT, w4a16.FRAGMENT)

    def runs_on(self, target: Capability) -> bool:
        """Return whether a GPU of this compute capability has the kernel's instructions."""
        if self.fp4 and not (target in TARGETS and TARGETS[target].fp4):
            return False
        return target == self.least if self.alone else target >= self.least


def _rows(dtype: torch.dtype, N: int, K: int) -> tuple[Spec, ...]:
    return (dtype, (N, K)), (torch.float32, (N,))


def _groups(scale: torch.dtype, group: int, N: int, K: int) -> tuple[Spec, ...]:
    return (torch.uint8, (N, K // 2)), (scale, (N, K // group)), (torch.float32, (2,))


def _tiles(N: int, K: int) -> tuple[Spec, ...]:
    scale = FP8, (*w4a4.tiles(N, K), w4a4.TILE)
    return (torch.uint8, (N, K // 2)), scale, (torch.float32, (3,))


def _fragments(N: int, K: int) -> tuple[Spec, ...]:
    tiles = N // w4a16.FRAGMENT, K // w4a16.FRAGMENT
    return (torch.int32, (*tiles, 512)), (torch.int32, (*tiles, 64)), (torch.float32, (2,))


def _in_fragments(data: Tensor, blocks: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    from fused_dequant.weights.fragments import to_fragments  # triton comes with it

    return *to_fragments(data, blocks), factor.contiguous()


def _in_fragments_for_fp8(data: Tensor, blocks: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    return *w4a8.to_fragments(data, blocks), (factor / 16).contiguous()


def _in_fp8(data: Tensor, blocks: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    runs = (factor / 16).repeat_interleave(formats.GATE_UP_RUN, 1)  # gate and up rows alternate
    rows = runs.repeat(1, -(-data.shape[1] // runs.shape[1]))[:, : data.shape[1]]
    return formats.nvfp4_as_e4m3(data, blocks), rows.contiguous()


def _decode_rows(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return data.to(dtype) * scale.to(dtype)[..., None]


def _decode_groups(data: Tensor, scale: Tensor, dtype: torch.dtype, unit: float = 128.0) -> Tensor:
    return formats.dequantize_nvfp4(data, scale, torch.full((1,), unit, device=data.device), dtype)


def _decode_tiles(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    row_scales = w4a4.from_tiles(scale, data.shape[1], 2 * data.shape[2])
    return _decode_groups(data, row_scales, dtype, 1.0)


def _rounded_groups(weight: Tensor) -> tuple[Tensor, ...]:
    shared = FP8_MAX * E2M1_MAX / weight.abs().max()
    return (*formats.quantize_nvfp4(weight, shared), 128 / shared)


_FRAGMENTS = partial(
    Kernel, "nvfp4_hopper", (9, 0), _fragments, spans=(w4a16.FRAGMENT, w4a16.FRAGMENT), alone=True
)
KERNELS = {
    "bf16": Kernel(
        "matmul", (8, 0),
        lambda N, K: ((torch.bfloat16, (N, K)),),
        lambda data, _, dtype: data.to(dtype),
        lambda weight: (weight.to(torch.bfloat16),),
    ),
    "int8": Kernel(
        "matmul", (8, 0), partial(_rows, torch.int8), _decode_rows,
        partial(formats.quantize_rows, dtype=torch.int8),
    ),
    "fp8": Kernel(
        "matmul", (8, 9), partial(_rows, FP8), _decode_rows,
        partial(formats.quantize_rows, dtype=FP8), _in_fp8,
    ),
    "nvfp4": Kernel(
        "nvfp4", (8, 0), partial(_groups, FP8, GROUP), _decode_groups, _rounded_groups,
        spans=(1, 2),
    ),
    "mxfp4": Kernel(
        "nvfp4", (8, 0), partial(_groups, torch.uint8, MX_GROUP), formats.dequantize_mxfp4,
        formats.quantize_mxfp4, spans=(1, 2),
    ),
    "nvfp4_fragments": _FRAGMENTS(
        lambda *parts: w4a16.decode_fragments(*parts[:2]).to(parts[2]), lay_out=_in_fragments
    ),
    "nvfp4_e2m1": Kernel(
        "nvfp4_blackwell", (10, 0), _tiles, _decode_tiles, spans=(1, 2), fp4=True
    ),
    "nvfp4_e4m3": _FRAGMENTS(
        lambda *parts: w4a8.decode_fragments(*parts[:2]).to(parts[2]),
        lay_out=_in_fragments_for_fp8, experts_only=True,
    ),
}  # fmt: skip
