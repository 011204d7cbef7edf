"""Keeps matrices that torch decoded from a weight on a CPU, for as long as the weight lives.

Decoding a matrix takes longer than multiplying a canvas by it, so each matrix is decoded only once.
A float32 matrix takes 4 bytes per element, in addition to the weight's own bytes.
"""

from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_KEPT = WeakTensorKeyDictionary()  # tensor -> name -> (version of the tensor, what was made of it)


def kept(tensor: torch.Tensor, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return `make()`, computed once and kept under `name` until `tensor` changes or is freed."""
    of_tensor: dict[str, tuple[int, torch.Tensor]] = _KEPT.setdefault(tensor, {})
    version, made = of_tensor.get(name, (None, tensor))
    if version != tensor._version:
        made = make()
        of_tensor[name] = tensor._version, made
    return made


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` itself if it is float32, else a float32 copy, which is made once and kept."""
    return tensor if tensor.dtype == torch.float32 else kept(tensor, "float32", tensor.float)
