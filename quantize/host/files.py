"""Writes files and folders atomically, so that a kill or a power cut leaves none incomplete.

A file or folder is written under a temporary name in the same place, synced to disk, then renamed.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantize.errors import InputError

REDO = "it was changed or damaged: remove it, and `quantize run ... --resume` makes it again"
TEMPORARY_SUFFIX = ".partial"


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, atomically as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: its final name never holds an incomplete `content`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically, in stable formatting; ValueError if it has NaN or infinity."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *keys: str, remedy: str = REDO) -> Any:
    """Return the JSON object in a file; it must have all `keys` ("a.b" is the key "b" within "a").

    `remedy` ends error messages; the default says that `quantize run` makes the file again.
    Raise InputError if the file is not JSON, names a key twice, is not an object, or lacks a key.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object; {remedy}")
    for key in keys:
        inner: Any = value
        for part in key.split("."):
            if not isinstance(inner, dict) or part not in inner:
                raise InputError(f"{path}: {key!r} is missing there; {remedy}")
            inner = inner[part]
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError: no JSON, a key that stands twice, no finite number.

    JSON leaves open which of two equal keys counts, and readers differ: Python's takes the last one.
    It has no NaN and no infinity, which Python's reader takes and few others do.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice!r} stands there twice")
    for key, stated in pairs:
        for number in stated if type(stated) is list else (stated,):
            if type(number) is float and not math.isfinite(number):
                raise ValueError(f"key {key!r} has {number}, and JSON's numbers are finite")
    return value


@contextmanager
def folder_when_complete(final: Path, *, keep_partial: bool = False) -> Generator[Path]:
    """Yield a temporary folder beside `final`; it replaces `final` if the block raises no error.

    If `keep_partial`, a folder that an interrupted try left is used again, else it is removed.
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
    """Force to disk a file's bytes, or a folder's list of entries (not the bytes of its files)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
