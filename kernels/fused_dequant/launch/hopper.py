"""Code that the Gluon kernels for Hopper share: a barrier of all threads, copies, and `follow`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton 3.7 renamed thread_barrier to barrier.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Triton 3.8 renamed the copies: of single values (cp.async), of boxes (TMA) to shared memory and back.
BEFORE_3_8 = gl.constexpr(not hasattr(tma, "async_load"))  # memory may shrink; ptxas is 12.8
load_later = async_copy.async_copy_global_to_shared if BEFORE_3_8 else async_copy.async_load
load_box = tma.async_copy_global_to_shared if BEFORE_3_8 else tma.async_load
store_box = tma.async_copy_shared_to_global if BEFORE_3_8 else tma.async_store
# (shared memory, dtype, shape, layout) -> the same memory; Triton 3.9 renamed the method.
BEFORE_3_9 = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
reinterpret = getattr(gl.shared_memory_descriptor, "_reinterpret" if BEFORE_3_9 else "reinterpret")


@gluon.jit
def follow(CHAINED: gl.constexpr):
    """If CHAINED, wait until the previous kernel is complete, then let the next one start."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
