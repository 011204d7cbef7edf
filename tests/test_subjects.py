"""The lint of commits: long subjects after the first commit that counts, in every kind of copy."""

import subprocess
from pathlib import Path

import pytest

from tests.support import subjects

LONG = "A" * 73
WHO = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def git(folder: Path, *words: str) -> str:
    command = ["git", *WHO, *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A repository with a long subject up to its first commit that counts; and that commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", LONG)
    first = git(folder, "rev-parse", "HEAD")
    git(folder, "commit", "-q", "--allow-empty", "-m", "B" * 72, "-m", "A body. " * 20)
    return folder, first


def test_subjects_after_the_first_commit_are_looked_at(repository: tuple[Path, str]) -> None:
    folder, first = repository
    assert subjects.too_long(folder, first) == []
    git(folder, "commit", "-q", "--allow-empty", "-m", LONG)
    (line,) = subjects.too_long(folder, first)
    assert line.endswith(f" {LONG}")


def test_a_shallow_clone_has_later_commits_alone(
    repository: tuple[Path, str], tmp_path: Path
) -> None:
    folder, first = repository
    for subject, count in (("C", 0), (LONG, 1)):
        git(folder, "commit", "-q", "--allow-empty", "-m", subject)
        clone = tmp_path / subject[:3]
        git(tmp_path, "clone", "-q", "--depth", "1", folder.as_uri(), str(clone))
        assert len(subjects.too_long(clone, first)) == count


def test_where_no_history_is_ours_there_is_nothing_to_look_at(
    repository: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = repository
    assert subjects.too_long(folder, "0" * 40) == []  # a copy that begins anew
    (folder / "inside").mkdir()
    assert (
        subjects.too_long(folder / "inside", first) == []
    )  # a distribution in a user's repository
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert subjects.too_long(tmp_path, first) == []
    monkeypatch.setenv("PATH", "")
    assert subjects.too_long(folder, first) == []
