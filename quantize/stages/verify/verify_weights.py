"""Verifies values: kept weights, scales, dead experts, errors, and decompression.

See `verify` for what each check says. Linears of one part of a source tensor are checked together, on a
GPU where there is one, since calls of torch are what takes time. So compressed-tensors gets rows of
several Linears in one call, each row with the global scale of its Linear. Kept weights are compared on
the CPU.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantize.checkpoints.layout import ConfigSchemes, module_tensors
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, linear_shape
from quantize.errors import InputError
from quantize.host.progress import track
from quantize.recipe.sections import Recipe
from quantize.schemes.records import INPUT_SCALES, Scheme, sound_each
from quantize.schemes.rounding import blocks
from quantize.stages.device import Device

# Modules of one source tensor whose decompression is compared as a whole, spread evenly over it.
DECOMPRESSED_PER_TENSOR = 16
DECOMPRESSED_ROWS = 8  # rows compared of every other module
FAULTS_KEPT = 10
T = TypeVar("T")
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
    device: Device,
) -> dict[str, float | None]:
    """Check the values of every tensor, part by part, read by all cores.

    Return the relative error of every quantized source tensor, None where it is no number.
    """
    verifier = _Verifier(artifact, source, Decompressor(artifact), device)
    distance: dict[str, float] = defaultdict(float)
    norm: dict[str, float] = defaultdict(float)
    for target, part in each_part(targets, verifier.check, "verify", device):
        for name, check in part.checks.items():
            checks[name].add(check)
        distance[target.name] += part.distance
        norm[target.name] += part.norm
    errors: dict[str, float | None] = {}
    for target in targets:
        if target.scheme is not None:
            error = ratio(distance[target.name], norm[target.name])
            stated = recipe.verification.max_relative_error
            limit = stated.get(target.scheme.name, target.scheme.max_relative_error)
            errors[target.name] = error if math.isfinite(error) else None
            checks["error"].expect(
                error <= limit,
                f"{target.name}: relative error {error:.4f} is over the recipe's {limit}",
            )
    return errors


def each_part(
    targets: Iterable[Target], look: Callable[[Target, int, int], T], what: str, device: Device
) -> Iterator[tuple[Target, T]]:
    """Look at every tensor part by part, (target, start, stop), read by all cores; yield in order.

    Fused experts have parts of as much as the device takes, kept tensors of as much as a CPU does;
    another Linear is whole.
    """
    tasks: list[tuple[Target, int, int]] = []
    for target in targets:
        rows, kept = target.shape[0], target.scheme is None
        where = Device() if kept else device  # kept bytes are compared where they were read
        splits = kept or len(target.shape) == 3
        runs = where.runs(rows, target.bytes_before) if splits else [(0, rows)]
        tasks += [(target, *run) for run in runs]
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = pool.map(lambda task: look(*task), tasks)
        pairs = track(zip(tasks, found, strict=True), what, len(tasks), "parts of tensors")
        for (target, _, _), part in pairs:
            yield target, part


class Decompressor:
    """Decompresses Linears with compressed-tensors, the format's own library."""

    def __init__(self, artifact: Checkpoint) -> None:
        # Importing it takes seconds, in which the files are being hashed.
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        config = artifact.config["quantization_config"]
        self._schemes = ConfigSchemes(config)
        self._groups = QuantizationConfig.model_validate(config).config_groups
        self._default_format: str = config["format"]
        self._compressor: Any = BaseCompressor.get_value_from_registry

    def group(self, module: str) -> str:
        """Return the name of the config group that a quantized module belongs to."""
        return str(self._schemes.group_of(module))

    def weight(self, group: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return BF16 weights [R, in] as compressed-tensors reads them.

        Args:
            group: the config group of the Linears whose rows these are.
            tensors: what the rows have on disk, by suffix: [R, ...], global scales [R, 1, 1].
        """
        settings: Any = self._groups[group]
        compressor = self._compressor(settings.format or self._default_format)
        return compressor.decompress(dict(tensors), settings)["weight"]


def ratio(distance: float, norm: float) -> float:
    """Return the root of the quotient of two sums of squares, 0 where both are 0."""
    return math.sqrt(distance / norm) if norm else (0.0 if distance == 0 else math.inf)


@dataclass
class _Part:
    """Results of a part of one tensor: checks, and sums of squares of W - W' and of W."""

    checks: dict[str, Check] = field(default_factory=lambda: new_checks(VALUE_CHECKS))
    distance: float = 0.0
    norm: float = 0.0


@dataclass(frozen=True)
class _Verifier:
    """Compares parts of an artifact with its source; threads share it."""

    artifact: Checkpoint
    source: Checkpoint
    decompressor: Decompressor
    device: Device

    def check(self, target: Target, start: int, stop: int) -> _Part:
        """Check rows (experts) start:stop of one source tensor."""
        if target.scheme is not None:
            return self._quantized(target, target.scheme, start, stop)
        part, name = _Part(), target.name
        both = (side.read_rows(name, start, stop) for side in (self.source, self.artifact))
        part.checks["kept"].expect(same_bits(*both), f"{name} differs from the source")
        return part

    def _quantized(self, target: Target, scheme: Scheme, start: int, stop: int) -> _Part:
        part, count = _Part(), len(target.modules)
        out, inputs = linear_shape(target.shape, target.modules)
        indices = range(start * count // target.shape[0], stop * count // target.shape[0])
        modules = target.modules[indices.start : indices.stop]
        compared = [_compared_rows(index, count, out) for index in indices]
        pinned = self.device.pinned
        rows = self.source.read_rows(target.name, start, stop, pinned=pinned)
        read = {
            suffix: self.artifact.read_stacked([f"{m}.{suffix}" for m in modules], pinned=pinned)
            for suffix in scheme.compressed.tensors(out, inputs)
        }
        with self.device.turn:
            weight = self.device.take(rows).view(-1, out, inputs)
            tensors = {suffix: self.device.take(tensor) for suffix, tensor in read.items()}
            mine = scheme.dequantize(tensors)
            squares = _sums_of_squares(weight, mine).T.tolist()
            del weight
            flags = (
                sound_each(tensors),
                _positive(tensors["weight_scale"], scheme),
                _alive(mine),
                self._decompressed_alike(modules, compared, tensors, mine),
            )
            found = zip(modules, squares, *torch.stack(flags).tolist(), strict=True)
        for module, (norm, distance), sound, positive, alive, alike in found:
            if not sound:
                part.checks["scales"].expect(False, self._unsound(module))
                continue
            part.norm += norm
            part.distance += distance
            fault = f"{module}.weight_scale is not above 0 throughout"
            part.checks["scales"].expect(positive, fault)
            if target.module_class == "experts":
                part.checks["experts"].expect(alive, f"{module} is all zero")
            fault = f"{module}: compressed-tensors decompresses other weights"
            part.checks["decompression"].expect(alike, fault)
        return part

    def _unsound(self, module: str) -> str:
        """Return what the reader says of a module one of whose tensors it refuses."""
        from quantize.checkpoints.load import read_finite

        try:
            for name in module_tensors(self.artifact, module):
                read_finite(self.artifact, name)
        except InputError as error:
            return str(error)
        return f"{module}: a tensor held NaN, infinity or 0 when it was read first"

    def _decompressed_alike(
        self,
        modules: Sequence[str],
        compared: Sequence[slice],
        tensors: Mapping[str, Tensor],
        mine: Tensor,
    ) -> Tensor:
        """Return for each module whether the rows to be compared have the same bits: bool [n]."""
        alike = torch.zeros(len(modules), dtype=torch.bool, device=mine.device)
        groups: dict[str, dict[int, slice]] = defaultdict(dict)
        for index, (module, rows) in enumerate(zip(modules, compared, strict=True)):
            groups[self.decompressor.group(module)][index] = rows
        for group, chosen in groups.items():
            own = _rows(mine, chosen)
            stored = {
                suffix: _rows(tensor, chosen)
                if tensor.dim() == 3
                else _a_row(tensor, chosen, mine.shape[1])
                for suffix, tensor in tensors.items()
                if suffix not in INPUT_SCALES
            }
            equal = [
                _equal_rows(
                    self.decompressor.weight(group, {s: t[block] for s, t in stored.items()}),
                    own[block],
                )
                for block in blocks(own)
            ]
            counts = [len(range(*rows.indices(mine.shape[1]))) for rows in chosen.values()]
            for index, rows in zip(chosen, torch.cat(equal).split(counts), strict=True):
                alike[index] = rows.all()
        return alike


def _rows(tensor: Tensor, chosen: Mapping[int, slice]) -> Tensor:
    """Join rows of matrices [n, out, ...], chosen by index: [R, ...]."""
    parts = [tensor[index, rows] for index, rows in chosen.items()]
    if len(parts) == 1:
        return parts[0]
    if tensor.element_size() == 1:  # as bytes, since not every operation takes 8-bit floats
        return torch.cat([part.view(torch.uint8) for part in parts]).view(tensor.dtype)
    return torch.cat(parts)


def _a_row(scales: Tensor, chosen: Mapping[int, slice], out: int) -> Tensor:
    """Repeat scales [n, 1] of whole matrices for each of their rows that is chosen: [R, 1, 1]."""
    counts = [len(range(*rows.indices(out))) for rows in chosen.values()]
    parts = zip(chosen, counts, strict=True)
    return torch.cat([scales[index].expand(count, 1, 1) for index, count in parts])


def _equal_rows(theirs: Tensor, mine: Tensor) -> Tensor:
    """Return for each row whether dtype and bits are the same: bool [R]."""
    if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
        return torch.zeros(len(mine), dtype=torch.bool, device=mine.device)
    return (theirs.contiguous().view(torch.int16) == mine.view(torch.int16)).all(1)


def _positive(scales: Tensor, scheme: Scheme) -> Tensor:
    """Return for each of [n, out, groups] whether scales are as they must be: bool [n]."""
    scale = scales.float().flatten(1)
    zero_allowed = scheme.codes.group is not None  # the scale of an all-zero block of 16
    return (scale >= 0 if zero_allowed else scale > 0).all(1) & (scale > 0).any(1)


def _alive(weight: Tensor) -> Tensor:
    """Return for each of [n, out, in] whether any weight is not 0: bool [n]."""
    found = weight[:, 0].any(1)  # a look at one row is mostly enough
    return found if found.all() else weight.flatten(1).any(1)


def _sums_of_squares(weight: Tensor, mine: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sums of squares of W and of W - W' for each of [n, out, in]: float64 [2, n].

    They are norms squared: float32's, unless one overflows.
    """
    found = torch.zeros(2, len(weight), dtype=torch.float64, device=weight.device)
    for block in blocks(weight):
        own = weight[block].to(dtype)
        norm = torch.linalg.vector_norm(own, dim=(-2, -1))
        distance = torch.linalg.vector_norm(own.sub_(mine[block]), dim=(-2, -1))
        found[:, block[0]] += torch.stack((norm, distance)).double().square()
    if dtype == torch.float32 and not found.isfinite().all():
        return _sums_of_squares(weight, mine, torch.float64)
    return found


def _compared_rows(index: int, modules: int, out: int) -> slice:
    """Return the rows of a source tensor's module `index` whose decompression is compared."""
    if index % max(1, modules // DECOMPRESSED_PER_TENSOR) == 0:
        return slice(0, out)
    start = index * DECOMPRESSED_ROWS % out
    return slice(start, start + DECOMPRESSED_ROWS)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (NaN equals NaN here)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
