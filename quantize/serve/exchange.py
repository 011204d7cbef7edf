"""The jobs of one HTTP request: submit, collect their events, end them when nobody listens.

Whoever hangs up, or waits longer than the request may take, frees its slots: the jobs are cancelled.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request

from quantize.serve.failures import RequestError
from quantize.serve.scheduler import Draft, Event, Job, Scheduler
from quantize.serve.text import Delta

MAX_PENDING_DRAFTS = 64  # a client that reads slowly misses drafts, never text


class Exchange:
    """A request's jobs and their events, in the order in which they happen.

    Args:
        scheduler: runs the jobs.
        request: its client may hang up.
        seconds: time the request may take.
    """

    def __init__(self, scheduler: Scheduler, request: Request, seconds: float) -> None:
        self.scheduler = scheduler
        self.jobs: Sequence[Job] = ()
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._seconds = seconds
        self._deadline = self._loop.time() + seconds
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._gone: asyncio.Task[None] | None = None

    def post(self, index: int, event: Event) -> None:
        """Add an event of job `index`, from any thread."""
        self._loop.call_soon_threadsafe(self._put, index, event)

    def _put(self, index: int, event: Event) -> None:
        if not (isinstance(event, Draft) and self._events.qsize() >= MAX_PENDING_DRAFTS):
            self._events.put_nowait((index, event))

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand the jobs over.

        Raises:
            RequestError: as `Scheduler.submit`.
        """
        self.scheduler.submit(jobs)
        self.jobs = jobs
        self._gone = self._loop.create_task(self._cancel_when_gone())

    async def events(self) -> AsyncIterator[tuple[int, Draft | Delta]]:
        """Yield (job, event) until every job has finished.

        Raises:
            RequestError: a job failed, or time ran out; all jobs are cancelled then.
        """
        unfinished = len(self.jobs)
        try:
            while unfinished:
                async with asyncio.timeout_at(self._deadline):
                    index, event = await self._events.get()
                if isinstance(event, RequestError):
                    raise event
                unfinished -= isinstance(event, Delta) and event.finish is not None
                yield index, event
        except TimeoutError:
            raise RequestError(
                504, f"not finished within {self._seconds:g} s", code="timeout"
            ) from None
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs."""
        self.scheduler.cancel(self.jobs)
        if self._gone is not None:
            self._gone.cancel()

    async def _cancel_when_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            continue
        gone = RequestError(499, "the client hung up", code="client_gone")
        self._put(0, gone)
