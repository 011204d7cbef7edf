"""Verifies values: kept weights, scales, dead experts, errors, and decompression.

See `verify` for what each check says. A part is a range of rows (experts) of a source tensor. The
part's quantized bytes come from files, or from memory during convert (`witness`). The Linears of a part
are checked together, on a GPU if there is one; weights kept in BF16 are compared on the CPU.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantize.checkpoints.reader import DTYPES, Checkpoint, TensorSpec
from quantize.checkpoints.targets import Target, linear_shape, specs
from quantize.host.progress import track
from quantize.recipe.sections import Recipe
from quantize.schemes.records import Scheme, sound_each
from quantize.schemes.rounding import blocks
from quantize.stages.device import Device
from quantize.stages.verify.decompression import Decompressor, compared_rows

FAULTS_KEPT = 10
A_LINEAR = 2.0  # limit on the error of one Linear, as a multiple of its source tensor's limit
S = TypeVar("S")
T = TypeVar("T")
PartOf = tuple[Target, int, int]  # rows (experts) start:stop of a source tensor
VALUE_CHECKS = ("kept", "scales", "experts", "error", "decompression")


@dataclass
class Check:
    """One check: how many things it looked at, and its first ten faults."""

    name: str
    looked_at: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the check looked at something and found nothing wrong."""
        return self.looked_at > 0 and not self.faults

    def expect(self, ok: bool, fault: str) -> None:
        """Count one thing looked at; if it is not `ok`, keep `fault`, up to ten faults in all."""
        self.looked_at += 1
        if not ok and len(self.faults) < FAULTS_KEPT:
            self.faults.append(fault)

    def as_json(self) -> dict[str, Any]:
        """Return this check's entry of verification.json."""
        return asdict(self) | {"passed": self.passed}

    def add(self, other: "Check") -> None:
        """Add the counts of another check, and its faults up to ten in all."""
        self.looked_at += other.looked_at
        self.faults = (self.faults + other.faults)[:FAULTS_KEPT]


def new_checks(names: Iterable[str]) -> dict[str, Check]:
    """Return name -> an empty check, for every name."""
    return {name: Check(name) for name in names}


@dataclass
class PartResult:
    """Results for one part of a tensor: checks, sum of (W - W')^2 (`distance`), sum of W^2 (`norm`)."""

    checks: dict[str, Check] = field(default_factory=lambda: new_checks(VALUE_CHECKS))
    distance: float = 0.0
    norm: float = 0.0


def check_weights(
    artifact: Checkpoint,
    source: Checkpoint,
    targets: list[Target],
    recipe: Recipe,
    checks: dict[str, Check],
    device: Device,
) -> dict[str, float | None]:
    """Add checks of all tensors' values to `checks`; return quantized source tensor -> relative error.

    None stands for an error that is not finite, which JSON cannot hold.
    """
    comparer = Comparer(source, recipe, device, Decompressor(artifact.config))

    def check(part: PartOf) -> PartResult:
        return comparer.check(part, comparer.read(artifact, part))

    return add_up(each_part(parts_of(targets, device), check, "verify"), recipe, checks)


def add_up(
    parts: Iterable[tuple[PartOf, PartResult]], recipe: Recipe, checks: dict[str, Check]
) -> dict[str, float | None]:
    """Add parts' results and error checks to `checks`; return tensor -> error, None if not finite."""
    quantized: dict[str, Scheme] = {}
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (target, _, _), part in parts:
        for name, check in part.checks.items():
            checks[name].add(check)
        if target.scheme is not None:
            quantized[target.name] = target.scheme
            of_target = sums[target.name]
            of_target[:] = of_target[0] + part.distance, of_target[1] + part.norm
    errors = {name: ratio(*sums[name]) for name in quantized}
    for name, error in errors.items():
        limit = error_limit(recipe, quantized[name])
        checks["error"].expect(
            error <= limit, f"{name}: relative error {error:.4f} is over the recipe's {limit}"
        )
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def error_limit(recipe: Recipe, scheme: Scheme) -> float:
    """Return the limit on a source tensor's relative error: the recipe's, or else the scheme's."""
    return recipe.verification.max_relative_error.get(scheme.name, scheme.max_relative_error)


def parts_of(targets: Iterable[Target], device: Device) -> list[PartOf]:
    """Split fused experts and BF16 tensors into parts for a device; others are one part each."""
    parts: list[PartOf] = []
    for target in targets:
        rows, kept = target.shape[0], target.scheme is None
        where = Device() if kept else device  # kept bytes are compared where they were read
        splits = kept or len(target.shape) == 3
        runs = where.runs(rows, target.bytes_before) if splits else [(0, rows)]
        parts += [(target, *run) for run in runs]
    return parts


def each_part(parts: Sequence[S], look: Callable[[S], T], what: str) -> Iterator[tuple[S, T]]:
    """Yield (part, look(part)) in order, computed on all cores; `what` is the progress bar's title."""
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        looked_at = pool.map(look, parts)
        yield from track(zip(parts, looked_at, strict=True), what, len(parts), "parts of tensors")


def modules_of(part: PartOf) -> tuple[int, tuple[str, ...]]:
    """Return the index of a part's first Linear in its tensor, and the names of its Linears."""
    target, start, stop = part
    count, rows = len(target.modules), target.shape[0]
    first, end = start * count // rows, stop * count // rows
    return first, target.modules[first:end]


def ratio(distance: float, norm: float) -> float:
    """Return sqrt(distance / norm) of sums of squares. If norm is 0: infinity, or 0 for 0 / 0."""
    return math.sqrt(distance / norm) if norm else (0.0 if distance == 0 else math.inf)


