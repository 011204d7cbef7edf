"""Microseconds of an all-reduce of a layer's rows over the GPUs of one host, captured in a CUDA graph.

    torchrun --nproc-per-node 2 tests/benchmarks/all_reduce.py

A model that is split over GPUs adds up the rows of a layer's outputs once a layer. Compared are NCCL
and the one-shot and two-shot all-reduces of torch's symmetric memory, with 256 BF16 rows of 2,816 (1.44
MB) for every canvas. A graph has 30 of them, as many as the model has layers. The time of one is that
of two replays divided by 60; printed are the median, the least and the most of 40 such pairs.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

LAYERS, PAIRS, HIDDEN = 30, 40, 2816
ROWS = (256, 1024, 4096)  # of 1, 4 and 16 canvases


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of LAYERS calls."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(LAYERS):
            work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Return the time of one call of the graph, of every pair of replays."""
    found: list[float] = []
    for _ in range(PAIRS):
        dist.barrier()
        torch.cuda.synchronize()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended) / (2 * LAYERS) * 1e3)
    return found


def main() -> None:
    """Print a line for every number of rows and every kind."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    world = dist.get_world_size()
    for rows in ROWS:
        shared = symmetric.empty(rows * HIDDEN, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, group.group_name)
        own = torch.zeros_like(shared)
        summed = torch.ops.symm_mem
        kinds: dict[str, Callable[[], Any]] = {
            "one-shot": partial(summed.one_shot_all_reduce, shared, "sum", group.group_name),
            "two-shot": partial(summed.two_shot_all_reduce_, shared, "sum", group.group_name),
            "NCCL": partial(dist.all_reduce, own),
        }
        shared.fill_(rank + 1.0)
        assert torch.all(kinds["one-shot"]() == world * (world + 1) / 2)
        shared.zero_()  # sums of sums stay finite
        for name, work in kinds.items():
            times = microseconds(captured(work))
            if rank == 0:
                print(
                    f"{rows} rows, {2 * shared.numel() / 1e6:.2f} MB, {name}: "
                    f"median {statistics.median(times):.2f} us, {min(times):.2f} to {max(times):.2f}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
