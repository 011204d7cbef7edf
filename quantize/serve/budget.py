"""What a request's form may cost: units of work, which shape an answer, and seconds, which end it.

Units are counted alike on every machine, so that a seed gives the same answer everywhere: when they
are used up, an answer takes its known way to an end. Seconds protect other requests. They are seconds
of a thread's own time, so that a busy machine does not end anyone's request.
"""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

DELAY = 0.25  # seconds that one request's form may take of any one canvas of another request
ALONE = 2.0  # seconds of one canvas while no other request runs
PREPARING = 1.0  # seconds for finding out whether any text of a form fits


class OverBudgetError(Exception):
    """Working on a form has taken all the seconds that it may take; the message says so."""


class WorkMeter:
    """Counts the work on one form or one canvas; `units` is how much is left before it is cut short."""

    def __init__(self, units: int, most: Callable[[], float], of_what: str) -> None:
        self.units = units
        self.complaint: str | None = None  # why a search ended early, if it did
        self._begun = time.thread_time()
        self._most, self._of_what = most, of_what  # `most`: how many seconds it may take, by now

    def step(self) -> None:
        """Count a unit, on the thread that does the work; OverBudgetError: no seconds are left."""
        self.units -= 1
        most = self._most()
        if self.seconds > most:
            raise OverBudgetError(
                f"working out {self._of_what} takes more than {most:.2g} s; ask for a "
                f"simpler form, or for fewer max_tokens"
            )

    @property
    def seconds(self) -> float:
        """Seconds of this thread's own time since the meter was made."""
        return time.thread_time() - self._begun


class Allowance:
    """The engine thread's time that one request's form may take, whatever its number of choices.

    Before each step the scheduler notes since when the oldest canvas of another request is under way.
    What the form has taken since then delays that canvas, and is at most DELAY seconds. A request that
    comes during a step waits for its end, and holds what is worked on then to DELAY seconds too.
    """

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque()  # (when, seconds)
        self._since: float | None = None

    def note(self, since: float | None) -> None:
        """Note the time (`monotonic`) since which the oldest canvas of others runs; None: no other."""
        self._since = since
        while self._taken and (since is None or self._taken[0][0] < since):
            self._taken.popleft()

    def another_came(self) -> None:
        """Note that another request waits, if none ran until now; from any thread."""
        if self._since is None:
            self._since = time.monotonic()

    @property
    def most(self) -> float:
        """Seconds that a piece of work may take."""
        return ALONE if self._since is None else max(DELAY - sum(s for _, s in self._taken), 0.0)

    @contextmanager
    def meter(self, units: int) -> Generator[WorkMeter]:
        """Give a meter for one piece of work on the engine's thread, and count what it takes."""
        meter = WorkMeter(units, lambda: self.most, "which tokens of a canvas the form allows")
        try:
            yield meter
        finally:
            self._taken.append((time.monotonic(), meter.seconds))
