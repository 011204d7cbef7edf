"""Programmatic dependent launch: let the next kernel of a sequence start while this one drains.

The experts are six or seven launches of 3 to 120 us. Launched as usual, each waits until the one before has left
every SM; chained, its blocks move in as soon as the last blocks of the one before are running, compute
their addresses (and, where the weights depend on nothing, start to load them) and only then wait.

Two rules keep it safe. Every kernel of a chain calls `wait` before it reads what a predecessor wrote or writes
anything. And it calls `release` only after `wait`, so whoever starts next knows that everything before
its direct predecessor is complete. The first kernel of a sequence is launched plainly.
Needs sm_90; elsewhere, and in the interpreter, CHAINED is False and nothing is emitted.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def chained(x: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that follows another one of ours on x's device."""
    if x.device.type == "cpu" or torch.cuda.get_device_capability() < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Everything earlier kernels wrote is visible after this."""
    if CHAINED:
        gdc_wait()


@triton.jit
def release(CHAINED: tl.constexpr):
    """The next kernel may start."""
    if CHAINED:
        gdc_launch_dependents()
