"""Score BF16 and quantized alike: same harness, prompts, seeds and sampler.

Sides, each a folder of `evaluation/`:

    bf16                 the base
    quantized            what the gate judges, activations rounded as the recipe says
    quantized-<mode>     further ways to round activations, when asked for
    bf16-again           BF16 with a second seed: the noise floor, when asked for

Either model may sit behind an OpenAI-compatible server instead of in this process. A task is done on
a side when its conditions file names the model and settings of this run; finished samples of an
unfinished task are kept beside it. BF16 scores do not depend on the recipe, so runs share their
samples in `.bf16/` beside the runs, under a hash of everything they depend on.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from recovery.samples import Batch, Finished, SampleStore
from recovery.scoring import (
    Scoring,
    count_documents,
    first_requests,
    is_private,
    known_tasks,
    local_data,
    score,
)
from recovery.server import Server, ServerError

from quantize.answerer import Answerer
from quantize.bundled import HELDOUT
from quantize.checkpoint import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.manifest import fingerprint
from quantize.progress import say, track
from quantize.recipe import ActivationMode, Evaluation
from quantize.run_dir import RunDir, read_json, write_json, write_text
from quantize.runtime import Sampler

BF16, BF16_AGAIN, QUANTIZED = "bf16", "bf16-again", "quantized"
BUNDLED_TASKS = ("word_problems", "word_problems_thinking")
RECORDED = 8  # samples a side whose denoising is recorded for the report's viewer


class Backend(Protocol):
    """A model that answers batches, and what its samples depend on."""

    sampler_settings: dict[str, Any]
    made_with: dict[str, Any]

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Finished]:
        """Yield each batch as it is finished."""
        ...


class ServedModel:
    """A model behind a server."""

    def __init__(self, url: str, in_flight: int) -> None:
        self.server = Server(url, in_flight=in_flight, api_key=os.environ.get("OPENAI_API_KEY"))
        # Its template, sampler and precision are the server's own; both sides must be served then.
        self.sampler_settings: dict[str, Any] = {"sampler": "the server's"}
        self.made_with: dict[str, Any] = {"served_model": self.server.model}

    def __call__(self, batches: Sequence[Batch]) -> Iterator[Finished]:
        """Ask for every sample on its own, several at a time."""
        return self.server([[request] for batch in batches for request in batch])


@dataclass(frozen=True)
class Side:
    """One thing that is scored: the folder of its scores, its model, the seed of its noise."""

    name: str
    backend: Backend
    seed: int


def evaluate(
    run: RunDir,
    source: Path,
    digest: str,
    settings: Evaluation,
    *,
    modes: Sequence[ActivationMode] = (),
    noise_floor: bool = False,
    data_dir: Path | None = None,
    server: str | None = None,
    base_server: str | None = None,
    in_flight: int = 8,
    device: str = "cpu",
) -> None:
    """Score every task of the recipe on every side; write evaluation/<side>/<task>.jsonl.

    Args:
        run: where the quantized checkpoint is and the scores go.
        source: folder of the BF16 checkpoint.
        digest: its fingerprint.
        settings: tasks, limits, repeats, seed.
        modes: activation modes to score besides the recipe's.
        noise_floor: whether BF16 is scored once more, with another seed.
        data_dir: folder with <task>.jsonl or .csv files in place of data sets on the Hub.
        server: URL of a server with the quantized model.
        base_server: URL of a server with the BF16 model.
        in_flight: requests at once to a server.
        device: where the models run that are not served.

    Raises:
        InputError: an unknown task. ResourceError: a data set or a server that cannot be had.
    """
    data = {task: data_file(task, data_dir) for task in known(settings.tasks)}
    _announce(settings, data)
    sampler = Sampler.from_checkpoint(source)

    def model(folder: Path, identity: str, mode: ActivationMode, url: str | None) -> Backend:
        if url is not None:
            return ServedModel(url, in_flight)
        return Answerer(folder, identity, mode, sampler, device)

    try:
        base = model(source, digest, "none", base_server)
        quantized = fingerprint(Checkpoint.open(run.checkpoint))
        _score_side(run, Side(BF16, base, settings.seed), settings, data)
        if noise_floor:
            _score_side(run, Side(BF16_AGAIN, base, settings.seed + 1), settings, data)
        for name, mode in quantized_sides(settings.activations, modes):
            backend = model(run.checkpoint, quantized, mode, server)
            _score_side(run, Side(name, backend, settings.seed), settings, data)
    except ServerError as error:
        raise ResourceError(str(error)) from error
    write_json(run.evaluation / "done.json", {"tasks": settings.tasks})


def known(tasks: list[str]) -> list[str]:
    """Return `tasks` when all of them exist.

    Raises:
        InputError: one does not.
    """
    if unknown := sorted(set(tasks) - set(known_tasks())):
        shipped = ", ".join(known_tasks())
        raise InputError(f"evaluation: no task named {unknown[0]!r}; there are: {shipped}")
    return tasks


def quantized_sides(
    gated: ActivationMode, more: Sequence[ActivationMode]
) -> list[tuple[str, ActivationMode]]:
    """Return (folder name, activation mode); the gate reads the first."""
    named: dict[ActivationMode, str] = {gated: QUANTIZED}
    for mode in more:
        named.setdefault(mode, f"{QUANTIZED}-{mode.replace('_', '-')}")
    return [(name, mode) for mode, name in named.items()]


def data_file(task: str, data_dir: Path | None) -> Path | None:
    """Return the local file of a task, None when its data set comes from the Hub.

    Raises:
        ResourceError: `data_dir` has no such file.
    """
    if data_dir is None:
        return HELDOUT if task in BUNDLED_TASKS else None
    found = local_data(task, data_dir)
    if found is None:
        raise ResourceError(f"{data_dir}: no .jsonl or .csv of task {task!r}; put it there")
    return found


def _announce(settings: Evaluation, data: dict[str, Path | None]) -> None:
    """Load every data set before any model, and say how much there is to do.

    Raises:
        ResourceError: a data set cannot be had or read.
    """
    for task, file in data.items():
        try:
            documents = count_documents(task, file)
        except ValueError as error:
            raise ResourceError(str(error)) from error
        asked = min(documents, settings.limit.get(task, documents))
        repeats = settings.repeats.get(task, 1)
        say(f"{task}: {asked} questions x {repeats} repeats = {asked * repeats} samples a model")


def _score_side(
    run: RunDir, side: Side, settings: Evaluation, data: dict[str, Path | None]
) -> None:
    for task in settings.tasks:
        made_with = side.backend.made_with | {
            "task": task,
            "data": _digest(data[task]),
            "limit": settings.limit.get(task),
            "repeats": settings.repeats.get(task, 1),
            "seed": side.seed,
            "batch_size": settings.batch_size,
        }
        if _is_done(run.evaluation / side.name, task, made_with):
            continue
        kept = _store_path(run, side, task, made_with)
        try:
            store = SampleStore(kept, made_with)
        except ValueError as error:
            raise InputError(str(error)) from error
        scoring = score(
            task,
            store,
            side.backend,
            data_file=data[task],
            limit=settings.limit.get(task),
            repeats=settings.repeats.get(task, 1),
            seed=side.seed,
            batch_size=settings.batch_size,
            sampler=side.backend.sampler_settings,
            progress=lambda finished, total, task=task: _track(finished, total, task, side.name),
        )
        if isinstance(side.backend, Answerer) and not is_private(task):
            limit = min(RECORDED, settings.limit.get(task, RECORDED))
            asked = first_requests(task, data_file=data[task], limit=limit, seed=side.seed)
            recorded = side.backend.record(asked)
            write_json(run.evaluation / side.name / f"{task}.canvases.json", recorded)
        _write(run.evaluation / side.name, scoring)
        if side.name != BF16:
            kept.unlink(missing_ok=True)


def _track(finished: Iterator[Finished], total: int, task: str, side: str) -> Iterable[Finished]:
    return track(finished, f"{task}, {side}", total)


def _digest(file: Path | None) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file else None


def _is_done(folder: Path, task: str, made_with: dict[str, Any]) -> bool:
    conditions = folder / f"{task}.conditions.json"
    return (
        (folder / f"{task}.jsonl").exists()
        and conditions.exists()
        and read_json(conditions)["made_with"] == made_with
    )


def _store_path(run: RunDir, side: Side, task: str, made_with: dict[str, Any]) -> Path:
    """Return where finished samples are kept: in the run, or shared by runs for a local BF16."""
    key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:12]
    if side.name == BF16 and isinstance(side.backend, Answerer):
        return run.path.parent / ".bf16" / f"{task}-{key}.jsonl"
    return run.evaluation / side.name / f"{task}-{key}.partial.jsonl"


def _write(folder: Path, scoring: Scoring) -> None:
    """Write rows, then conditions: the conditions say that the task is done, and for what."""
    rows = [json.dumps(asdict(row), ensure_ascii=False) for row in scoring.rows]
    write_text(folder / f"{scoring.task}.jsonl", "\n".join(rows) + "\n")
    conditions = {"compared": scoring.conditions, "made_with": scoring.made_with}
    write_json(folder / f"{scoring.task}.conditions.json", conditions)
