"""Canvases for the tests of the sampler, and a draw held against float64."""

import torch
from fused_dequant import CanvasState, Draw

from tests.support.kernels_support.device import DEVICE


def begin(B: int, L: int, V: int, stability: int = 1) -> CanvasState:
    seeds = torch.tensor([3, -7, 2**62 + 5, 11][:B], device=DEVICE)
    canvas = torch.randint(0, V, (B, L), device=DEVICE)
    return CanvasState.begin(canvas, seeds, stability)


def assert_drawn(
    logits: torch.Tensor, temperature: torch.Tensor, u: torch.Tensor, draw: Draw
) -> None:
    """The draw against float64: its cumulative interval holds u, up to float32's rounding of a sum."""
    p = (logits.double() / temperature[:, None, None].double()).softmax(-1)
    upper = p.cumsum(-1).gather(-1, draw.sampled[..., None]).squeeze(-1)
    probability = p.gather(-1, draw.sampled[..., None]).squeeze(-1)
    assert (probability > 0).all()
    assert (u[..., 0] <= upper + 2e-6).all()
    assert (u[..., 0] >= upper - probability - 2e-6).all()
    entropy = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(draw.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
