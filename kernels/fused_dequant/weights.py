"""One quantized weight, or one for each expert, in the layout its kernel reads.

    scheme            data                        scale                      factor
    bf16              bf16 [E, N, K]              none                       none
    fp8, int8         e4m3 or int8 [E, N, K]      f32 [E, N]                 none
    nvfp4             uint8 [E, N, K/2]           e4m3 [E, N, K/16]          f32 [E, 2]
    nvfp4_fragments   int32 [E, N/64, K/64, 512]  int32 [E, N/64, K/64, 64]  f32 [E, 2]

A dense weight has E = 1. `factor` is 128 / global_scale for gate rows and for up rows (equal if the
weight has no such split); 128 undoes the powers of two of the exact decode. `nvfp4_fragments` is the
same weight for Hopper (`formats.to_fragments`).

gate_up weights of experts are interleaved (`formats.interleave_gate_up`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fused_dequant import formats
from fused_dequant.targets import capability


@dataclass(frozen=True)
class Weight:
    """Tensors of one scheme; see the module's docstring."""

    scheme: str
    data: torch.Tensor
    scale: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K) of the dequantized weight."""
        experts, rows, columns = self.data.shape[:3]
        if self.scheme == "nvfp4_fragments":
            return experts, rows * formats.FRAGMENT, columns * formats.FRAGMENT
        return experts, rows, columns * 2 if self.scheme.startswith("nvfp4") else columns

    @property
    def bytes(self) -> int:
        """Bytes a kernel reads when every expert is used."""
        tensors = (self.data, self.scale, self.factor)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def clone(self) -> "Weight":
        """A copy in memory of its own."""
        return self._each(torch.Tensor.clone)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Weight":
        rest = (None if t is None else change(t) for t in (self.scale, self.factor))
        return Weight(self.scheme, change(self.data), *rest)

    def to(self, device: torch.device | str) -> "Weight":
        """The same weight on a device."""
        return self._each(lambda tensor: tensor.to(device))


def bf16(weight: torch.Tensor) -> Weight:
    """Weight [N, K] or [E, N, K]."""
    return Weight("bf16", _with_experts(weight.to(torch.bfloat16)))


def eight_bit(weight: torch.Tensor, scale: torch.Tensor) -> Weight:
    """e4m3 or int8 weight [N, K] or [E, N, K] with scale [N], [N, 1], [E, N] or [E, N, 1]."""
    schemes = {dtype: scheme for scheme, dtype in formats.EIGHT_BIT.items()}
    if weight.dtype not in schemes:
        raise ValueError(f"an 8-bit weight is float8_e4m3fn or int8, got {weight.dtype}")
    data = _with_experts(weight)
    return Weight(schemes[weight.dtype], data, scale.float().reshape(data.shape[:2]).contiguous())


def nvfp4(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> Weight:
    """Canonical NVFP4 (see `formats`), for the device that holds it.

    packed uint8 [N, K/2] or [E, N, K/2]; global_scale f32 [1], [E] or, for gate and up, [E, 2]. On
    Hopper the weight is repacked into fragments when N and K are multiples of 64.
    """
    data, blocks = _with_experts(packed), _with_experts(scale)
    factor = (128.0 / global_scale.float()).reshape(len(data), -1).expand(-1, 2).contiguous()
    whole = data.shape[1] % formats.FRAGMENT == 0 and data.shape[2] % (formats.FRAGMENT // 2) == 0
    if whole and is_hopper(data.device):
        return Weight("nvfp4_fragments", *formats.to_fragments(data, blocks), factor)
    return Weight("nvfp4", data, blocks, factor)


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values [E, N, K] in `dtype`. Gate and up rows of an [E, 2] global scale are interleaved rows."""
    data, scale, factor = weight.data, weight.scale, weight.factor
    if scale is None:
        return data.to(dtype)
    if factor is None:
        return data.to(dtype) * scale.to(dtype)[..., None]
    if weight.scheme == "nvfp4_fragments":
        values = formats.decode_fragments(data, scale).to(dtype)
    else:
        unit = torch.full((1,), 128.0, device=data.device)
        values = formats.dequantize_nvfp4(data, scale, unit, dtype)
    runs = values.unflatten(1, (-1, formats.GATE_UP_RUN)) if _is_split(factor) else None
    if runs is None:
        return values * factor[:, :1, None].to(dtype)
    per_run = factor.to(dtype).repeat(1, runs.shape[1] // 2)
    return (runs * per_run[:, :, None, None]).flatten(1, 2)


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of sm_90, which alone has `wgmma`."""
    return device.type == "cuda" and capability(device) == (9, 0)


def _is_split(factor: torch.Tensor) -> bool:
    return bool((factor[:, 0] != factor[:, 1]).any())


def _with_experts(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor[None]
