"""Measures seconds and peak memory of a block of work, and the host's free memory.

Writing 5 to /proc/self/clear_refs resets the peak of a process' resident memory (VmHWM) before each
stage. If Linux refuses the reset, None is reported, since VmHWM may be an earlier stage's peak.
"""

import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

FORGET, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
CGROUP = Path("/sys/fs/cgroup")  # of version 2, as a container sees its own


def now() -> str:
    """Return the present time in UTC, as "2026-01-31T12:00:00+00:00"."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def free_memory() -> int:
    """Return the bytes of host memory, free or used to cache files, within a container's limit."""
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no file, or "max": there is no limit
        limit, used = (int((CGROUP / f"memory.{n}").read_text()) for n in ("max", "current"))
        lines = (line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        files = sum(int(n) for name, n in lines if name in ("active_file", "inactive_file"))
        free = min(free, limit - used + files)
    return free


@contextmanager
def measured() -> Generator[dict[str, Any]]:
    """Yield a dict that is filled when the block ends, even if it raises an error.

    Keys: `seconds`; `ended`, the time as `now` writes it; `peak_rss_bytes`, None if it cannot be
    measured; `peak_gpu_bytes` and the GPU's name `gpu`, both None if the block took no GPU memory.
    """
    facts: dict[str, Any] = {}
    forgot = False
    with suppress(OSError):
        forgot = FORGET.write_text("5") > 0
    before = _gpu_bytes(reset=True)
    began = time.monotonic()
    try:
        yield facts
    finally:
        after = _gpu_bytes()
        used = after is not None and after > (before or 0)
        facts |= {
            "seconds": round(time.monotonic() - began, 2),
            "peak_rss_bytes": _peak_bytes() if forgot else None,
            "peak_gpu_bytes": after if used else None,
            "gpu": _cuda().get_device_name() if used else None,
            "ended": now(),
        }


def _peak_bytes() -> int | None:
    with suppress(OSError):
        match = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())  # of 1,024 bytes
        return int(match[1]) * 1024 if match else None
    return None


def _cuda() -> Any:
    return sys.modules["torch"].cuda


def _gpu_bytes(*, reset: bool = False) -> int | None:
    """Return torch's peak bytes on this process' GPU; `reset` first begins a new peak."""
    if "torch" not in sys.modules or not _cuda().is_initialized():
        return None
    if reset:
        _cuda().reset_peak_memory_stats()
    return _cuda().max_memory_allocated()
