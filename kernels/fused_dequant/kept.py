"""Keeps what torch makes of a weight on a CPU, for as long as the weight lives.

Decoding a matrix takes longer than a canvas' product with it, so it is decoded once, and takes 4 bytes
a weight beside the weight's own.
"""

from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_KEPT = WeakTensorKeyDictionary()  # tensor -> name -> (version of the tensor, what was made of it)


def kept(tensor: torch.Tensor, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of `make`, kept under `name`; it is made anew if `tensor` has changed since."""
    own: dict[str, tuple[int, torch.Tensor]] = _KEPT.setdefault(tensor, {})
    version, made = own.get(name, (None, tensor))
    if version != tensor._version:
        made = make()
        own[name] = tensor._version, made
    return made


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight in float32: a copy that is kept, or the weight itself."""
    return tensor if tensor.dtype == torch.float32 else kept(tensor, "float32", tensor.float)
