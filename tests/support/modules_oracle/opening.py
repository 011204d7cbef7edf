"""Opens a checkpoint as the oracle: in float32, the truth, or in BF16, a yardstick."""

from pathlib import Path

import torch

from quantize.schemes.modes import ActivationMode
from tests.support.modules_oracle.engine import ModelEngine
from tests.support.modules_oracle.simulated import load_rounding


def open_modules(
    folder: Path,
    mode: ActivationMode = "none",
    *,
    capacity: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ModelEngine:
    """Return transformers' modules behind the passes of an engine."""
    return ModelEngine(load_rounding(folder, mode, dtype, device), capacity)
