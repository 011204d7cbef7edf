"""Who computes a pass: a GPU all of it, or each core of a CPU some of its sequences.

If threads share a matrix product, some BLAS libraries sum in another order, and round the last elements
of a thread's share differently. Here no product is shared. So the results of a sequence depend neither
on the number of cores nor on the other sequences (`fused_dequant.launch.dispatch.sequences_of`).
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from fused_dequant.launch.dispatch import launches
from torch import Tensor

from quantize.runtime.gpu.memory import CANVASES_A_PIECE

T = TypeVar("T")
R = TypeVar("R")


class _Here(threading.local):
    core = False  # whether this thread is one of `Cores`


_HERE = _Here()


class WholeDevice:
    """A GPU: it computes a pass as one, in launches whose shapes are filled up to a few sizes."""

    whole = True  # whether a pass is computed as one
    canvases_at_once = CANVASES_A_PIECE  # whose logits are computed at once

    def share(self, count: int) -> list[slice]:
        """Return one slice, of all `count` sequences."""
        return [slice(0, count)]

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return what `work` returns for each item, in order."""
        return [work(item) for item in items]

    def one(self, work: Callable[[], R]) -> R:
        """Return what `work` returns."""
        return work()

    def by_canvas(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return `work` of canvases [b, ...]."""
        return work(rows)

    def by_sequence(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return `work` of rows [B, n, ...] of B sequences, as [B * n, ...]."""
        return work(rows).flatten(0, 1)


class Cores(WholeDevice):
    """A pool of `count` threads, each of which computes on one core of a CPU."""

    whole = False
    canvases_at_once = 1

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, "core", _on_one_core)

    def share(self, count: int) -> list[slice]:
        """Split `count` sequences into slices, at most one per thread; only the last may be shorter."""
        size = -(-count // self._count)
        return [slice(start, min(start + size, count)) for start in range(0, count, size or 1)]

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return what `work` returns for each item, in order; threads compute items side by side.

        A caller that is itself a thread of a pool computes all items, so it never waits for its pool.
        """
        return list(map(work, items) if _HERE.core else self._pool.map(work, items))

    def one(self, work: Callable[[], R]) -> R:
        """Return what `work` returns, computed on one core."""
        return work() if _HERE.core else self._pool.submit(work).result()

    def by_canvas(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return `work` of canvases [b, ...], of which a core takes one at a time."""
        parts = self.each(work, rows.split(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def by_sequence(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return `work` of rows [B, n, ...] as [B * n, ...]; one core takes a sequence at a time."""
        return self.one(lambda: torch.cat([work(row) for row in rows]))


def _on_one_core() -> None:
    torch.set_num_threads(1)
    _HERE.core = True


def compute_of(device: torch.device) -> WholeDevice:
    """Return what computes passes on `device`: the device itself, or the cores of a CPU."""
    return GPU if launches(device) else cores(torch.get_num_threads())


GPU = WholeDevice()
cores = cache(Cores)  # all engines share the threads
