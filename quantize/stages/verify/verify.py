"""Checks statically that the artifact is what the plan said, and close to its source.

A check that looked at nothing fails. One thread per core reads weights in parts of about 8 MB (on a GPU
64 MB). So memory holds a few parts, whatever the size of the model.

The full form compares all values with the source. The short form relies on convert's `witness`, which
compared all values in memory, with the same code, source and recipe. Then every part on disk is
compared with the witness' digest, a sample with the source. Both forms check names, files, scales.

  unchanged     every file still has the checksum that convert recorded when it wrote it
  config        config.json is the source's, and quantizes what the plan says, with the plan's schemes
  layout        every name, dtype and shape is what config.json calls for
  counts        numbers of quantized modules and bytes are the plan's; what must stay BF16 has no scale
  one owner     vLLM reads `model.decoder.` and `model.encoder.language_model.` as `model.`,
                and still no two tensors have one name (each of the two keeps its `layer_scalar`s)
  shared        q/k/v, and gate/up of an MLP or an expert, have equal global and input scales
  calibrated    input scales are those that calibration found
  tokenizer     tokenizer.json exists and is JSON

Checks of values (`verify_weights`):

  kept          BF16 tensors equal the source bit for bit
  scales        finite, and above 0 except for the block scales of all-zero blocks
  experts       no expert has a projection that is all zero
  error         |W - W'| / |W| is within the recipe's limit for every source tensor, and within twice
                that limit for every Linear
  decompression our dequantized weights equal compressed-tensors', bit for bit: at least 16 modules of
                every source tensor (or all) in all rows, its other modules in some rows

Only the short form has these checks:

  as encoded    the bytes at the headers' offsets are those that convert's witness checked
  read back     5 % of the parts are compared with the source once more
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from quantize.checkpoints.inspect import owners, refusal
from quantize.checkpoints.layout import check_layout, schemes_by_module
from quantize.checkpoints.reader import Checkpoint, check_tokenizer, read_header
from quantize.checkpoints.scales import read_scales, shared
from quantize.checkpoints.targets import Target, sum_bytes
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.host.progress import say
from quantize.recipe.sections import Recipe
from quantize.runs.folder import RunDir
from quantize.runs.manifest import checksums, fingerprint
from quantize.stages.device import Device
from quantize.stages.verify.verify_weights import (
    VALUE_CHECKS,
    Check,
    Comparer,
    check_weights,
    new_checks,
)
from quantize.stages.verify.witness import BEHIND_CONVERT, Record, recall

ALWAYS = ("unchanged", "config", "layout", "counts", "one owner", "tokenizer", *VALUE_CHECKS)
CONVERT = "`quantize convert RUN` writes it again"


@dataclass(frozen=True)
class VerificationResult:
    """All checks by name; relative error of each quantized source tensor, None if it is not finite."""

    checks: dict[str, Check]
    relative_error: dict[str, float | None] = field(default_factory=dict[str, float | None])

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks.values())


def verify(
    artifact: Checkpoint, source: Checkpoint, targets: list[Target], recipe: Recipe, run: RunDir, *,
    device: str = "cpu", full: bool = False,
) -> VerificationResult:  # fmt: skip
    """Check a checkpoint against its source and plan; write verification.json, and return the checks.

    If layout and size are right, values are compared on `device` while files are hashed. If `full`
    is set or `run` has no valid record of convert's checks, these are all values, else a sample.
    """
    held = "--full" if full else recall(run, source, targets, recipe)
    if isinstance(held, str):
        say(f"verify: {held}: all of it is compared with {source.folder}")
    names = [*ALWAYS, *(BEHIND_CONVERT if isinstance(held, Record) else ())]
    if any(target.scheme and target.scheme.shares_global_scale for target in targets):
        names.append("shared")
    if recipe.needs_calibration:
        names.append("calibrated")
    verification = VerificationResult(new_checks(names))
    with ThreadPoolExecutor(1) as beside:
        hashing = beside.submit(checksums, artifact)
        _check_config(artifact, source, targets, verification.checks["config"])
        _check_counts(artifact, targets, verification.checks["counts"])
        for name, count in owners(artifact).items():
            fault = f"{count} tensors of the artifact map to {name}"
            verification.checks["one owner"].expect(count == 1, fault)
        _expect_sound(verification.checks["tokenizer"], partial(check_tokenizer, artifact.folder))
        _expect_sound(verification.checks["layout"], partial(check_layout, artifact))
        # A foreign writer's wider scales pass as a layout, and have other bytes than the plan's.
        if verification.checks["layout"].passed and artifact.nbytes == sum_bytes(targets)[1]:
            verification.checks["layout"].looked_at = len(artifact.tensors)
            _check_scales(artifact, targets, run.calibration, verification.checks)
            where, checks = Device(device), verification.checks
            errors = (
                held.compare(artifact, Comparer(source, recipe, where, None), checks)
                if isinstance(held, Record)
                else check_weights(artifact, source, targets, recipe, checks, where)
            )
            verification.relative_error.update(errors)
    hashes = hashing.result()
    _check_unchanged(hashes, run.conversion_json, verification.checks["unchanged"])
    # `artifact` ties this file to these bytes: a checkpoint that changes later is not verified.
    content = {
        "artifact": fingerprint(artifact),
        "sha256": hashes,
        "scored_as": fingerprint(artifact, settings_of=source.folder),
        "passed": verification.passed,
        "checks": [check.as_json() for check in verification.checks.values()],
        "relative_error": verification.relative_error,
    }
    write_json(run.verification_json, content)
    return verification


def _expect_equal(
    check: Check,
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
    fault: str,
    default: Any = None,
) -> None:
    """Expect equal values under every name; `fault` is a format of name, expected and actual."""
    for name in sorted(expected.keys() | actual.keys()):
        both = expected.get(name, default), actual.get(name, default)
        check.expect(both[0] == both[1], fault.format(name, *both))


def _expect_sound(check: Check, look: Callable[[], object]) -> None:
    why = refusal(look)
    check.expect(not why, why)


def _check_unchanged(hashes: dict[str, str], record: Path, check: Check) -> None:
    """Compare every file with convert's record, so that nothing newer is verified."""
    if not record.is_file():
        check.expect(False, f"{record} is missing: nothing says what convert wrote; {CONVERT}")
        return
    written: dict[str, str] = read_json(record, "files")["files"]
    _expect_equal(check, hashes, written, f"{{}} is not what convert wrote; {CONVERT}")


