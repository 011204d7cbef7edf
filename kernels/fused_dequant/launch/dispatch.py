"""Decides where the kernels run: on a GPU, and in tests where Triton interprets them.

Modules that a CPU needs do not import triton, which does not exist for macOS and Windows.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

interpreted = False  # set by tests, which also repair bf16 in Triton's interpreter

# Schemes whose kernels failed on this machine (`selftest`): weights are laid out for plainer kernels.
distrusted: set[str] = set()


def launches(device: torch.device) -> bool:
    """Return whether operations on tensors of `device` launch kernels; if not, torch computes."""
    return interpreted or device.type != "cpu"


class _Sequences(threading.local):
    rows: int | None = None
    sequences: int = 1


_SEQUENCES = _Sequences()


@contextmanager
def sequences_of(rows: int) -> Generator[None]:
    """Within the `with` block, a torch product of this thread takes `rows` rows: one sequence.

    Some CPU libraries sum in another order if a product has more rows. With one product per
    sequence, a sequence's results do not depend on other sequences. Kernels ignore this setting.
    """
    before, _SEQUENCES.rows = _SEQUENCES.rows, rows
    try:
        yield
    finally:
        _SEQUENCES.rows = before


@contextmanager
def launched_as_one_of(sequences: int) -> Generator[None]:
    """Within the `with` block, this thread launches kernels with the configuration for one sequence.

    The batch has `sequences` sequences of equal length. A kernel's order of sums depends on its launch
    configuration, never on other rows. So each sequence gets the same bits as in a launch by itself.
    """
    before, _SEQUENCES.sequences = _SEQUENCES.sequences, sequences
    try:
        yield
    finally:
        _SEQUENCES.sequences = before


def launched_as(count: int) -> int:
    """Return `count` (rows, slots or sequences); in `launched_as_one_of`, the share of one sequence."""
    return count // _SEQUENCES.sequences


def sequence_rows(count: int) -> int:
    """Return the rows of one torch product: `sequences_of`'s number if it divides `count`, else all."""
    rows = _SEQUENCES.rows
    return rows if rows is not None and count % rows == 0 else max(count, 1)
