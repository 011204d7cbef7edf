"""Processes that torchrun started: connected while the block runs, and no longer."""

import os
import socket
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from quantize.processes import ALONE, joined


def work(rank: int, port: int, fails: bool, said: Path) -> None:
    """One of two processes, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    files = [tmp_path / str(rank) for rank in range(2)]
    processes = [
        get_context("fork").Process(target=work, args=(rank, port, fails, file))
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    end = ", failed" if fails else ""
    assert [file.read_text() for file in files] == [f"0, not [1]{end}", f"1, not [0]{end}"]


def test_without_torchrun_there_is_one() -> None:
    with joined() as processes:
        assert processes == ALONE
        assert processes.others("found") == []
        assert list(processes.mine([1, 2, 3])) == [1, 2, 3]
        processes.wait()
