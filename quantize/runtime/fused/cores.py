"""A CPU's cores: each computes some of the sequences of a pass.

Where threads share a product, some BLAS libraries sum it in another order, and round the last elements
of a thread's share differently. So no product is shared, and a sequence's results depend neither on the
number of cores nor on its neighbours (`fused_dequant.dispatch.sequences_of`).
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from fused_dequant.dispatch import launches

T = TypeVar("T")
R = TypeVar("R")


class _Here(threading.local):
    core = False  # whether this thread is one of `Cores`


_HERE = _Here()


class Cores:
    """`count` threads that compute on one core each."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, "core", _on_one_core)

    def share(self, count: int) -> list[slice]:
        """Cut `count` sequences into at most one slice a thread, all but the last equally long."""
        size = -(-count // self._count)
        return [slice(start, min(start + size, count)) for start in range(0, count, size or 1)]

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return what `work` returns for every item, in order; threads compute items side by side.

        A thread that is one of `Cores` computes all items itself, so that it never waits for its pool.
        """
        return list(map(work, items) if _HERE.core else self._pool.map(work, items))

    def one(self, work: Callable[[], R]) -> R:
        """Return what `work` returns, computed on one core."""
        return work() if _HERE.core else self._pool.submit(work).result()


def _on_one_core() -> None:
    torch.set_num_threads(1)
    _HERE.core = True


def cores_of(device: torch.device) -> Cores | None:
    """Return the threads that compute the passes on a CPU, None for a GPU."""
    return None if launches(device) else cores(torch.get_num_threads())


cores = cache(Cores)  # which all engines share
