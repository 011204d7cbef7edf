"""A command's work in two processes, as torchrun would start them, forked from this one."""

import os
import socket
from collections.abc import Callable
from multiprocessing import get_context

import torch


def in_two(work: Callable[[int], object]) -> None:
    """Call `work` with its rank in two processes; each must come to its end. One thread each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [get_context("fork").Process(target=_start, args=(r, port, work)) for r in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
        assert process.exitcode == 0


def _start(rank: int, port: int, work: Callable[[int], object]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    work(rank)
