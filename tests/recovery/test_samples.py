"""Finished samples: torn files, kills, foreign stores, and what a resumed run asks the model."""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import pytest

from quantize.errors import ResourceError
from quantize.host.processes import joined
from quantize.recovery.samples import (
    Completion,
    Finished,
    Request,
    SampleStore,
    Share,
    Waiting,
    sample_seed,
)
from tests.support.syncs import noted_syncs
from tests.support.two_processes import in_two

REQUESTS = [Request("x" * (i % 5 + 1) + str(i), i, 64) for i in range(10)]
MADE_WITH = {"model": "a", "sampler": {"t": 1}}


class Model:
    """Answers with the seed; remembers what it was asked; may die after some answers."""

    def __init__(self, dies_after: int = 1000) -> None:
        self.dies_after = dies_after
        self.asked: list[int] = []

    def __call__(self, requests: Waiting) -> Iterator[Finished]:
        for request in requests:
            if len(self.asked) == self.dies_after:
                raise KeyboardInterrupt
            self.asked.append(request.seed)
            yield request, Completion(f"é{request.seed}", 3, [2], False)


def complete(path: Path, model: Model, keep: Callable[[str], str] = str) -> SampleStore:
    store = SampleStore(path, MADE_WITH)
    store.complete(REQUESTS, model, lambda finished, total: finished, keep)
    return store


def test_a_killed_run_asks_for_the_rest_and_ends_with_the_same_bytes(
    tmp_path: Path,
) -> None:
    whole = Model()
    complete(tmp_path / "whole", whole)
    killed, resumed = Model(dies_after=2), Model()
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path / "killed", killed)
    complete(tmp_path / "killed", resumed)
    assert killed.asked + resumed.asked == whole.asked
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_line_torn_at_any_byte_is_run_again_and_nothing_else(tmp_path: Path) -> None:
    complete(tmp_path / "whole", Model())
    whole = (tmp_path / "whole").read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in {
        1,
        len(lines[0]) - 1,
        len(lines[0]),
        len(lines[0]) + 7,
        len(whole) - 1,
        len(whole),
    }:
        torn = tmp_path / f"torn{size}"
        torn.write_bytes(whole[:size])
        model = Model()
        complete(torn, model)
        assert torn.read_bytes() == whole
        kept = whole[:size].count(b"\n") - 1
        assert len(model.asked) == 10 - max(kept, 0)


