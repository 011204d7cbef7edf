"""Verifies values: kept weights, scales, dead experts, errors, and decompression.

See `verify` for what each check says.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from quantize.checkpoints.layout import ConfigSchemes, scheme_tensors
from quantize.checkpoints.load import read_module
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, linear_shape
from quantize.errors import InputError
from quantize.progress import track
from quantize.recipe import Recipe
from quantize.rounding import blocks
from quantize.schemes import Scheme

# Modules of one source tensor whose decompression is compared as a whole, spread evenly over it.
DECOMPRESSED_PER_TENSOR = 16
DECOMPRESSED_ROWS = 8  # rows compared of every other module
PART_BYTES = 1 << 24
FAULTS_KEPT = 10
VALUE_CHECKS = ("kept", "scales", "experts", "error", "decompression")


@dataclass
class Check:
    """One check: how many things it looked at, and what it found wrong (the first ten)."""

    name: str
    looked_at: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the check looked at something and found nothing wrong."""
        return self.looked_at > 0 and not self.faults

    def expect(self, ok: bool, fault: str) -> None:
        """Count one thing looked at, and keep `fault` unless `ok`."""
        self.looked_at += 1
        if not ok and len(self.faults) < FAULTS_KEPT:
            self.faults.append(fault)

    def add(self, other: "Check") -> None:
        """Add the counts and faults of another check."""
        self.looked_at += other.looked_at
        self.faults = (self.faults + other.faults)[:FAULTS_KEPT]


def new_checks(names: Iterable[str]) -> dict[str, Check]:
    """Return an empty check for every name."""
    return {name: Check(name) for name in names}


def check_weights(
    artifact: Checkpoint,
    source: Checkpoint,
    targets: list[Target],
    recipe: Recipe,
    checks: dict[str, Check],
) -> dict[str, float | None]:
    """Check the values of every tensor, part by part on all cores.

    Return the relative error of every quantized source tensor, None where it is no number.
    """
    decompressor = Decompressor(artifact)
    tasks = [(target, *rows) for target in targets for rows in _runs(target)]
    cores = len(os.sched_getaffinity(0))
    distance: dict[str, float] = defaultdict(float)
    norm: dict[str, float] = defaultdict(float)
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = pool.map(lambda task: _check_part(decompressor, source, *task), tasks)
        pairs = track(zip(tasks, parts, strict=True), "verify", len(tasks), "parts of tensors")
        for (target, _, _), part in pairs:
            for name, check in part.checks.items():
                checks[name].add(check)
            distance[target.name] += part.distance
            norm[target.name] += part.norm
    errors: dict[str, float | None] = {}
    for target in targets:
        if target.scheme is not None:
            error = _relative_error(distance[target.name], norm[target.name])
            stated = recipe.verification.max_relative_error
            limit = stated.get(target.scheme.name, target.scheme.max_relative_error)
            errors[target.name] = error if math.isfinite(error) else None
            checks["error"].expect(
                error <= limit,
                f"{target.name}: relative error {error:.4f} is over the recipe's {limit}",
            )
    return errors


class Decompressor:
    """Decompresses single Linears with compressed-tensors, the format's own library."""

    def __init__(self, artifact: Checkpoint) -> None:
        config = artifact.config["quantization_config"]
        self.artifact = artifact
        self.schemes = ConfigSchemes(config)
        self.groups = QuantizationConfig.model_validate(config).config_groups
        self.default_format: str = config["format"]

    def weight(
        self,
        module: str,
        scheme: Scheme,
        out: int,
        inputs: int,
        rows: slice = slice(None),
    ) -> torch.Tensor:
        """Return rows of the BF16 weight [out, inputs] of a module as compressed-tensors reads it."""
        group: Any = self.groups[str(self.schemes.group_of(module))]
        tensors = scheme_tensors("", scheme, out, inputs).items()
        state = {
            name.removeprefix("."): self._read(
                f"{module}{name}", rows if len(spec.shape) > 1 else None
            )
            for name, spec in tensors
        }
        compressor: Any = BaseCompressor.get_value_from_registry(
            group.format or self.default_format
        )
        return compressor.decompress(state, group)["weight"]

    def _read(self, name: str, rows: slice | None) -> torch.Tensor:
        if rows is None:
            return self.artifact.read(name)
        start, stop, _ = rows.indices(self.artifact.tensors[name].shape[0])
        return self.artifact.read_rows(name, start, stop)


