"""Code that the Gluon kernels for Hopper share: a barrier of all threads, and `follow`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton 3.7 renamed thread_barrier to barrier.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def follow(CHAINED: gl.constexpr):
    """If CHAINED, wait until the previous kernel is complete, then let the next one start."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
