"""Static verification: is the artifact what the plan said, and close to what it was made from?

Every check counts what it looked at; a check that looked at nothing fails. Weights are read in parts
of about 16 MB, by one thread a core, so memory stays at a few parts whatever the size of the model.

  layout        every name, dtype and shape is what config.json calls for
  counts        quantized modules and bytes equal the plan's; nothing that must stay BF16 has a scale
  one owner     no two tensors map to one module once vLLM reads `model.decoder.` and
                `model.encoder.language_model.` both as `model.` (`layer_scalar` has one each)
  kept          BF16 tensors equal the source bit for bit
  scales        finite; above 0 but for the block scales of all-zero blocks
  experts       no expert has a projection that is all zero
  error         |W - W'| / |W| of every source tensor within the recipe's limit
  decompression our dequantized weights equal compressed-tensors' own, bit for bit
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from quantize.checkpoints.layout import ConfigSchemes, check_layout, scheme_tensors
from quantize.checkpoints.load import read_module
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import QUANTIZABLE, Target, linear_shape, module_class
from quantize.errors import InputError
from quantize.manifest import checksums, fingerprint
from quantize.progress import track
from quantize.recipe import Recipe
from quantize.run_dir import RunDir, write_json
from quantize.schemes import Scheme

# Modules of one source tensor whose decompression is compared, spread evenly over it.
DECOMPRESSED_PER_TENSOR = 16
PART_BYTES = 1 << 24
FAULTS_KEPT = 10
CHECKS = (
    "layout",
    "counts",
    "one owner",
    "kept",
    "scales",
    "experts",
    "error",
    "decompression",
)


@dataclass
class Check:
    """One check: how many things it looked at, and what it found wrong (the first ten)."""

    name: str
    looked_at: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether it looked at something and found nothing wrong."""
        return self.looked_at > 0 and not self.faults

    def expect(self, ok: bool, fault: str) -> None:
        """Count one thing looked at; note `fault` unless `ok`."""
        self.looked_at += 1
        if not ok and len(self.faults) < FAULTS_KEPT:
            self.faults.append(fault)

    def add(self, other: "Check") -> None:
        """Count what another one looked at and found."""
        self.looked_at += other.looked_at
        self.faults = (self.faults + other.faults)[:FAULTS_KEPT]


@dataclass(frozen=True)
class Verification:
    """All checks by name, and the relative error of every quantized source tensor."""

    checks: dict[str, Check]
    relative_error: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks.values())

    def summary(self) -> str:
        """Return one line: what failed first, or that all passed."""
        for check in self.checks.values():
            if not check.passed:
                fault = check.faults[0] if check.faults else "it looked at nothing"
                return f"{check.name}: {fault}"
        return f"{len(self.checks)} checks passed"

    def as_json(self) -> dict[str, Any]:
        """Return what verification.json holds."""
        return {
            "passed": self.passed,
            "checks": [{**asdict(c), "passed": c.passed} for c in self.checks.values()],
            "relative_error": self.relative_error,
        }


def verify(
    artifact: Checkpoint, source: Checkpoint, targets: list[Target], recipe: Recipe, run: RunDir
) -> Verification:
    """Check a quantized checkpoint against its source and plan; write verification.json."""
    found = Verification({name: Check(name) for name in CHECKS}, {})
    if _check_layout(artifact, found.checks["layout"]):
        _check_counts(artifact, targets, found.checks["counts"])
        _check_owner(artifact, found.checks["one owner"])
        _check_weights(artifact, source, targets, recipe, found)
    # Ties this file to these bytes: a checkpoint that is written again, or rots, is not verified by it.
    identity = {"artifact": fingerprint(artifact), "sha256": checksums(artifact)}
    write_json(run.verification_json, {**identity, **found.as_json()})
    return found


class Decompressor:
    """Decompresses single Linears with compressed-tensors, the format's own library."""

    def __init__(self, artifact: Checkpoint) -> None:
        config = artifact.config["quantization_config"]
        self.artifact = artifact
        self.schemes = ConfigSchemes(config)
        self.groups = QuantizationConfig.model_validate(config).config_groups
        self.default_format: str = config["format"]

    def weight(self, module: str, scheme: Scheme, out: int, inputs: int) -> torch.Tensor:
        """Return the BF16 weight [out, inputs] of a module as compressed-tensors reads it."""
        group: Any = self.groups[str(self.schemes.group_of(module))]
        state = {
            name.removeprefix(f"{module}."): self.artifact.read(name)
            for name in scheme_tensors(module, scheme, out, inputs)
        }
        compressor: Any = BaseCompressor.get_value_from_registry(
            group.format or self.default_format
        )
        return compressor.decompress(state, group)["weight"]


