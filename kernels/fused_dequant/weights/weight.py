"""Weights of one Linear or of all experts, quantized or BF16, laid out for a device's kernel.

`layouts.KERNELS` describes each scheme's tensors and names its kernel. `build` makes a weight from
tensors as stored on disk, and chooses the layout for the device that holds them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from fused_dequant import formats, reference
from fused_dequant.formats import EIGHT_BIT, FOUR_BIT, Activation
from fused_dequant.inputs.activations import quantize_rows, values
from fused_dequant.launch.dispatch import launched_as, launches, sequence_rows
from fused_dequant.launch.targets import capability
from fused_dequant.weights import tuning, w4a4, w4a16
from fused_dequant.weights.choose import layout_for, target_of
from fused_dequant.weights.kept import kept
from fused_dequant.weights.layouts import KERNELS

SCALED_ROWS = ("fp8", "int8")  # schemes with one scale per row


@dataclass(frozen=True)
class Weight:
    """The tensors of a weight; `layouts` lists dtypes and shapes of each scheme's tensors."""

    scheme: str
    data: Tensor
    scale: Tensor | None = None
    factor: Tensor | None = None
    # whether another CUDA stream fills it; then kernels read it only after the previous kernel ended
    streamed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K) of the dequantized weight."""
        (experts, rows, columns), spans = self.data.shape[:3], KERNELS[self.scheme].spans
        return experts, rows * spans[0], columns * spans[1]

    @property
    def bytes(self) -> int:
        """Return the total bytes of all tensors; a kernel reads this many if every expert is used."""
        return sum(t.nbytes for t in (self.data, self.scale, self.factor) if t is not None)

    @property
    def shared(self) -> Tensor | None:
        """Return the global scale f32 [1] of activations if products read them in NVFP4, else None."""
        return self.factor[0, 2:] if self.scheme == FOUR_BIT and self.factor is not None else None

    @property
    def multiply(self) -> Callable[..., Tensor]:
        """Return what multiplies rows by this weight: a kernel's `launch`, or a function in torch."""
        if not launches(self.data.device):
            return partial(_multiply_in_torch, self)
        kernel = import_module(f"fused_dequant.products.{KERNELS[self.scheme].module}")
        return partial(kernel.launch, self)

    def config(self, verb: str, tokens: int) -> tuning.Config:
        """Return the configuration of `verb` (linear, experts) for `tokens`; raise like `require`."""
        require(self.scheme, self.data.device)
        rows = launched_as(tokens)
        return tuning.choose(verb, self.scheme, rows, *self.shape[1:], self.data.device)

    def reads(self, x: Tensor, scale: Tensor | None = None) -> Activation:
        """Return rows x [M, K] as this weight reads them: bf16, or 8 bits or NVFP4 with their scales.

        If `scale` is given, x is already quantized. Raise ValueError if x does not fit the weight.
        """
        code_dtype = torch.uint8 if self.scheme == FOUR_BIT else EIGHT_BIT.get(self.scheme)
        packed = 2 if x.dtype == torch.uint8 else 1
        if packed * x.shape[-1] != self.shape[2]:
            raise ValueError(f"x {tuple(x.shape)} does not fit a weight of K = {self.shape[2]}")
        if scale is not None and x.dtype != code_dtype:
            raise ValueError(
                f"activations of {x.dtype} do not fit a weight of scheme {self.scheme}"
            )
        if code_dtype is None:
            return x.to(torch.bfloat16).contiguous(), None
        if scale is None:
            return quantize_rows(x, self.scheme, self.shared)
        return x.contiguous(), scale

    def clone(self) -> "Weight":
        """Return a copy whose tensors have memory of their own; its `streamed` is False."""
        rest = (None if t is None else t.clone() for t in (self.scale, self.factor))
        return Weight(self.scheme, self.data.clone(), *rest)


def require(scheme: str, device: torch.device) -> None:
    """Raise ValueError if `scheme` is unknown, or if `device` is a GPU without a kernel for it."""
    if scheme not in KERNELS:
        raise ValueError(f"unknown scheme {scheme!r}; known: {', '.join(KERNELS)}")
    kernel = KERNELS[scheme]
    if device.type != "cpu" and not kernel.runs_on(target := capability(device)):
        need = ".".join(map(str, kernel.least)) + ("" if kernel.alone else " or newer")
        has = ".".join(map(str, target))
        raise ValueError(
            f"scheme {scheme} needs compute capability {need}; "
            f"{torch.cuda.get_device_name(device)} has {has}. Use another scheme for this device."
        )


