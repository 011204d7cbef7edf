"""Programmatic dependent launch: the next kernel of a sequence starts while this one drains.

Between two kernels of a stream the machine is idle for about a microsecond: the last blocks finish, the
next kernel is launched and computes its addresses. A chained kernel is launched as soon as every block
of the kernel before has released it, and waits where it first needs what that kernel wrote.

Two rules keep it safe. Every program of a chained kernel, also one that returns at once, waits before
it writes, and before it reads what an earlier kernel wrote; only weights may be read sooner. And it
releases the next kernel only after it has waited: while a kernel runs, all before its predecessor
are complete. Kernels that are not chained start when the one before is complete, as always.

Streamed weights (`Weight.streamed`) may not be read sooner: it is not documented that a programmatic
launch heeds the event after which they have arrived, so products that read them early leave the chain.

Reading resident weights early does not always pay: products that asked for their first weights before
they waited made a step 3 % slower, and a kernel that fetched weights into the L2 beside the attention
changed nothing (10.2 ms a forward, FP8, batch 1). The kernels between the products (`residual`,
`router`) read a few KB of weights, and read them early.

`follow` is for Triton kernels, `hopper.follow` for Gluon's. It needs sm_90; elsewhere, and in the
interpreter, CHAINED is False and nothing is emitted.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fused_dequant.targets import capability


def chained(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments of a kernel that has a parameter CHAINED."""
    if device.type == "cpu" or capability(device) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait for the kernel before, then release the next."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
