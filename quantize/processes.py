"""The processes that torchrun started for one command: which part is mine, and what the others found.

    torchrun --nproc-per-node 8 -m quantize calibrate RUN

Every process does the same work up to the point where it takes its share; gloo carries what they
found, so it needs no GPU. Without torchrun there is one process, and nobody else.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Number `rank` of `count` processes."""

    rank: int = 0
    count: int = 1

    def mine(self, work: Sequence[T]) -> Sequence[T]:
        """Return every `count`-th item, from the `rank`-th on."""
        return work[self.rank :: self.count]

    def others(self, found: T) -> list[T]:
        """Hand `found` to all other processes; return theirs. All must call it."""
        if self.count == 1:
            return []
        import torch

        distributed: Any = torch.distributed
        everyone: list[Any] = [None] * self.count
        distributed.all_gather_object(everyone, found)
        return everyone[: self.rank] + everyone[self.rank + 1 :]

    def wait(self) -> None:
        """Return when all processes have called it."""
        if self.count > 1:
            import torch

            distributed: Any = torch.distributed
            distributed.barrier()


ALONE = Processes()


@contextmanager
def joined() -> Generator[Processes]:
    """Yield the processes of this command, connected while the block runs."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    import torch

    distributed: Any = torch.distributed
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # A process may wait for the slowest as long as it takes.
    distributed.init_process_group("gloo", timeout=timedelta(days=30))
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    """Return whether this process writes what all have found: the first one, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def best_device() -> str:
    """Return the GPU, this process' own under torchrun, or cpu where there is none."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
