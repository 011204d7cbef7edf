"""Progress bars with an estimate of the time left, on stderr, for every loop that takes seconds.

In a terminal a rich bar; elsewhere (CI, a pipe) one line when the loop starts and one when it ends,
so that a log stays readable.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")

# Of the processes that torchrun starts, the first speaks.
console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")


def say(message: str) -> None:
    """Print one plain line to stderr: what a stage starts, skips or has found."""
    console.print(message, highlight=False, markup=False)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield `items` while showing how many are done and how long the rest will take.

    `total` is taken from `len(items)` when it is not given; an unknown total shows a count only.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        yield from _with_bar(items, description, total)
    else:
        yield from _with_lines(items, description, total)


def _with_bar(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield from bar.track(items, total=total, description=description)


def _with_lines(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    say(f"{description}: {total if total is not None else 'an unknown number'} to do")
    started, count = time.monotonic(), 0
    for item in items:
        yield item
        count += 1
    say(f"{description}: {count} done in {time.monotonic() - started:.1f} s")
