"""Writes and reads scorings, counts them and pairs them, for evaluate, report and compare."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from recovery.estimands import Estimand
from recovery.gate import Verdict, not_comparable
from recovery.scoring import Row, Scoring
from recovery.sequential import Look, Plan, at_looks
from recovery.statistics import Comparison, compare
from recovery.steps import StepInflation, share_at, step_inflation

from quantize.errors import InputError
from quantize.host.files import REDO, read_json, write_json, write_text


def pair(
    base: Scoring,
    other: Scoring,
    *,
    estimand: Estimand,
    margin_pp: float,
    confidence: float,
    max_step_inflation: float | None = None,
    other_seed: bool = False,
) -> tuple[dict[str, Any], Comparison | None]:
    """Compare two scorings of a task, as an entry of report.json and as figures for the gate.

    Where looks were planned, as many answers are compared as the last look has that both sides
    completed, and on the estimand for which they were planned the p-values are sequential.

    Args:
        base: scoring that `bf16_counts` describes.
        other: scoring that `quantized_counts` describes.
        estimand: what the difference is judged on.
        margin_pp: allowed loss in percentage points.
        confidence: confidence of the intervals.
        max_step_inflation: share of more denoising steps that is allowed, None for no limit.
        other_seed: whether the two must have different seeds (the noise floor).
    """
    planned = base.made_with.get("planned")
    plan = None if planned is None else Plan(**planned)
    looks = plan.taken(base.answered, other.answered) if plan else []
    if plan and looks:
        base, other = (side.only(plan.until(looks[-1])) for side in (base, other))
    differs = _differs(base, other, other_seed=other_seed)
    if differs is None and plan and not looks:
        differs = Verdict("NOT COMPARABLE", "no look is complete on both sides")
    terms: dict[str, Any] = {"estimand": estimand, "margin_pp": margin_pp}
    terms |= {"max_step_inflation": max_step_inflation}
    comparison = None
    if differs is None:
        comparison = _compare(base, other, plan, looks, confidence=confidence, **terms)
    entry = {
        "not_comparable": differs.reason if differs else None,
        **(asdict(comparison) if comparison else terms | {"step_inflation": None}),
        "made_with": other.made_with,
        "bf16_counts": counts(base.rows),
        "quantized_counts": counts(other.rows),
    }
    return entry, comparison


def _compare(
    base: Scoring,
    other: Scoring,
    plan: Plan | None,
    looks: Sequence[Look],
    *,
    max_step_inflation: float | None,
    **settings: Any,
) -> Comparison:
    def compared(base: Scoring, other: Scoring) -> Comparison:
        return replace(
            compare(base.by_question(), other.by_question(), **settings),
            step_inflation=_steps(base, other, settings["confidence"], max_step_inflation),
            max_step_inflation=max_step_inflation,
        )

    if plan is None or plan.estimand != settings["estimand"] or len(plan.looks) == 1:
        return compared(base, other)
    seen = [plan.until(look) for look in looks]
    return at_looks([compared(base.only(part), other.only(part)) for part in seen], looks)


def _steps(
    base: Scoring, other: Scoring, confidence: float, limit: float | None
) -> StepInflation | None:
    """Return how many more steps `other` takes, None where an answer does not tell its steps."""
    sides = (base, other)
    if any(not row.denoising_steps for side in sides for row in side.rows):
        return None
    most = base.conditions.get("sampler", {}).get("max_denoising_steps", math.inf)
    never_stopped = [
        share_at([step for row in side.rows for step in row.denoising_steps], most)
        for side in sides
    ]
    costs = _costs(base), _costs(other)
    try:
        return step_inflation(*costs, never_stopped, confidence=confidence, limit=limit)
    except ValueError:  # one question alone has steps or tokens
        return None


def _costs(side: Scoring) -> dict[str, tuple[int, int]]:
    """Return question -> its denoising steps and tokens over all answers."""
    sums: dict[str, tuple[int, int]] = {}
    for row in side.rows:
        steps, tokens = sums.get(side.names[row.doc_id], (0, 0))
        sums[side.names[row.doc_id]] = steps + sum(row.denoising_steps), tokens + row.tokens
    return sums


def _differs(base: Scoring, other: Scoring, *, other_seed: bool) -> Verdict | None:
    """Return why two scorings cannot be compared, None where they can."""
    ignored = {"seed", "seeds"} if other_seed else set[str]()
    ours, theirs = (
        {key: value for key, value in side.conditions.items() if key not in ignored}
        for side in (base, other)
    )
    made = (
        {key: value for key, value in side.made_with.items() if key not in ignored | {"model"}}
        for side in (base, other)
    )
    if other_seed and _share_a_seed(base, other):
        return Verdict("NOT COMPARABLE", "both sides have the same seed: no noise is between them")
    return not_comparable(ours, theirs) or not_comparable(*made)


def _share_a_seed(base: Scoring, other: Scoring) -> bool:
    return any(a.seed == b.seed for a, b in zip(base.rows, other.rows, strict=False))


def write_scoring(folder: Path, scoring: Scoring) -> None:
    """Write rows, then conditions, which describe them and never stand beside other rows."""
    about = folder / f"{scoring.task}.conditions.json"
    about.unlink(missing_ok=True)
    rows = [json.dumps(asdict(row), ensure_ascii=False) for row in scoring.rows]
    write_text(folder / f"{scoring.task}.jsonl", "\n".join(rows) + "\n")
    write_json(about, _conditions(folder, scoring.task, scoring.conditions, scoring.made_with))


def _conditions(folder: Path, task: str, compared: Any, made_with: Any) -> dict[str, Any]:
    """Return what a conditions file holds: a sha256 covers it and the rows that lie there."""
    digest = hashlib.sha256((folder / f"{task}.jsonl").read_bytes())
    digest.update(json.dumps([compared, made_with], sort_keys=True).encode())
    return {"compared": compared, "made_with": made_with, "sha256": digest.hexdigest()}


def read_scoring(folder: Path, task: str) -> Scoring:
    """Read a scoring that evaluate wrote.

    Raises:
        InputError: the scoring is missing, or is not what was written.
    """
    path, about = folder / f"{task}.jsonl", folder / f"{task}.conditions.json"
    if not path.exists() or not about.exists():
        raise InputError(f"{path}: missing or unfinished; run `quantize evaluate` first")
    try:
        lines = path.read_text("utf-8").split("\n")  # answers may hold other ends of lines: U+2028
        rows = [Row(**json.loads(line)) for line in lines if line]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: a line is no scored sample ({error}); {REDO}") from error
    found = read_json(about, "compared", "made_with", "sha256")
    if found != _conditions(folder, task, found["compared"], found["made_with"]):
        raise InputError(f"{path}: not what was scored under {about.name}; {REDO}")
    return Scoring(task, rows, found["compared"], found["made_with"])


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the counts besides the score; steps are None when a server does not report them."""
    steps = [step for row in rows for step in row.denoising_steps]
    tokens = sum(row.tokens for row in rows)
    return {
        "samples": len(rows),
        "no_answer": sum(not row.answered for row in rows),
        "truncated": sum(row.truncated for row in rows),
        "tokens_per_sample": round(tokens / len(rows), 4),
        "tokens_per_forward": round(tokens / sum(steps), 4) if steps else None,
        "steps_per_canvas": round(mean(steps), 4) if steps else None,
        "canvases_per_sample": round(len(steps) / len(rows), 4) if steps else None,
        "canvases_by_steps": {str(s): n for s, n in sorted(Counter(steps).items())},
    }
