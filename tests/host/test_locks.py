"""The second process on a run or on a store is refused at once; a killed one leaves no lock behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantize.errors import ResourceError
from quantize.host.locks import locked

HOLD = """
import sys, time
from pathlib import Path
from quantize.host.locks import locked
with locked(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_holder_is_named_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    started = time.monotonic()
    with pytest.raises(ResourceError, match=f"run 7: process {holder.pid} is at work"):
        locked(lock, "run 7").__enter__()
    assert time.monotonic() - started < 1
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with locked(lock, "run 7"):
        assert lock.read_text() == f"{os.getpid()}\n"
        with pytest.raises(ResourceError, match=f"process {os.getpid()} "):
            locked(lock, "run 7").__enter__()
    with locked(lock, "run 7"):
        pass


def test_of_torchruns_processes_the_first_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with locked(tmp_path / "lock", "a run"):
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(ResourceError):  # a rank without others is a process like any other
            locked(tmp_path / "lock", "a run").__enter__()
        monkeypatch.setenv("WORLD_SIZE", "2")
        with locked(tmp_path / "lock", "a run"):
            pass
