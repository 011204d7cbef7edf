"""Decides where the kernels run: on a GPU, and in tests where Triton interprets them.

No module that a CPU needs imports triton, which macOS and Windows lack.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

# Tests set it: Triton's interpreter computes bf16 wrongly without their repairs.
interpreted = False

# Schemes of weights (`layouts`) whose kernels computed wrong numbers on this machine (`selftest`):
# weights are laid out for a plainer kernel.
distrusted: set[str] = set()


def launches(device: torch.device) -> bool:
    """Whether operations on tensors of `device` launch kernels; elsewhere torch computes."""
    return interpreted or device.type != "cpu"


class _Here(threading.local):
    rows: int | None = None
    sequences: int = 1


_HERE = _Here()


@contextmanager
def sequences_of(rows: int) -> Generator[None]:
    """While the block runs, let torch multiply this thread's rows in sequences of `rows` rows each.

    Some CPU libraries sum a product of more rows in another order: multiplied by itself, a sequence
    has results that do not depend on its neighbours. Kernels ignore this.
    """
    before, _HERE.rows = _HERE.rows, rows
    try:
        yield
    finally:
        _HERE.rows = before


@contextmanager
def launched_as_one_of(sequences: int) -> Generator[None]:
    """While the block runs, choose this thread's launches as if for one of `sequences` of equal length.

    How a kernel sums depends on how it is launched, never on a row's neighbours: so each sequence of
    a batch has the numbers, to the bit, that it has alone.
    """
    before, _HERE.sequences = _HERE.sequences, sequences
    try:
        yield
    finally:
        _HERE.sequences = before


def launched_as(count: int) -> int:
    """Return how many of `count` rows, slots or sequences a launch's configuration is chosen for."""
    return count // _HERE.sequences


def sequence_rows(count: int) -> int:
    """Return how many of `count` rows are multiplied together: those of a sequence, or all."""
    own = _HERE.rows
    return own if own is not None and count % own == 0 else max(count, 1)
