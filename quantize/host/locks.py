"""Locks that let one process at a time work on a run folder, a store or a cache; they end with it.

The lock is the kernel's (flock), so a kill frees it. The file stays, and names its last holder.
"""

import fcntl
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from os import getpid
from pathlib import Path

from quantize.errors import InputError, ResourceError
from quantize.host.processes import is_alone, is_first


@contextmanager
def locked(file: Path, what: str) -> Generator[None]:
    """Hold the lock `file` while the block runs; under torchrun only the first process takes it.

    If another process holds the lock, raise ResourceError at once; the message begins with `what`.
    """
    if not is_first():
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            held.seek(0)
            holder = held.read().strip() or "unknown"
            raise ResourceError(
                f"{what}: process {holder} is at work there; try again when it has ended"
            ) from error
        held.truncate(0)
        held.write(f"{getpid()}\n")
        held.flush()
        yield


@contextmanager
def in_turn(file: Path) -> Generator[None]:
    """Hold the lock `file` while the block runs; wait for other processes of this machine that hold it.

    Where no such file can be made, the block runs at once.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(file.open("a")), fcntl.LOCK_EX)
        yield


def holder(file: Path) -> str | None:
    """Return the pid, as text, of the process that holds the lock `file`; None if the lock is free."""
    with file.open("r+", encoding="utf-8") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return held.read().strip() or "unknown"
    return None


def refuse_several(what: str) -> None:
    """Raise InputError if torchrun started several processes: the command `what` runs in one."""
    if not is_alone():
        raise InputError(
            f"`quantize {what}` is one process; torchrun is for `quantize calibrate RUN`, and "
            f"for round, fidelity and evaluate"
        )
