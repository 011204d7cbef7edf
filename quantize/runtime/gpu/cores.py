"""The cores of a CPU: each core computes some of the sequences of a pass.

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

T = TypeVar("T")
R = TypeVar("R")


class _Here(threading.local):
    core = False  # whether this thread is one of `Cores`


_HERE = _Here()


class Cores:
    """A pool of `count` threads, each of which computes on one core."""

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


def _on_one_core() -> None:
    torch.set_num_threads(1)
    _HERE.core = True


def cores_of(device: torch.device) -> Cores | None:
    """Return the threads that compute passes on `device`; None for a GPU."""
    return None if launches(device) else cores(torch.get_num_threads())


cores = cache(Cores)  # all engines share the threads