def _relative_error(distance: float, norm: float) -> float:
    """Return the root of the quotient of two sums of squares, 0 when both are 0."""
    return math.sqrt(distance / norm) if norm else (0.0 if distance == 0 else math.inf)


def _runs(target: Target) -> Iterator[tuple[int, int]]:
    """Split fused experts, or rows of a kept tensor, into (start, stop); a Linear stays whole."""
    rows = target.shape[0]
    splits = target.scheme is None or len(target.shape) == 3
    step = max(1, rows * PART_BYTES // target.bytes_before) if splits else rows
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


@dataclass
class _Part:
    """Results of a part of one tensor: checks, and sums of squares of W - W' and of W."""

    checks: dict[str, Check] = field(default_factory=lambda: new_checks(VALUE_CHECKS))
    distance: float = 0.0
    norm: float = 0.0


def _check_part(
    decompressor: Decompressor, source: Checkpoint, target: Target, start: int, stop: int
) -> _Part:
    """Check rows (experts) start:stop of one source tensor."""
    part, artifact = _Part(), decompressor.artifact
    rows = source.read_rows(target.name, start, stop)
    if target.scheme is None:
        same = _same_bits(rows, artifact.read_rows(target.name, start, stop))
        part.checks["kept"].expect(same, f"{target.name} differs from the source")
        return part
    out, inputs = linear_shape(target.shape, target.modules)
    first = start * len(target.modules) // target.shape[0]
    for i, weight in enumerate(rows.view(-1, out, inputs), first):
        module = target.modules[i]
        try:
            mine = read_module(artifact, module, target.scheme)
        except InputError as error:  # a NaN or infinite tensor, named by the reader
            part.checks["scales"].expect(False, str(error))
            continue
        for block in blocks(weight):
            own = weight[block].float()
            part.norm += _sum_of_squares(own)
            part.distance += _sum_of_squares(own.sub_(mine[block]))
        _check_scales(artifact, module, target.scheme, part.checks["scales"])
        if target.module_class == "experts":
            alive = bool(mine[:1].any() or mine.any())  # a look at one row is mostly enough
            part.checks["experts"].expect(alive, f"{module} is all zero")
        compared = _compared_rows(i, len(target.modules), out)
        theirs = decompressor.weight(module, target.scheme, out, inputs, compared)
        fault = f"{module}: compressed-tensors decompresses other weights"
        part.checks["decompression"].expect(_same_bits(theirs, mine[compared]), fault)
    return part


def _compared_rows(index: int, modules: int, out: int) -> slice:
    """Return the rows of a source tensor's module `index` whose decompression is compared."""
    if index % max(1, modules // DECOMPRESSED_PER_TENSOR) == 0:
        return slice(0, out)
    start = index * DECOMPRESSED_ROWS % out
    return slice(start, start + DECOMPRESSED_ROWS)


def _check_scales(artifact: Checkpoint, module: str, scheme: Scheme, check: Check) -> None:
    scale = artifact.read(f"{module}.weight_scale").float()
    zero_allowed = scheme.codes.group is not None  # the scale of an all-zero block of 16
    good = bool((scale >= 0 if zero_allowed else scale > 0).all()) and bool((scale > 0).any())
    check.expect(good, f"{module}.weight_scale is not above 0 throughout")


def _sum_of_squares(x: torch.Tensor) -> float:
    """Return the sum of squares, a norm squared in float64: float32's, unless that overflows."""
    norm = x.norm().item()
    return (x.double().norm().item() if norm == math.inf else norm) ** 2


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (NaN equals NaN here)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
