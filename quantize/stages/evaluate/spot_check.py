"""Asks BF16 a random sample of an imported baseline's answers again; `recovery.spot_check` judges."""

import random
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quantize.errors import GateError, InputError
from quantize.host.files import read_json, write_json
from quantize.host.progress import metered, say
from quantize.recipe.sections import Evaluation, Gate
from quantize.recovery.rows import Row
from quantize.recovery.samples import Finished, SampleStore
from quantize.recovery.scoring import score
from quantize.recovery.sequential import Part
from quantize.recovery.spot_check import SpotCheck
from quantize.reports.scores import read_scoring, scored_tasks
from quantize.runs.folder import RunDir
from quantize.runs.models import BASELINE
from quantize.runtime import Placement, Sampler
from quantize.stages.evaluate.baseline_pack import READERS, SUMS, flat
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.evaluate.tasks import Task, open_tasks
from quantize.stages.memory_needs import scored_positions


def spot_check(
    run: RunDir, source: Path, digest: str, settings: Evaluation, gate: Gate, count: int,
    seed: int | None = None, *, place: Placement, data_dir: Path | None = None,
) -> SpotCheck:  # fmt: skip
    """Let BF16 give `count` of the answers again that a run took from a pack; write what was found.

    `source` is the BF16 checkpoint, `digest` its fingerprint, and `place` where it runs. `seed` draws
    the answers; by default it is one that nobody can know beforehand.

    Raises:
        InputError: the run's BF16 answers were not imported. GateError: the sample speaks against them.
    """
    scorings = {task: read_scoring(run.evaluation / BASELINE, task) for task in scored_tasks(run)}
    imported = [scoring.made_with["model"].get("imported") for scoring in scorings.values()]
    if not imported or imported[0] is None:
        raise InputError(f"{run.path}: its BF16 answers were made here; there is no pack to check")
    origin: Mapping[str, Any] = imported[0]
    seed = secrets.randbits(32) if seed is None else seed
    rows = {
        (task, row.doc_id, row.repeat): row
        for task, scoring in scorings.items()
        for row in scoring.rows
    }
    drawn = random.Random(seed).sample(sorted(rows), min(count, len(rows)))
    tasks = {task.name: task for task in open_tasks(settings, gate, data_dir)}
    config = read_json(run.checkpoint / "config.json", "canvas_length", "text_config")
    context = scored_positions(config, max(t.token_limit + t.prompt_tokens for t in tasks.values()))
    place = replace(place, activations="none", max_context=context)
    sampler = Sampler.from_checkpoint(source)
    bf16 = Answerer(source, digest, sampler, place, settings.batch_size)
    here, there = flat(bf16.made_with), origin["made_with"]
    again = dict[tuple[str, int, int], Row]()
    for name, repeat in sorted({(name, repeat) for name, _, repeat in drawn}):
        questions = sorted(doc for task, doc, at in drawn if (task, at) == (name, repeat))
        for row in _answered(tasks[name], bf16, questions, repeat, settings.seed):
            again[name, row.doc_id, row.repeat] = row
    bf16.release()
    pairs = [(rows[key], again[key]) for key in drawn]
    if any((stored.doc_hash, stored.seed) != (made.doc_hash, made.seed) for stored, made in pairs):
        raise InputError(f"{run.path}: the tasks' data is not what this run was scored on")
    checked = SpotCheck(
        origin["pack"],
        seed,
        all(here.get(key) == there.get(key) for key in (*SUMS, *READERS)),
        len(pairs),
        sum(_said(stored) != _said(made) for stored, made in pairs),
        sum(stored.score > made.score for stored, made in pairs),
        sum(stored.score < made.score for stored, made in pairs),
    )
    said = f"Spot check: {checked.fault or checked}."
    write_json(run.spot_check_json, asdict(checked) | {"said": said})
    if checked.fault:
        raise GateError(f"{run.path}: do not trust its baseline: {checked.fault}")
    say(f"baseline: {checked}")
    return checked


def _said(row: Row) -> tuple[object, ...]:
    return row.text, row.tokens, row.denoising_steps, row.truncated


def _answered(
    task: Task, bf16: Answerer, questions: Sequence[int], repeat: int, seed: int
) -> Iterable[Row]:
    """Return the scored answers of `bf16` to one repeat of some questions."""
    with (
        tempfile.TemporaryDirectory(prefix="quantize-spot-check-") as scratch,
        metered(f"{task.name}, BF16 again", len(questions), "answers") as meter,
    ):

        def counted(finished: Iterator[Finished], _: int) -> Iterator[Finished]:
            for sample in finished:
                meter.add()
                yield sample

        made = score(
            task.name, SampleStore(Path(scratch, "answers.jsonl"), {}), bf16,
            Part(questions, range(repeat, repeat + 1)), data_file=task.data, definition=task.definition,
            seed=seed, sampler=bf16.sampler_settings, progress=counted,
        )  # fmt: skip
    assert made is not None  # one process answers
    return made.rows
