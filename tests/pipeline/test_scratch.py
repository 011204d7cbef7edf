"""One folder of scratch serves several runs, of one recipe too: none takes another's recording."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantize.errors import ResourceError
from quantize.host.locks import locked
from quantize.pipeline.run import opened
from quantize.pipeline.stages import Run, stage
from quantize.runs.folder import RunDir
from quantize.stages.denoising import Denoising
from tests.support.quick_run import Quick


def at(quick: Quick, folder: Path, scratch: Path) -> Run:
    """Return the finished run as if it lay in `folder`, with this scratch."""
    with opened(quick.folder.path) as run:
        there = RunDir(folder / run.folder.path.name)
        return replace(run, folder=there, options={"scratch": scratch})


def test_two_runs_of_a_recipe_have_recordings_of_their_own(quick: Quick, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    one, two = (at(quick, tmp_path / name, scratch) for name in ("one", "two"))
    assert one.folder.path.name == two.folder.path.name
    assert one.recording != two.recording
    assert one.recording == at(quick, tmp_path / "two" / ".." / "one", scratch).recording
    assert one.recording.parent == scratch
    assert replace(one, options={}).recording == one.folder.path / "recording"


@pytest.mark.parametrize("name", ["calibrate", "round"])
def test_a_recording_is_one_process_s(
    name: str, quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host may have the same folders, and share the scratch: the lock is beside it."""
    run, seen = at(quick, tmp_path / "one", tmp_path / "scratch"), list[Path]()
    lock = run.recording.with_name(f".{run.recording.name}.lock")

    def work(*_: object, scratch: Path) -> None:
        with pytest.raises(ResourceError, match="is at work there"), locked(lock, "again"):
            pass
        seen.append(scratch)

    for module in ("calibrate.calibrate", "round_weights.round_weights"):
        function = module.partition(".")[0]
        monkeypatch.setattr(f"quantize.stages.{module}.{function}", work)
    stage(name).work(run)
    assert seen == [run.recording]
    with locked(lock, "held"), pytest.raises(ResourceError, match=r"-recording: process \d+ is at"):
        stage(name).work(run)
    assert seen == [run.recording]


def test_scratch_that_cannot_be_written_is_one_line(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "scratch").write_text("a file")
    run = at(quick, tmp_path / "one", tmp_path / "scratch")
    said = r"cannot be written to .*name another disk with --scratch"
    with pytest.raises(ResourceError, match=said):
        stage("calibrate").work(run)


@pytest.mark.parametrize("spoil", [shutil.rmtree, lambda folder: None])
def test_a_recording_that_is_gone_at_once_is_an_error_and_not_a_fault_of_ours(
    spoil: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = object.__new__(Denoising)
    found.__dict__["identity"] = "of this run"
    found._source = Path("unread")

    def run(**_: object) -> None:
        tmp_path.joinpath("recording").mkdir()
        spoil(tmp_path / "recording")

    monkeypatch.setattr(found, "run", run)
    monkeypatch.setattr("quantize.stages.denoising.Recorder", lambda folder: None)
    monkeypatch.setattr(
        "quantize.stages.denoising.Checkpoint.open",
        lambda _: type("Opened", (), {"config": {"text_config": {"hidden_size": 8}}}),
    )
    with pytest.raises(ResourceError, match="gone or damaged; check the disk"):
        found.recording(tmp_path / "recording")
