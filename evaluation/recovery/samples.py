"""Finished samples on disk: appended batch by batch while a task runs, rewritten whole at its end.

A sample is known by its key: document, repeat, prompt, thinking and seed. A batch is appended with
one write and one fsync; after a kill the last line may be torn and is dropped, so at most one batch
runs again. Batches are formed from the full list of samples, whatever is done already: a resumed run
feeds the model the same batches as an unbroken one and ends with the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
        denoising_steps: decoder forwards of each canvas.
        truncated: whether the token limit ended it.
    """

    text: str
    tokens: int
    denoising_steps: list[int]
    truncated: bool


Generate = Callable[[Sequence[Request]], Sequence[Completion]]


def sample_seed(run_seed: int, document: str, repeat: int) -> int:
    """Return the seed of a sample: the same for BF16 and quantized, in any order and process."""
    digest = hashlib.sha256(f"{run_seed}:{document}:{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: a non-negative int64


class SampleStore:
    """The samples of one task that are finished, in memory and on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Completion] = dict(_read(path))

    def complete(
        self,
        requests: Sequence[Request],
        generate: Generate,
        batch_size: int,
        progress: Callable[[Iterable[list[Request]]], Iterable[list[Request]]],
    ) -> None:
        """Generate what is missing, batch by batch, the longest prompts first."""
        ordered = sorted(requests, key=lambda r: (-len(r.prompt), r.key))
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        missing = [b for b in batches if any(request.key not in self.done for request in b)]
        if not missing:
            return
        for batch in progress(missing):
            completions = list(generate(batch))
            if len(completions) != len(batch):
                raise ValueError(f"{len(batch)} requests and {len(completions)} completions")
            self._append(batch, completions)

    def _append(self, batch: Sequence[Request], completions: Sequence[Completion]) -> None:
        lines = [
            json.dumps({"key": request.key, **asdict(completion)}, ensure_ascii=False) + "\n"
            for request, completion in zip(batch, completions, strict=True)
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
        self.done |= {r.key: c for r, c in zip(batch, completions, strict=True)}


def _read(path: Path) -> Iterable[tuple[str, Completion]]:
    """Yield the whole lines of a store; a torn last line is cut off, so that appending goes on."""
    if not path.exists():
        return
    whole = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        row: dict[str, Any] = json.loads(line)
        yield row.pop("key"), Completion(**row)
        whole += len(line)
    os.truncate(path, whole)
