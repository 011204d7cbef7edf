"""Static verification: is the artifact what the plan said, and close to what it was made from?

Every check counts what it looked at; a check that looked at nothing fails. Weights are read tensor by
tensor, so memory stays at a few tensors of the source.

  layout        every name, dtype and shape is what config.json calls for
  counts        quantized modules and bytes equal the plan's; nothing that must stay BF16 has a scale
  one owner     no two tensors map to one module once vLLM reads `model.decoder.` and
                `model.encoder.language_model.` both as `model.` (`layer_scalar` has one each)
  kept          BF16 tensors equal the source bit for bit
  scales        finite; above 0 but for the block scales of all-zero blocks
  experts       no expert is all zero
  error         |W - W'| / |W| of every source tensor within the recipe's limit
  decompression our dequantized weights equal compressed-tensors' own, bit for bit
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from quantize.checkpoint import Checkpoint
from quantize.errors import InputError
from quantize.layout import ConfigSchemes, scheme_tensors
from quantize.load import check_layout, read_weight
from quantize.manifest import fingerprint
from quantize.progress import track
from quantize.recipe import Recipe, Scheme
from quantize.run_dir import RunDir, write_json
from quantize.targets import QUANTIZABLE, Target, linear_shape, module_class

# Modules of one source tensor whose decompression is compared, spread evenly over it.
DECOMPRESSED_PER_TENSOR = 16
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
        decompressor = Decompressor(artifact)
        for target in track(targets, "verify"):
            if target.scheme is None:
                same = _same_bits(source.read(target.name), artifact.read(target.name))
                found.checks["kept"].expect(same, f"{target.name} differs from the source")
            else:
                limit = recipe.verification.max_relative_error[target.scheme]
                _check_weights(decompressor, source, target, target.scheme, limit, found)
    # The fingerprint ties this file to these bytes: a checkpoint written again is not verified by it.
    write_json(run.verification_json, {"artifact": fingerprint(artifact)} | found.as_json())
    return found


def relative_error(weight: torch.Tensor, other: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of `weight`; 0 when both are zero."""
    norm = weight.float().norm().item()
    distance = (weight.float() - other.float()).norm().item()
    return distance / norm if norm else (0.0 if distance == 0 else float("inf"))


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
    decompressor: Decompressor,
    source: Checkpoint,
    target: Target,
    scheme: Scheme,
    limit: float,
    found: Verification,
) -> None:
    """Check scales, values and decompression of one quantized source tensor."""
    checks, artifact = found.checks, decompressor.artifact
    try:
        mine = read_weight(
            artifact, target.name, target.shape, dict.fromkeys(target.modules, scheme)
        )
    except InputError as error:  # a NaN or infinite tensor, named by the reader
        checks["scales"].expect(False, str(error))
        return
    for module in target.modules:
        scale = artifact.read(f"{module}.weight_scale").float()
        zero_allowed = scheme in ("NVFP4", "NVFP4A16")  # the scale of an all-zero block of 16
        good = bool((scale >= 0 if zero_allowed else scale > 0).all()) and bool((scale > 0).any())
        checks["scales"].expect(good, f"{module}.weight_scale is not above 0 throughout")
    if target.module_class == "experts":
        for expert, largest in enumerate(mine.abs().amax(dim=(1, 2)).tolist()):
            checks["experts"].expect(largest > 0, f"{target.name}: expert {expert} is all zero")
    error = found.relative_error[target.name] = relative_error(source.read(target.name), mine)
    checks["error"].expect(
        error <= limit, f"{target.name}: relative error {error:.4f} is over the recipe's {limit}"
    )
    _check_decompression(decompressor, target, scheme, mine, checks["decompression"])


def _check_decompression(
    decompressor: Decompressor, target: Target, scheme: Scheme, mine: torch.Tensor, check: Check
) -> None:
    """Compare our weight of `target` with what compressed-tensors reads, module by module."""
    out, inputs = linear_shape(target.shape, target.modules)
    modules = mine.reshape(len(target.modules), out, inputs)  # gate and up rows follow each other
    stride = max(1, len(target.modules) // DECOMPRESSED_PER_TENSOR)
    for i in range(0, len(target.modules), stride):
        theirs = decompressor.weight(target.modules[i], scheme, out, inputs)
        same = _same_bits(theirs, modules[i])
        check.expect(same, f"{target.modules[i]}: compressed-tensors decompresses other weights")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (NaN equals NaN here)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
