"""The sets of versions: what a commit draws, where the newest stand, which package a red one names."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support import versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [Requirement(line) for line in PROJECT["dependencies"]]


def test_a_commit_draws_the_same_cell_each_time() -> None:
    (drawn,) = versions.chosen("1")
    assert versions.chosen("1") == [drawn]
    assert drawn in versions.cells()
    assert versions.chosen("newest/runtime") == ["newest/runtime"]
    assert versions.chosen("") == ["oldest", "measured", "newest"]


def test_every_declared_package_has_a_newest_version_and_none_pins_it_back() -> None:
    newest = versions.pins(versions.NEWEST)
    assert "llmcompressor" not in newest
    for line in DECLARED:
        assert line.specifier.contains(newest[canonicalize_name(line.name)]), line.name


@pytest.mark.parametrize(
    "package", ["torch", "triton", "transformers", "compressed-tensors", "huggingface_hub"]
)
def test_the_newest_set_stands_at_the_end_of_a_declared_range(package: str) -> None:
    """So that no release is declared that was not seen; raising a bound asks for a new record."""
    (line,) = (line for line in DECLARED if line.name == package)
    (end,) = (Version(bound.version) for bound in line.specifier if bound.operator == "<")
    seen = Version(versions.pins(versions.NEWEST)[canonicalize_name(package)])
    if len(end.release) == 1:
        assert seen.major == end.major - 1
    else:
        assert (seen.major, seen.minor) == (end.major, end.minor - 1)


def test_a_red_newest_set_names_the_package_that_cures_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed: list[str] = []

    def run(command: list[Any], **_: Any) -> SimpleNamespace:
        installed[:] = [word for word in command if "==" in str(word)]
        resolved = not installed[0].startswith("numpy==")
        return SimpleNamespace(returncode=0 if resolved else 1)

    def tested(_: Path, name: str, arguments: tuple[str, ...]) -> list[str]:
        assert (name, arguments) == ("newest", ("tests/a.py::test_b",))
        return [] if installed[0].startswith("compressed-tensors==") else ["tests/a.py::test_b"]

    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions.subprocess, "run", run)
    monkeypatch.setattr(versions, "tested", tested)
    monkeypatch.setattr(versions, "make", lambda name: installed.clear())
    newest, before = versions.pins(versions.NEWEST), versions.pins(versions.CONSTRAINTS)
    package = "compressed-tensors"
    assert versions.culprits(tmp_path, ["tests/a.py::test_b"]) == [
        f"{package} {newest[package]} (green with {before[package]})"
    ]


def test_a_red_core_names_the_packages_that_cure_it_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers 5.17 fails beside hub 2: each alone cures nothing."""
    there: set[str] = set()
    runs: list[tuple[str, ...]] = []

    def lay_over(packages: list[str]) -> None:
        there.clear()
        there.update(packages)

    def tested(_: Path, name: str, arguments: tuple[str, ...]) -> list[str]:
        assert name == "core"
        runs.append(arguments)
        cured = not there & {"transformers", "huggingface-hub"}
        return [] if cured else ["tests/a.py::test_b"]

    monkeypatch.setattr(versions, "lay_over", lay_over)
    monkeypatch.setattr(versions, "tested", tested)
    assert not versions.run("core", ())
    newest = versions.pins(versions.NEWEST)
    pair = [f"{name} {newest[name]}" for name in ("huggingface-hub", "transformers")]
    assert capsys.readouterr().out.endswith(f"core is red because of:\n  {' with '.join(pair)}\n")
    assert runs[0] == versions.CORE
    assert set(runs[1:]) == {("tests/a.py::test_b",)}
    assert all((versions.ROOT / file).is_file() for file in versions.CORE)
