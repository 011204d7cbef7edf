"""One thread drives the engine: jobs wait in a queue, and take or leave a slot between canvases.

    while there is work:
        drop cancelled jobs -> admit waiting jobs to free slots -> denoise until a canvas is finished,
        and meanwhile send what the previous canvas added -> release the slots of finished jobs

A free slot goes to the waiting job whose request has the fewest slots, and no request has all slots:
however many choices it wants, and however often a form has a canvas denoised again, another request
begins with the next canvas.

This thread also makes the text of answers, because a stop string must free a slot before the next
canvas begins. Without stop strings, only EOS and length end an answer. Its text is made and sent
while the engine denoises the next canvas, so the GPU never waits for text. If the engine fails,
only the jobs in its slots fail. If the text of a job cannot be made, only that job fails.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quantize.errors import InputError
from quantize.runtime import Sampler
from quantize.runtime.engine.interface import Engine
from quantize.runtime.prompt.images import Images
from quantize.runtime.sampler.known_tokens import Given
from quantize.serve.budget import Allowance
from quantize.serve.failures import RequestError
from quantize.serve.guides import AnswerGuide
from quantize.serve.metrics import Metrics
from quantize.serve.text import Answer, Delta

TOGETHER = 0.002  # seconds that an idle engine waits for another job, while slots are free
LONGEST_RETRY = 60
BROKEN_AFTER = 3  # failures in a row after which the engine counts as broken

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """Canvas number `canvas` (from 0) after a step: all its tokens, and which are accepted."""

    canvas: int
    step: int
    tokens: list[int]
    accepted: list[bool]


Event = Delta | Draft | RequestError  # the last is a `RequestError`, or a `Delta` with a finish


@dataclass(eq=False)
class Job:
    """One sample to generate: an answer to the token ids `prompt`, with the noise of `seed`."""

    prompt: Sequence[int]
    seed: int
    sampler: Sampler
    answer: Answer  # the growing answer, to be read only after the last event
    emit: Callable[[Event], None]  # called on the scheduler's thread; for drafts, on an engine's
    drafts: bool = False  # whether every denoising step is emitted
    images: Images | None = None  # for the prompt's placeholders
    given: Given | None = None  # the known tokens
    guide: AnswerGuide | None = None  # the one in `given`; its error ends the job
    param: str = "messages"  # the request's parameter that `prompt` comes from
    request: object = None  # what the jobs of one request have in common
    cancelled: bool = False
    started: float = 0.0
    began: float = 0.0  # its canvas under way


class Scheduler:
    """Runs jobs on `engine`, used only by the scheduler's thread; at most `max_queue` jobs wait."""

    def __init__(self, engine: Engine, *, max_queue: int, metrics: Metrics) -> None:
        self.engine, self.max_queue, self.metrics = engine, max_queue, metrics
        self._waiting: deque[Job] = deque()
        self._reserved = 0  # places of jobs whose prompts are being prepared
        self._running: dict[int, Job] = {}
        self._unsaid: deque[Job] = deque()  # jobs whose last canvas has not been handed out
        self._changed = threading.Condition()
        self._draining = self._stopped = False
        self._seconds = 1.0  # running mean of the seconds that a job spends in its slot
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the scheduler's thread."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether new jobs are taken, and the engine did not fail BROKEN_AFTER times in a row."""
        alive = self._thread.is_alive() and not self._draining
        return alive and self._failures < BROKEN_AFTER

    @property
    def load(self) -> tuple[int, int]:
        """Return how many jobs run, and how many wait or have a place reserved."""
        return len(self._running), len(self._waiting) + self._reserved

    def reserve(self, count: int) -> None:
        """Reserve `count` places in the queue for a request's jobs, before its prompt is encoded.

        RequestError: 503 during shutdown; 429: fewer places are free; 400: `count` exceeds `max_queue`.
        """
        if count > self.max_queue:
            raise RequestError(400, f"n: {count} choices, and the queue holds {self.max_queue}")
        with self._changed:
            if self._draining:
                raise _shutting_down()
            waiting = self.load[1]
            if waiting + count > self.max_queue:
                later = min(1 + int(self._seconds * waiting / self.engine.capacity), LONGEST_RETRY)
                message = f"the queue is full: {waiting} of {self.max_queue} are waiting"
                raise RequestError(429, message, code="queue_full", retry_after=later)
            self._reserved += count

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs in reserved places; in a shutdown, free the places, raise RequestError 503."""
        request = object()
        for job in jobs:
            job.request = request
        with self._changed:
            self._reserved -= len(jobs)
            if self._draining:
                raise _shutting_down()
            self._waiting.extend(jobs)
            for allowance in filter(None, map(_allowance, tuple(self._running.values()))):
                allowance.another_came()
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job], reserved: int = 0) -> None:
        """Free `reserved` places; jobs send no more events; running ones end after their canvas."""
        with self._changed:
            self._reserved -= reserved
            for job in jobs:
                job.cancelled = True
                if job in self._waiting:
                    self._waiting.remove(job)

    def drain(self) -> None:
        """Take no more jobs, and refuse waiting jobs with 503; running jobs go on."""
        with self._changed:
            self._draining = True
            refused, self._waiting = self._waiting, deque()
            self._changed.notify()
        for job in refused:
            job.emit(_shutting_down())

    def stop(self) -> None:
        """Drain, end running jobs after their current canvas, and wait until the thread ends."""
        self.drain()
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():  # a server may end before it began
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            self._leave([slot for slot, job in self._running.items() if job.cancelled])
            self._admit()
            if self._running:
                self._step()
            else:
                self._speak()
            self.metrics.running.set(len(self._running))
            self.metrics.waiting.set(self.load[1])
        self._speak()
        for slot in list(self._running):
            self._running[slot].emit(_shutting_down())
            self._leave([slot])

    def _wait(self) -> bool:
        with self._changed:
            idle = False
            while not (self._waiting or self._running or self._unsaid or self._stopped):
                idle = True
                self._changed.wait()
            # Jobs that come together begin together: waiting a canvas costs far more than a moment.
            jobs = 0 if idle else len(self._waiting)
            while jobs < len(self._waiting) < self.engine.capacity and not self._stopped:
                jobs = len(self._waiting)
                self._changed.wait(TOGETHER)
            return not self._stopped

    def _admit(self) -> None:
        for slot in range(self.engine.capacity):
            if slot in self._running:
                continue
            if (job := self._next()) is None:
                return
            job.started = job.began = time.monotonic()
            try:
                self.engine.admit(slot, job.prompt, job.seed, job.sampler, job.images, job.given)
            except InputError as error:
                job.emit(RequestError(400, str(error), param=job.param, code="invalid_prompt"))
            except Exception:  # it is logged and answered with a 500; the server goes on
                self._fail([job])
                self.engine.release(slot)
            else:
                self._running[slot] = job

    def _next(self) -> Job | None:
        """Take the waiting job whose request has the fewest slots, unless it has all but one."""
        slots = Counter(job.request for job in self._running.values())
        with self._changed:
            job = min(self._waiting, key=lambda job: slots[job.request], default=None)
            if job is None or slots[job.request] >= max(1, self.engine.capacity - 1):
                return None
            self._waiting.remove(job)
            return job

    def _step(self) -> None:
        slots = sorted(self._running)
        watched = any(self._running[slot].drafts for slot in slots)
        if watched:
            self._speak()  # before the first draft of the next canvas
        self._note_canvases()
        started = time.monotonic()
        try:
            canvases = self.engine.denoise(slots, self._show if watched else None, self._speak)
        except Exception:  # out of memory, a kernel's fault: the server goes on
            self._speak()
            self._fail([self._running[slot] for slot in slots])
            self._leave(slots)
            return
        self._speak()  # in case the engine did not call it
        self._failures = 0
        finished = [(s, canvas) for s, canvas in zip(slots, canvases, strict=True) if canvas]
        self.metrics.canvas_seconds.observe(time.monotonic() - started)
        self.metrics.batch.observe(len(slots))
        self.metrics.canvases.inc(len(finished))
        self.metrics.steps.inc(sum(canvas.steps for _, canvas in finished))
        for slot, canvas in finished:
            job = self._running[slot]
            job.began = time.monotonic()
            held = None if job.guide is None else job.guide.constraint
            if held and held.error is not None:
                message = f"the answer could not be held to its form: {held.error}"
                job.emit(RequestError(400, message, code="constraint_failed"))
                self._leave([slot])
                continue
            with self._failing_alone(job):
                job.answer.commit(canvas, held is not None and held.complete)
                self._unsaid.append(job)
            if job.answer.finish:
                self._leave([slot])
                self._seconds += 0.1 * (time.monotonic() - job.started - self._seconds)
                self.metrics.tokens.inc(job.answer.tokens)

    def _note_canvases(self) -> None:
        """Tell each request's allowance since when the oldest canvas of another request runs."""
        for job in self._running.values():
            if (allowance := _allowance(job)) is not None:
                others = (o.began for o in self._running.values() if o.request is not job.request)
                allowance.note(min(others, default=time.monotonic() if self._waiting else None))

    def _speak(self) -> None:
        while self._unsaid:
            job = self._unsaid.popleft()
            if not job.cancelled:
                with self._failing_alone(job):
                    job.emit(job.answer.delta())

    @contextmanager
    def _failing_alone(self, job: Job) -> Generator[None]:
        try:
            yield
        except Exception:  # it is logged and answered with a 500; the server goes on
            self._fail([job])
            job.cancelled = True  # which frees its slot once its canvas is done

    def _show(self, slot: int, step: int, tokens: list[int], accepted: list[bool]) -> None:
        job = self._running[slot]
        if job.drafts and not job.cancelled:
            job.emit(Draft(job.answer.sample.canvases, step, tokens, accepted))

    def _leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.engine.release(slot)
            del self._running[slot]

    def _fail(self, jobs: Sequence[Job]) -> None:
        self._failures += 1
        self.metrics.failures.inc()
        log.exception("the engine failed; %d samples are lost", len(jobs))
        message = "the engine failed; see the server's log"
        for job in jobs:
            job.emit(RequestError(500, message, code="engine_failed"))


def _allowance(job: Job) -> Allowance | None:
    held = None if job.guide is None else job.guide.constraint
    return None if held is None else held.allowance


def _shutting_down() -> RequestError:
    return RequestError(503, "the server is shutting down", code="shutting_down", retry_after=10)
