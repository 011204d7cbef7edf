"""Stores a task's samples on disk, each as soon as it is finished.

There is one file per task and model. Its first line says what made the samples (model, sampler,
precision); a store of samples made otherwise raises ValueError. Each further line is one sample
(several in files of earlier versions): `{"batch": [{"key", "text", "tokens", "denoising_steps",
"truncated", "signs"}], "sha256"}`. A killed process loses only its samples in flight. A thread
syncs the file, so that no model waits for the disk. If the machine fails, at most the samples that
finished during two syncs are lost. An incomplete last line is removed; any other line whose
sha256 does not match is an error.

Several processes share the missing samples: whoever has a free slot takes the next one, and writes
it to a file of its own. Opening a store reads the files of all processes, so a resumed run may have
another number of processes.

A sample is identified by its key, a hash of prompt, seed, token limit and whether thinking is on.
"""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, TextIO

from quantize.recovery.health import text_signs


@dataclass(frozen=True)
class Request:
    """A request for one sample: user's message, seed of the noise, token limit, thinking or not."""

    prompt: str
    seed: int
    max_new_tokens: int
    thinking: bool = False

    @property
    def key(self) -> str:
        """Hash of all fields: 16 hexadecimal digits, which identify the sample."""
        text = json.dumps([self.prompt, self.seed, self.max_new_tokens, self.thinking])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Completion:
    """The model's answer to a request."""

    text: str  # the whole answer, thinking channel included
    tokens: int  # new tokens, padding excluded
    denoising_steps: list[int]  # steps of each canvas; empty if a server does not report them
    truncated: bool  # whether the token limit ended the answer
    # Signs of ill health in its whole text (`recovery.health`); the store fills them in.
    signs: list[str] | None = None


Finished = tuple[Request, Completion]


@dataclass(frozen=True)
class Waiting:
    """Requests to answer: `missing` are those of all processes; iterating takes this process' next one.

    A request that is taken belongs to this process, so take it only when it can begin.
    """

    missing: Sequence[Request]
    taken: Iterator[Request]

    def __iter__(self) -> Iterator[Request]:
        return self.taken


# Yields each request that it takes with its answer once it is answered, in any order.
Generate = Callable[[Waiting], Iterator[Finished]]
Progress = Callable[[Iterator[Finished], int], Iterable[Finished]]


@dataclass(frozen=True)
class Share:
    """How one of several `processes` shares a task's samples; `wait` is a barrier for all of them.

    `numbers` begins the sequence 0, 1, 2, ..., of which each process gets those that it asks for first.
    """

    rank: int = 0
    processes: int = 1
    wait: Callable[[], None] = lambda: None
    numbers: Callable[[], Iterator[int]] = count


