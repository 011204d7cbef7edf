"""Decides where the kernels run: on a GPU, and in tests where Triton interprets them.

No module that a CPU needs imports triton, which macOS and Windows lack.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

interpreted = False  # set by tests, whose repairs Triton's interpreter needs for right bf16

# Schemes of weights (`layouts`) whose kernels computed wrong numbers on this machine (`selftest`):
# weights are laid out for a plainer kernel.
distrusted: set[str] = set()


def launches(device: torch.device) -> bool:
    """Return whether operations on tensors of `device` launch kernels; if not, torch computes."""
    return interpreted or device.type != "cpu"


class _Here(threading.local):
    rows: int | None = None
    sequences: int = 1


_HERE = _Here()


@contextmanager
def sequences_of(rows: int) -> Generator[None]:
    """Within the `with` block, torch multiplies this thread's rows in runs of `rows`: a sequence each.

    Some CPU libraries sum in another order if a product has more rows. A sequence that is multiplied
    alone has results that do not depend on its neighbours. Kernels ignore this.
    """
    before, _HERE.rows = _HERE.rows, rows
    try:
        yield
    finally:
        _HERE.rows = before


@contextmanager
def launched_as_one_of(sequences: int) -> Generator[None]:
    """Within the `with` block, this thread launches a batch of `sequences` as if it were one sequence.

    All are of one length. A kernel's order of sums depends on its launch configuration, never on a
    row's neighbours. So each sequence of the batch has the numbers, to the bit, that it has alone.
    """
    before, _HERE.sequences = _HERE.sequences, sequences
    try:
        yield
    finally:
        _HERE.sequences = before


def launched_as(count: int) -> int:
    """Return the count to configure a launch by: `count` rows, slots or sequences, or a sequence's."""
    return count // _HERE.sequences


def sequence_rows(count: int) -> int:
    """Return how many of `count` rows torch multiplies at once: all, or those of a sequence."""
    own = _HERE.rows
    return own if own is not None and count % own == 0 else max(count, 1)
