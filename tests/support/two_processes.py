"""Work in other processes, forked from this one: what is imported need not be imported again."""

import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import torch

from quantize.runtime.gpu.cores import cores


def forked(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a process that calls `work`, with one thread."""

    def begin() -> None:
        torch.set_num_threads(1)
        cores.cache_clear()  # threads are not forked
        work(*arguments)

    process = get_context("fork").Process(target=begin)
    process.start()
    return process


def in_two(work: Callable[[int], object]) -> None:
    """Call `work` with its rank in two processes, as torchrun would; each must come to its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [forked(_start, rank, port, work) for rank in range(2)]
    for process in started:
        process.join(300)
        assert process.exitcode == 0


def _start(rank: int, port: int, work: Callable[[int], object]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(rank)
