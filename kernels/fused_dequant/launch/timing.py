"""Captures CUDA graphs, and times work: the median over replays that use several buffers in turn."""

import gc
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Generator[None]:
    """Capture into `graph` what the `with` block launches; `options` are for `torch.cuda.graph`."""
    collects = gc.isenabled()
    gc.disable()  # collecting an older graph would free it, which would invalidate the capture
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if collects:
            gc.enable()


def measure(calls: Sequence[Callable[[], object]], *, replays: int = 20, least: int = 4) -> float:
    """Return microseconds per call, the median over `replays` replays of one CUDA graph.

    `calls` do the same work on different buffers. Together the buffers should be several times as
    large as the L2 cache. The graph captures all calls once or several times, at least `least` calls,
    so that gaps between launches are those of a real step.
    """
    rounds = -(-least // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(replays)
    ]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in pairs) * 1000 / (rounds * len(calls))
