"""Scores a task whose answers a function gives, through lm-eval's harness."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quantize.recovery.own import Definition
from quantize.recovery.rows import Scoring
from quantize.recovery.samples import Completion, Finished, Request, SampleStore, Waiting
from quantize.recovery.scoring import score, size
from quantize.recovery.sequential import Part

Answer = Callable[[Request], str]


def answering(answer: Answer) -> Callable[[Waiting], Iterator[Finished]]:
    def generate(requests: Waiting) -> Iterator[Finished]:
        for request in requests:
            yield request, Completion(answer(request), 5, [3], request.seed % 7 == 0)

    return generate


def run(
    task: str,
    folder: Path,
    data: Path,
    answer: Answer,
    *,
    repeats: int = 1,
    limit: int | None = None,
    definition: Definition | None = None,
) -> Scoring:
    questions = size(task, data, definition)[0] if limit is None else limit
    found = score(
        task,
        SampleStore(folder / f"{task}.samples.jsonl", {"model": "scripted"}),
        answering(answer),
        Part(range(questions), range(repeats)),
        data_file=data,
        definition=definition,
        seed=0,
        sampler={"entropy_bound": 0.1},
        progress=lambda finished, _: finished,
    )
    assert found is not None
    return found


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
