"""Writes and judges scores in the files of NVIDIA's NeMo Evaluator 0.3 (`nel compare`, `nel gate`).

    FOLDER/[BENCHMARK/]eval-*.json     benchmark.name, benchmark.scores.METRIC.value
    FOLDER/[BENCHMARK/]results.jsonl   one line per answer: problem_idx, repeat, reward

(docs.nvidia.com/nemo/evaluator, "Evaluation Result Format".) Such files lack prompts, seeds,
samplers, steps and signs of ill health. So only accuracy is judged, and whoever made the files
vouches for equal conditions. In our files, `config.planned` says how much was planned: a run that
ended early is then judged by the bounds of interim looks. We write no text: a task may be private.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from pydantic import AliasPath, BaseModel, Field, ValidationError

from quantize.errors import InputError
from quantize.host.files import write_json, write_text
from quantize.recovery.estimands import Estimand
from quantize.recovery.gate import Verdict, judge
from quantize.recovery.pairing import in_common, paired
from quantize.recovery.rows import Row, Scoring
from quantize.recovery.sequential import Plan
from quantize.recovery.statistics import Comparison
from quantize.recovery.terms import Terms
from quantize.reports.scores import read_scoring, scored_tasks
from quantize.runs.folder import RunDir
from quantize.runs.models import BASELINE, CANDIDATE


class _Answer(BaseModel, strict=True):
    problem_idx: int
    repeat: int = 0
    reward: float = Field(ge=0, le=1)
    expected_answer: Any = ""


class _Bundle(BaseModel):
    name: str = Field(validation_alias=AliasPath("benchmark", "name"))
    planned: Plan | None = Field(None, validation_alias=AliasPath("config", "planned"))


Record = TypeVar("Record", _Answer, _Bundle)


def export(run: RunDir, folder: Path) -> None:
    """Write a run's scores to `folder`/bf16 and `folder`/quantized, as far as both models answered.

    Raise InputError if the run has no finished scores, or if `folder` exists.
    """
    if folder.exists():
        raise InputError(f"{folder}: it is there already; name a new folder")
    models = BASELINE, CANDIDATE
    tasks = scored_tasks(run)
    pairs = [in_common(*(read_scoring(run.evaluation / m, task) for m in models)) for task in tasks]
    for task, pair in zip(tasks, pairs, strict=True):  # all are read before one is written
        for model, scoring in zip(models, pair[:2], strict=True):
            place = folder / model / task
            place.mkdir(parents=True)
            answers = [
                {"problem_idx": row.doc_id, "repeat": row.repeat, "reward": row.score}
                for row in scoring.rows
            ]
            write_text(place / "results.jsonl", "".join(f"{json.dumps(a)}\n" for a in answers))
            mean = fmean(row.score for row in scoring.rows)
            planned = scoring.made_with.get("planned")
            config = {"benchmark": task, "model": model, "planned": planned}
            benchmark = {"name": task, "scores": {"mean_reward": {"value": mean}}}
            write_json(place / f"eval-{task}.json", {"config": config, "benchmark": benchmark})


def judge_bundles(
    baseline: Path, candidate: Path, margins_pp: Mapping[str, float], estimand: Estimand
) -> Verdict:
    """Return the gate's verdict on all benchmarks of two NeMo folders, at 95 % confidence.

    `margins_pp` maps each benchmark to its allowed loss in percentage points.

    Raises:
        InputError: a file cannot be read, margins do not fit benchmarks, or answers are too few.
    """
    ours, theirs = _read(baseline), _read(candidate)
    named = [", ".join(sorted(each)) for each in (ours, theirs, margins_pp)]
    if named[0] != named[1]:
        return Verdict("NOT COMPARABLE", f"benchmarks differ: {named[0]} against {named[1]}")
    if named[0] != named[2]:
        raise InputError(f"margins of {named[2]}, bundles of {named[0]}; name a margin for each")
    if odd := [margin for margin in margins_pp.values() if not 0 < margin <= 100]:
        raise InputError(f"a margin of {odd[0]:g} points: more than 0 and at most 100 are meant")
    found: dict[str, Comparison] = {}
    for name, margin in margins_pp.items():
        try:
            each = paired(ours[name], theirs[name], Terms(estimand=estimand, margin_pp=margin))
        except ValueError as error:
            raise InputError(f"{name}: {error}") from error
        if isinstance(each, Verdict):
            return Verdict(each.outcome, f"{name}: {each.reason}")
        found[name] = each
    return judge(found)


def _read(folder: Path) -> dict[str, Scoring]:
    found: dict[str, Scoring] = {}
    for path in sorted([*folder.glob("eval-*.json"), *folder.glob("*/eval-*.json")]):
        bundle, results = _parsed(_Bundle, path, _text(path)), path.with_name("results.jsonl")
        lines = enumerate(_text(results).split("\n"), 1)
        read = [_parsed(_Answer, results, x, f"line {n}: ") for n, x in lines if x.strip()]
        answers = sorted(read, key=lambda answer: (answer.problem_idx, answer.repeat))
        asked = [[a.problem_idx, a.repeat, str(a.expected_answer)] for a in answers]
        single = {(index, repeat) for index, repeat, _ in asked}
        if bundle.name in found or len(single) < len(asked):
            raise InputError(f"{results}: an answer, or benchmark {bundle.name!r}, is there twice")
        rows = [
            Row(a.problem_idx, a.repeat, "", "", "", "", {"reward": a.reward}, 0, "", 0, [], False)
            for a in answers
        ]
        made_with = {"planned": bundle.planned and asdict(bundle.planned)}
        found[bundle.name] = Scoring(bundle.name, rows, {"answers": asked}, made_with)
    if not found:
        raise InputError(f"{folder}: no eval-*.json there, nor in a folder of it")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error


def _parsed(model: type[Record], path: Path, text: str, line: str = "") -> Record:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the record"
        raise InputError(f"{path}: {line}{key}: {first['msg']}") from error
