"""Counts what the server does, for Prometheus (GET /metrics)."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quantize.host.gauge import Gauge as Driver
from quantize.runtime.prompt.prefixes import PrefixCache

Kind = TypeVar("Kind", Counter, Gauge, Histogram)

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def made(kind: type[Kind], name: str, says: str, *labels: str, **more: Any) -> Kind:
            return kind(f"quantize_{name}", says, labels, registry=self.registry, **more)

        self.requests = made(Counter, "requests", "Answered requests.", "path", "status")
        says = "Time from request to the end of its answer."
        self.seconds = made(Histogram, "request_seconds", says, "path", buckets=SECONDS)
        says = "Requests that had a parameter ignored."
        self.ignored = made(Counter, "ignored_parameters", says, "name")
        self.running = made(Gauge, "running", "Samples in a slot.")
        self.waiting = made(Gauge, "waiting", "Samples in the queue.")
        self.failures = made(Counter, "failures", "Failures of the engine.")
        self.tokens = made(Counter, "tokens", "Tokens of finished samples.")
        self.canvases = made(Counter, "canvases", "Canvases denoised.")
        self.steps = made(Counter, "denoising_steps", "Denoising steps, summed over samples.")
        says = "Samples that denoised together until one finished a canvas."
        self.batch = made(Histogram, "batch_size", says, buckets=(1, 2, 4, 8, 16))
        says = "Time until a batch of samples has finished a canvas."
        self.canvas_seconds = made(Histogram, "canvas_seconds", says, buckets=SECONDS)

    def watch(self, prefixes: PrefixCache[Any] | None, device: torch.device) -> None:
        """Add gauges of a prefix cache, if any, and of a GPU that NVML finds; a GET reads them."""
        if prefixes is not None:
            says = "Tokens of prompts that were looked for."
            self._ask("prefix_asked_tokens", says, lambda: prefixes.asked)
            says = "Those that needed no encoding."
            self._ask("prefix_reused_tokens", says, lambda: prefixes.reused)
            self._ask("prefix_bytes", "Memory of what is kept.", lambda: prefixes.nbytes)
        if (driver := Driver.of(device)) is None:
            return

        def held() -> float:
            free, total = torch.cuda.mem_get_info(device)
            return total - free

        self._ask("gpu_utilization", "Share of the last moment in which kernels ran.", driver.busy)
        self._ask("gpu_memory_bytes", "Memory in use, by any process.", held)
        says = "Clock of the processors."
        self._ask("gpu_clock_mhz", says, lambda: getattr(driver.clock(), "mhz", None))
        self._ask("gpu_energy_joules", "Energy since the driver was loaded.", driver.joules)

    def _ask(self, name: str, says: str, value: Callable[[], float | None]) -> None:
        gauge = Gauge(f"quantize_{name}", says, registry=self.registry)
        gauge.set_function(lambda: math.nan if (reading := value()) is None else reading)
