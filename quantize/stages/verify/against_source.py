"""Compares a checkpoint that was quantized elsewhere with the BF16 model that it is said to be.

  kept    every tensor that is not quantized equals BF16's, bit for bit
  error   |W - W'| / |W| of every Linear is at most `TIMES` what its scheme gives BF16's Linear by
          rounding to nearest
  length  <W, W'> / <W, W> of every Linear is 1 within `STRETCH`: all scales a tenth too large would
          raise an NVFP4 matrix' error by a third only

The limits leave room for other ways of rounding. On 126 matrices of the bundled model, in every scheme,
GPTQ on strongly correlated inputs left at most 1.37 times the error of rounding to nearest, shrunk
ranges less, and both a length within 0.016 of 1; block scales moved by a row left 3.5 times.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoints.layout import bf16_layout, module_tensors, schemes_by_module
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, linear_modules, linear_shape, module_class
from quantize.errors import InputError
from quantize.stages.device import Device
from quantize.stages.verify.verify_weights import (
    PartOf,
    each_part,
    modules_of,
    new_checks,
    parts_of,
    ratio,
    same_bits,
)

CHECKS = ("kept", "error", "length")
TIMES = 2.0  # the error of rounding to nearest that another way of rounding may have
STRETCH = 0.05


@dataclass(frozen=True)
class Likeness:
    """One Linear beside BF16's: sums of squares, and its errors as shares of |W|."""

    module: str
    scheme: str
    norm: float  # |W|^2
    distance: float  # |W - W'|^2
    error: float  # |W - W'| / |W|
    nearest: float  # |W - W''| / |W|, W'' being W rounded to nearest
    length: float  # <W, W'> / <W, W>

    @property
    def times(self) -> float:
        """How many times the error of rounding to nearest."""
        return ratio(self.error**2, self.nearest**2)

    def __str__(self) -> str:
        return (
            f"{self.module}: relative error {self.error:.4f}, and rounding to nearest in {self.scheme} "
            f"leaves {self.nearest:.4f}"
        )


def compare(artifact: Checkpoint, source: Checkpoint, device: str = "cpu") -> dict[str, Any]:
    """Compare every tensor of a quantized checkpoint, whose layout is right, with its BF16 model.

    Returns:
        `checks`, a list as verification.json holds it; `relative_error` by tensor of BF16; `worst`, the
        Linear that is farthest from rounding to nearest, None where there is none.

    Raises:
        InputError: the two are models of different shapes.
    """
    checks = new_checks(CHECKS)
    sums: dict[str, list[float]] = {}
    found: list[Likeness] = []
    where = Device(device)
    comparer = _Comparer(artifact, source, schemes_by_module(artifact.config), where)
    parts = parts_of(_targets(artifact, source), where)
    for (target, _, _), part in each_part(parts, comparer.check, "compare"):
        for one in part:
            if isinstance(one, str):
                checks["kept" if target.scheme is None else "error"].expect(not one, one)
                continue
            found.append(one)
            total = sums.setdefault(target.name, [0.0, 0.0])
            total[:] = total[0] + one.distance, total[1] + one.norm
    found.sort(key=lambda one: -one.times)  # the worst are the faults that are kept
    for one in found:
        checks["error"].expect(one.times <= TIMES, str(one))
        stretched = f"{one.module}: {one.length:.3f} times as long as BF16's"
        checks["length"].expect(abs(one.length - 1) <= STRETCH, stretched)
    worst = found[0] if found else None
    return {
        "checks": [check.as_json() for check in checks.values()],
        "relative_error": {name: ratio(*total) for name, total in sums.items()},
        "worst": worst and asdict(worst),
    }


def _targets(artifact: Checkpoint, source: Checkpoint) -> Iterator[Target]:
    """Yield BF16's tensors, each with the scheme that the artifact has for its first Linear."""
    schemes = schemes_by_module(artifact.config)
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


@dataclass(frozen=True)
class _Comparer:
    """Compares parts of tensors; threads share it."""

    artifact: Checkpoint
    source: Checkpoint
    schemes: dict[str, Any]
    device: Device

    def check(self, part: PartOf) -> list[Likeness | str]:
        """Return what each Linear is like, or a sentence where it cannot be read.

        A kept tensor has a sentence where it differs from BF16's, else "".
        """
        target, start, stop = part
        rows = self.source.read_rows(target.name, start, stop)
        if target.scheme is None:
            same = same_bits(rows, self.artifact.read_rows(target.name, start, stop))
            return ["" if same else f"{target.name} differs from BF16's"]
        weights = rows.view(-1, *linear_shape(target.shape, target.modules))
        found = zip(modules_of(part)[1], weights, strict=True)
        return [self._likeness(module, weight) for module, weight in found]

    def _likeness(self, module: str, weight: Tensor) -> Likeness | str:
        from quantize.checkpoints.load import read_finite

        scheme = self.schemes[module]
        try:
            names = module_tensors(self.artifact, module)
            read = {
                name.removeprefix(f"{module}."): read_finite(self.artifact, name) for name in names
            }
        except InputError as error:
            return str(error)
        with self.device.turn:
            theirs = {suffix: self.device.take(tensor) for suffix, tensor in read.items()}
            weight = self.device.take(weight)
            ranges = scheme.observe(weight, "memoryless_minmax")
            nearest = scheme.dequantize(scheme.quantize(weight, ranges, None, None))
            own, mine = weight.double(), scheme.dequantize(theirs).double()
            sums = (own * own, (own - mine).square(), (own - nearest).square(), own * mine)
            norm, distance, least, inner = torch.stack([each.sum() for each in sums]).tolist()
        length = inner / norm if norm else 1.0
        errors = ratio(distance, norm), ratio(least, norm)
        return Likeness(module, str(scheme), norm, distance, *errors, length)
