"""The folder of one run: where each stage's result lies, and how it is written whole.

A stage is done when its file exists under its final name. Files and folders are therefore written
under a temporary name in the same place, synced to disk, then renamed: after a kill or a power cut a
final name holds the whole result or nothing.
"""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from quantize.errors import InputError

REDO = "it was changed or damaged: remove it, and `quantize run ... --resume` makes it again"
TEMPORARY_SUFFIX = ".partial"
README, RESULTS = "README.md", ".eval_results"  # the model card, beside the checkpoint it describes


class RunDir:
    """Paths of one run. Every property is the final name of one stage's result."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def recipe_yaml(self) -> Path:
        """The resolved recipe, with every default."""
        return self.path / "recipe.yaml"

    @property
    def manifest_json(self) -> Path:
        """Versions, hardware, seeds, seconds and peak memory per stage."""
        return self.path / "manifest.json"

    @property
    def stages_json(self) -> Path:
        """Digests of each stage's result and of its inputs."""
        return self.path / "stages.json"

    @property
    def lock(self) -> Path:
        """The lock that the process at work in the run holds."""
        return self.path / ".lock"

    @property
    def targets_csv(self) -> Path:
        """One row a source tensor: scheme or reason to keep, bytes before and after."""
        return self.path / "targets.csv"

    @property
    def calibration(self) -> Path:
        """Input scales, expert coverage and recorded trajectories."""
        return self.path / "calibration"

    @property
    def rounding(self) -> Path:
        """Codes and scales of every quantized Linear that GPTQ found, one file a layer."""
        return self.path / "rounding"

    @property
    def checkpoint(self) -> Path:
        """The quantized checkpoint: a Hub-ready folder."""
        return self.path / "checkpoint"

    @property
    def conversion_json(self) -> Path:
        """Checksum of every file of the checkpoint as it was written."""
        return self.path / "conversion.json"

    @property
    def verification_json(self) -> Path:
        """Findings of the static checks of the checkpoint."""
        return self.path / "verification.json"

    @property
    def fidelity_json(self) -> Path:
        """Distance from BF16 on replayed trajectories."""
        return self.path / "fidelity.json"

    @property
    def evaluation(self) -> Path:
        """Scored samples: {bf16,quantized}/<task>.jsonl."""
        return self.path / "evaluation"

    @property
    def report_json(self) -> Path:
        """Everything the reports show, and the verdict."""
        return self.path / "report.json"

    @property
    def report_md(self) -> Path:
        """The report for people, in Markdown."""
        return self.path / "report.md"

    @property
    def report_html(self) -> Path:
        """The report for people, one self-contained page."""
        return self.path / "report.html"

    @property
    def junit_xml(self) -> Path:
        """The gate's results for a CI system."""
        return self.path / "junit.xml"

    @property
    def log(self) -> Path:
        """Tracebacks of unexpected errors."""
        return self.path / "run.log"


def existing_run(path: Path) -> RunDir:
    """Return the folder of a run that is there.

    Raises:
        InputError: there is no such folder, or no run in it.
    """
    folder = RunDir(path)
    if not folder.manifest_json.exists():
        what = "no manifest.json there" if folder.path.is_dir() else "no such folder"
        raise InputError(f"{path}: {what}; name a folder that `quantize run` made: outputs/...")
    return folder


def is_card(name: str) -> bool:
    """Return whether a file of a checkpoint, by its path in it, is the model card or scores with it.

    They may be written and written again without making it another checkpoint.
    """
    return name == README or name.startswith(f"{RESULTS}/")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that the final name never holds a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON with stable formatting, atomically. NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *keys: str) -> Any:
    """Read a JSON object from a file of a run.

    All `keys` must be present; "source.folder" is the key "folder" within "source".

    Raises:
        InputError: the file is not JSON, is not an object, or lacks a key.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); {REDO}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object; {REDO}")
    for key in keys:
        found: Any = value
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                raise InputError(f"{path}: {key!r} is missing there; {REDO}")
            found = cast(dict[str, Any], found)[part]
    return value


@contextmanager
def folder_when_complete(final: Path, *, keep_partial: bool = False) -> Generator[Path]:
    """Yield a temporary folder beside `final`; rename it to `final` when the block ends well.

    `final` does not appear on an error. With `keep_partial` the temporary folder of an interrupted
    try is handed on, for a stage that can use the finished files in it; else it starts empty.
    """
    temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
    if temporary.exists() and not keep_partial:
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True, exist_ok=True)
    yield temporary
    for path in temporary.rglob("*"):
        sync_file(path)
    sync_folder(temporary)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    sync_folder(final.parent)


def sync_file(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A folder is opened and synced like a file; then its entries, not its files, reach the disk.
sync_folder = sync_file
