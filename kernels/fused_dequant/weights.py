"""One quantized weight, or one for each expert, in its kernel's layout; it chooses that kernel.

`layouts.KERNELS` says what a scheme's tensors are. `build` makes a weight of tensors as they are on
disk, and chooses the layout by the device that holds them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from fused_dequant import formats, reference, tuning, w4a8, w4a16
from fused_dequant.activations import Activation, quantize_rows, values
from fused_dequant.dispatch import launches
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.layouts import KERNELS
from fused_dequant.targets import capability


@dataclass(frozen=True)
class Weight:
    """Tensors of one scheme; see `layouts`.

    `streamed` weights lie in memory that is filled again and again on another stream: no kernel reads
    them before the kernel before it is complete (`chain`).
    """

    scheme: str
    data: torch.Tensor
    scale: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    streamed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K) of the dequantized weight."""
        (experts, rows, columns), spans = self.data.shape[:3], KERNELS[self.scheme].spans
        return experts, rows * spans[0], columns * spans[1]

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


def build(
    scheme: str,
    codes: torch.Tensor,
    scale: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    *,
    in_fp8: bool = False,
) -> Weight:
    """Return a weight of tensors as they are on disk, laid out for the device that holds them.

    Args:
        scheme: bf16, fp8, int8 or nvfp4.
        codes: [N, ...] of a dense weight, [E, N, ...] of experts.
        scale: of rows or blocks, [N, ...] or [E, N, ...].
        factor: f32 [1], [E] or, for gate and up, [E, 2]: 128 times what values are multiplied with
            beside `scale`, for NVFP4 128 / global_scale; None for 1.
        in_fp8: whether NVFP4 becomes what FP8 products read (W4A8): its values are rounded to e4m3
            (`formats.nvfp4_as_e4m3`), its rows are FP8. On Hopper experts stay as small as they are;
            everything else becomes a weight of scheme fp8.
    """
    dense, data = codes.dim() == 2, _with_experts(codes)
    if scale is None:
        return Weight(scheme, data)
    if scheme in EIGHT_BIT:
        return Weight(scheme, data, scale.float().reshape(data.shape[:2]).contiguous())
    factor = torch.ones(len(data), device=data.device) if factor is None else factor
    blocks, factor = _with_experts(scale), factor.float().reshape(len(data), -1).expand(-1, 2)
    if in_fp8:
        return _in_fp8(data, blocks, factor / 16, dense)
    if scheme == "nvfp4" and _in_whole_fragments(data):
        from fused_dequant.fragments import to_fragments

        return Weight("nvfp4_fragments", *to_fragments(data, blocks), factor.contiguous())
    return Weight(scheme, data, blocks, factor.contiguous())


def _in_fp8(data: torch.Tensor, blocks: torch.Tensor, factor: torch.Tensor, dense: bool) -> Weight:
    if not dense and _in_whole_fragments(data):
        return Weight("nvfp4_e4m3", *w4a8.to_fragments(data, blocks), factor.contiguous())
    runs = factor.repeat_interleave(formats.GATE_UP_RUN, 1)  # gate and up rows alternate
    rows = runs.repeat(1, -(-data.shape[1] // runs.shape[1]))[:, : data.shape[1]]
    return build("fp8", formats.nvfp4_as_e4m3(data, blocks), rows)


def bf16(weight: torch.Tensor) -> Weight:
    """Return a BF16 weight of [N, K] or [E, N, K]."""
    return build("bf16", weight.to(torch.bfloat16))


def eight_bit(weight: torch.Tensor, scale: torch.Tensor) -> Weight:
    """Return a weight of e4m3 or int8 [N, K] or [E, N, K], scales [N], [N, 1], [E, N] or [E, N, 1]."""
    scheme = next((s for s in ("fp8", "int8") if EIGHT_BIT[s] == weight.dtype), None)
    if scheme is None:
        raise ValueError(f"an 8-bit weight is float8_e4m3fn or int8, got {weight.dtype}")
    return build(scheme, weight, scale)


def nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, *, in_fp8: bool = False
) -> Weight:
    """Return a weight of canonical NVFP4 (see `formats`), laid out for the device that holds it.

    packed uint8 [N, K/2] or [E, N, K/2]; global_scale f32 [1], [E] or, for gate and up, [E, 2]. On
    Hopper the weight is repacked into fragments when N and K are multiples of 64; no block scale may be
    negative or NaN there. `in_fp8` is as for `build`.
    """
    return build("nvfp4", packed, scale, 128.0 / global_scale.float(), in_fp8=in_fp8)


def _in_whole_fragments(data: torch.Tensor) -> bool:
    whole = data.shape[1] % w4a16.FRAGMENT == 0 and data.shape[2] % (w4a16.FRAGMENT // 2) == 0
    return whole and is_hopper(data.device)


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values [E, N, K] in `dtype`; where gate and up differ in scale, rows are interleaved."""
    values, factor = KERNELS[weight.scheme].decode(weight.data, weight.scale, dtype), weight.factor
    if factor is None:
        return values
    if not bool((factor[:, 0] != factor[:, 1]).any()):
        return values * factor[:, :1, None].to(dtype)
    runs = values.unflatten(1, (-1, formats.GATE_UP_RUN))
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


def _with_experts(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor[None]
