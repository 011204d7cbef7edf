"""Score one task on one model: our YAML, lm-eval's harness, one pass a repeat.

lm-eval's own `repeats` scores the first answer only (take_first), so each repeat is scored by a pass
of its own over the stored answers; generation happens in the first. What comes back is one row a
document and repeat, in that order, and the conditions under which two scorings may be compared.
"""

import importlib.resources
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from recovery.model import BlockDiffusionLM, Progress
from recovery.samples import Generate, SampleStore

TASKS = Path(str(importlib.resources.files("recovery").joinpath("tasks")))


@dataclass(frozen=True)
class Row:
    """One scored sample. `scores` holds each filter's metric; the task's first filter is the score."""

    doc_id: int
    repeat: int
    doc_hash: str
    prompt_hash: str
    target: str
    answer: str
    scores: dict[str, float]
    seed: int
    text: str
    tokens: int
    denoising_steps: list[int]
    truncated: bool

    @property
    def score(self) -> float:
        """The task's score of this sample, 0..1."""
        return next(iter(self.scores.values()))

    @property
    def answered(self) -> bool:
        """Whether an answer could be extracted at all."""
        return self.answer != "[invalid]"


@dataclass(frozen=True)
class Scoring:
    """All rows of a task on one model, and the conditions they were taken under."""

    task: str
    rows: list[Row]
    conditions: dict[str, Any]

    def by_question(self) -> dict[str, list[float]]:
        """Return document -> its scores in the order of repeats."""
        scores: dict[str, list[float]] = {}
        for row in self.rows:
            scores.setdefault(row.doc_hash, []).append(row.score)
        return scores


def known_tasks() -> list[str]:
    """Return the names of the tasks that ship."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def score(
    task: str,
    store: SampleStore,
    generate: Generate,
    *,
    data_file: Path | None,
    limit: int | None,
    repeats: int,
    seed: int,
    batch_size: int,
    sampler: Mapping[str, Any],
    progress: Progress,
) -> Scoring:
    """Score `task`.

    Args:
        task: one of `known_tasks()`.
        store: where finished samples are kept; a resumed run passes the same.
        generate: answers a batch of requests.
        data_file: a local jsonl in place of the data set that the task names on the Hub.
        limit: the first so many documents, all when None.
        repeats: samples a document.
        seed: of the run; equal for the models that are compared.
        batch_size: requests a call of `generate`.
        sampler: the sampler's settings, as a condition of the comparison.
        progress: wraps the batches to show how far they are.

    Raises:
        ValueError: an unknown task, or one with no documents.
    """
    if task not in known_tasks():
        raise ValueError(f"no task named {task!r}; there are {', '.join(known_tasks())}")
    model = BlockDiffusionLM(
        store, generate, seed=seed, repeats=repeats, batch_size=batch_size, progress=progress
    )
    rows: list[Row] = []
    conditions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        manager = _manager(task, data_file, Path(folder))
        for model.repeat in range(repeats):
            results = _evaluate(model, task, manager, limit)
            rows += _rows(results["samples"][task], model)
            conditions = _conditions(task, results, limit, repeats, seed, sampler, rows)
    if not rows:
        raise ValueError(f"task {task!r} has no documents")
    return Scoring(task, sorted(rows, key=lambda row: (row.doc_id, row.repeat)), conditions)


def _manager(task: str, data_file: Path | None, folder: Path) -> TaskManager:
    """Return a manager of this one task, reading `data_file` where one is given."""
    override: dict[str, Any] = {"include": str(TASKS / f"{task}.yaml"), "task": task}
    if data_file is not None:
        override |= {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(data_file.resolve())}},
        }
    (folder / f"{task}.yaml").write_text(yaml.safe_dump(override))
    return TaskManager(include_path=str(folder), include_defaults=False)


def _evaluate(
    model: BlockDiffusionLM, task: str, manager: TaskManager, limit: int | None
) -> dict[str, Any]:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    evaluate: Any = simple_evaluate  # its decorator hides the signature from type checkers
    results: dict[str, Any] = evaluate(
        model=model,
        tasks=[task],
        task_manager=manager,
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )
    return results


def _rows(samples: list[dict[str, Any]], model: BlockDiffusionLM) -> list[Row]:
    """Merge lm-eval's rows, one a document and filter, into one a document."""
    merged: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        merged.setdefault(sample["doc_id"], []).append(sample)
    rows: list[Row] = []
    for doc_id, filtered in merged.items():
        first = filtered[0]
        completion = model.completion(doc_id, model.repeat)
        rows.append(
            Row(
                doc_id=doc_id,
                repeat=model.repeat,
                doc_hash=first["doc_hash"],
                prompt_hash=first["prompt_hash"],
                target=str(first["target"]),
                answer=str(first["filtered_resps"][0]),
                scores={sample["filter"]: float(sample["exact_match"]) for sample in filtered},
                seed=model.requests[doc_id, model.repeat].seed,
                **asdict(completion),
            )
        )
    return rows


def _conditions(
    task: str,
    results: dict[str, Any],
    limit: int | None,
    repeats: int,
    seed: int,
    sampler: Mapping[str, Any],
    rows: list[Row],
) -> dict[str, Any]:
    """Return what must be equal on both sides for their scores to be compared."""
    config = results["configs"][task]
    return {
        "task": task,
        "task_version": results["versions"][task],
        "lm_eval": version("lm-eval"),
        "generation": json.loads(json.dumps(config["generation_kwargs"], default=str)),
        "limit": limit,
        "repeats": repeats,
        "seed": seed,
        "sampler": dict(sampler),
        "documents": [row.doc_hash for row in rows if row.repeat == 0],
        "prompts": [row.prompt_hash for row in rows if row.repeat == 0],
        "seeds": [row.seed for row in rows],
    }
