"""Checks the files beside a model's weights for what a later stage would refuse."""

from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantize.checkpoints.reader import SETTINGS, check_tokenizer, read_json_object
from quantize.runtime.sampler.sampler import Sampler

if TYPE_CHECKING:
    from quantize.checkpoints.from_transformers import DiffusionGemmaForBlockDiffusion


def check_carried(folder: Path) -> None:
    """Raise InputError if a JSON file that every quantized checkpoint carries is damaged."""
    for file in sorted(folder.glob("*.json")):
        if any(fnmatch(file.name, pattern) for pattern in SETTINGS):
            read_json_object(file)


LOOKS = (check_tokenizer, check_carried, Sampler.from_checkpoint)


def check_beside(folder: Path) -> None:
    """Raise the first InputError of LOOKS: tokenizer and template, JSON files, generation settings."""
    for look in LOOKS:
        look(folder)


def load(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> "DiffusionGemmaForBlockDiffusion":
    """Return a BF16 or quantized checkpoint as a transformers model, as `checkpoints.load` does.

    Raise InputError, too, if its generation settings are not the sampler's (`do_sample`, `top_k`):
    the model would answer otherwise than the folder says.
    """
    from quantize.checkpoints import (
        load as weights,
    )  # transformers takes seconds; most need no model

    Sampler.from_checkpoint(Path(folder))
    return weights.load(Path(folder), dtype=dtype, device=device)
