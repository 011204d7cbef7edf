"""The device that weights are quantized and verified on: the CPU, or a GPU that threads use in turns.

Many threads read a checkpoint, on a GPU into pinned memory, which torch keeps and hands out again. A
few at a time copy what they have read to the GPU, compute there and copy the result back. Launching is
Python's work, of which more threads do no more; and so a GPU holds the temporaries of TURNS threads
only, however many cores there are.
"""

from contextlib import AbstractContextManager, nullcontext
from threading import Semaphore
from typing import Any

import torch

TURNS = 4


class Device:
    """Where weights are computed with.

    Attributes:
        turn: a context in which a thread uses the device; on a CPU everyone always may.
        pinned: whether what is read for the device should lie in pinned memory.
    """

    def __init__(self, name: str = "cpu") -> None:
        self._device = torch.device(name)
        self.pinned = self._device.type == "cuda"
        if self.pinned:
            torch.cuda.init()  # here, not in many threads at once
        self.turn: AbstractContextManager[Any] = Semaphore(TURNS) if self.pinned else nullcontext()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device; it is complete for what is launched there afterwards."""
        return tensor.to(self._device, non_blocking=True)

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor back to the host, and wait for it."""
        if not self.pinned:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
