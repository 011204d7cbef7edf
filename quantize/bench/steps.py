"""Times one denoising step of the fused engine, and the parts of a step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.gpu.rates import seconds_of

TIMED = 12  # steps
PARTS = ("experts", "dense", "attention", "vocabulary", "sampler")


def time_step(engine: FusedEngine, slots: Sequence[int]) -> float:
    """Return the milliseconds of one denoising step of `slots`, the mean over TIMED steps.

    Each slot's next canvas is begun and discarded. Steps past a canvas' end take as long as others.
    """
    step, graphs = engine.denoiser.begin_waiting(slots)
    seconds = seconds_of(lambda: step.take(graphs), TIMED)
    engine.drop_canvases(slots)
    return seconds * 1e3


def profile_step(engine: FusedEngine, slots: Sequence[int]) -> dict[str, float]:
    """Return part -> GPU milliseconds of one denoising step; keys are PARTS and "rest".

    Kernels outside all parts are "rest". The step is profiled twice, and only the second time counts,
    since the GPU is idle before the first. The canvases begun in `slots` are discarded.
    """
    step, _ = engine.denoiser.begin_waiting(slots)
    step.take(graphs=False)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(2):
            step.take(graphs=False)
        torch.cuda.synchronize()
    engine.drop_canvases(slots)
    on_gpu: list[Any] = [e for e in record.events() or () if e.device_type == DeviceType.CUDA]
    named = [event for event in on_gpu if event.name in PARTS]  # from first kernel to last
    kernels = sorted(
        (event for event in on_gpu if event.name not in PARTS),
        key=lambda event: event.time_range.start,
    )
    parts: dict[str, float] = dict.fromkeys((*PARTS, "rest"), 0.0)
    ended: dict[int, float] = {}  # by stream
    for event in kernels[len(kernels) // 2 :]:
        owner = next((part.name for part in named if _within(event, part)), "rest")
        # A chained kernel starts to wait while the kernel before it runs: that time is not its own.
        before = max(event.time_range.start, ended.get(event.device_resource_id, 0.0))
        ended[event.device_resource_id] = max(before, event.time_range.end)
        parts[owner] += (ended[event.device_resource_id] - before) / 1e3
    return parts


def _within(event: Any, part: Any) -> bool:
    """Return whether a kernel ran on the stream and within the time span of a profiled part."""
    inner, span = event.time_range, part.time_range
    inside = span.start <= inner.start and inner.end <= span.end
    return inside and event.device_resource_id == part.device_resource_id
