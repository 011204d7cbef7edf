"""Shows on stderr how far a loop is: units and tokens done, their rate, the time that is left.

In a terminal this is a bar; elsewhere (CI, a pipe) it is a line when the loop begins, one every 30
seconds with an estimate of what is left, and one when it ends, so that a log stays readable.
"""

import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from quantize.host.processes import is_first
from quantize.host.units import duration

T = TypeVar("T")

# Of the processes that torchrun starts, the first speaks.
console = Console(stderr=True, quiet=not is_first())
EVERY = 30.0  # seconds between two lines where no bar is drawn


def say(message: str) -> None:
    """Print one plain line to stderr: what a stage starts, skips or has found."""
    console.print(message, highlight=False, markup=False)


class Meter:
    """Counts what a loop has done, and what is known of the part that is under way.

    Args:
        title: names the loop.
        total: number of units, None where it is not known.
        unit: what is counted, in the plural.
    """

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self.tokens = 0
        self._ahead = [0, 0]  # units and tokens that are made but not yet handed over
        self._began = time.monotonic()

    def add(self, units: int = 1, tokens: int = 0) -> None:
        """Count finished units and their tokens, which are then no longer announced."""
        self.done, self.tokens = self.done + units, self.tokens + tokens
        self.announce(-units, -tokens)

    def announce(self, units: int, tokens: int) -> None:
        """Count units and tokens that are made but not yet handed over."""
        self._ahead = [max(0, self._ahead[0] + units), max(0, self._ahead[1] + tokens)]

    @property
    def made(self) -> int:
        """The number of units made, handed over or not."""
        return self.done + self._ahead[0]

    def status(self) -> str:
        """Return "37 of 120 samples, 8,214 tokens (513/s), 16 s, about 36 s left"."""
        seconds = time.monotonic() - self._began
        of = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{self.made:,}{of} {self.unit}".rstrip(), *self._token_rate(seconds)]
        parts.append(duration(seconds))
        if self.total is not None and 0 < self.made < self.total:
            left = seconds / self.made * (self.total - self.made)
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)

    def end(self) -> str:
        """Return a line that says what the finished loop has done."""
        seconds = time.monotonic() - self._began
        parts = [f"{self.done:,} {self.unit}".rstrip() + " done", *self._token_rate(seconds)]
        return f"{', '.join(parts)} in {seconds:.1f} s"

    def _token_rate(self, seconds: float) -> list[str]:
        tokens = self.tokens + self._ahead[1]
        return [f"{tokens:,} tokens ({tokens / max(seconds, 1e-3):,.0f}/s)"] if tokens else []


def track(items: Iterable[T], title: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Yield `items` while showing how many are done and how long the rest will take.

    An item is done when the next one is asked for. `total` is taken from `len(items)` when it is not
    given; an unknown total shows a count only.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with metered(title, total, unit) as meter:
        for item in items:
            yield item
            meter.add()


@contextmanager
def metered(title: str, total: int | None, unit: str) -> Generator[Meter]:
    """Yield a meter and show it while the block runs, as a bar or as lines."""
    meter = Meter(title, total, unit)
    with _bar(meter) if sys.stderr.isatty() else _lines(meter):
        yield meter


class _Status(ProgressColumn):
    """Shows a meter in words, and updates the bar beside it."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def render(self, task: Task) -> Text:
        """Return the meter's words."""
        task.completed = self.meter.made
        return Text(self.meter.status())


@contextmanager
def _bar(meter: Meter) -> Generator[None]:
    columns = (TextColumn("{task.description}"), BarColumn(), _Status(meter))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(meter.title, total=meter.total)
        yield
        bar.update(task, completed=meter.made)


@contextmanager
def _lines(meter: Meter) -> Generator[None]:
    of = "an unknown number of" if meter.total is None else f"{meter.total:,}"
    say(f"{meter.title}: {of} {meter.unit}".rstrip() + " to do")
    over = threading.Event()

    def speak() -> None:
        while not over.wait(EVERY):
            say(f"{meter.title}: {meter.status()}")

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()
    say(f"{meter.title}: {meter.end()}")