def sample_seed(run_seed: int, document: str, repeat: int) -> int:
    """Return a sample's seed (63 bits), the same for every model and in every order and process."""
    digest = hashlib.sha256(f"{run_seed}:{document}:{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: a non-negative int64


class SampleStore:
    """The finished samples of one task and model, in memory (`done`, by request's key) and on disk.

    `complete` writes to the file `path`, in processes after the first to `path`.RANK. `made_with`
    is what samples depend on besides requests. `share` says how processes share them; None: one.

    Raise ValueError if a file's samples have another `made_with`, or if a line is damaged.
    """

    def __init__(
        self, path: Path, made_with: Mapping[str, Any], share: Share | None = None
    ) -> None:
        self.first = path
        self.share = share or Share()
        self.path = path.with_name(f"{path.name}.{self.share.rank}") if self.share.rank else path
        self.made_with = dict(made_with)
        self._header = json.dumps({"made_with": self.made_with}, sort_keys=True) + "\n"
        self.done: dict[str, Completion] = {}
        self._read_all()

    def remove(self) -> None:
        """Remove the task's sample files, including those that other processes wrote."""
        for file in self._files():
            file.unlink()

    def complete(
        self,
        requests: Sequence[Request],
        generate: Generate,
        progress: Progress,
        keep: Callable[[str], str] = str,
    ) -> None:
        """Generate missing samples until none waits; most tokens, then longest prompts, come first.

        Then wait for the other processes and read their samples. `requests` are those of all
        processes, including answered requests. `progress(samples, count)` yields the new samples as
        they finish, about `count`; it may show progress. `keep(text)` returns the text to store.

        Raise ValueError if some requests were not answered, or a file of samples is damaged.
        """
        ordered = sorted(set(requests), key=lambda r: (-r.max_new_tokens, -len(r.prompt), r.key))
        missing = [request for request in ordered if request.key not in self.done]
        # Numbers count all requests: a process that came late has read some of these answers.
        numbers = takewhile(lambda number: number < len(ordered), self.share.numbers())
        taken = (ordered[n] for n in numbers if ordered[n].key not in self.done)
        if (first := next(taken, None)) is not None:
            waiting = Waiting(missing, chain([first], taken))
            about = -(-len(missing) // self.share.processes)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file, _syncing(file) as sync:
                for request, completion in progress(generate(waiting), about):
                    self._append(file, request.key, _kept(completion, keep))
                    sync()
        self.share.wait()
        self._read_all()
        self.share.wait()  # no process removes a file that another process still reads
        if unanswered := sum(request.key not in self.done for request in ordered):
            raise ValueError(f"{unanswered} of {len(ordered)} requests were not answered")

    def add(self, request: Request, completion: Completion, keep: Callable[[str], str]) -> None:
        """Write a sample, unless there is one of this request; no disk is waited for."""
        if request.key not in self.done:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                self._append(file, request.key, _kept(completion, keep))

    def _append(self, file: TextIO, key: str, completion: Completion) -> None:
        answers = [{"key": key, **asdict(completion)}]
        line = {"batch": answers, "sha256": _sha256(answers)}
        header = "" if file.tell() else self._header
        file.write(header + json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        self.done[key] = completion

    def _files(self) -> list[Path]:
        others = self.first.parent.glob(f"{self.first.name}.*")
        return [file for file in (self.first, *sorted(others)) if file.exists()]

    def _read_all(self) -> None:
        for file in self._files():
            whole = self._read(file)
            if file == self.path:  # this process appends to it; the others' files may be growing
                os.truncate(file, whole)

    def _read(self, path: Path) -> int:
        """Read the whole lines of a file, not a torn last one; return the number of bytes read."""
        header, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
        if not header.endswith(b"\n"):
            return 0
        if header.decode() != self._header:
            raise ValueError(
                f"{path}: its samples were made with {header.decode().strip()[:200]}, "
                f"not with {self._header.strip()[:200]}; remove the file to start over"
            )
        whole = len(header)
        for number, line in enumerate(lines, 2):
            if not line.endswith(b"\n"):
                break
            try:
                stored = json.loads(line)
                if stored["sha256"] != _sha256(stored["batch"]):
                    raise ValueError("its digest is of another batch")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}: line {number} was changed or damaged ({error}); remove the file to "
                    f"start over"
                ) from error
            self.done |= {row.pop("key"): Completion(**row) for row in stored["batch"]}
            whole += len(line)
        return whole


def _kept(made: Completion, keep: Callable[[str], str]) -> Completion:
    """Return what is stored of a completion; those of a baseline pack have their signs already."""
    signs = text_signs(made.text) if made.signs is None else made.signs
    return replace(made, text=keep(made.text), signs=signs)


def _sha256(batch: Any) -> str:
    """Return the first 16 digits of a batch's sha256, as it would be read back from JSON."""
    return hashlib.sha256(json.dumps(batch, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _syncing(file: TextIO) -> Generator[Callable[[], None]]:
    """Yield a function that syncs a growing file in a thread; at the end sync, or raise OSError."""
    running: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:

        def go_on() -> None:
            if not running or running[-1].done():
                wait()
                running.append(pool.submit(os.fsync, file.fileno()))

        def wait() -> None:
            while running:
                running.pop().result()

        try:
            yield go_on
        finally:
            wait()
            pool.submit(os.fsync, file.fileno()).result()
