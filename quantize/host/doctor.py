"""Checks what `quantize` needs of this machine: packages, compiler, GPUs, memory, disk, caches.

Sources: the distribution's metadata (needed packages), torch (GPUs), nvidia-smi (driver version).
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from platformdirs import user_cache_dir

from quantize.host.resources import free_memory
from quantize.host.units import size

DISTRIBUTION = "diffusiongemma-quantize"
EXTRAS = {"serve": "quantize serve", "sign": "push --sign"}
MODEL_BYTES = 52_000_000_000  # BF16 weights of the 26B model; a run writes at most as much again
COMPILERS = ("cc", "gcc", "clang")
NEEDED, WANTED = "needed", "wanted"


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: its name, what was seen, and advice (None if all is well).

    `level` is NEEDED if commands fail without the thing, else WANTED.
    """

    what: str
    seen: str
    advice: str | None = None
    level: str = WANTED


def findings(out: Path, version: str) -> Iterator[Finding]:
    """Yield findings about this machine; `out` is the folder of runs, `version` is quantize's."""
    yield Finding("quantize", f"{version} in {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}")
    yield from packages()
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)
    advice = "install a C compiler (Debian: apt install gcc): Triton needs one"
    yield Finding("C compiler", compiler or "none", None if compiler else advice)
    yield from _gpus()
    total = psutil.virtual_memory().total
    yield Finding("memory", f"{size(free_memory())} free of {size(total)}")
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    advice = f"a run of the 26B model needs {size(MODEL_BYTES)} and more there"
    little = advice if free < MODEL_BYTES else None
    yield Finding(f"disk of {there}", f"{size(free)} free", little)
    yield from _caches()


def packages() -> Iterator[Finding]:
    """Yield a finding for each package that is missing or misversioned, and one for the rest."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield Finding("packages", "not installed as a package", "pip install -e .", NEEDED)
        return
    fine: list[str] = []
    for need in needed:
        extras = ("", *EXTRAS) if need.marker else ("",)
        stands = (e for e in extras if not need.marker or need.marker.evaluate({"extra": e}))
        if (extra := next(stands, None)) is None:
            continue
        installed = next((d.version for d in metadata.distributions(name=need.name)), None)
        if installed is not None and need.specifier.contains(installed, prereleases=True):
            fine.append(f"{need.name} {installed}")
            continue
        asked = f"{need.name}{need.specifier}" + (f", for {EXTRAS[extra]}" if extra else "")
        command = f"pip install '{DISTRIBUTION}{f'[{extra}]' if extra else ''}'"
        yield Finding(asked, installed or "missing", command, WANTED if extra else NEEDED)
    yield Finding("packages", ", ".join(fine))


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # said among the packages
    if not torch.cuda.is_available():
        built, seen = torch.version.cuda, _driver()
        unbuilt = "this torch is a CPU build; install the build for your driver's CUDA"
        hidden = "torch does not reach it: hidden (CUDA_VISIBLE_DEVICES), or the driver too old?"
        advice = (hidden if built else unbuilt) if seen else None
        yield Finding("GPU", f"{seen or 'none'}; torch's CUDA: {built or 'none'}", advice)
        return
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        target = f"sm_{one.major}{one.minor}"
        gpu = f"{one.name}, {target}, {size(one.total_memory)}, CUDA {torch.version.cuda}"
        old = f"{target} has no kernels here (sm_80 is the oldest); hide it to use the CPU"
        yield Finding(f"GPU {index}", gpu, old if one.major < 8 else None)
    yield Finding("driver", _driver() or "nvidia-smi is not here")


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "; ".join(dict.fromkeys(done.stdout.split("\n"))).strip("; ") or None


def _caches() -> Iterator[Finding]:
    home = Path.home()
    hub = os.environ.get("HF_HOME") or home / ".cache" / "huggingface"
    triton = os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"
    tuned = Path(user_cache_dir(DISTRIBUTION, appauthor=False))
    for name, folder in (("downloads", hub), ("compiled kernels", triton), ("tuning", tuned)):
        yield Finding(name, f"{folder}{'' if Path(folder).is_dir() else ' (not there yet)'}")
