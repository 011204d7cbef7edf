"""Scores one model on one task, one interim look at a time, with lm-eval's harness and our YAML.

lm-eval's own `repeats` scores only the first answer (take_first). So each repeat is scored in a
separate run of lm-eval over stored answers; the first run generates the answers of all repeats.

A private task (GPQA, or one that a recipe defines as private) leaves no text on disk: its rows hold
hashes, letters and counts, and the datasets library converts a local file in a temporary folder.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import lm_eval.utils
import yaml
from lm_eval.api import task as harness
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from quantize.recovery.catalog import THINKING, files_of, is_private, known_tasks
from quantize.recovery.extraction import VERSION
from quantize.recovery.filters import final_choice
from quantize.recovery.health import without_thinking
from quantize.recovery.lm import BlockDiffusionLM, cut
from quantize.recovery.own import Definition, finding, templates
from quantize.recovery.rows import Row, Scoring, asked
from quantize.recovery.samples import Completion, Generate, Progress, Request, SampleStore
from quantize.recovery.sequential import Part

READERS = {".jsonl": "json", ".csv": "csv"}  # suffix of a local data set -> its reader
# lm-eval renders templates with full access to Python; a recipe must not bring code.
lm_eval.utils.env = templates()

FEWSHOT_SEED = 1234  # lm-eval's default, which orders a task's examples


def local_data(task: str, folder: Path) -> Path | None:
    """Return a task's NAME.jsonl or NAME.csv in `folder`, or None; NAME_thinking uses NAME's."""
    files = [folder / f"{task.removesuffix(THINKING)}{suffix}" for suffix in READERS]
    return next((file for file in files if file.is_file()), None)


def score(
    task: str, store: SampleStore, generate: Generate, part: Part, *, data_file: Path | None,
    definition: Definition | None = None, seed: int, sampler: Mapping[str, Any], progress: Progress,
    earlier: Scoring | None = None,
) -> Scoring | None:  # fmt: skip
    """Generate the missing answers of `part`; return its scores, None in processes after the first.

    `data_file` is a local .jsonl or .csv that replaces the task's data set on the Hub, or None.
    `definition` is that of a recipe's own task (`recovery.own`); None means a shipped task. The
    run's `seed` and the `sampler` settings are recorded as conditions of the comparison. `earlier`
    has answers of the same model that another rule of extraction scored: they are scored again, and
    not asked for again.

    Raise ValueError if the task is unknown or has no documents, or as `SampleStore.complete` does.
    """
    if definition is None and task not in known_tasks():
        raise ValueError(f"no task named {task!r}; there are {', '.join(known_tasks())}")
    rows: list[Row] = []
    conditions: dict[str, Any] = {}
    loaded = _loaded(task, definition, data_file, part.questions)
    keep = keeping(task, definition)

    def complete(requests: Sequence[Request]) -> None:
        store.done |= _told(earlier, model.requests) if earlier else {}
        store.complete(requests, generate, progress, keep)

    model = BlockDiffusionLM(store.done, complete, seed=seed, part=part)
    for model.repeat in part.repeats:
        results = _evaluate(model, task, loaded, part.questions)
        if store.share.rank > 0:
            return None
        metrics = [entry["metric"] for entry in results["configs"][task]["metric_list"]]
        metric = "exact_match" if "exact_match" in metrics else metrics[0]
        rows += _rows(results["samples"][task], model, metric)
        conditions = _conditions(task, results, seed, sampler)
    if not rows:
        raise ValueError(f"task {task!r} has no documents")
    rows.sort(key=lambda row: (row.doc_id, row.repeat))
    if definition is not None and is_private(task, definition):
        rows, conditions = list(map(_hashed, rows)), conditions | {"private": True}
    return Scoring(task, rows, conditions | asked(rows), store.made_with)


def _told(earlier: Scoring, requests: Mapping[tuple[int, int], Request]) -> dict[str, Completion]:
    """Return the answers of an earlier scoring to those of `requests` that they were made for."""
    generation = earlier.conditions["generation"]
    limit, thinking = int(generation["max_gen_toks"]), bool(generation.get("thinking", False))
    return {
        request.key: Completion(row.text, row.tokens, row.denoising_steps, row.truncated, row.signs)
        for row in earlier.rows
        if (request := requests.get((row.doc_id, row.repeat))) is not None
        and (row.seed, limit, thinking) == (request.seed, request.max_new_tokens, request.thinking)
    }


def first_requests(
    task: str,
    *,
    data_file: Path | None,
    definition: Definition | None = None,
    questions: Sequence[int],
    seed: int,
) -> list[Request]:
    """Return `score`'s requests, by ascending index, for one answer to each of `questions`."""
    done: dict[str, Completion] = {}

    def note(requests: Sequence[Request]) -> None:
        done.update({request.key: Completion("", 1, [1], True) for request in requests})

    model = BlockDiffusionLM(done, note, seed=seed, part=Part(questions, range(1)))
    _evaluate(model, task, _loaded(task, definition, data_file, questions), questions)
    return [model.requests[key] for key in sorted(model.requests)]


