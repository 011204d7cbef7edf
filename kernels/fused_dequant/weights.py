"""One quantized weight, or one for each expert, in its kernel's layout; it chooses that kernel.

    scheme            data                        scale                      factor
    bf16              bf16 [E, N, K]              none                       none
    fp8, int8         e4m3 or int8 [E, N, K]      f32 [E, N]                 none
    nvfp4             uint8 [E, N, K/2]           e4m3 [E, N, K/16]          f32 [E, 2]
    nvfp4_fragments   int32 [E, N/64, K/64, 512]  int32 [E, N/64, K/64, 64]  f32 [E, 2]
    nvfp4_e4m3        int32 [E, N/64, K/64, 512]  int32 [E, N/64, K/64, 64]  f32 [E, 2]

A dense weight has E = 1. `factor` is 128 / global_scale for gate rows and for up rows (equal if the
weight has no such split); 128 undoes the powers of two of the exact decode. `nvfp4_fragments` is the
same weight for Hopper (`formats.to_fragments`). `nvfp4_e4m3` is NVFP4 that Hopper multiplies in 8 bits
(`w4a8`), its factor 8 / global_scale; elsewhere, and in dense products, such a weight is an fp8 one.

gate_up weights of experts are interleaved (`formats.interleave_gate_up`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from fused_dequant import formats, reference, tuning, w4a8
from fused_dequant.activations import Activation, quantize_rows, values
from fused_dequant.dispatch import launches
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.targets import Capability, capability


@dataclass(frozen=True)
class Kernel:
    """The kernel that multiplies with the weights of a scheme.

    Attributes:
        module: module of this package whose `launch` has the arguments of `matmul.launch`.
        least: the lowest compute capability that has the instructions.
        alone: whether no other capability has them.
    """

    module: str
    least: Capability
    alone: bool = False

    def runs_on(self, target: Capability) -> bool:
        """Whether a GPU of this compute capability has the kernel's instructions."""
        return target == self.least if self.alone else target >= self.least


KERNELS = {
    "bf16": Kernel("matmul", (8, 0)),
    "int8": Kernel("matmul", (8, 0)),
    "fp8": Kernel("matmul", (8, 9)),
    "nvfp4": Kernel("nvfp4", (8, 0)),
    "nvfp4_fragments": Kernel("nvfp4_hopper", (9, 0), alone=True),
    "nvfp4_e4m3": Kernel("nvfp4_hopper", (9, 0), alone=True),
}
FRAGMENTS = ("nvfp4_fragments", "nvfp4_e4m3")  # schemes laid out for `wgmma`


