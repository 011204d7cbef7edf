"""Captures passes of a fixed shape as CUDA graphs, and decides which steps are worth a capture.

Everything that changes between replays is in device memory. A graph is captured when its pass first
runs. A graph serves one number of sequences; a denoising step's graph also serves only one sampler's
settings. Requests choose these settings freely, so `Steps` limits how many graphs are captured.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from fused_dequant.launch.timing import capturing
from torch import Tensor

from quantize.runtime.sampler.sampler import Sampler

CAPTURED = 8  # pairs (rows, settings) whose graphs are kept, besides those of the warm-up
WORTH = 8  # canvases after which further settings are worth a capture
BETWEEN = (3, 6, 12)  # numbers of rows that steps have besides the powers of two

Pool = Any  # torch's handle of CUDA graphs' memory; None where nothing is captured
S = TypeVar("S")


def bucket(rows: int) -> int:
    """Return the smallest number of rows >= `rows` for which steps are captured."""
    return min(count for count in (*BETWEEN, power_of_two(rows)) if count >= rows)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


class Replayed:
    """A function of tensors of fixed shapes that replays a CUDA graph from its second call on.

    The first call runs kernel by kernel, which compiles the kernels, and then captures the graph. Every
    replay returns the same tensors, with new values. Graphs share the memory `pool`, since no two run
    at once and none leaves data there for another graph.
    """

    def __init__(self, work: Callable[..., Any], pool: Pool) -> None:
        self._work, self._pool = work, pool
        self._given: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, *given: Tensor) -> Any:
        """Return what `work` returns for the tensors `given`."""
        if self._graph is None:
            self._given = [tensor.clone() for tensor in given]
            result, self._graph = self._work(*given), torch.cuda.CUDAGraph()
            # another thread may copy rows to the host meanwhile
            with capturing(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._result = self._work(*self._given)
            return result
        for kept, new in zip(self._given, given, strict=True):
            kept.copy_(new)
        self._graph.replay()
        return self._result


class Steps(Generic[S]):
    """Keeps a `Step` for each (rows, sampler) in use, and decides which of them are captured.

    The first CAPTURED pairs are captured at once. Each further pair first begins WORTH canvases without
    a graph, so n canvases cause at most CAPTURED + n / WORTH captures. The CAPTURED pairs used most
    recently keep graphs; so do all pairs of the warm-up (`hold`). `make(rows, sampler)` returns a step.
    Steps without graphs are kept for as many pairs as there are `slots`, or CAPTURED if that is more.
    """

    def __init__(self, make: Callable[[int, Sampler], S], slots: int = CAPTURED) -> None:
        self._make, self._slots = make, slots
        self._lasting: dict[tuple[int, Sampler], S] = {}
        self._captured: OrderedDict[tuple[int, Sampler], S] = OrderedDict()
        self._tried: OrderedDict[tuple[int, Sampler], tuple[S, int]] = OrderedDict()

    def get(self, rows: int, sampler: Sampler, begun: int) -> tuple[S, bool]:
        """Return the step of `rows` sequences, and whether to use CUDA graphs.

        `begun` of their canvases begin now: a canvas counts once, however often others end before it.
        """
        key = (rows, sampler)
        if key in self._lasting:
            return self._lasting[key], True
        if key in self._captured:
            self._captured.move_to_end(key)
            return self._captured[key], True
        step, canvases = self._tried.pop(key, None) or (self._make(rows, sampler), 0)
        if worth := len(self._captured) < CAPTURED or canvases >= WORTH:
            self._captured[key] = step
        else:
            self._tried[key] = step, canvases + begun
        if len(self._captured) > CAPTURED:
            self._captured.popitem(last=False)
        if len(self._tried) > max(CAPTURED, self._slots):
            self._tried.popitem(last=False)
        return step, worth

    def hold(self) -> None:
        """Never drop the graphs captured so far; they do not count towards CAPTURED."""
        self._lasting |= self._captured
        self._captured.clear()
