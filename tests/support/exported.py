"""Copies of the bundled model to edit, and GGUF files as the `gguf` package reads them."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from quantize.bundled import CHECKPOINT


def copy_bundled(folder: Path, source: Path = CHECKPOINT) -> Path:
    """Copy a checkpoint to edit. No links: a link changes the time of the weights that others read."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def read_tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    """Read a file's tensors with the `gguf` package."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def read_keys(path: Path) -> dict[str, Any]:
    """Read a file's metadata with the `gguf` package."""
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in tensor.shape[::-1])


def values_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Dequantize a tensor as the `gguf` package does: [..., out, in] float32."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape_of(tensor))
