"""Counts what the server does, for Prometheus (GET /metrics)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quantize.host.gauge import Gauge as Driver
from quantize.runtime.prefixes import PrefixCache
from quantize.serve.text import Answer

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "quantize_requests", "Answered requests.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "quantize_request_seconds", "Time from request to the end of its answer.",
            ["path"], registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self.ignored = Counter(
            "quantize_ignored_parameters", "Requests that had a parameter ignored.", ["name"],
            registry=registry,
        )  # fmt: skip
        self.running = Gauge("quantize_running", "Samples in a slot.", registry=registry)
        self.waiting = Gauge("quantize_waiting", "Samples in the queue.", registry=registry)
        self.failures = Counter("quantize_failures", "Failures of the engine.", registry=registry)
        self.tokens = Counter("quantize_tokens", "Tokens of finished samples.", registry=registry)
        self.canvases = Counter("quantize_canvases", "Canvases denoised.", registry=registry)
        self.steps = Counter(
            "quantize_denoising_steps", "Denoising steps, summed over samples.", registry=registry
        )
        self.batch = Histogram(
            "quantize_batch_size", "Samples that denoised together until one finished a canvas.",
            registry=registry, buckets=(1, 2, 4, 8, 16),
        )  # fmt: skip
        self.canvas_seconds = Histogram(
            "quantize_canvas_seconds", "Time until a batch of samples has finished a canvas.",
            registry=registry, buckets=SECONDS,
        )  # fmt: skip

    def watch(self, prefixes: PrefixCache[Any] | None) -> None:
        """Show what an engine keeps of the beginnings of prompts, as it stands when it is asked."""
        if prefixes is None:
            return
        for name, says, value in (
            ("asked_tokens", "Tokens of prompts that were looked for.", lambda: prefixes.asked),
            ("reused_tokens", "Those that needed no encoding.", lambda: prefixes.reused),
            ("bytes", "Memory of what is kept.", lambda: prefixes.nbytes),
        ):
            gauge = Gauge(f"quantize_prefix_{name}", says, registry=self.registry)
            gauge.set_function(value)

    def watch_gpu(self, device: torch.device) -> None:
        """Show what the driver says of a GPU, as it stands when it is asked; nothing for a CPU."""
        if (driver := Driver.of(device)) is None:
            return

        def held() -> float:
            free, total = torch.cuda.mem_get_info(device)
            return total - free

        for name, says, value in (
            ("utilization", "Share of the last moment in which kernels ran.", driver.busy),
            ("memory_bytes", "Memory in use, by any process.", held),
            ("clock_mhz", "Clock of the processors.", lambda: getattr(driver.clock(), "mhz", None)),
            ("energy_joules", "Energy since the driver was loaded.", driver.joules),
        ):
            gauge = Gauge(f"quantize_gpu_{name}", says, registry=self.registry)
            gauge.set_function(lambda value=value: _or_nan(value()))

    def canvas(self, seconds: float, batch: int, steps: Sequence[int]) -> None:
        """Count a batch of samples, and the steps of the canvases that it finished."""
        self.canvas_seconds.observe(seconds)
        self.batch.observe(batch)
        self.canvases.inc(len(steps))
        self.steps.inc(sum(steps))

    def ignore(self, names: Sequence[str]) -> None:
        """Count the parameters of a request that are ignored."""
        for name in names:
            self.ignored.labels(name).inc()

    def finished(self, answer: Answer) -> None:
        """Count a finished sample."""
        self.tokens.inc(answer.tokens)

    def page(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return generate_latest(self.registry)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
