"""Shares work among the processes that torchrun started for one command, and gathers results.

    torchrun --nproc-per-node 8 -m quantize calibrate RUN

All processes run the same code, and each takes its share of a loop's items, or whoever is free takes
the next item. They exchange results through gloo, so no GPU is needed. Without torchrun there is one.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from quantize.errors import ResourceError

T = TypeVar("T")
_distributed: Callable[[], Any] = partial(import_module, "torch.distributed")  # torch takes seconds


@dataclass(frozen=True)
class Processes:
    """Process number `rank` (from 0) of a command's `count` processes; they exchange results."""

    rank: int = 0
    count: int = 1
    store: Any = field(default=None, compare=False)  # torch's store, which all processes share
    _sequences: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def mine(self, work: Sequence[T]) -> Sequence[T]:
        """Return this process' share of the work: every `count`-th item, from index `rank` on."""
        return work[self.rank :: self.count]

    def others(self, value: T) -> list[T]:
        """Send `value` to all others and return theirs, by rank; every process must call this."""
        if self.count == 1:
            return []
        everyone: list[Any] = [None] * self.count
        with _together():
            _distributed().all_gather_object(everyone, value)
        return everyone[: self.rank] + everyone[self.rank + 1 :]

    def of_first(self, value: T) -> T:
        """Return what the first process passed as `value`; all processes must call this."""
        others = self.others(value)
        return value if self.rank == 0 else others[0]

    def wait(self) -> None:
        """Return once all processes have called this."""
        if self.count > 1:
            with _together():
                _distributed().barrier()

    def numbers(self) -> Iterator[int]:
        """Return an iterator over 0, 1, 2, ..., each of which goes to the process that asks first.

        Every process must call this, as often as the others: each call begins the next sequence.
        """
        if self.count == 1:
            return itertools.count()
        sequence = f"numbers {next(self._sequences)}"

        def following(_: int) -> int:
            with _together():
                return self.store.add(sequence, 1) - 1

        return map(following, itertools.count())


ALONE = Processes()


@contextmanager
def joined() -> Generator[Processes]:
    """Connect this command's processes for a `with` block; yield this process' `Processes`."""
    if is_alone():
        yield ALONE
        return
    import torch

    distributed, device = _distributed(), best_device()
    if device != "cpu":
        torch.cuda.set_device(device)
    with _together():
        store, rank, size = next(distributed.rendezvous("env://"))
        how = {"store": store, "rank": rank, "world_size": size}
        # A process may have to wait long for the slowest process.
        distributed.init_process_group("gloo", timeout=timedelta(days=30), **how)
    try:
        processes = Processes(rank, size, store)
        name = device if device == "cpu" else torch.cuda.get_device_name(device)
        if (first := processes.of_first(name)) != name:
            raise ResourceError(
                f"process {rank + 1} of {size} has {name}, and the first one {first}: results are made "
                f"on GPUs of one kind; CUDA_VISIBLE_DEVICES= names those to use"
            )
        yield processes
    finally:
        distributed.destroy_process_group()


@contextmanager
def _together() -> Generator[None]:
    """Raise ResourceError if the processes' connection fails in this block, as when one has ended."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        why = (text.partition("] ")[2] or text).partition(". ")[0]  # without its place in torch
        raise ResourceError(
            f"another process of this command ended, or cannot be reached ({why[:200]}); its own line "
            f"says why, and the same command goes on"
        ) from error


def is_alone() -> bool:
    """Return whether torchrun started no other process for this command."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_first() -> bool:
    """Return whether this process is the first or only one; only the first writes results."""
    return is_alone() or os.environ.get("RANK", "0") == "0"


def best_device() -> str:
    """Return this process' GPU, "cuda:N" (N is 0 without torchrun), or "cpu" if there is none.

    Raise ResourceError if torchrun started more processes than there are GPUs.
    """
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    place, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if place and place >= gpus:
        raise ResourceError(
            f"process {place + 1} of this machine has no GPU: there are {gpus}; torchrun "
            f"--nproc-per-node {gpus}"
        )
    return f"cuda:{place}"
