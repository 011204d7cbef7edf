"""What a loop says of itself, in a pipe and in a terminal; sizes and times in units that fit."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quantize.host import progress
from quantize.host.progress import Meter, metered, noted, screen, track, within
from quantize.host.units import duration, size


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds that have passed since the first call."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def set_to(seconds: float) -> None:
        now[0] = seconds

    return set_to


def test_samples_and_tokens_with_what_is_left(clock: Callable[[float], None]) -> None:
    meter = Meter("gsm8k, bf16", 120, "samples")
    clock(10)
    assert meter.status() == "0 of 120 samples, 10 s"
    meter.announce(20, 500)  # a batch of 30 is under way, and 20 of it have ended
    assert meter.status() == "20 of 120 samples, 500 tokens (50/s), 10 s, about 50 s left"
    meter.add(30, 700)  # it is handed over: nothing is counted twice
    assert meter.status() == "30 of 120 samples, 700 tokens (70/s), 10 s, about 30 s left"
    meter.add(90, 2300)
    assert meter.status() == "120 of 120 samples, 3,000 tokens (300/s), 10 s"
    assert meter.end() == "120 samples done, 3,000 tokens (300/s) in 10.0 s"


def test_a_pipe_gets_a_line_every_so_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while nothing moves: a log that is silent looks like a process that hangs."""
    assert progress.EVERY == 30
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with metered("gsm8k, bf16", 4, "samples") as meter:
        meter.add(1, 10)
        deadline = time.monotonic() + 20
        lines: list[str] = []
        while not any("1 of 4" in line for line in lines) and time.monotonic() < deadline:
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
        meter.add(3, 30)
    last = capsys.readouterr().err.splitlines()[-1]
    assert lines[0] == "gsm8k, bf16: 4 samples to do"
    # A line may have come before the first sample.
    spoken = next(line for line in lines if "1 of 4" in line)
    assert spoken.startswith("gsm8k, bf16: 1 of 4 samples, 10 tokens (")
    assert spoken.endswith(" left")
    assert last.startswith("gsm8k, bf16: 4 samples done, 40 tokens (")


def test_a_terminal_gets_a_bar_that_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out, force_terminal=True, width=160))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert list(track(range(144), "convert", unit="blocks")) == list(range(144))
    assert "convert" in out.getvalue()
    assert "144 of 144 blocks" in out.getvalue()


def test_a_loop_that_is_left_early_ends_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    loop = track(range(3), "convert")
    assert next(loop) == 0
    loop.close()
    assert capsys.readouterr().err == "convert: 3 to do\n"


def test_a_loop_within_a_loop_is_told_by_the_outer_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A search said "replaying: 80 steps to do" 54 times; and another terminal sees both."""
    for every in ("EVERY", "NOTED_EVERY"):
        monkeypatch.setattr(progress, every, 0.01)
    note, deadline, said, seen = tmp_path / "note.json", time.monotonic() + 20, "", ""
    with noted(note), within(Meter("search", None, "")):
        for _ in track(["layer 3 mlp"], "NVFP4 alone", unit="groups", name=str):
            for step in track(range(2), "replaying", unit="steps"):
                while step and not ("replaying 1/2" in said and "1 of 2" in seen):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                    said += capsys.readouterr().err
                    seen = note.read_text("utf-8") if note.exists() else ""
    assert "NVFP4 alone: 0 of 1 groups, layer 3 mlp, 0 s; replaying 1/2\n" in said
    assert "replaying: 2 steps to do" not in said
    under_way = json.loads(seen)["under_way"]
    assert [line.partition(":")[0] for line in under_way] == ["search", "NVFP4 alone", "replaying"]
    assert not note.exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (13_900_000, "13.9 MB"), (999_499, "999 kB"),
        (999_600, "1.00 MB"), (9_996_000, "10.0 MB"), (51_648_000_000, "51.6 GB"), (2e15, "2,000 TB"),
    ],
)  # fmt: skip
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (65, "1 min 05 s"), (8040, "2 h 14 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines_are_wrapped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CI job's log was wrapped at 80 columns, within paths and commands."""
    line = " ".join(f"word{i}" for i in range(100))

    def shown(**options: Any) -> list[str]:
        out = io.StringIO()
        screen(file=out, **options).print(line)
        return out.getvalue().splitlines()

    monkeypatch.delenv("COLUMNS", raising=False)
    assert shown() == [line]
    assert len(shown(force_terminal=True)) > 1
    monkeypatch.setenv("COLUMNS", "100")
    assert max(map(len, shown())) in range(80, 101)


def test_a_pipe_gets_whole_lines() -> None:
    """The console is made when the module is imported, so a process of its own shows it."""
    code = "from quantize.host.progress import say; say('word ' * 100)"
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert len(done.stderr.splitlines()) == 1
