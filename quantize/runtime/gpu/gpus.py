"""Finds the kernels that run a scheme on a GPU, before weights are read.

A kernel runs on GPUs that have its instructions (`fused_dequant.weights.layouts.KERNELS`). Kernels that
Hopper can run have run on an H200. For other GPUs (`fused_dequant.launch.targets`), tests compile and
check the kernels, but nobody has run them. On any other GPU, a kernel is compiled at its first launch.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fused_dequant.formats import FOUR_BIT
from fused_dequant.launch.targets import TARGETS, Capability, capability, name_of
from fused_dequant.weights import tuning
from fused_dequant.weights.choose import layout_for, preferred
from fused_dequant.weights.layouts import KERNELS
from platformdirs import user_cache_dir

from quantize.errors import InputError, ResourceError
from quantize.host.known_gpus import KNOWN_GPUS
from quantize.runtime.gpu.rates import Rates

TUNED = Path(user_cache_dir("diffusiongemma-quantize", appauthor=False)) / "tuning"
HOPPER: Capability = (9, 0)  # the capability on which the kernels have run
OLDEST: Capability = (8, 0)  # bf16 tensor cores, which every scheme needs
# Version of the order in which kernels sum. Raise it with every change: results get other bits.
SUMS = 2


@dataclass(frozen=True)
class Gpu:
    """A GPU by its common name, with figures that its maker states and nobody measured here."""

    name: str
    capability: Capability
    memory: float = 0  # bytes, 0 where it is not known
    # for dense products summed in float32, one rate for both FP8 and INT8; None if not known
    rates: Rates | None = None
    link: float = 0  # bytes/s from the host to the GPU, one way; 0 if not known
    ran: bool = False  # whether the kernels and the runtime have run on one

    @property
    def target(self) -> str:
        """The target that kernels are compiled for, such as sm_90."""
        return name_of(self.capability)

    @property
    def fp4(self) -> bool:
        """Whether the GPU's tensor cores multiply NVFP4."""
        return self.capability in TARGETS and TARGETS[self.capability].fp4


GPUS = {
    key: Gpu(
        known.name,
        known.capability,
        known.memory * 1e9,
        Rates(known.copy * 1e12, known.bf16 * 1e12, known.eight * 1e12, known.fp4 * 1e12),
        known.link * 1e9,
        known.ran,
    )
    for key, known in KNOWN_GPUS.items()
}


@dataclass(frozen=True)
class GpuVerdict:
    """Whether a GPU runs a scheme: `kernels` is the module that runs it, or None; `note` explains."""

    scheme: str
    kernels: str | None
    note: str


def named(name: str, memory: float | None = None) -> Gpu:
    """Return the GPU that `--gpu` names: one of GPUS, or a target such as sm_89 with `memory` bytes.

    Raise InputError if `name` is neither, or a target without `memory`.
    """
    key = re.sub(r"[\s_-]|nvidia|geforce", "", name.lower())
    if target := re.fullmatch(r"sm(\d+)(\d)", key):
        if memory is None:
            raise InputError(f"--gpu {name}: name its memory too, with --gpu-memory")
        return Gpu(name, (int(target[1]), int(target[2])), memory)
    for known in (key, f"rtx{key}", key.removeprefix("dgx"), key.removesuffix("sxm")):
        if known in GPUS:
            return GPUS[known]
    raise InputError(f"--gpu {name}: one of {', '.join(GPUS)}, or sm_NN with --gpu-memory")


def at_hand(device: torch.device) -> Gpu:
    """Return a device's GPU; rates and link are known if its name and capability are in GPUS."""
    name = torch.cuda.get_device_name(device)
    version = torch.cuda.get_device_capability(device)
    words = name.replace(" ", "").lower()
    names = sorted(GPUS, key=len, reverse=True)  # an "h200" is in "GH200" too
    known = next((GPUS[n] for n in names if n in words and GPUS[n].capability == version), None)
    memory = torch.cuda.get_device_properties(device).total_memory
    return replace(known, name=name, memory=memory) if known else Gpu(name, version, memory)


def verdict(scheme: str, gpu: Gpu) -> GpuVerdict:
    """Return whether a GPU runs a scheme (a key of KERNELS), and if not, what to use instead."""
    version, target = gpu.capability, gpu.target
    if version < OLDEST:
        need = "sm_80 or newer: older GPUs have no bf16 tensor cores; use a CPU or another GPU"
        return GpuVerdict(scheme, None, f"{target}; {scheme} needs {need}")
    if not KERNELS[scheme].runs_on(version):
        least = name_of(KERNELS[scheme].least)
        return GpuVerdict(
            scheme, None,
            f"{target} has no {scheme.upper()} tensor cores, which {least} or newer has; "
            f"use INT8_DYNAMIC, or NVFP4A16, whose activations are bf16",
        )  # fmt: skip
    kernels = KERNELS[layout_for(scheme, None, version, ())].module
    if version == HOPPER:
        note = "run on an H200"
    elif version in TARGETS:
        note = "compiled and checked, never run"
    else:
        note = f"{target} is not among the targets that were compiled for: compiled at first use"
    if scheme == "nvfp4" and gpu.fp4:
        note += "; activations stay bf16 (W4A16); FP4 units multiply W4A4, the mode per_layer"
    if scheme == FOUR_BIT:
        note += "; W4A4 on FP4 units"
    return GpuVerdict(scheme, kernels, note)


def on_units(scheme: str) -> str:
    """Return the layout of a scheme's calibrated weights where FP4 units multiply them."""
    return preferred(scheme, "per_layer")[0]


def launches_of(device: torch.device) -> list[Any]:
    """Return [name, SUMS, launch configurations of its kernels] for a GPU, and ["cpu"] for a CPU."""
    if device.type != "cuda":
        return [device.type]
    tuning.user_tables(TUNED)
    name = torch.cuda.get_device_name(device)
    return [name, SUMS, tuning.table(name, name_of(capability(device)))]


def launches_digest(device: torch.device) -> str | None:
    """Return a hash of a GPU's launch configurations, which affect results' bits; None for a CPU."""
    if device.type != "cuda":
        return None
    launches = json.dumps(launches_of(device), sort_keys=True)
    return hashlib.sha256(launches.encode()).hexdigest()[:16]


def check_gpu(schemes: Iterable[str], device: torch.device) -> None:
    """Raise ResourceError if a GPU cannot run the kernels of all `schemes`, or is missing.

    The message says what to use instead. A CPU runs all schemes, in torch. On a GPU, also load the
    user's tuned launch tables, for later launches.
    """
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ResourceError("no CUDA device here: run on a machine with an NVIDIA GPU")
    if torch.version.hip:
        why = "the kernels are for NVIDIA GPUs: hide this one with HIP_VISIBLE_DEVICES="
        raise ResourceError(why)
    tuning.user_tables(TUNED)
    gpu = at_hand(device)
    for decision in (verdict(scheme, gpu) for scheme in sorted({"bf16", *schemes})):
        if decision.kernels is None:
            raise ResourceError(
                f"{gpu.name} cannot run {decision.scheme}: {decision.note}; or hide this GPU with "
                f"CUDA_VISIBLE_DEVICES="
            )
