"""Checks convert's parts in memory, so that verify need not read the whole BF16 model again.

convert passes every part to `Witness.check` after it is encoded and before it is written. The witness
reads the part's source itself, checks the bytes as `verify_weights` checks files, and records their
digest (XXH3, 128 bits). Later `verify` finds every part on disk through the headers and digests it.
Bytes that a writer lost, mixed up, wrote twice or wrote elsewhere have another digest. `verify` also
compares a share of the parts with the source. A record is not trusted if it is missing, incomplete
(convert was interrupted), or of another checkpoint, source, recipe or code. Verify then compares all.
"""

import json
import math
import random
from collections import defaultdict
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch
import xxhash

from quantize.checkpoints.reader import GENERATION, Checkpoint, bytes_of
from quantize.checkpoints.targets import Target
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.recipe.sections import Recipe
from quantize.runs.digests import hashed
from quantize.runs.folder import RunDir
from quantize.runs.manifest import code_digest
from quantize.schemes.records import Scheme
from quantize.stages.device import Device
from quantize.stages.verify.decompression import Decompressor
from quantize.stages.verify.verify_weights import (
    VALUE_CHECKS,
    Check,
    Comparer,
    PartOf,
    PartResult,
    add_up,
    each_part,
    new_checks,
)

SHARE = 0.05  # share of each scheme's parts, and of BF16 parts, compared with the source once more
BEHIND_CONVERT = ("as encoded", "read back")


class Witness:
    """Checks what convert's threads encode; `config` is the config.json that convert writes."""

    def __init__(
        self, source: Checkpoint, config: dict[str, Any], recipe: Recipe, device: str = "cpu"
    ) -> None:
        self._comparer = Comparer(source, recipe, Device(device), Decompressor(config))
        self._checked: dict[tuple[str, int], tuple[PartOf, PartResult, str]] = {}

    def check(self, target: Target, start: int, stop: int, encoded: torch.Tensor) -> None:
        """Check rows (experts) start:stop of `target`; `encoded` are their bytes on disk, uint8 [n]."""
        part = target, start, stop
        result = self._comparer.check(part, encoded)
        self._checked[target.name, start] = part, result, _digest(encoded)

    def write(self, targets: list[Target], run: RunDir) -> None:
        """Write what the checks found, in the order of `targets`, to a file beside convert's record."""
        order = {target.name: index for index, target in enumerate(targets)}
        results = sorted(self._checked.values(), key=lambda one: (order[one[0][0].name], one[0][1]))
        source, recipe = self._comparer.source, self._comparer.recipe
        checks = new_checks(VALUE_CHECKS)
        errors = add_up(((part, result) for part, result, _ in results), recipe, checks)
        digests: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for (target, start, stop), _, digest in results:
            digests[target.name].append((start, stop, digest))
        record = {
            "of": _identity(run, source, recipe),
            "checks": [asdict(check) for check in checks.values()],
            "relative_error": errors,
            "digests": digests,
        }
        write_json(run.witness_json, record)


def _digest(encoded: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bytes_of(encoded))


def _identity(run: RunDir, source: Checkpoint, recipe: Recipe) -> dict[str, str]:
    """Return digests of what a record is of; the digest of convert's record is the checkpoint's.

    No part is in the file of generation settings, which `adopt` writes, and verify hashes by itself.
    """
    written = read_json(run.conversion_json, "files")
    written["files"].pop(GENERATION, None)
    return {
        "checkpoint": sha256(json.dumps(written, sort_keys=True).encode()).hexdigest(),
        "source": hashed({shard.name: shard for shard in source.shards}),
        "recipe": recipe.digest(),
        "code": code_digest(),
    }


@dataclass(frozen=True)
class Record:
    """What a `Witness` found: checks, relative errors by tensor, the digest of every part's bytes."""

    checks: list[Check]
    relative_error: dict[str, float | None]
    digests: list[tuple[PartOf, str]]

    def compare(
        self, artifact: Checkpoint, comparer: Comparer, checks: dict[str, Check]
    ) -> dict[str, float | None]:
        """Check all parts on disk by digest, some by value; fill `checks`; return `relative_error`."""
        for check in self.checks:
            checks[check.name].add(check)
        sample = self._sample()

        def look(numbered: tuple[int, tuple[PartOf, str]]) -> tuple[bool, list[str] | None]:
            index, (part, digest) = numbered
            encoded = comparer.read(artifact, part)
            same = _digest(encoded) == digest
            if index not in sample:
                return same, None
            compared = comparer.check(part, encoded).checks.values()
            return same, [fault for check in compared for fault in check.faults]

        parts = list(enumerate(self.digests))
        for (_, ((target, start, stop), _)), (same, faults) in each_part(parts, look, "verify"):
            where = f"{target.name}, rows {start} to {stop - 1}"
            checks["as encoded"].expect(same, f"{where}: not the bytes that were encoded")
            if faults is not None:
                checks["read back"].expect(not faults, f"{where}: {' '.join(faults[:1])}")
        return self.relative_error

    def _sample(self) -> set[int]:
        """Return indices of sampled parts, at least one per scheme, the same for equal bytes."""
        numbers: dict[Scheme | None, list[int]] = defaultdict(list)
        for number, ((target, _, _), _) in enumerate(self.digests):
            numbers[target.scheme].append(number)
        draw = random.Random("".join(digest for _, digest in self.digests))
        chosen = (
            draw.sample(indices, math.ceil(SHARE * len(indices))) for indices in numbers.values()
        )
        return {number for indices in chosen for number in indices}


def recall(run: RunDir, source: Checkpoint, targets: list[Target], recipe: Recipe) -> Record | str:
    """Return the witness' record of a run's checkpoint, or a text: why no record can be trusted."""
    name = run.witness_json.name
    if not (run.witness_json.is_file() and run.conversion_json.is_file()):
        return f"{name} is missing"
    try:
        content = read_json(run.witness_json)
        for what, digest in _identity(run, source, recipe).items():
            if content["of"][what] != digest:
                return f"{name} is of another {what}"
        digests: list[tuple[PartOf, str]] = []
        for target in targets:
            stated = content["digests"].get(target.name, [])
            begins, ends = [start for start, _, _ in stated], [stop for _, stop, _ in stated]
            if [*begins, target.shape[0]] != [0, *ends]:
                return f"{name} lacks a part of {target.name}: convert was interrupted"
            digests += [((target, start, stop), digest) for start, stop, digest in stated]
        checks = [Check(**check) for check in content["checks"]]
        return Record(checks, dict(content["relative_error"]), digests)
    except (InputError, AttributeError, KeyError, TypeError, ValueError):
        return f"{name} is damaged"