def build(
    scheme: str,
    codes: Tensor,
    scale: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    in_fp8: bool = False,
    shared: Tensor | None = None,
) -> Weight:
    """Return a weight made from tensors as stored on disk, laid out for the device that holds them.

    Args:
        scheme: bf16, fp8, int8, nvfp4 or mxfp4.
        codes: [N, ...] for a dense weight, [E, N, ...] for experts.
        scale: scales of rows or blocks, [N, ...] or [E, N, ...]; None for bf16.
        factor: 128 / global_scale of NVFP4: f32 [1], [E], or [E, 2] for gate and up. None means 1.
        in_fp8: whether NVFP4 weights are for FP8 products (W4A8), which round them to e4m3 and read FP8
            activations (`formats.nvfp4_as_e4m3`); `layout_for` says which of them stay in 4 bits.
        shared: f32 [1], the activations' global scale, if NVFP4 is for FP4 units (W4A4); else None.
    """
    dense, data = codes.dim() == 2, _with_experts(codes)
    if scale is None:
        return Weight(scheme, data)
    if scheme in EIGHT_BIT:
        return Weight(scheme, data, scale.float().reshape(data.shape[:2]).contiguous())
    factor = torch.ones(len(data), device=data.device) if factor is None else factor
    blocks, factor = _with_experts(scale), factor.float().reshape(len(data), -1).expand(-1, 2)
    if shared is not None:
        factors = torch.cat([factor / 128 / shared, shared.expand(len(data), 1)], 1)
        return Weight(FOUR_BIT, data, w4a4.to_tiles(blocks), factors)
    whole = data.shape[1] % w4a16.FRAGMENT == 0 and data.shape[2] % (w4a16.FRAGMENT // 2) == 0
    mode, target = "fp8" if in_fp8 else None, target_of(data.device)
    layout = layout_for(scheme, mode, target, dense=dense, whole=whole)
    if layout == scheme:
        return Weight(scheme, data, blocks, factor.contiguous())
    lay_out = KERNELS[layout].lay_out
    assert lay_out is not None, layout
    return Weight(layout, *lay_out(data, blocks, factor))


def bf16(weight: Tensor) -> Weight:
    """Return a weight of scheme bf16 made from a tensor [N, K] or [E, N, K]."""
    return build("bf16", weight.to(torch.bfloat16))


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a weight's values [E, N, K] in `dtype`; gate and up rows stay interleaved."""
    data, columns = _decoded(weight, dtype), _columns(weight)
    if columns is None:
        return data
    if weight.shared is not None:  # the factor includes 1 / shared, which is no part of the weight
        columns = columns * weight.shared
    return data * columns.to(dtype)[..., None]


def _decoded(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values [E, N, K] in `dtype` without the factors of whole rows, which `_columns` has."""
    if weight.scheme in SCALED_ROWS:
        return weight.data.to(dtype)
    return KERNELS[weight.scheme].decode(weight.data, weight.scale, dtype)


def _multiply_in_torch(
    weight: Weight,
    x: Tensor,
    x_scale: Tensor | None,
    config: tuning.Config,
    ids: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """Do what `matmul.launch` does, with `ids` [M, topk] as blocks; experts' rows stay float32."""
    rows, columns = values((x, x_scale)), _columns(weight)
    if ids is None:
        y = reference.matmul_each(rows, _unscaled(weight)[0], sequence_rows(len(rows)))
        return (y if columns is None else y * columns[0]).to(torch.bfloat16)
    gated, chosen = share is None, ids.flatten().long()
    matrices = _unscaled(weight, halves=gated)
    order, runs = _by_expert(chosen, len(matrices), sequence_rows(len(x)) * len(chosen) // len(x))
    picked = rows.index_select(0, order // (len(chosen) // len(rows)))
    y = torch.empty(len(order), weight.shape[1])
    counts = [count for _, count in runs]
    transposed = matrices.transpose(1, 2).unbind()
    for part, out, (expert, _) in zip(picked.split(counts), y.split(counts), runs, strict=True):
        torch.mm(part, transposed[expert], out=out)
    if columns is not None:
        expert = _halves(columns) if gated else columns
        y = y * expert.index_select(0, chosen[order])
    y = y * share[order, None] if share is not None else reference.gelu_mul(*y.chunk(2, -1))
    if len(order) < len(chosen):
        return torch.zeros(len(chosen), y.shape[1]).index_copy_(0, order, y)
    return y.index_select(0, order.argsort())


def _by_expert(chosen: Tensor, experts: int, choices: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Sort choices int64 [N], so many per sequence, by expert: indices, runs of (expert, how many)."""
    count = -(-len(chosen) // choices)
    sequence = torch.arange(len(chosen)) // choices
    outside = (chosen < 0) | (chosen >= experts)  # of no existing expert: left out
    key, order = torch.where(outside, experts, chosen).mul_(count).add_(sequence).sort(stable=True)
    runs = torch.bincount(key, minlength=count * (experts + 1)).tolist()[: count * experts]
    expert_runs = [(run // count, many) for run, many in enumerate(runs) if many]
    return order[: sum(runs)], expert_runs


def _halves(rows: Tensor) -> Tensor:
    """Return interleaved rows [E, 2I, ...] reordered: all gate rows first, then all up rows."""
    runs = rows.unflatten(1, (-1, 2, formats.GATE_UP_RUN))
    return runs.transpose(1, 2).flatten(1, 3)


def _unscaled(weight: Weight, *, halves: bool = False) -> Tensor:
    """Return `_decoded` values [E, N, K] in float32, with `halves` in the order of `_halves`."""
    if halves:
        return kept(weight.data, "halves", lambda: _halves(_decoded(weight)).contiguous())
    return kept(weight.data, "unscaled", lambda: _decoded(weight))


def _columns(weight: Weight) -> Tensor | None:
    """Return what a product's columns are multiplied by, f32 [E, N]; None if by nothing."""
    if weight.scheme in SCALED_ROWS:
        return weight.scale
    if weight.factor is None:
        return None
    runs = weight.shape[1] // formats.GATE_UP_RUN
    if not bool((weight.factor[:, 0] != weight.factor[:, 1]).any()):
        return weight.factor[:, :1].expand(-1, weight.shape[1])
    return weight.factor[:, :2].repeat(1, runs // 2).repeat_interleave(formats.GATE_UP_RUN, 1)


def _with_experts(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 3 else tensor[None]
