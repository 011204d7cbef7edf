"""The compute capabilities that kernels are compiled for, and what the GPU of a device can do.

With `QUANTIZE_TARGET=sm_89` a newer GPU runs an RTX 4090's kernels and tiles, to test them.
"""

import os
import re
from dataclasses import dataclass

import torch

Capability = tuple[int, int]
FORCE = "QUANTIZE_TARGET"


@dataclass(frozen=True)
class Abilities:
    """Properties of GPUs of one compute capability; `TARGETS` maps the capability to them."""

    example: str  # a GPU of this capability
    shared: int  # KiB of shared memory that a block may have
    processors: int  # streaming multiprocessors
    fp4: bool = False  # whether tensor cores multiply NVFP4


TARGETS: dict[Capability, Abilities] = {
    (8, 0): Abilities("A100", 163, 108),
    (8, 6): Abilities("RTX 3090", 99, 82),
    (8, 9): Abilities("RTX 4090", 99, 128),
    (9, 0): Abilities("H200", 227, 132),
    (10, 0): Abilities("B200", 227, 148, fp4=True),
    (10, 3): Abilities("B300", 227, 148, fp4=True),
    (11, 0): Abilities("Jetson Thor", 227, 20, fp4=True),
    (12, 0): Abilities("RTX 5090", 99, 170, fp4=True),
    (12, 1): Abilities("DGX Spark", 99, 48, fp4=True),
}


def name_of(target: Capability) -> str:
    """Return the name of a compute capability, such as sm_90 for (9, 0)."""
    return f"sm_{target[0]}{target[1]}"


def forced() -> Capability | None:
    """Return the capability in QUANTIZE_TARGET, None if unset; raise ValueError if not in TARGETS."""
    name = os.environ.get(FORCE)
    if not name:
        return None
    numbers = re.fullmatch(r"sm_(\d+)(\d)", name)
    capability = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if capability not in TARGETS:
        known = ", ".join(map(name_of, TARGETS))
        raise ValueError(f"{FORCE}={name}: one of {known}")
    return capability


def capability(device: torch.device) -> Capability:
    """Return the capability to compile for: `forced`, or that of `device` ("meta": current GPU)."""
    gpu = device if device.type == "cuda" else None
    return forced() or torch.cuda.get_device_capability(gpu)


def fp4_units(device: torch.device) -> bool:
    """Return whether `device` has tensor cores for NVFP4; True on a CPU (Triton's interpreter)."""
    if device.type == "cpu":
        return True
    target = capability(device)
    return target in TARGETS and TARGETS[target].fp4


def lowering(device: torch.device) -> dict[str, str]:
    """Return launch arguments that make Triton use `device`'s tensor cores; only sm_121 needs any.

    For sm_121 Triton 3.7 would emit Ampere's instructions, which multiply FP8 in half precision and
    cannot multiply NVFP4. With "sm120" it emits sm_120's, which sm_121 has, and assembles for sm_121.
    """
    return {"arch": "sm120"} if device.type != "cpu" and capability(device) == (12, 1) else {}


def has_boxes(device: torch.device) -> bool:
    """Return whether TMA copies tiles on `device`: on sm_90 and newer, and in Triton's interpreter."""
    return device.type == "cpu" or capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Return whether `device` is a GPU of sm_90; no other has the instruction `wgmma`."""
    return device.type != "cpu" and capability(device) == (9, 0)


def processors(device: torch.device) -> int:
    """Return how many streaming multiprocessors a GPU has; 4 on a CPU, for interpreted kernels."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if device.type == "cpu" else TARGETS[capability(device)].processors
