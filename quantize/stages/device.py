"""The device that weights are quantized and verified on: the CPU, or a GPU that threads use in turns.

Many threads read a checkpoint; for a GPU they read it into pinned memory. Only TURNS threads at a time
copy what they read to the GPU, compute there and copy the result back. So the GPU holds temporaries of
few threads; more threads would launch kernels no faster. A GPU gets several experts of the 26B model at
a time, which saves launches; a CPU gets one expert.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Semaphore
from typing import Any

import torch

TURNS = 3
# Bytes of BF16 weights at a time: gate and up of one expert of the 26B model, or of eight. On a CPU
# pieces of 4 to 16 MB cost the same time, and small ones hold less memory.
PIECE_BYTES = {"cpu": 1 << 23, "cuda": 1 << 26}


class Device:
    """The CPU or GPU on which weights are computed.

    Attributes:
        turn: the context in which a thread uses the device; a GPU admits TURNS threads, a CPU all.
        pinned: whether data for the device should be read into pinned memory.
        makers: how many threads read and compute (others write and hash): one per core, half for a GPU.
    """

    def __init__(self, name: str = "cpu") -> None:
        self._device = torch.device(name)
        self.pinned = self._device.type == "cuda"
        cores = len(os.sched_getaffinity(0))
        self.makers = max(1, cores // 2) if self.pinned else cores
        if self.pinned:
            torch.cuda.init()  # here, not in many threads at once
        self.turn: AbstractContextManager[Any] = Semaphore(TURNS) if self.pinned else nullcontext()

    def runs(self, rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges (start, stop) of about PIECE_BYTES each; `rows` rows have `nbytes` in all."""
        step = max(1, rows * PIECE_BYTES[self._device.type] // nbytes)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device; the copy is queued, and later kernels see it complete."""
        return tensor.to(self._device, non_blocking=True)

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host; wait until the copy is complete."""
        if not self.pinned:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
