"""Reads a GPU's energy, clock, and whether power limits the clock, from its driver (NVML).

The driver updates its energy counter every 20 to 100 ms. `watched` polls the counter while work
runs and notes each change. Power is the energy between two changes, over the time between them.
"""

import ctypes
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from quantize.host.progress import every

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
PROCESSORS = 1  # NVML_CLOCK_SM
# NVML's reasons for a clock that is held down by power: the driver's limit, and the board's brake.
POWER = 0x04 | 0x80
LOOK = 0.01  # seconds between two polls of the counter; a change's time may be off by this


@dataclass(frozen=True)
class Clock:
    """The processors' clock in MHz, and whether the power limit holds it down (`capped`)."""

    mhz: int
    capped: bool


@dataclass(frozen=True)
class Gauge:
    """Reads one GPU's energy, load and clock through NVML."""

    _library: Any
    _handle: ctypes.c_void_p

    @classmethod
    def of(cls, device: torch.device) -> "Gauge | None":
        """Return the gauge of a device, or None for a CPU or a GPU that NVML does not find."""
        if device.type != "cuda":
            return None
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
        return cls(library, handle)

    def joules(self) -> float | None:
        """Return the joules used since the driver was loaded; None if the driver does not say."""
        millijoules, read = ctypes.c_ulonglong(), self._library.nvmlDeviceGetTotalEnergyConsumption
        failed = read(self._handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3

    def busy(self) -> float | None:
        """Return the share (0 to 1) of the last period in which kernels ran; None if not known."""
        percent = (ctypes.c_uint * 2)()  # of the processors and of the memory
        failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, percent)
        return None if failed else percent[0] / 100

    def clock(self) -> Clock | None:
        """Return the present clock; None if the driver does not say."""
        now, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        library, handle = self._library, self._handle
        if library.nvmlDeviceGetClockInfo(
            handle, PROCESSORS, ctypes.byref(now)
        ) or library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons)):
            return None
        return Clock(now.value, bool(reasons.value & POWER))


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
