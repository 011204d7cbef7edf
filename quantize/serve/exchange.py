"""One HTTP request: reserves places in the queue, submits its jobs, and collects their events.

The request's places and slots are freed when its asyncio task ends: after the answer or a refusal,
or when the client hangs up. The time limit runs from the moment the body was read.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from quantize.serve.failures import RequestError
from quantize.serve.scheduler import Draft, Event, Job, Scheduler
from quantize.serve.text import Delta

MAX_PENDING_DRAFTS = 64  # a client that reads slowly misses drafts, never text


class Exchange:
    """A request: `count` jobs, one per choice, done within `seconds`; raises as `reserve` does."""

    def __init__(self, scheduler: Scheduler, seconds: float, count: int) -> None:
        scheduler.reserve(count)
        self._scheduler, self._reserved, self._seconds = scheduler, count, seconds
        self._jobs: Sequence[Job] = ()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        task: Any = asyncio.current_task()
        task.add_done_callback(lambda _: self._close())

    def post(self, index: int, event: Event) -> None:
        """Queue an event of job `index`, from any thread; drop a draft if the queue is long."""
        self._loop.call_soon_threadsafe(self._put, index, event)

    def _put(self, index: int, event: Event) -> None:
        if not (isinstance(event, Draft) and self._events.qsize() >= MAX_PENDING_DRAFTS):
            self._events.put_nowait((index, event))

    @asynccontextmanager
    async def in_time(self) -> AsyncGenerator[None]:
        """Limit a block to the time left (RequestError 504); any error frees places and ends jobs."""
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except BaseException as error:
            self._close()
            if not isinstance(error, TimeoutError):
                raise
            message = f"not finished within {self._seconds:g} s"
            raise RequestError(504, message, code="timeout") from None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Give the scheduler one job per reserved place; RequestError 503 during shutdown."""
        self._reserved = 0
        self._scheduler.submit(jobs)
        self._jobs = jobs

    async def events(self) -> AsyncIterator[tuple[int, Draft | Delta]]:
        """Yield (job index, event) until all jobs end; RequestError: a job failed, or time is up."""
        unfinished = len(self._jobs)
        while unfinished:
            async with self.in_time():
                index, event = await self._events.get()
                if isinstance(event, RequestError):
                    raise event
            unfinished -= isinstance(event, Delta) and event.finish is not None
            yield index, event

    def _close(self) -> None:
        self._scheduler.cancel(self._jobs, self._reserved)
        self._reserved = 0
