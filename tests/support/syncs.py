"""What reached the disk, and when: every fsync, and whether a final name was there by then."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Sync:
    """One fsync: of which inode, of how many bytes, and whether `final` existed already."""

    inode: int
    size: int
    appeared: bool


def noted_syncs(monkeypatch: pytest.MonkeyPatch, final: Path) -> list[Sync]:
    """Note every fsync from now on."""
    noted: list[Sync] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        about = os.fstat(descriptor)
        noted.append(Sync(about.st_ino, about.st_size, final.exists()))

    monkeypatch.setattr(os, "fsync", note)
    return noted


def synced(noted: list[Sync], path: Path, *, appeared: bool) -> bool:
    """Whether a file or folder was synced before, or after, the final name appeared."""
    inode = path.stat().st_ino
    return any(sync.inode == inode and sync.appeared == appeared for sync in noted)
