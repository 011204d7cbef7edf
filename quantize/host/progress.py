"""Shows on stderr how far a loop is: units and tokens done, their rate, the time that is left.

A terminal shows a bar. Elsewhere (CI, a pipe) a line is printed when the loop begins, when it ends,
and every 30 seconds between, with an estimate of the time left; so a log stays readable. An inner
loop has no bar or lines of its own; the outer loop's bar or lines show the inner loop's progress.

While `noted` runs, a file holds the same figures for another terminal (`quantize status`).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from quantize.host.files import write_text
from quantize.host.processes import is_first
from quantize.host.units import duration

UNWRAPPED = 100_000  # columns, where no terminal shows them

T = TypeVar("T")


def screen(**options: Any) -> Console:
    """Return a console that wraps lines to the width of a terminal, or to COLUMNS; a log's never."""
    made = Console(**options)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = UNWRAPPED
    return made


# Only the first of the processes that torchrun starts prints.
console = screen(stderr=True, quiet=not is_first())
EVERY = 30.0  # seconds between two lines where no bar is drawn
NOTED_EVERY = 2.0  # seconds between two notes for another terminal
_under_way: "list[Meter]" = []  # the outermost first
_said: list[str] = []  # the last line


def say(message: str) -> None:
    """Print one plain line to stderr: what a stage starts, skips or has found."""
    _said[:] = [message]
    console.print(message, highlight=False, markup=False)


class Meter:
    """Counts the units and tokens that a loop has done; it has `total` units, None if not known.

    `unit` is the plural word for a unit ("samples"); `item` names the current unit, or is empty.
    """

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit, self.item = title, total, unit, ""
        self.done = self.tokens = 0
        self._ahead = [0, 0]  # units and tokens that are made but not yet handed over
        self._began = time.monotonic()

    def add(self, units: int = 1, tokens: int = 0) -> None:
        """Count finished units and their tokens; they no longer count as announced."""
        self.done, self.tokens = self.done + units, self.tokens + tokens
        self.announce(-units, -tokens)

    def announce(self, units: int, tokens: int) -> None:
        """Show units and tokens as made although they are unfinished; `add` counts them later."""
        self._ahead = [max(0, self._ahead[0] + units), max(0, self._ahead[1] + tokens)]

    @property
    def made(self) -> int:
        """The number of units made, both finished and announced."""
        return self.done + self._ahead[0]

    def status(self) -> str:
        """Return "37 of 120 samples, 8,214 tokens (513/s), 16 s, about 36 s left"."""
        seconds = time.monotonic() - self._began
        of = "" if self.total is None else f" of {self.total:,}"
        counted = [f"{self.made:,}{of} {self.unit}".rstrip()] if self.unit or self.made else []
        parts = [*counted, *filter(None, [self.item]), *self._token_rate(seconds)]
        parts.append(duration(seconds))
        if self.total is not None and 0 < self.made < self.total:
            remaining = seconds / self.made * (self.total - self.made)
            parts.append(f"about {duration(remaining)} left")
        return ", ".join(parts)

    def end(self) -> str:
        """Return a line that says what the finished loop has done."""
        seconds = time.monotonic() - self._began
        parts = [f"{self.done:,} {self.unit}".rstrip() + " done", *self._token_rate(seconds)]
        return f"{', '.join(parts)} in {seconds:.1f} s"

    def _token_rate(self, seconds: float) -> list[str]:
        tokens = self.tokens + self._ahead[1]
        return [f"{tokens:,} tokens ({tokens / max(seconds, 1e-3):,.0f}/s)"] if tokens else []


def track(
    items: Iterable[T],
    title: str,
    total: int | None = None,
    unit: str = "",
    name: Callable[[T], str] = lambda _: "",
) -> Iterator[T]:
    """Yield `items` while showing `name(item)` of the current one, and how many are done and left.

    An item is done when the next one is asked for. `total` is len(items) by default, if that is known.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with metered(title, total, unit) as meter:
        for item in items:
            meter.item = name(item)
            yield item
            meter.add()


@contextmanager
def metered(title: str, total: int | None, unit: str, *, brief: bool = False) -> Generator[Meter]:
    """Yield a meter, shown as a bar or as lines; if `brief`, without lines at begin and end.

    Within another meter it is neither: the outer meter's line tells how far it is.
    """
    meter = Meter(title, total, unit)
    with within(meter) as is_outermost:
        if not is_outermost:
            yield meter
            return
        with _bar(meter) if sys.stderr.isatty() else _lines(meter, brief):
            yield meter


@contextmanager
def within(meter: Meter) -> Generator[bool]:
    """List a meter as running in this block; yield True if no outer meter has a total or unit."""
    is_outermost = all(meter.total is None and not meter.unit for meter in _under_way)
    _under_way.append(meter)
    try:
        yield is_outermost
    finally:
        _under_way.remove(meter)


def _inner(meter: Meter) -> list[str]:
    inner = _under_way[_under_way.index(meter) + 1 :] if meter in _under_way else []
    return [f"{meter.title} {meter.made:,}/{meter.total or '?'}" for meter in inner]


@contextmanager
def noted(file: Path) -> Generator[None]:
    """Keep the running loops' status and `say`'s last message in a JSON file during the block."""
    if not is_first():
        yield
        return
    last = ""

    def note() -> None:
        nonlocal last
        lines = [f"{meter.title}: {meter.status()}" for meter in list(_under_way)]
        if (text := json.dumps({"under_way": lines, "said": _said})) != last:
            with suppress(OSError):  # a full disk, say, which the work itself will report
                write_text(file, text)
        last = text

    try:
        with every(NOTED_EVERY, note):
            yield
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def every(seconds: float, work: Callable[[], None]) -> Generator[None]:
    """Call `work` once every `seconds` seconds, on another thread, while the block runs."""
    over = Event()

    def keep() -> None:
        while not over.wait(seconds):
            work()

    keeper = Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


class _Status(ProgressColumn):
    """Shows a meter in words, and updates the bar beside it."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def render(self, task: Task) -> Text:
        task.completed = self.meter.made
        return Text("; ".join([self.meter.status(), *_inner(self.meter)]))


@contextmanager
def _bar(meter: Meter) -> Generator[None]:
    columns = (TextColumn("{task.description}"), BarColumn(), _Status(meter))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(meter.title, total=meter.total)
        yield
        bar.update(task, completed=meter.made)


@contextmanager
def _lines(meter: Meter, brief: bool) -> Generator[None]:
    of = "an unknown number of" if meter.total is None else f"{meter.total:,}"
    if not brief:
        say(f"{meter.title}: {of} {meter.unit}".rstrip() + " to do")

    def speak() -> None:
        say("; ".join([f"{meter.title}: {meter.status()}", *_inner(meter)]))

    with every(EVERY, speak):
        yield
    if not brief:
        say(f"{meter.title}: {meter.end()}")
