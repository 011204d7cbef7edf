"""Processes that torchrun started: connected while the block runs, and no longer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import run as torchrun

import quantize
from quantize.errors import InputError
from quantize.host.processes import ALONE, joined
from quantize.pipeline import run as pipeline
from quantize.pipeline.stages import STAGES, Stage
from tests.support.two_processes import forked, in_two


def work(rank: int, fails: bool, said: Path) -> None:
    try:
        with joined() as processes:
            processes.wait()
            said.write_text(f"{processes.rank}, not {processes.others(processes.rank)}")
            if fails:
                raise KeyError
    except KeyError:
        said.write_text(said.read_text() + ", failed")
    if torch.distributed.is_initialized():
        said.write_text("the group is there still")


@pytest.mark.parametrize("fails", [False, True])
def test_the_group_is_destroyed_whatever_happens(fails: bool, tmp_path: Path) -> None:
    files = [tmp_path / str(rank) for rank in range(2)]
    in_two(lambda rank: work(rank, fails, files[rank]))
    end = ", failed" if fails else ""
    assert [file.read_text() for file in files] == [f"0, not [1]{end}", f"1, not [0]{end}"]


PROGRAM = """
import sys
from pathlib import Path
from quantize.host.processes import is_first, joined
from quantize.host.progress import console
with joined() as processes:
    found = f"{processes.rank} of {processes.count}, not {processes.others(processes.rank)}"
    about = f"{found}, first: {is_first()}, quiet: {console.quiet}"
    Path(sys.argv[1], str(processes.rank)).write_text(about)
"""


def test_torchrun_starts_them(tmp_path: Path) -> None:
    """Other tests fork two processes with what torchrun tells its own: this is what it tells."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    launch = ["--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    launcher = forked(torchrun.main, launch)
    launcher.join(300)
    assert launcher.exitcode == 0
    assert (tmp_path / "0").read_text() == "0 of 2, not [1], first: True, quiet: False"
    assert (tmp_path / "1").read_text() == "1 of 2, not [0], first: False, quiet: True"


@pytest.mark.parametrize("stage", [stage for stage in STAGES if not stage.shares_work])
def test_a_stage_that_shares_no_work_is_one_process(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python too, where no command refuses it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    run: Any = None
    with pytest.raises(InputError, match=f"`quantize {stage.name}` is one process"):
        pipeline.work(run, stage)


def test_a_run_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its recipe is read."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="`quantize run` is one process"):
        quantize.run("no such recipe", out=tmp_path)


def test_without_torchrun_there_is_one() -> None:
    with joined() as processes:
        assert processes == ALONE
        assert processes.others("found") == []
        assert list(processes.mine([1, 2, 3])) == [1, 2, 3]
        processes.wait()
