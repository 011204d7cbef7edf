"""Checks global scales and input scales, each of which is one number for a whole matrix.

A scale must be finite and above 0, since a server divides by it. Servers fuse some Linears into one
matrix (q/k/v of a layer, gate/up of an expert or MLP), and apply the first or the largest of their
scales to all rows. So scales of fused Linears must be equal; different experts may have different
scales. A server loads a missing input scale as 0. So if one Linear of a fused matrix has an input
scale, all its Linears must. If one expert of a layer has one, all Linears of its experts must.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import fused_with
from quantize.schemes.records import INPUT_SCALES, TENSOR_SCALES

LAYER_EXPERT = re.compile(r"(.*\.experts)\.\d+\..+")
Scales = dict[str, dict[str, float]]  # module -> suffix -> value
Finding = tuple[bool, str]  # whether a scale is right, and the fault to report if not


def read_scales(checkpoint: Checkpoint) -> Scales:
    """Return all global and input scales of a checkpoint: module -> suffix -> value."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, info in checkpoint.tensors.items():
        if name.rpartition(".")[2] in TENSOR_SCALES and info.shape in ((), (1,)):
            alike[info.dtype, info.shape].append(name)
    scales: Scales = defaultdict(dict)
    for names in alike.values():
        values = checkpoint.read_stacked(names).flatten().tolist()
        for name, value in zip(names, values, strict=True):
            module, _, suffix = name.rpartition(".")
            scales[module][suffix] = value
    return dict(scales)


def positive(scales: Scales) -> Iterator[Finding]:
    """Yield a finding for each scale: whether it is a finite number above 0."""
    for module, of_module in scales.items():
        for suffix, value in of_module.items():
            yield 0 < value < math.inf, f"{module}.{suffix} is {value}, not above 0"


def shared(scales: Scales) -> Iterator[Finding]:
    """Yield a finding for every later scale of a fused matrix: does it equal the first scale?"""
    first: dict[tuple[str, str], tuple[str, float]] = {}
    for module, of_module in scales.items():
        for suffix, value in of_module.items():
            other, expected = first.setdefault((fused_with(module), suffix), (module, value))
            differ = f"{module}.{suffix} is {value:g} and {other}'s is {expected:g}"
            if module != other:
                same = value == expected or (math.isnan(value) and math.isnan(expected))
                yield same, f"{differ}: a server fuses them"


def complete(scales: Scales) -> Iterator[Finding]:
    """Yield a finding for each Linear: whether it has every input scale that its group's Linears have.

    A group is one fused matrix or all experts of a layer; Linears without any scale do not count.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for module in scales:
        match = LAYER_EXPERT.fullmatch(module)
        groups[match[1] if match else fused_with(module)].append(module)
    for modules in groups.values():
        for suffix in INPUT_SCALES:
            if having := [module for module in modules if suffix in scales[module]]:
                for module in modules:
                    missing = f"{module}.{suffix} is missing, and {having[0]} has one"
                    yield suffix in scales[module], missing
