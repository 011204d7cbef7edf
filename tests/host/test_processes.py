"""Processes that torchrun started: connected while the block runs, and no longer."""

import json
import os
from collections.abc import Callable
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import run as torchrun

import quantize
from quantize.errors import InputError, ResourceError
from quantize.host.processes import ALONE, best_device, joined
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


def test_each_number_goes_to_the_process_that_asks_first(tmp_path: Path) -> None:
    """In each of two sequences; a process that asks for more gets more."""

    def ask(rank: int) -> None:
        with joined() as processes:
            first = list(islice(processes.numbers(), 5 * rank))
            processes.wait()
            second = list(takewhile(lambda number: number < 20, processes.numbers()))
            (tmp_path / str(rank)).write_text(json.dumps([first, second]))

    in_two(ask)
    (none, some), (all_five, others) = (
        json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)
    )
    assert (none, all_five) == ([], [0, 1, 2, 3, 4])
    assert sorted(some + others) == list(range(20))


@pytest.mark.parametrize("ask", ["wait", "others", "numbers"])
def test_a_process_whose_fellow_has_ended_says_so_in_one_line(ask: str, tmp_path: Path) -> None:
    """And not that memory is short, as other errors of torch mean."""

    def ended(rank: int) -> None:
        try:
            with joined() as processes:
                processes.wait()
                if rank == (ask == "numbers"):  # the first process holds the store
                    calls: dict[str, Callable[[], object]] = {
                        "wait": processes.wait,
                        "others": lambda: processes.others(1),
                        "numbers": lambda: list(processes.numbers()),
                    }
                    calls[ask]()
                os._exit(0)
        except ResourceError as error:
            (tmp_path / "said").write_text(str(error))
        os._exit(0)

    in_two(ended)
    assert (tmp_path / "said").read_text().startswith("another process of this command ended")


def on_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: names[int(device[-1])])


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, "H200", "H200")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert best_device() == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        ResourceError, match=r"has no GPU: there are 2; torchrun --nproc-per-node 2"
    ):
        best_device()


def test_gpus_of_two_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, "H200", "H100")

    def join(rank: int) -> None:
        said = "joined"
        try:
            with joined():
                pass
        except ResourceError as error:
            said = str(error)
        (tmp_path / str(rank)).write_text(said)

    in_two(join)
    assert (tmp_path / "0").read_text() == "joined"
    assert "process 2 of 2 has H100, and the first one H200" in (tmp_path / "1").read_text()


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
