"""Where the kernels' tests run: on an NVIDIA GPU, or interpreted with TRITON_INTERPRET=1."""

import os

import pytest
import torch
from fused_dequant.weights import is_hopper

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from kernels_support import interpreter

    interpreter.install()

GPU = not INTERPRETED and torch.cuda.is_available()
HOPPER = GPU and is_hopper(torch.device("cuda"))  # not where another target is forced
DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not GPU, reason="no GPU, not interpreting"),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(DEVICE)