@dataclass(frozen=True)
class Weight:
    """Tensors of one scheme; see the module's docstring."""

    scheme: str
    data: torch.Tensor
    scale: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K) of the dequantized weight."""
        experts, rows, columns = self.data.shape[:3]
        if self.scheme in FRAGMENTS:
            return experts, rows * formats.FRAGMENT, columns * formats.FRAGMENT
        return experts, rows, columns * 2 if self.scheme.startswith("nvfp4") else columns

    @property
    def bytes(self) -> int:
        """Return the bytes that a kernel reads when every expert is used."""
        tensors = (self.data, self.scale, self.factor)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def multiply(self) -> Callable[..., torch.Tensor]:
        """Return the product with this weight: a kernel's launch on a GPU, elsewhere torch.

        `matmul.launch` has its arguments.
        """
        if not launches(self.data.device):
            return partial(_multiply_in_torch, self)
        kernel = import_module(f"fused_dequant.{KERNELS[self.scheme].module}")
        return partial(kernel.launch, self)

    def config(self, verb: str, tokens: int) -> tuning.Config:
        """Choose how the kernel is launched for `tokens` rows; `verb` is linear or experts.

        Raises:
            ValueError: the device lacks the kernel's instructions.
        """
        require(self.scheme, self.data.device)
        return tuning.choose(verb, self.scheme, tokens, *self.shape[1:], self.data.device)

    def reads(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Activation:
        """Return rows [M, K] as the scheme multiplies them: in 8 bits with scales f32 [M], or bf16.

        `scale` belongs to rows that are quantized already.

        Raises:
            ValueError: the rows do not fit the weight.
        """
        own = EIGHT_BIT.get(self.scheme)
        if x.shape[-1] != self.shape[2]:
            raise ValueError(f"x {tuple(x.shape)} does not fit a weight of K = {self.shape[2]}")
        if scale is not None and x.dtype != own:
            raise ValueError(
                f"activations of {x.dtype} do not fit a weight of scheme {self.scheme}"
            )
        if own is None:
            return x.to(torch.bfloat16).contiguous(), None
        return quantize_rows(x, self.scheme) if scale is None else (x.contiguous(), scale)

    def clone(self) -> "Weight":
        """Return a copy in memory of its own."""
        return self._each(torch.Tensor.clone)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Weight":
        rest = (None if t is None else change(t) for t in (self.scale, self.factor))
        return Weight(self.scheme, change(self.data), *rest)

    def to(self, device: torch.device | str) -> "Weight":
        """Return the same weight on a device."""
        return self._each(lambda tensor: tensor.to(device))


def require(scheme: str, device: torch.device) -> None:
    """Raise ValueError unless `device` can run `scheme`."""
    if scheme not in KERNELS:
        raise ValueError(f"unknown scheme {scheme!r}; known: {', '.join(KERNELS)}")
    kernel = KERNELS[scheme]
    if device.type != "cpu" and not kernel.runs_on(own := capability(device)):
        need = ".".join(map(str, kernel.least)) + ("" if kernel.alone else " or newer")
        has = ".".join(map(str, own))
        raise ValueError(
            f"scheme {scheme} needs compute capability {need}; "
            f"{torch.cuda.get_device_name(device)} has {has}. Use another scheme for this device."
        )


def bf16(weight: torch.Tensor) -> Weight:
    """Return a BF16 weight of [N, K] or [E, N, K]."""
    return Weight("bf16", _with_experts(weight.to(torch.bfloat16)))


def eight_bit(weight: torch.Tensor, scale: torch.Tensor) -> Weight:
    """Return a weight of e4m3 or int8 [N, K] or [E, N, K], scales [N], [N, 1], [E, N] or [E, N, 1]."""
    scheme = next((s for s in ("fp8", "int8") if EIGHT_BIT[s] == weight.dtype), None)
    if scheme is None:
        raise ValueError(f"an 8-bit weight is float8_e4m3fn or int8, got {weight.dtype}")
    data = _with_experts(weight)
    return Weight(scheme, data, scale.float().reshape(data.shape[:2]).contiguous())


def nvfp4(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> Weight:
    """Return a weight of canonical NVFP4 (see `formats`), laid out for the device that holds it.

    packed uint8 [N, K/2] or [E, N, K/2]; global_scale f32 [1], [E] or, for gate and up, [E, 2]. On
    Hopper the weight is repacked into fragments when N and K are multiples of 64; no block scale may be
    negative or NaN there.
    """
    data, blocks = _with_experts(packed), _with_experts(scale)
    factor = (128.0 / global_scale.float()).reshape(len(data), -1).expand(-1, 2).contiguous()
    if _in_whole_fragments(data):
        from fused_dequant.fragments import to_fragments

        return Weight("nvfp4_fragments", *to_fragments(data, blocks), factor)
    return Weight("nvfp4", data, blocks, factor)


def nvfp4_in_fp8(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, *, experts: bool
) -> Weight:
    """Return canonical NVFP4, with the arguments of `nvfp4`, to be multiplied in FP8 (W4A8).

    Its values are rounded to e4m3 (`formats.nvfp4_as_e4m3`), its rows are FP8. On Hopper `experts` stay
    as small as they are; everything else becomes a weight of scheme fp8.
    """
    data, blocks = _with_experts(packed), _with_experts(scale)
    factor = (8.0 / global_scale.float()).reshape(len(data), -1).expand(-1, 2).contiguous()
    if experts and _in_whole_fragments(data):
        return Weight("nvfp4_e4m3", *w4a8.to_fragments(data, blocks), factor)
    runs = factor.repeat_interleave(formats.GATE_UP_RUN, 1)  # gate and up rows alternate
    rows = runs.repeat(1, -(-data.shape[1] // runs.shape[1]))[:, : data.shape[1]]
    return eight_bit(formats.nvfp4_as_e4m3(data, blocks), rows)


def _in_whole_fragments(data: torch.Tensor) -> bool:
    whole = data.shape[1] % formats.FRAGMENT == 0 and data.shape[2] % (formats.FRAGMENT // 2) == 0
    return whole and is_hopper(data.device)


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values [E, N, K] in `dtype`; where gate and up differ in scale, rows are interleaved."""
    data, scale, factor = weight.data, weight.scale, weight.factor
    if scale is None:
        return data.to(dtype)
    if factor is None:
        return data.to(dtype) * scale.to(dtype)[..., None]
    if weight.scheme in FRAGMENTS:
        decode = w4a8 if weight.scheme == "nvfp4_e4m3" else formats
        values = decode.decode_fragments(data, scale).to(dtype)
    else:
        unit = torch.full((1,), 128.0, device=data.device)
        values = formats.dequantize_nvfp4(data, scale, unit, dtype)
    runs = values.unflatten(1, (-1, formats.GATE_UP_RUN)) if _is_split(factor) else None
    if runs is None:
        return values * factor[:, :1, None].to(dtype)
    per_run = factor.to(dtype).repeat(1, runs.shape[1] // 2)
    return (runs * per_run[:, :, None, None]).flatten(1, 2)


def _multiply_in_torch(
    weight: Weight,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    config: tuning.Config,
    ids: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply as `matmul.launch`, by `ids` [M, topk], not blocks; experts' rows stay float32."""
    rows, matrices = values((x, x_scale)), dequantize(weight)
    if ids is None:
        return reference.matmul(rows, matrices[0]).to(torch.bfloat16)
    chosen = ids.flatten()
    rows = rows.repeat_interleave(len(chosen) // len(rows), 0)
    y = torch.zeros(len(chosen), weight.shape[1])
    for expert in set(chosen.tolist()) & set(range(len(matrices))):
        y[chosen == expert] = reference.matmul(rows[chosen == expert], matrices[expert])
    if share is not None:
        return y * share[:, None]
    return reference.gelu_mul(*y.unflatten(-1, (-1, 2, 8)).unbind(-2)).flatten(-2)


def is_hopper(device: torch.device) -> bool:
    """Return whether this is a GPU of sm_90, which alone has `wgmma`."""
    return device.type != "cpu" and capability(device) == (9, 0)


def _is_split(factor: torch.Tensor) -> bool:
    return bool((factor[:, 0] != factor[:, 1]).any())


def _with_experts(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor[None]
