"""The scheduler, on an engine that waits to be told: who joins when, who leaves, who is refused."""

import queue
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from quantize.runtime.engine.interface import Canvas
from quantize.serve import scheduler
from quantize.serve.failures import RequestError
from quantize.serve.metrics import Metrics
from quantize.serve.scheduler import Event, Job, Scheduler
from quantize.serve.text import Answer, Delta, Text
from tests.support.serving import SAMPLER, ScriptedEngine, tokenizer


class Case:
    """A scheduler and the events of its jobs."""

    def __init__(self, max_queue: int = 8, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine(2)
        self.scheduler = Scheduler(self.engine, max_queue=max_queue, metrics=Metrics())
        self.scheduler.start()

    def job(self, canvases: int) -> tuple[Job, "queue.Queue[Event]"]:
        events: queue.Queue[Event] = queue.Queue()
        answer = Answer(Text(tokenizer()).split, SAMPLER, 8 * canvases, canvases)
        return Job([2], 0, SAMPLER, answer, events.put), events

    def submit(self, canvases: int) -> tuple[Job, "queue.Queue[Event]"]:
        job, events = self.job(canvases)
        self.queue([job])
        return job, events

    def queue(self, jobs: Sequence[Job]) -> None:
        self.scheduler.reserve(len(jobs))
        self.scheduler.submit(jobs)

    def canvas(self) -> None:
        """Wait until the engine is at a canvas, and let it finish that one."""
        assert self.engine.entered.acquire(timeout=20)
        self.engine.allowed.release()


@pytest.fixture
def case() -> Generator[Case]:
    found = Case()
    yield found
    found.engine.allowed.release(100)
    found.scheduler.stop()
    assert found.engine.said == {}


def finished(events: "queue.Queue[Event]") -> str:
    text = ""
    while True:
        event = events.get(timeout=20)
        assert isinstance(event, Delta), event
        text += event.content
        if event.finish:
            return text


def test_jobs_join_and_leave_at_canvas_boundaries(case: Case) -> None:
    _, first = case.submit(3)
    assert case.engine.entered.acquire(timeout=20)
    _, second = case.submit(1)  # arrives inside the first canvas of `first`
    _, third = case.submit(1)  # finds both slots taken
    case.engine.allowed.release()
    for _ in range(2):
        case.canvas()
    assert finished(first).startswith("c1 ")
    assert finished(second).startswith("c1 ")
    assert finished(third).startswith("c1 ")
    assert case.engine.batches == [[0], [0, 1], [0, 1]]


def test_no_request_has_all_slots_and_the_fewest_come_first(case: Case) -> None:
    """A request of three choices came first; two others begin with the next canvas each."""
    choices = [case.job(2) for _ in range(3)]
    case.queue([job for job, _ in choices])
    assert case.engine.entered.acquire(timeout=20)
    _, second = case.submit(1)
    _, third = case.submit(1)
    case.engine.allowed.release()
    case.canvas()
    assert finished(second).startswith("c1 ")
    case.canvas()
    assert finished(third).startswith("c1 ")
    case.engine.allowed.release(100)
    for _, events in choices:
        assert finished(events).startswith("c1 ")
    assert case.engine.batches == [[0], [0, 1], [0, 1], [0], [0], [0]]


def test_a_canvas_that_is_denoised_again_lets_others_in() -> None:
    """As a form may have it, up to eight times: the engine returns no canvas in between."""

    class Again(ScriptedEngine):
        tries = 0

        def denoise(self, slots: Sequence[int], *arguments: Any) -> list[Canvas | None]:
            canvases = super().denoise(slots, *arguments)
            self.tries += 1
            return [
                None if slot == 0 and self.tries < 4 else c
                for slot, c in zip(slots, canvases, strict=True)
            ]

    case = Case(engine=Again(2))
    _, first = case.submit(1)
    assert case.engine.entered.acquire(timeout=20)
    _, second = case.submit(1)
    case.engine.allowed.release(100)
    assert finished(second)
    assert finished(first)
    case.scheduler.stop()
    assert case.engine.batches == [[0], [0, 1], [0], [0]]


def test_jobs_that_come_together_begin_together(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "TOGETHER", 30.0)
    _, first = case.submit(2)
    assert not case.engine.entered.acquire(timeout=0.05)  # there is a second slot
    _, second = case.submit(1)
    case.canvas()
    assert finished(second).startswith("c1 ")
    assert case.engine.entered.acquire(timeout=20)
    _, third = case.submit(1)
    case.engine.allowed.release()
    assert finished(first).startswith("c1 ")
    case.canvas()  # at once: the engine was not idle
    assert finished(third).startswith("c1 ")
    assert case.engine.batches == [[0, 1], [0], [0]]


@pytest.mark.parametrize(("stops", "before"), [([], 0), (["zzz"], 1)])
def test_text_is_made_once_the_next_canvas_has_begun(stops: list[str], before: int) -> None:
    """But for stop strings, which decide whether there is a next one."""
    made: list[Sequence[int]] = []

    def split(tokens: Sequence[int]) -> tuple[str, str]:
        made.append(tokens)
        return "", "text"

    class Watched(ScriptedEngine):
        def denoise(self, *arguments: Any) -> list[Canvas]:
            found.append(len(made))
            return super().denoise(*arguments)

    engine, found, events = Watched(1), list[int](), queue.Queue[Event]()
    engine.free = True
    running = Scheduler(engine, max_queue=1, metrics=Metrics())
    running.start()
    running.reserve(1)
    running.submit([Job([2], 0, SAMPLER, Answer(split, SAMPLER, 24, 3, stops), events.put)])
    finished(events)
    running.stop()
    assert found == [0, before, 2 * before + 1]
    assert len(made) == 3 + 3 * before


def test_a_scheduler_that_never_began_is_stopped() -> None:
    never_begun = Scheduler(ScriptedEngine(1), max_queue=1, metrics=Metrics())
    never_begun.stop()
    assert not never_begun.healthy


def test_every_canvas_is_handed_out_once_by_an_engine_that_lends_no_time(case: Case) -> None:
    case.engine.lends = False
    case.engine.free = True
    _, events = case.submit(3)
    deltas = [events.get(timeout=20) for _ in range(3)]
    assert [isinstance(delta, Delta) and delta.content[:3] for delta in deltas] == [
        "c1 ", "c2 ", "c3 ",
    ]  # fmt: skip
    assert events.empty()


def test_a_full_queue_refuses_all_jobs_of_a_request(case: Case) -> None:
    case.submit(1)
    assert case.engine.entered.acquire(timeout=20)
    case.queue([case.job(1)[0] for _ in range(7)])
    with pytest.raises(RequestError, match="the queue is full: 7 of 8 are waiting") as caught:
        case.queue([case.job(1)[0] for _ in range(2)])
    assert caught.value.status == 429
    assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
    assert case.scheduler.load == (1, 7)
    with pytest.raises(RequestError, match="9 choices, and the queue holds 8"):
        case.queue([case.job(1)[0] for _ in range(9)])


def test_a_cancelled_job_leaves_the_queue_now_and_a_slot_after_its_canvas(case: Case) -> None:
    running, said = case.submit(100)
    assert case.engine.entered.acquire(timeout=20)
    waiting, _ = case.submit(1)
    case.scheduler.cancel([running, waiting])
    assert case.scheduler.load == (1, 0)
    _, later = case.submit(1)
    case.engine.allowed.release()
    case.canvas()
    assert finished(later).startswith("c1 ")
    assert case.engine.batches == [[0], [0]]
    assert said.empty()  # not a word after it was cancelled


def test_a_failure_fails_its_batch_and_no_one_else(case: Case) -> None:
    _, events = case.submit(1)
    assert case.engine.entered.acquire(timeout=20)
    case.engine.fault = RuntimeError("out of memory")
    case.engine.allowed.release()
    failure = events.get(timeout=20)
    assert isinstance(failure, RequestError)
    assert failure.status == 500
    assert "memory" not in str(failure)  # the log has it
    case.engine.fault = None
    _, later = case.submit(1)
    case.canvas()
    assert finished(later).startswith("c1 ")
    assert case.scheduler.healthy


@pytest.mark.parametrize("step", ["commit", "delta"])
def test_text_that_cannot_be_made_fails_its_job_and_no_one_else(
    case: Case, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (broken, events), (_, beside) = jobs = case.job(3), case.job(3)

    def failing(*_: object) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(broken.answer, step, failing)
    for job, _ in jobs:
        case.queue([job])
    case.engine.allowed.release(100)
    assert finished(beside).startswith("c1 ")
    failure = events.get(timeout=20)
    assert isinstance(failure, RequestError)
    assert failure.status == 500
    assert events.empty()  # one event ends a job
    assert case.engine.batches[-1] == [1]  # text is made while the engine is at the next canvas
    assert case.scheduler.healthy


def test_an_engine_that_keeps_failing_is_not_healthy(case: Case) -> None:
    case.engine.fault = RuntimeError("sticky")
    for _ in range(3):
        assert case.scheduler.healthy
        _, events = case.submit(1)
        case.canvas()
        assert isinstance(events.get(timeout=20), RequestError)
    assert not case.scheduler.healthy


def test_draining_refuses_who_waits_and_finishes_who_runs(case: Case) -> None:
    _, running = case.submit(1)
    assert case.engine.entered.acquire(timeout=20)
    _, waiting = case.submit(1)
    case.scheduler.drain()
    refused = waiting.get(timeout=20)
    assert isinstance(refused, RequestError)
    assert refused.status == 503
    with pytest.raises(RequestError, match="shutting down"):
        case.submit(1)
    case.engine.allowed.release()
    assert finished(running).startswith("c1 ")


def test_stopping_ends_what_runs_with_an_answer(case: Case) -> None:
    _, running = case.submit(100)
    assert case.engine.entered.acquire(timeout=20)
    case.engine.allowed.release(2)
    case.scheduler.stop()
    *_, last = running.queue
    assert isinstance(last, RequestError)
    assert last.status == 503