def _check_layout(artifact: Checkpoint, check: Check) -> bool:
    try:
        check.looked_at = len(check_layout(artifact))
    except InputError as error:
        check.expect(False, str(error))
    return check.passed


def _check_counts(artifact: Checkpoint, targets: list[Target], check: Check) -> None:
    scaled = [n.rsplit(".", 1)[0] for n in artifact.tensors if n.endswith(".weight_scale")]
    planned = sum(len(target.modules) for target in targets)
    check.expect(len(scaled) == planned, f"{len(scaled)} modules quantized; the plan has {planned}")
    after = sum(target.bytes_after for target in targets)
    check.expect(artifact.nbytes == after, f"{artifact.nbytes} bytes; the plan has {after}")
    for module in scaled:
        kind = "experts" if ".experts." in module else module_class(f"{module}.weight")
        check.expect(kind in QUANTIZABLE, f"{module} ({kind}) is quantized and must stay BF16")


def _check_owner(artifact: Checkpoint, check: Check) -> None:
    merged = Counter(
        name.replace("model.encoder.language_model.", "model.").replace("model.decoder.", "model.")
        for name in artifact.tensors
        if not name.endswith("layer_scalar")
    )
    for name, count in merged.items():
        check.expect(count == 1, f"{count} tensors of the artifact map to {name}")


def _check_weights(
    artifact: Checkpoint,
    source: Checkpoint,
    targets: list[Target],
    recipe: Recipe,
    found: Verification,
) -> None:
    """Check the values of every tensor, part by part on all cores."""
    decompressor = Decompressor(artifact)
    tasks = [(target, *rows) for target in targets for rows in _runs(target)]
    cores = len(os.sched_getaffinity(0))
    distance: dict[str, float] = defaultdict(float)
    norm: dict[str, float] = defaultdict(float)
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = pool.map(lambda task: _check_part(decompressor, source, *task), tasks)
        for (target, _, _), part in track(zip(tasks, parts, strict=True), "verify", len(tasks)):
            for name, check in part.checks.items():
                found.checks[name].add(check)
            distance[target.name] += part.distance
            norm[target.name] += part.norm
    for target in targets:
        if target.scheme is not None:
            error = _relative_error(distance[target.name], norm[target.name])
            stated = recipe.verification.max_relative_error
            limit = stated.get(target.scheme.name, target.scheme.max_relative_error)
            found.relative_error[target.name] = error
            found.checks["error"].expect(
                error <= limit,
                f"{target.name}: relative error {error:.4f} is over the recipe's {limit}",
            )


def _relative_error(distance: float, norm: float) -> float:
    """Return the root of two sums of squares' quotient; 0 when both are zero."""
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
    """What a part of one tensor showed: checks, and sums of squares of W - W' and of W."""

    checks: dict[str, Check] = field(default_factory=lambda: {name: Check(name) for name in CHECKS})
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
    stride = max(1, len(target.modules) // DECOMPRESSED_PER_TENSOR)
    first = start * len(target.modules) // target.shape[0]
    for i, weight in enumerate(rows.view(-1, out, inputs), first):
        module = target.modules[i]
        try:
            mine = read_module(artifact, module, target.scheme)
        except InputError as error:  # a NaN or infinite tensor, named by the reader
            part.checks["scales"].expect(False, str(error))
            continue
        part.distance += _sum_of_squares(weight.float() - mine.float())
        part.norm += _sum_of_squares(weight.float())
        _check_scales(artifact, module, target.scheme, part.checks["scales"])
        if target.module_class == "experts":
            part.checks["experts"].expect(bool(mine.any()), f"{module} is all zero")
        if i % stride == 0:
            same = _same_bits(decompressor.weight(module, target.scheme, out, inputs), mine)
            fault = f"{module}: compressed-tensors decompresses other weights"
            part.checks["decompression"].expect(same, fault)
    return part


def _check_scales(artifact: Checkpoint, module: str, scheme: Scheme, check: Check) -> None:
    scale = artifact.read(f"{module}.weight_scale").float()
    zero_allowed = scheme.codes.group is not None  # the scale of an all-zero block of 16
    good = bool((scale >= 0 if zero_allowed else scale > 0).all()) and bool((scale > 0).any())
    check.expect(good, f"{module}.weight_scale is not above 0 throughout")


def _sum_of_squares(x: torch.Tensor) -> float:
    return x.norm().item() ** 2


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (NaN equals NaN here)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
