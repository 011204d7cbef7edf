"""One HTTP request: it reserves places, submits its jobs, collects their events, and can end early.

A client that hangs up, or waits longer than the request may take, frees its place in the queue and its
slots. Time counts from the moment the body was read: preparing is waiting too.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from quantize.serve.failures import RequestError
from quantize.serve.scheduler import Draft, Event, Job, Scheduler
from quantize.serve.text import Delta

Prepared = TypeVar("Prepared")

MAX_PENDING_DRAFTS = 64  # a client that reads slowly misses drafts, never text


class Exchange:
    """A request's jobs and their events, in the order in which they happen.

    Args:
        scheduler: runs the jobs.
        request: the HTTP request, whose client may hang up.
        seconds: time the request may take.
        count: number of jobs that it will have.

    Raises:
        RequestError: as in `Scheduler.reserve`.
    """

    def __init__(self, scheduler: Scheduler, request: Request, seconds: float, count: int) -> None:
        scheduler.reserve(count)
        self._reserved = count
        self.scheduler = scheduler
        self.jobs: Sequence[Job] = ()
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._seconds = seconds
        self._deadline = self._loop.time() + seconds
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._gone = self._loop.create_task(self._until_gone())

    def post(self, index: int, event: Event) -> None:
        """Add an event of job `index`, from any thread."""
        self._loop.call_soon_threadsafe(self._put, index, event)

    def _put(self, index: int, event: Event) -> None:
        if not (isinstance(event, Draft) and self._events.qsize() >= MAX_PENDING_DRAFTS):
            self._events.put_nowait((index, event))

    async def prepare(self, work: Coroutine[Any, Any, Prepared]) -> Prepared:
        """Return the result of `work`, unless the client hangs up or the time runs out before.

        Raises:
            RequestError: 499 or 504; or what `work` raises.
        """
        task = self._loop.create_task(work)
        left = self._deadline - self._loop.time()
        try:
            done, _ = await asyncio.wait(
                {task, self._gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            task.cancel()
        if task in done:
            return task.result()
        raise client_gone() if self._gone in done else self._too_late()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over the jobs, one for each place reserved.

        Raises:
            RequestError: as in `Scheduler.submit`.
        """
        self._reserved = 0
        self.scheduler.submit(jobs)
        self.jobs = jobs
        self._gone.add_done_callback(self._tell_gone)

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
            raise self._too_late() from None
        finally:
            self.close()

    def close(self) -> None:
        """Cancel jobs that still run, and free reserved places."""
        self.scheduler.give_back(self._reserved)
        self._reserved = 0
        self.scheduler.cancel(self.jobs)
        self._gone.cancel()

    def _too_late(self) -> RequestError:
        return RequestError(504, f"not finished within {self._seconds:g} s", code="timeout")

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            continue

    def _tell_gone(self, gone: asyncio.Task[None]) -> None:
        if not gone.cancelled():
            self._put(0, client_gone())


def client_gone() -> RequestError:
    """Return the error of a client that hung up; nobody reads it."""
    return RequestError(499, "the client hung up", code="client_gone")