def size(
    task: str, data_file: Path | None, definition: Definition | None = None
) -> tuple[int, int]:
    """Load a task's data set; return (number of documents, most tokens of an answer).

    Raise ValueError if the data set cannot be fetched or read; the message says what to do.
    """
    try:
        loaded = _loaded(task, definition, data_file)["tasks"][task]
        limit = int(loaded.config.generation_kwargs["max_gen_toks"])
        return len(loaded.eval_docs), limit
    except Exception as error:  # datasets and its readers raise a dozen unrelated types
        private = is_private(task, definition)
        what = "" if private else " ".join(str(error).split())[:200]
        token = "accept the data set's terms on the Hub and set HF_TOKEN, or " * is_private(task)
        name = task.removesuffix(THINKING)
        raise ValueError(
            f"task {task}: {data_file or 'its data set on the Hub'} cannot be read "
            f"({type(error).__name__} {what}); {token}put {name}.jsonl or {name}.csv into a folder for "
            f"--data-dir"
        ) from error


def keeping(task: str, definition: Definition | None) -> Callable[[str], str]:
    """Return a function from an answer to the text kept: for private tasks, what scoring needs."""
    if not is_private(task, definition):
        return str
    if definition is None or "of" in definition["metadata"]:
        return lambda text: final_choice(without_thinking(text))
    find = finding(definition)
    stops = definition["generation_kwargs"].get("until") or []
    return lambda text: find(cut(text, stops))


def _hashed(row: Row) -> Row:
    """Return a row whose target, answer and text are hashes; equal texts have equal hashes."""

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    answer = digest(row.answer) if row.answered else row.answer
    return replace(row, target=digest(row.target), answer=answer, text=digest(row.text), kind=None)


def _manager(
    task: str, definition: Definition | None, data_file: Path | None, folder: Path
) -> TaskManager:
    override = {**(definition or {"include": list(map(str, files_of(task)))}), "task": task}
    if data_file is not None:
        override |= {
            "dataset_path": READERS[data_file.suffix],
            "dataset_name": None,
            "test_split": "test",
            "dataset_kwargs": {
                "data_files": {"test": str(data_file.resolve())},
                "cache_dir": str(folder / "datasets"),
            },
        }
    (folder / f"{task}.yaml").write_text(yaml.safe_dump(override))
    return TaskManager(include_path=str(folder), include_defaults=False)


def _loaded(
    task: str,
    definition: Definition | None,
    data_file: Path | None,
    questions: Sequence[int] = (),
) -> dict[str, Any]:
    """Load a task and its data, or only `questions`, as lm-eval's `simple_evaluate` does."""
    stamp = data_file.stat() if data_file else None
    version = (stamp.st_mtime_ns, stamp.st_size) if stamp else None
    loaded = _read(task, json.dumps(definition), data_file, version)
    asked = copy(loaded["tasks"][task])
    asked.set_config(key="num_fewshot", value=asked.get_config("num_fewshot") or 0)
    asked.set_fewshot_seed(seed=FEWSHOT_SEED)
    if questions:  # lm-eval decodes every document again for each repeat and filter
        docs, wanted = asked.eval_docs, set(questions)
        few = [docs[i] if i in wanted else None for i in range(len(docs))]
        asked.has_test_docs, asked.test_docs = (lambda: True), (lambda: few)
    return loaded | {"tasks": {task: asked}}


@lru_cache(8)  # every look at every model asks for it
def _read(
    task: str, definition: str, data_file: Path | None, version: tuple[int, int] | None
) -> dict[str, Any]:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # The libraries' progress bars would break up the caller's bar.
    datasets.disable_progress_bars()
    harness.tqdm = partial(tqdm, disable=True)  # type: ignore
    with tempfile.TemporaryDirectory() as folder:
        manager: Any = _manager(task, json.loads(definition), data_file, Path(folder))
        return manager.load([task])


def _evaluate(
    model: BlockDiffusionLM, task: str, loaded: dict[str, Any], questions: Sequence[int]
) -> dict[str, Any]:
    # `simple_evaluate` would also describe the machine: a second per call, and git's complaints.
    run: Any = evaluate  # its decorator hides the signature from type checkers
    chosen = {task: list(questions)}
    return run(lm=model, task_dict=loaded, samples=chosen, bootstrap_iters=0, log_samples=True)


def _rows(samples: list[dict[str, Any]], model: BlockDiffusionLM, metric: str) -> list[Row]:
    """Merge lm-eval's rows, one per document and filter, into one per document and `metric`."""
    merged: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        merged.setdefault(sample["doc_id"], []).append(sample)
    return [
        Row(
            doc_id=doc_id,
            repeat=model.repeat,
            doc_hash=first["doc_hash"],
            prompt_hash=first["prompt_hash"],
            target=str(first["target"]),
            answer=str(first["filtered_resps"][0]),
            scores={sample["filter"]: float(sample[metric]) for sample in (first, *others)},
            seed=model.requests[doc_id, model.repeat].seed,
            kind=kind if isinstance(kind := first["doc"].get("kind"), str) else None,
            **asdict(model.completion(doc_id, model.repeat)),
        )
        for doc_id, (first, *others) in merged.items()
    ]


def _conditions(
    task: str, results: dict[str, Any], seed: int, sampler: Mapping[str, Any]
) -> dict[str, Any]:
    config = results["configs"][task]
    return {
        "task": task,
        "task_version": results["versions"][task],
        "extraction": VERSION,
        "lm_eval": version("lm-eval"),
        "generation": json.loads(json.dumps(config["generation_kwargs"], default=str)),
        "seed": seed,
        "sampler": dict(sampler),
    }
