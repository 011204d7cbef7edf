"""Converts fused experts to one Linear per expert and back, names and weights.

The BF16 checkpoint holds a layer's experts in two tensors, servers read one Linear each:

  experts.gate_up_proj [E, 2 I, H], gate rows first  <->  experts.E.{gate,up}_proj [I, H]
  experts.down_proj    [E, H, I]                     <->  experts.E.down_proj      [H, I]

`targets.linear_modules` gives the Linears' names, expert by expert, gate before up. That
order is the order of the fused rows, so splitting is a view and fusing a concatenation.
"""

from collections.abc import Sequence

import torch


def split_experts(fused: torch.Tensor, projections: int) -> torch.Tensor:
    """View fused weights [E, projections * out, in] as [E, projections, out, in]."""
    return fused.unflatten(1, (projections, -1))


def fuse_experts(weights: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Fuse Linears [out, in], in `linear_modules` order, to one tensor of `shape` [E, rows, in]."""
    return torch.stack(tuple(weights)).view(shape)
