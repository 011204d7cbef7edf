"""Finished samples on disk: appended as they finish while a task runs.

One file a task and model. Its first line says what the samples were made with (model, sampler,
precision); a store that is opened for anything else refuses. Every further line is one batch:
`{"batch": [{"key", "text", "tokens", "denoising_steps", "truncated"}, ...]}`, written with one write
and one fsync. After a kill the last line may be torn and is cut off, so at most what was in flight
runs again. Batches are formed from the full list of samples, whatever is done already: a resumed run
feeds the model the same batches as an unbroken one and ends with the same bytes.

A sample is known by its key: prompt, seed, token limit and thinking. Prompts are kept as hashes only.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """What one sample asks of the model: the user's message and the seed of all its noise."""

    prompt: str
    seed: int
    max_new_tokens: int
    thinking: bool = False

    @property
    def key(self) -> str:
        """Short hash of everything above."""
        text = json.dumps([self.prompt, self.seed, self.max_new_tokens, self.thinking])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Completion:
    """What the model made of it.

    Attributes:
        text: the whole answer, thinking channel included.
        tokens: new tokens, padding excluded.
        denoising_steps: decoder forwards of each canvas; empty when a server does not say.
        truncated: whether the token limit ended it.
    """

    text: str
    tokens: int
    denoising_steps: list[int]
    truncated: bool


Batch = Sequence[Request]
Finished = tuple[Batch, Sequence[Completion]]
# Takes all missing batches and yields each as it is finished, in any order: a model in this process
# answers one after the other, a server several at a time.
Generate = Callable[[Sequence[Batch]], Iterator[Finished]]
Progress = Callable[[Iterator[Finished], int], Iterable[Finished]]


def sample_seed(run_seed: int, document: str, repeat: int) -> int:
    """Return the seed of a sample: the same for BF16 and quantized, in any order and process."""
    digest = hashlib.sha256(f"{run_seed}:{document}:{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: a non-negative int64


class SampleStore:
    """The samples of one task that are finished, in memory and on disk.

    Args:
        path: the file; made when the first batch is finished.
        made_with: what the samples depend on besides their requests.

    Raises:
        ValueError: the file holds samples made with something else, or is no such file.
    """

    def __init__(self, path: Path, made_with: Mapping[str, Any]) -> None:
        self.path = path
        self.made_with = dict(made_with)
        self._header = json.dumps({"made_with": self.made_with}, sort_keys=True) + "\n"
        self.done: dict[str, Completion] = {}
        if path.exists():
            self._read()

    def complete(
        self,
        requests: Sequence[Request],
        generate: Generate,
        batch_size: int,
        progress: Progress,
        keep: Callable[[str], str] = str,
    ) -> None:
        """Generate what is missing, batch by batch, the longest prompts first.

        Args:
            requests: all samples of the task, finished ones included.
            generate: answers batches.
            batch_size: requests a batch.
            progress: wraps the finished batches, of which there will be so many.
            keep: what is kept of an answer's text; a private task keeps its letter only.

        Raises:
            ValueError: some requests were not answered.
        """
        ordered = sorted(set(requests), key=lambda r: (-len(r.prompt), r.key))
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        missing = [b for b in batches if any(request.key not in self.done for request in b)]
        if missing:
            for batch, completions in progress(generate(missing), len(missing)):
                if len(completions) != len(batch):
                    raise ValueError(f"{len(batch)} requests and {len(completions)} completions")
                self._append(batch, [replace(each, text=keep(each.text)) for each in completions])
        if unanswered := sum(request.key not in self.done for request in ordered):
            raise ValueError(f"{unanswered} of {len(ordered)} requests were not answered")

    def _append(self, batch: Batch, completions: Sequence[Completion]) -> None:
        finished = {r.key: c for r, c in zip(batch, completions, strict=True)}
        line = {"batch": [{"key": key, **asdict(c)} for key, c in finished.items()]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            header = "" if file.tell() else self._header
            file.write(header + json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done |= finished

    def _read(self) -> None:
        """Read the whole lines; a torn last line is cut off, so that appending goes on."""
        header, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
        if not header.endswith(b"\n"):
            os.truncate(self.path, 0)
            return
        if header.decode() != self._header:
            raise ValueError(
                f"{self.path}: its samples were made with {header.decode().strip()[:200]}, "
                f"not with {self._header.strip()[:200]}; remove the file to start over"
            )
        whole = len(header)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            for row in json.loads(line)["batch"]:
                key = row.pop("key")
                self.done[key] = Completion(**row)
            whole += len(line)
        os.truncate(self.path, whole)