@pytest.mark.parametrize("dies_after", [1000, 2])
def test_every_answer_is_written_before_the_next_and_all_is_on_the_disk_in_the_end(
    dies_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syncs wait here until nothing is asked any more: no model waits for them."""
    path, ended, late = tmp_path / "store", threading.Event(), []
    fsync = os.fsync
    monkeypatch.setattr("os.fsync", lambda file: (late.append(ended.wait(60)), fsync(file))[1])
    noted, lines = noted_syncs(monkeypatch, path), list[int]()

    def progress(finished: Iterator[Finished], total: int) -> Iterator[Finished]:
        try:
            for each in finished:
                yield each
                lines.append(path.read_bytes().count(b"\n"))
        finally:
            ended.set()

    store = SampleStore(path, MADE_WITH)
    with contextlib.suppress(KeyboardInterrupt):
        store.complete(REQUESTS, Model(dies_after), progress)
    assert lines == list(range(2, len(lines) + 2))  # with the header
    assert all(late)
    assert noted[-1].size == path.stat().st_size
    assert {sync.inode for sync in noted} == {path.stat().st_ino}
    assert len(noted) == 2


def test_samples_of_another_model_are_refused(tmp_path: Path) -> None:
    complete(tmp_path / "store", Model())
    with pytest.raises(ValueError, match="remove the file"):
        SampleStore(tmp_path / "store", MADE_WITH | {"model": "b"})
    with pytest.raises(ValueError, match="remove the file"):
        SampleStore(tmp_path / "store", MADE_WITH | {"sampler": {"t": 2}})


def test_a_store_says_what_its_samples_were_made_with(tmp_path: Path) -> None:
    """In its first line; the order of settings means nothing, and folders are made."""
    path = tmp_path / "run" / "side" / "store"
    complete(path, Model())
    header, *lines = path.read_text("utf-8").splitlines()
    assert json.loads(header) == {"made_with": MADE_WITH}
    assert sum("é3" in line for line in lines) == 1  # as it is, not escaped
    assert len(SampleStore(path, dict(reversed(MADE_WITH.items()))).done) == 10
    other = {"model": "b" * 500}
    with pytest.raises(ValueError, match="made with") as error:
        SampleStore(path, other)
    wanted = json.dumps({"made_with": other})[:200]
    assert f"made with {header[:200]}, not with {wanted}; remove" in str(error.value)


def test_longest_prompts_come_first_and_progress_is_told_how_many_samples(tmp_path: Path) -> None:
    told: list[int] = []
    model = Model()
    store = SampleStore(tmp_path / "store", MADE_WITH)
    store.complete(REQUESTS, model, lambda finished, total: (told.append(total), finished)[1])
    lengths = [len(REQUESTS[seed].prompt) for seed in model.asked]
    assert lengths == sorted(lengths, reverse=True)
    assert told == [10]


def test_most_tokens_come_before_longest_prompts(tmp_path: Path) -> None:
    """Else a long answer begins last, and every other slot idles until it ends."""
    requests = [Request("x" * i, i, 64 * (i % 3 + 1)) for i in range(1, 8)]
    model = Model()
    SampleStore(tmp_path / "store", {}).complete(requests, model, lambda finished, _: finished)
    assert model.asked == [5, 2, 7, 4, 1, 6, 3]


def test_every_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    together = complete_together(tmp_path / "store", 3)
    files = {store.path: len(model.asked) for model, store in together if model.asked}
    assert set(tmp_path.iterdir()) == files.keys()
    names = {store.path.name for _, store in together}
    assert names == {"store", "store.1", "store.2"}
    assert all(len(f.read_bytes().splitlines()) == n + 1 for f, n in files.items())


def test_a_slow_process_leaves_what_waits_to_the_others(tmp_path: Path) -> None:
    """The slow one ends its first sample when all others are answered."""
    begun, all_others = threading.Event(), threading.Event()
    shared, barrier = count(), threading.Barrier(2, timeout=60)

    def slow(requests: Waiting) -> Iterator[Finished]:
        for request in requests:
            begun.set()
            assert all_others.wait(60)
            yield request, Completion("", 1, [1], False)

    def fast(requests: Waiting) -> Iterator[Finished]:
        assert begun.wait(60)
        for number, request in enumerate(requests, 2):
            if number == len(REQUESTS):
                all_others.set()
            yield request, Completion("", 1, [1], False)

    def work(rank: int) -> int:
        store = SampleStore(tmp_path / "store", {}, Share(rank, 2, barrier.wait, lambda: shared))
        store.complete(REQUESTS, (slow, fast)[rank], lambda finished, _: finished)
        return len(store.path.read_bytes().splitlines()) - 1

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [1, 9]


def test_a_process_that_comes_late_takes_what_nobody_has_taken(tmp_path: Path) -> None:
    """It has read answers that others gave in this sequence already."""
    shared, late = count(), Model()
    first = SampleStore(tmp_path / "store", {}, Share(1, 2, numbers=lambda: shared))

    def some(requests: Waiting) -> Iterator[Finished]:
        for request in islice(requests, 3):
            yield request, Completion("", 1, [1], False)

    with pytest.raises(ValueError, match="7 of 10"):
        first.complete(REQUESTS, some, lambda finished, _: finished)
    second = SampleStore(tmp_path / "store", {}, Share(0, 2, numbers=lambda: shared))
    second.complete(REQUESTS, late, lambda finished, _: finished)
    assert len(late.asked) == 7
    assert len(second.done) == 10


@pytest.mark.parametrize(
    ("old", "new"),
    [("é3", "é4"), ('"tokens": 3', '"tokens": 2'), ('"sha256"', '"sha"'), ("[{", "{")],
)
def test_a_sample_that_was_changed_is_an_error(old: str, new: str, tmp_path: Path) -> None:
    """On any line, the last one included; never an answer that no model gave."""
    path = tmp_path / "store"
    complete(path, Model())
    lines = path.read_text("utf-8").splitlines(keepends=True)
    changed = [n for n, line in enumerate(lines) if n and old in line]
    for n in (changed[0], changed[-1]):
        path.write_text(
            "".join([*lines[:n], lines[n].replace(old, new, 1), *lines[n + 1 :]]), "utf-8"
        )
        with pytest.raises(ValueError, match=f"line {n + 1} was changed or damaged"):
            SampleStore(path, MADE_WITH)


def test_what_is_not_kept_is_not_written(tmp_path: Path) -> None:
    store = complete(tmp_path / "store", Model(), keep=lambda text: text[-1])
    assert {c.text for c in store.done.values()} == set("0123456789")
    assert "é" not in (tmp_path / "store").read_text("utf-8")


def complete_together(path: Path, processes: int) -> list[tuple[Model, SampleStore]]:
    """Complete with several stores at once, as processes under torchrun do."""
    barrier, shared = threading.Barrier(processes, timeout=60), count()

    def work(rank: int) -> tuple[Model, SampleStore]:
        share = Share(rank, processes, barrier.wait, lambda: shared)
        store, model = SampleStore(path, MADE_WITH, share), Model()
        store.complete(REQUESTS, model, lambda finished, total: finished)
        return model, store

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(work, range(processes)))


def test_processes_share_the_requests_of_one(tmp_path: Path) -> None:
    alone = Model()
    expected = complete(tmp_path / "alone", alone).done
    together = complete_together(tmp_path / "together", 3)
    assert sorted(seed for model, _ in together for seed in model.asked) == sorted(alone.asked)
    assert all(store.done == expected for _, store in together)
    for model, _ in complete_together(tmp_path / "together", 2):  # a resumed run has fewer
        assert model.asked == []
    resumed = Model()
    store = complete(tmp_path / "together", resumed)
    assert (resumed.asked, store.done) == ([], expected)
    store.remove()
    assert [file.name for file in tmp_path.iterdir()] == ["alone"]


def test_a_lost_process_costs_only_what_it_had_taken(tmp_path: Path) -> None:
    """The others answer all that waits, end in one line, and the same command goes on."""
    path, said, lost = tmp_path / "store", tmp_path / "said", tmp_path / "lost"

    def work(rank: int) -> None:
        def generate(requests: Waiting) -> Iterator[Finished]:
            for number, request in enumerate(requests):
                if rank == 1 and number == 2:  # as if killed, with a third sample in its slot
                    lost.touch()
                    os._exit(0)
                while rank == 0 and not lost.exists():
                    time.sleep(0.01)
                yield request, Completion("", 1, [1], False)

        with joined() as processes:
            share = Share(rank, 2, processes.wait, processes.numbers)
            try:
                SampleStore(path, MADE_WITH, share).complete(REQUESTS, generate, lambda f, _: f)
            except ResourceError as error:
                said.write_text(str(error))

    in_two(work)
    assert said.read_text().startswith("another process of this command ended")
    rest = Model()
    assert len(complete(path, rest).done) == 10
    assert len(rest.asked) == 1


def test_missing_answers_are_an_error(tmp_path: Path) -> None:
    def lazy(requests: Waiting) -> Iterator[Finished]:
        yield next(iter(requests)), Completion("", 1, [1], False)

    with pytest.raises(ValueError, match="9 of 10 requests were not answered"):
        SampleStore(tmp_path / "lazy", {}).complete(REQUESTS, lazy, lambda f, _: f)


def test_a_line_of_several_samples_is_read(tmp_path: Path) -> None:
    """Versions with batches wrote them."""
    path = tmp_path / "store"
    complete(path, Model())
    header, *lines = path.read_text("utf-8").splitlines(keepends=True)
    answers = [answer for line in lines for answer in json.loads(line)["batch"]]
    digest = hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()[:16]
    path.write_text(header + json.dumps({"batch": answers, "sha256": digest}) + "\n", "utf-8")
    model = Model()
    assert len(complete(path, model).done) == 10
    assert model.asked == []


def test_seeds_depend_on_document_repeat_and_run_alone() -> None:
    assert sample_seed(0, "q", 1) == 4468019885146544226
    seeds = {sample_seed(run, doc, repeat) for run in (0, 1) for doc in "ab" for repeat in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_keys_tell_every_field_apart() -> None:
    request = Request("q", 1, 64)
    others = [
        Request("r", 1, 64),
        Request("q", 2, 64),
        Request("q", 1, 65),
        Request("q", 1, 64, True),
    ]
    assert len({r.key for r in [request, *others]}) == 5
