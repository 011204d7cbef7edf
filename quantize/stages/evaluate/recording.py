"""Writes questions, and canvases of answers that differ, for the report's table and viewer.

To record a question's canvases, both models answer it once more, from the scored answer's seed.
Recording pads the prompts, so sums may round to another answer. So each recording holds its own
answer, and the report says whether it equals the scored one. Nothing of a private task is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quantize.host.files import read_json, write_json
from quantize.recovery.catalog import is_private
from quantize.recovery.own import Definition
from quantize.recovery.rows import Row, Scoring
from quantize.recovery.samples import Request
from quantize.recovery.scoring import first_requests
from quantize.reports.questions import differing
from quantize.reports.scores import read_scoring
from quantize.runs.digests import sha256_of
from quantize.runs.models import BASELINE, CANDIDATE
from quantize.stages.evaluate.local_model import Answerer

RECORDED = 8  # questions of a task whose canvases are recorded


def leave_questions(
    folder: Path, task: str, data_file: Path | None, definition: Definition | None = None
) -> dict[int, Request]:
    """Write the prompts of the asked questions; return index -> request, {} for a private task."""
    if is_private(task, definition):
        return {}
    asked = sorted({row.doc_id for row in read_scoring(folder / BASELINE, task).rows})
    first = first_requests(
        task, data_file=data_file, definition=definition, questions=asked, seed=0
    )
    requests = dict(zip(asked, first, strict=True))
    prompts = {str(index): request.prompt for index, request in requests.items()}
    write_json(folder / "questions" / f"{task}.json", {"prompts": prompts})
    return requests


def record_differing(
    folder: Path, task: str, requests: Mapping[int, Request], models: Mapping[str, Answerer]
) -> None:
    """Denoise a public task's differing answers again with each of `models`; write their canvases.

    If no answers differ, one answer is recorded. `folder` has both models' scores; `requests` maps
    each question's index to its request.
    """
    sides = {side: read_scoring(folder / side, task) for side in (BASELINE, CANDIDATE)}
    chosen = choose(*sides.values())
    answers = [[row.doc_id, row.repeat] for row in chosen]
    for side, model in models.items():
        path = folder / side / f"{task}.canvases.json"
        of = {"answers": answers, "scores": sha256_of(folder / side / f"{task}.jsonl")[:16]}
        if path.exists() and read_json(path).get("of") == of:
            continue
        recorded = model.record([replace(requests[r.doc_id], seed=r.seed) for r in chosen])
        for row, sample in zip(chosen, recorded["samples"], strict=False):  # fewer were recorded
            sample |= {"question": row.doc_id, "repeat": row.repeat}
        write_json(path, {"of": of} | recorded)


def choose(base: Scoring, other: Scoring) -> Sequence[Row]:
    """Return up to RECORDED differing rows of `base`, changed scores first; if none, one row."""
    entries = sorted(differing(base, other), key=lambda entry: entry["outcome"] == "other answer")
    rows = {(row.doc_id, row.repeat): row for row in base.rows}
    chosen = [rows[entry["question"], entry["repeat"]] for entry in entries[:RECORDED]]
    return chosen or base.rows[:1]
