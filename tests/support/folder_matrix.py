"""Saves VARIANTS of `saved_by` with six versions of transformers, reads them here, writes docs' table.

    python -m tests.support.folder_matrix           # installs the versions into build/transformers
    python -m tests.support.folder_matrix 5.24.0    # one version again; the others stay as recorded
    rm -r build/transformers                        # what was saved there is not saved again

A folder is "equal" if our model gives, bit for bit or within 1e-6, the logits that the version's own
class computed from it, and if `inspect` and the start of `run` find nothing. It is "refused" if
`quantize.load`, `inspect` and the start of `run` all refuse it. Anything else ends this program with
1, and its words are what tests/data/folder_matrix.json then says. docs/folders.md shows the counts.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.metadata import version as version_here
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

from quantize.checkpoints.inspect import inspect
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.pipeline.run import check_source
from quantize.runtime.weights.beside import LOOKS, load
from tests.support.saved_by import VARIANTS, logits

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "data" / "folder_matrix.json"
PAGE = ROOT / "docs" / "folders.md"
BEGIN, END = "<!-- matrix: made by tests/support/folder_matrix.py -->\n", "<!-- end -->\n"
VERSIONS = ("5.11.0", "5.13.0", "5.15.0", "5.17.0", "5.20.0", "5.24.0")
EQUAL, REFUSED = "equal", "refused"
NOT_SAVED = "not saved"  # this version's class cannot write such a folder


def save(version: str, built: Path) -> Path:
    """Return the folder of VARIANTS as a version of transformers saved them (once)."""
    package, out = built / version, built / f"saved-{version}"
    if out.exists():
        return out
    if not package.exists():
        _install(version, package)
    partial = _partial(out)
    program = [sys.executable, "-m", "tests.support.saved_by", str(partial)]
    environment = os.environ | {"PYTHONPATH": str(package)}
    subprocess.run(program, check=True, cwd=ROOT, env=environment)
    return partial.rename(out)


def _partial(folder: Path) -> Path:
    """Return where a folder is made, without what an earlier try left there.

    It gets its name when all of it is there, since a folder that has its name is taken as whole.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    return partial


def _install(version: str, package: Path) -> None:
    """Install a version of transformers, and what it needs beside what is here, into `package`."""
    partial = _partial(package)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(partial)]
    subprocess.run([*pip, "--no-deps", f"transformers=={version}"], check=True)
    (stated,) = distributions(name="transformers", path=[str(partial)])
    ranges = {need.name: need.specifier for need in map(Requirement, stated.requires or ())}
    names = ("tokenizers", "huggingface-hub", "kernels")  # each version has its own ranges
    if not all(ranges[name].contains(version_here(name)) for name in names):
        subprocess.run([*pip, *(f"{name}{ranges[name]}" for name in names)], check=True)
    partial.rename(package)


def outcome(folder: Path) -> str:
    """Return EQUAL or REFUSED, or what is wrong with a folder's reading."""
    if not (folder / "config.json").exists():
        return NOT_SAVED
    loaded: Any = None

    def opened() -> None:
        nonlocal loaded
        loaded = load(folder, dtype=torch.bfloat16)

    checks: list[Callable[[], object]] = [
        lambda: check_source(Checkpoint.open(folder)),
        lambda: _refuse(inspect(folder, LOOKS).problems),
        opened,
    ]
    refusals = sum(_refused(check) for check in checks)
    if refusals:
        return REFUSED if refusals == len(checks) else f"refused by {refusals} of {len(checks)}"
    theirs = folder.with_name(f"{folder.name}.logits")
    if not theirs.exists():
        return "read, and its own class does not load it"
    apart = float((logits(loaded) - load_file(theirs)["logits"]).abs().max())
    return EQUAL if apart <= 1e-6 else f"differs by {apart:.3g}"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise InputError(problems[0])


def _refused(check: Callable[[], object]) -> bool:
    try:
        check()
    except InputError as error:
        return "\n" not in str(error)
    return False


def table(record: dict[str, dict[str, str]]) -> str:
    """Return docs' table: outcomes by version."""
    lines = ["| saved by transformers | folders | equal logits | refused |", "|---|---:|---:|---:|"]
    for version, found in record.items():
        outcomes = [said for said in found.values() if said != NOT_SAVED]
        counts = (len(outcomes), outcomes.count(EQUAL), outcomes.count(REFUSED))
        lines.append(f"| {version} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/folders.md with the table of the record."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    shown = table(json.loads(RECORD.read_text("utf-8")))
    return before + BEGIN + "\n" + shown + "\n" + END + rest.partition(END)[2]


def main(versions: list[str]) -> int:
    """Make the matrix again for `versions`, write record and page, and return the exit code."""
    logging.disable(logging.WARNING)
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    for version in versions:
        out = save(version, ROOT / "build" / "transformers")
        record[version] = {name: outcome(out / name) for name in VARIANTS}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(), "utf-8")
    said = {word for found in record.values() for word in found.values()}
    return int(bool(said - {EQUAL, REFUSED, NOT_SAVED}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*VERSIONS]))
