"""Compares a checkpoint that was quantized elsewhere with the BF16 model that it is said to be.

  kept    every tensor that is not quantized equals the BF16 model's, bit for bit
  error   |W - W'| / |W| of every Linear is at most `TIMES` times the error of the BF16 model's Linear
          rounded to nearest in the same scheme
  length  <W, W'> / <W, W> of every Linear is 1 within `STRETCH`. If all scales of an NVFP4 matrix are a
          tenth too large, its error rises by only a third. `error` would not show this fault

The limits leave room for other ways of rounding. They were tried on 126 matrices of the bundled model,
in every scheme. GPTQ on strongly correlated inputs left at most 1.37 times the error of rounding to
nearest; shrunk ranges left less. Both kept the length within 0.016 of 1. Block scales moved by one row,
which is a fault, left 3.5 times the error of rounding to nearest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoints.layout import bf16_layout, module_tensors, schemes_by_module
from quantize.checkpoints.load import read_finite
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, linear_modules, linear_shape, module_class
from quantize.errors import InputError
from quantize.schemes.records import Scheme
from quantize.stages.device import Device
from quantize.stages.verify.verify_weights import (
    PartOf,
    each_part,
    modules_of,
    new_checks,
    parts_of,
    ratio,
)

CHECKS = ("kept", "error", "length")
TIMES = 2.0  # limit on an error, as a multiple of that of rounding to nearest
STRETCH = 0.05


@dataclass(frozen=True)
class Likeness:
    """How a quantized Linear W' differs from the BF16 model's W."""

    module: str
    scheme: str
    norm: float  # |W|^2
    distance: float  # |W - W'|^2
    error: float  # |W - W'| / |W|
    nearest: float  # |W - W''| / |W|, W'' being W rounded to nearest
    length: float  # <W, W'> / <W, W>

    @property
    def times(self) -> float:
        """The Linear's error as a multiple of the error that rounding to nearest leaves."""
        return ratio(self.error**2, self.nearest**2)


def compare(artifact: Checkpoint, source: Checkpoint, device: str = "cpu") -> dict[str, Any]:
    """Compare every tensor of a quantized checkpoint, which passed `check_layout`, with its BF16 model.

    Returns:
        `checks` is a list as in verification.json. `relative_error` maps BF16 tensor to error.
        `worst` is the `Likeness` of largest `times`, as a dict, or None if no Linear was compared.

    Raises:
        InputError: a tensor of the BF16 model is missing, or has another dtype or shape.
    """
    checks = new_checks(CHECKS)
    sums: dict[str, list[float]] = {}
    likenesses: list[Likeness] = []
    where = Device(device)
    schemes = schemes_by_module(artifact.config)

    def look(part: PartOf) -> list[Likeness | str]:
        """Return the likeness of each Linear; for a kept tensor a sentence if it differs, else ""."""
        target, start, stop = part
        rows = source.read_rows(target.name, start, stop)
        if target.scheme is None:
            stored = artifact.read_rows(target.name, start, stop)
            same = torch.equal(rows.view(torch.uint8), stored.view(torch.uint8))  # NaN as well
            return ["" if same else f"{target.name} differs from BF16's"]
        weights = rows.view(-1, *linear_shape(target.shape, target.modules))
        named = zip(modules_of(part)[1], weights, strict=True)
        return [_likeness(artifact, m, schemes[m], weight, where) for m, weight in named]

    parts = parts_of(_targets(artifact, source, schemes), where)
    for (target, _, _), part in each_part(parts, look, "compare"):
        for one in part:
            if isinstance(one, str):
                checks["kept" if target.scheme is None else "error"].expect(not one, one)
                continue
            likenesses.append(one)
            total = sums.setdefault(target.name, [0.0, 0.0])
            total[:] = total[0] + one.distance, total[1] + one.norm
    likenesses.sort(key=lambda one: -one.times)  # the worst are the faults that are kept
    for one in likenesses:
        checks["error"].expect(
            one.times <= TIMES,
            f"{one.module}: relative error {one.error:.4f}, and rounding to nearest in {one.scheme} "
            f"leaves {one.nearest:.4f}",
        )
        stretched = f"{one.module}: {one.length:.3f} times as long as BF16's"
        checks["length"].expect(abs(one.length - 1) <= STRETCH, stretched)
    worst = likenesses[0] if likenesses else None
    return {
        "checks": [check.as_json() for check in checks.values()],
        "relative_error": {name: ratio(*total) for name, total in sums.items()},
        "worst": worst and asdict(worst),
    }


def _targets(
    artifact: Checkpoint, source: Checkpoint, schemes: Mapping[str, Scheme]
) -> Iterator[Target]:
    """Yield the BF16 tensors, each with the scheme that the artifact has for its first Linear."""
    for name, spec in bf16_layout(artifact.config).items():
        info = source.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (spec.dtype, spec.shape):
            raise InputError(
                f"{source.folder}: {name} is {info and [info.dtype, *info.shape]} there, and "
                f"{[spec.dtype, *spec.shape]} by {artifact.folder}/config.json; name its own BF16 model"
            )
        modules = tuple(m for m in linear_modules(name, info.shape) if m in schemes)
        scheme = schemes[modules[0]] if modules else None
        kind, reason = module_class(name), "" if scheme else "kept by its maker"
        yield Target(name, kind, scheme, reason, info.shape, modules, info.nbytes, 0)


def _likeness(
    artifact: Checkpoint, module: str, scheme: Scheme, weight: Tensor, device: Device
) -> Likeness | str:
    """Return the likeness of a Linear, or a sentence on why it cannot be read."""
    try:
        names = module_tensors(artifact, module)
        read = {name.removeprefix(f"{module}."): read_finite(artifact, name) for name in names}
    except InputError as error:
        return str(error)
    with device.turn:
        stored = {suffix: device.take(tensor) for suffix, tensor in read.items()}
        weight = device.take(weight)
        ranges = scheme.observe(weight, "memoryless_minmax")
        nearest = scheme.dequantize(scheme.quantize(weight, ranges, None, None))
        original, dequantized = weight.double(), scheme.dequantize(stored).double()
        sums = (
            original * original,
            (original - dequantized).square(),
            (original - nearest).square(),
            original * dequantized,
        )
        norm, distance, least, inner = torch.stack([terms.sum() for terms in sums]).tolist()
    length = inner / norm if norm else 1.0
    errors = ratio(distance, norm), ratio(least, norm)
    return Likeness(module, str(scheme), norm, distance, *errors, length)
