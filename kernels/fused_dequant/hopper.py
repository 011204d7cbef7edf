"""Code that the Gluon kernels for Hopper share: names of a barrier, `chain.follow` in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton 3.7 renamed it.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def follow(CHAINED: gl.constexpr):
    """Wait for the kernel before, then release the next."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
