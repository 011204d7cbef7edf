"""Shares work among the processes that torchrun started for one command, and gathers results.

    torchrun --nproc-per-node 8 -m quantize calibrate RUN

All processes run the same code, and each takes its share of a loop's items. They exchange results
through gloo, so no GPU is needed. Without torchrun there is one process.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")
_distributed: Callable[[], Any] = partial(import_module, "torch.distributed")  # torch takes seconds


@dataclass(frozen=True)
class Processes:
    """Process number `rank` (from 0) of a command's `count` processes; they exchange results."""

    rank: int = 0
    count: int = 1

    def mine(self, work: Sequence[T]) -> Sequence[T]:
        """Return this process' share of the work: every `count`-th item, from index `rank` on."""
        return work[self.rank :: self.count]

    def others(self, value: T) -> list[T]:
        """Send `found` to all others and return theirs, by rank; every process must call this."""
        if self.count == 1:
            return []
        everyone: list[Any] = [None] * self.count
        _distributed().all_gather_object(everyone, value)
        return everyone[: self.rank] + everyone[self.rank + 1 :]

    def of_first(self, value: T) -> T:
        """Return what the first process passed as `found`; all processes must call this."""
        others = self.others(value)
        return value if self.rank == 0 else others[0]

    def wait(self) -> None:
        """Return once all processes have called this."""
        if self.count > 1:
            _distributed().barrier()


ALONE = Processes()


@contextmanager
def joined() -> Generator[Processes]:
    """Connect this command's processes for a `with` block; yield this process' `Processes`."""
    if is_alone():
        yield ALONE
        return
    import torch

    distributed = _distributed()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # A process may have to wait long for the slowest process.
    distributed.init_process_group("gloo", timeout=timedelta(days=30))
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def is_alone() -> bool:
    """Return whether torchrun started no other process for this command."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_first() -> bool:
    """Return whether this process is the first or only one; only the first writes results."""
    return is_alone() or os.environ.get("RANK", "0") == "0"


def best_device() -> str:
    """Return this process' GPU, "cuda:N" (N is 0 without torchrun), or "cpu" if there is none."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
