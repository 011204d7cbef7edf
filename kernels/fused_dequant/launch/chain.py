"""Programmatic dependent launch: the next kernel of a sequence starts while this one drains.

Without it, the GPU idles for about a microsecond between two kernels of a stream: the last blocks
finish, then the next kernel is launched and computes addresses. A chained kernel starts as soon as
every block of the previous kernel has released it. It waits before it reads what that kernel wrote.

Two rules keep this safe. First, every program of a chained kernel must wait, even if it returns at
once: before it writes, and before it reads anything but weights. Second, a program may release the
next kernel only after this wait. So when a chained kernel starts, all earlier kernels but the previous
one are complete. When an unchained kernel starts, all earlier kernels are complete.

Streamed weights (`Weight.streamed`) may not be read before the wait: no document promises that a
programmatic launch waits until they have arrived. So a product that reads them early is not chained.

Reading resident weights early does not always pay. Products that requested their first weights
before the wait made a step 3 % slower. A kernel that fetched weights into the L2 during attention
changed nothing (10.2 ms per forward, FP8, batch 1). The kernels between the products (`residual`, and
`router` with few rows) read few weights, and read them early.

`follow` is for Triton kernels, `hopper.follow` for Gluon's. Chaining needs sm_90 or newer; on older
GPUs and in the interpreter, CHAINED is False and `follow` emits nothing.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fused_dequant.launch.targets import capability


def chained(device: torch.device) -> dict[str, bool]:
    """Return launch arguments; on sm_90 and newer they chain a kernel to the previous one."""
    if device.type == "cpu" or capability(device) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def follow(CHAINED: tl.constexpr):
    """If CHAINED, wait until the previous kernel is complete, then let the next one start."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
