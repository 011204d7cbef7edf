"""Reads a GPU's energy, clock, and whether power limits the clock, from its driver (NVML).

The driver updates its energy counter every 20 to 100 ms. `watched` polls the counter while work
runs and notes each change. Power is the energy between two changes, over the time between them.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pynvml
import torch

from quantize.host.progress import every

LOOK = 0.01  # seconds between two polls of the counter; a change's time may be off by this
# reasons for a clock that is held down by power: the driver's limit, and the board's brake
POWER = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown


@dataclass(frozen=True)
class Clock:
    """The processors' clock in MHz, and whether the power limit holds it down (`capped`)."""

    mhz: int
    capped: bool


@dataclass(frozen=True)
class Gauge:
    """Reads one GPU's energy, load and clock through NVML; None is what the driver does not say."""

    _handle: Any

    @classmethod
    def of(cls, device: torch.device) -> "Gauge | None":
        """Return the gauge of a device, or None for a CPU or a GPU that NVML does not find."""
        if device.type != "cuda":
            return None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return cls(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return None

    def joules(self) -> float | None:
        """Return the joules used since the driver was loaded."""
        with suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        return None

    def busy(self) -> float | None:
        """Return the share (0 to 1) of the last period in which kernels ran."""
        with suppress(pynvml.NVMLError):
            load: Any = pynvml.nvmlDeviceGetUtilizationRates(self._handle)
            return load.gpu / 100  # its stub takes this number for text
        return None

    def clock(self) -> Clock | None:
        """Return the present clock."""
        with suppress(pynvml.NVMLError):
            mhz = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            return Clock(mhz, bool(reasons & POWER))
        return None


@dataclass
class Watched:
    """The changes of a GPU's energy counter, as (seconds, joules), and the clock at each change."""

    steps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    clocks: list[Clock] = field(default_factory=list[Clock])

    @property
    def watts(self) -> float | None:
        """Mean power in W between the counter's first and last change; None with fewer than two."""
        if len(self.steps) < 2:
            return None
        (start, before), (end, after) = self.steps[0], self.steps[-1]
        return (after - before) / (end - start)


@contextmanager
def watched(gauge: Gauge | None) -> Generator[Watched]:
    """Yield a `Watched`, filled by a thread during the block; it stays empty without a gauge."""
    seen = Watched()
    if gauge is None:
        yield seen
        return
    last = gauge.joules()

    def look() -> None:
        nonlocal last
        if (joules := gauge.joules()) is not None and joules != last:
            last = joules
            seen.steps.append((time.perf_counter(), joules))
            seen.clocks += [clock] if (clock := gauge.clock()) else []

    with every(LOOK, look):
        yield seen
