"""Times work on the device by medians of CUDA graph replays over rotating buffers."""

import statistics
from collections.abc import Callable, Sequence

import torch


def measure(calls: Sequence[Callable[[], object]], *, replays: int = 20, least: int = 4) -> float:
    """Return the median microseconds of a call.

    `calls` are the same work on different buffers, whose bytes must exceed the L2 several times. One
    graph captures them in turn, and again until there are `least` launches, so that gaps between
    launches are those of a real step.
    """
    rounds = -(-least // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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