@dataclass(frozen=True)
class Comparer:
    """Compares parts of an artifact with its source; several threads share one."""

    source: Checkpoint
    recipe: Recipe
    device: Device
    decompressor: Decompressor | None  # None leaves the check of decompression out

    def read(self, artifact: Checkpoint, part: PartOf) -> Tensor:
        """Return a part's bytes in `artifact`, uint8 [n], from where the files' headers place them."""
        target, start, stop = part
        if target.scheme is None:
            return artifact.read_rows(target.name, start, stop).flatten().view(torch.uint8)
        names = [f"{m}.{s}" for m in modules_of(part)[1] for s in _specs(target, target.scheme)]
        return artifact.read_bytes(names, pinned=self.device.pinned)

    def check(self, part: PartOf, encoded: Tensor) -> PartResult:
        """Return what all checks find in a part; `encoded` are its bytes, uint8 [n], Linear by Linear.

        Kept weights are compared bit for bit with the source. Linears are checked for scales, relative
        error to the source, dead experts and decompression.
        """
        target, start, stop = part
        if target.scheme is not None:
            return self._quantized(part, target.scheme, encoded)
        result = PartResult()
        rows = self.source.read_rows(target.name, start, stop).flatten().view(torch.uint8)
        fault = f"{target.name} differs from the source"
        result.checks["kept"].expect(torch.equal(rows, encoded), fault)
        return result

    def _quantized(self, part: PartOf, scheme: Scheme, encoded: Tensor) -> PartResult:
        (target, start, stop), (first, modules), result = part, modules_of(part), PartResult()
        rows = self.source.read_rows(target.name, start, stop, pinned=self.device.pinned)
        with self.device.turn:
            weight = self.device.take(rows).view(-1, *linear_shape(target.shape, target.modules))
            tensors = _parsed(self.device.take(encoded), len(modules), _specs(target, scheme))
            dequantized = scheme.dequantize(tensors)
            squares = _sums_of_squares(weight, dequantized).T.tolist()
            del weight
            flags = [
                sound_each(tensors),
                _positive(tensors["weight_scale"], scheme),
                _alive(dequantized),
            ]
            if self.decompressor is not None:
                count, out = len(target.modules), dequantized.shape[1]
                compared = [compared_rows(first + i, count, out) for i in range(len(modules))]
                flags.append(self.decompressor.alike(modules, compared, tensors, dequantized))
            by_expert = torch.stack(flags).T.tolist()
        most = A_LINEAR * error_limit(self.recipe, scheme)
        for i, (module, (sound, positive, alive, *alike)) in enumerate(
            zip(modules, by_expert, strict=True)
        ):
            if not sound:
                fault = _unsound(module, {suffix: tensor[i] for suffix, tensor in tensors.items()})
                result.checks["scales"].expect(False, fault)
                continue
            norm, distance = squares[i]
            result.norm += norm
            result.distance += distance
            error = ratio(distance, norm)
            fault = f"{module}: relative error {error:.4f} is over {most:g}, twice the recipe's"
            result.checks["error"].expect(error <= most, fault)
            fault = f"{module}.weight_scale is not above 0 throughout"
            result.checks["scales"].expect(positive, fault)
            if target.module_class == "experts":
                result.checks["experts"].expect(alive, f"{module} is all zero")
            fault = f"{module}: compressed-tensors decompresses other weights"
            for same in alike:
                result.checks["decompression"].expect(same, fault)
        return result


def _specs(target: Target, scheme: Scheme) -> Mapping[str, TensorSpec]:
    """Return suffix -> spec of the tensors that each Linear of a target has on disk."""
    return specs(scheme.compressed, *linear_shape(target.shape, target.modules))


def _parsed(data: Tensor, count: int, layout: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors [count, ...] by suffix that bytes of Linears, uint8 [n], hold."""
    columns = data.view(count, -1).split([spec.nbytes for spec in layout.values()], dim=1)
    return {
        suffix: column.contiguous().view(DTYPES[spec.dtype]).view(count, *spec.shape)
        for (suffix, spec), column in zip(layout.items(), columns, strict=True)
    }


def _unsound(module: str, tensors: Mapping[str, Tensor]) -> str:
    bad = [s for s, tensor in tensors.items() if not sound_each({s: tensor[None]}).item()]
    return f"{module}.{bad[0]} holds NaN or infinity, or is not above 0"


def _positive(scales: Tensor, scheme: Scheme) -> Tensor:
    """Return bool [n]: whether each Linear's scales [n, out, groups] are above 0, or a block's 0."""
    scale = scales.float().flatten(1)
    zero_allowed = scheme.codes.group is not None  # the scale of an all-zero block of 16
    return (scale >= 0 if zero_allowed else scale > 0).all(1) & (scale > 0).any(1)


def _alive(weight: Tensor) -> Tensor:
    """Return bool [n]: whether any weight of each Linear [n, out, in] is not 0."""
    alive = weight[:, 0].any(1)  # one row is mostly enough
    return alive if alive.all() else weight.flatten(1).any(1)


def _sums_of_squares(
    weight: Tensor, dequantized: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the sums of squares of W and of W - W' for each of [n, out, in]: float64 [2, n]."""
    squares = torch.zeros(2, len(weight), dtype=torch.float64, device=weight.device)
    for block in blocks(weight):
        values = weight[block].to(dtype)
        norm = torch.linalg.vector_norm(values, dim=(-2, -1))
        distance = torch.linalg.vector_norm(values.sub_(dequantized[block]), dim=(-2, -1))
        squares[:, block[0]] += torch.stack((norm, distance)).double().square()
    if dtype == torch.float32 and not squares.isfinite().all():  # one overflowed
        return _sums_of_squares(weight, dequantized, torch.float64)
    return squares
