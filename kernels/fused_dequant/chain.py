"""Programmatic dependent launch: the next kernel of a sequence starts while this one drains.

Between two kernels of a stream the GPU is idle for about a microsecond: the last blocks finish, the
next kernel is launched and computes its addresses. A chained kernel is launched as soon as every block
of the kernel before has released it. It then waits where it first needs what that kernel wrote.

Two rules keep this safe. Every program of a chained kernel, even one that returns at once, must wait
before it writes, and before it reads what an earlier kernel wrote; only weights may be read sooner. And
it may release the next kernel only after that wait. So while a kernel runs, all kernels except the one
just before it are complete. Kernels that are not chained start when the one before is complete.

Streamed weights (`Weight.streamed`) may not be read sooner: no document promises that a programmatic
launch waits for the event of their arrival. So a product that would read them early is not chained.

Reading resident weights early does not always pay: products that asked for their first weights before
they waited made a step 3 % slower, and a kernel that fetched weights into the L2 beside the attention
changed nothing (10.2 ms a forward, FP8, batch 1). The kernels between the products (`residual`,
`router`) read a few KB of weights, and read them early.

`follow` is for Triton kernels, `hopper.follow` for Gluon's. Chaining needs sm_90; elsewhere, and in the
interpreter, CHAINED is False and `follow` emits nothing.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fused_dequant.targets import capability


def chained(device: torch.device) -> dict[str, bool]:
    """Return launch arguments that chain a kernel to the one before it, if `device` can do that."""
    if device.type == "cpu" or capability(device) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait for the previous kernel to complete, then let the next one start."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
