"""Reads the energy that a GPU has taken, from the counter that its driver keeps (NVML), in joules.

The counter moves every few tens of milliseconds: read it before and after some seconds of work.
"""

import ctypes
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver


class EnergyCounter:
    """The counter of one GPU since its driver was loaded, by a handle of NVML's."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def of(cls, device: torch.device) -> "EnergyCounter | None":
        """Return the counter of a device, or None where there is none or it may not be read."""
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
        counter = cls(library, handle)
        return None if counter.joules() is None else counter

    def joules(self) -> float | None:
        """Return the joules taken so far; None if the driver does not say."""
        millijoules = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(millijoules)
        )
        return None if failed else millijoules.value / 1e3