def _check_config(
    artifact: Checkpoint, source: Checkpoint, targets: list[Target], check: Check
) -> None:
    plain = {key: value for key, value in artifact.config.items() if key != "quantization_config"}
    fault = f"config.json: {{}} differs from the source's; {CONVERT}"
    _expect_equal(check, plain, source.config, fault)
    planned = {module: t.scheme for t in targets if t.scheme for module in t.modules}
    try:
        stated = schemes_by_module(artifact.config)
    except InputError as error:
        check.expect(False, str(error))
        return
    _expect_equal(check, stated, planned, "config.json: {} is {}; the plan has {}", "BF16")


def _check_counts(artifact: Checkpoint, targets: list[Target], check: Check) -> None:
    scaled = [n.rsplit(".", 1)[0] for n in artifact.tensors if n.endswith(".weight_scale")]
    planned = sum(len(target.modules) for target in targets)
    check.expect(len(scaled) == planned, f"{len(scaled)} modules quantized; the plan has {planned}")
    after = sum_bytes(targets)[1]
    check.expect(artifact.nbytes == after, f"{artifact.nbytes} bytes; the plan has {after}")
    quantizable = {module for target in targets for module in target.modules}
    for module in scaled:
        check.expect(module in quantizable, f"{module} is quantized and must stay BF16")


def _check_scales(
    artifact: Checkpoint, targets: list[Target], calibration: Path, checks: dict[str, Check]
) -> None:
    scales = read_scales(artifact)
    if "shared" in checks:
        for ok, fault in shared(scales):
            checks["shared"].expect(ok, fault)
    if "calibrated" in checks:
        path = calibration / "input_scales.safetensors"
        modules = [m for t in targets if t.scheme and t.scheme.calibrated for m in t.modules]
        written = {module: scales[module]["input_global_scale"] for module in modules}
        _check_calibrated(written, path, checks["calibrated"])


def _check_calibrated(written: dict[str, float], path: Path, check: Check) -> None:
    try:
        reader = Checkpoint(path.parent, {}, read_header(path))
        values = reader.read_stacked(list(reader.tensors)).tolist() if reader.tensors else []
    except InputError as error:
        check.expect(False, str(error))
        return
    by_name = dict(zip(reader.tensors, values, strict=True))
    expected = {f"{module}.input_global_scale": [value] for module, value in written.items()}
    _expect_equal(check, expected, by_name, f"{{}} is {{}} and calibration found {{}}; {CONVERT}")
