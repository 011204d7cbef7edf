"""Finds the kernels that run a scheme on a GPU, before weights are read.

A kernel runs on GPUs that have its instructions (`fused_dequant.weights.layouts.KERNELS`). Kernels that
Hopper can run have run on an H200. For other GPUs (`fused_dequant.launch.targets`), tests compile and
check the kernels, but nobody has run them. On any other GPU, a kernel is compiled at its first launch.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fused_dequant.formats import FOUR_BIT
from fused_dequant.launch.targets import TARGETS, Capability, capability, name_of
from fused_dequant.weights import tuning
from fused_dequant.weights.choose import layout_for
from fused_dequant.weights.layouts import KERNELS
from platformdirs import user_cache_dir

from quantize.errors import InputError, ResourceError
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

    @property
    def target(self) -> str:
        """The target that kernels are compiled for, such as sm_90."""
        return name_of(self.capability)

    @property
    def fp4(self) -> bool:
        """Whether the GPU's tensor cores multiply NVFP4."""
        return self.capability in TARGETS and TARGETS[self.capability].fp4


def _gpu(
    name: str, capability: Capability, gb: float, tb: float, bf16: float, eight: float, link: float
) -> Gpu:
    """Make a GPU from GB of memory, TB/s, TFLOP/s in bf16 and in 8 bits, and GB/s of its link."""
    rates = Rates(tb * 1e12, bf16 * 1e12, eight * 1e12, FP4.get(name, 0) * 1e12)
    return Gpu(name, capability, gb * 1e9, rates, link * 1e9)


# TFLOP/s of dense products in NVFP4 (W4A4); not looked up for other GPUs.
FP4 = {"B200": 9000, "RTX PRO 6000": 2015, "RTX 5090": 1676, "DGX Spark": 500}
PCIE4, PCIE5, C2C = 31.5, 63.0, 450.0  # GB/s one way, of 16 lanes; NVLink between Grace and its GPU
# Where each figure was looked up: docs/gpus.md, What makers state.
GPUS = {
    "a100": _gpu("A100", (8, 0), 80, 2.039, 312, 624, PCIE4),
    "a6000": _gpu("RTX A6000", (8, 6), 48, 0.768, 154.8, 309.7, PCIE4),
    "rtx3090": _gpu("RTX 3090", (8, 6), 24, 0.936, 71, 284, PCIE4),
    "l40s": _gpu("L40S", (8, 9), 48, 0.864, 362, 733, PCIE4),
    "rtx4090": _gpu("RTX 4090", (8, 9), 24, 1.008, 165, 330, PCIE4),
    "rtx4080": _gpu("RTX 4080", (8, 9), 16, 0.717, 97, 195, PCIE4),
    "h100": _gpu("H100", (9, 0), 80, 3.35, 989, 1979, PCIE5),
    "h100pcie": _gpu("H100 PCIe", (9, 0), 80, 2.0, 756, 1513, PCIE5),
    "h200": _gpu("H200", (9, 0), 141, 4.8, 989, 1979, PCIE5),
    "gh200": _gpu("GH200", (9, 0), 96, 4.0, 989, 1979, C2C),
    "b200": _gpu("B200", (10, 0), 180, 8.0, 2250, 4500, PCIE5),
    "b300": _gpu("B300", (10, 3), 288, 8.0, 2250, 4500, PCIE5),
    "gb300": _gpu("GB300", (10, 3), 288, 8.0, 2250, 4500, C2C),
    "dgxstation": _gpu("DGX Station", (10, 3), 288, 8.0, 2250, 4500, C2C),
    "rtxpro6000": _gpu("RTX PRO 6000", (12, 0), 96, 1.792, 504, 1007, PCIE5),
    "rtx5090": _gpu("RTX 5090", (12, 0), 32, 1.792, 209, 419, PCIE5),
    "rtx5080": _gpu("RTX 5080", (12, 0), 16, 0.96, 112, 225, PCIE5),
    # Its maker states 31 TFLOP/s in float32; the rates of products follow by the RTX 5090's ratio.
    # Host and GPU share their memory, so streaming reads from it and writes to it.
    "spark": _gpu("DGX Spark", (12, 1), 128, 0.273, 62, 124, 136),
}


@dataclass(frozen=True)
class Verdict:
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
    own = torch.cuda.get_device_capability(device)
    words = name.replace(" ", "").lower()
    names = sorted(GPUS, key=len, reverse=True)  # an "h200" is in "GH200" too
    known = next((GPUS[n] for n in names if n in words and GPUS[n].capability == own), None)
    memory = torch.cuda.get_device_properties(device).total_memory
    return Gpu(name, own, memory, known.rates if known else None, known.link if known else 0)


def verdict(scheme: str, gpu: Gpu) -> Verdict:
    """Return whether a GPU runs a scheme (a key of KERNELS), and if not, what to use instead."""
    own, target = gpu.capability, gpu.target
    if own < OLDEST:
        need = "sm_80 or newer: older GPUs have no bf16 tensor cores; use a CPU or another GPU"
        return Verdict(scheme, None, f"{target}; {scheme} needs {need}")
    if not KERNELS[scheme].runs_on(own):
        least = name_of(KERNELS[scheme].least)
        return Verdict(
            scheme, None,
            f"{target} has no {scheme.upper()} tensor cores, which {least} or newer has; "
            f"use INT8_DYNAMIC, or NVFP4A16, whose activations are bf16",
        )  # fmt: skip
    kernels = KERNELS[layout_for(scheme, None, own, ())].module
    if own == HOPPER:
        note = "run on an H200"
    elif own in TARGETS:
        note = "compiled and checked, never run"
    else:
        note = f"{target} is not among the targets that were compiled for: compiled at first use"
    if scheme == "nvfp4" and gpu.fp4:
        note += "; activations stay bf16 (W4A16); FP4 units multiply W4A4, the mode per_layer"
    if scheme == FOUR_BIT:
        note += "; W4A4 on FP4 units"
    return Verdict(scheme, kernels, note)


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
    for found in (verdict(scheme, gpu) for scheme in sorted({"bf16", *schemes})):
        if found.kernels is None:
            raise ResourceError(
                f"{gpu.name} cannot run {found.scheme}: {found.note}; or hide this GPU with "
                f"CUDA_VISIBLE_DEVICES="
            )
