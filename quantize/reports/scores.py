"""Writes and reads scorings (a model's scored answers to a task), counts rows, compares pairs."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from quantize.errors import InputError
from quantize.host.files import REDO, read_json, write_json, write_text
from quantize.recovery.gate import Verdict
from quantize.recovery.pairing import in_common, paired
from quantize.recovery.rows import Row, Scoring
from quantize.recovery.terms import Comparison, Terms, unmeasured
from quantize.runs.folder import RunDir, continued_by


def pair(
    base: Scoring, other: Scoring, terms: Terms, **may_differ: Any
) -> tuple[dict[str, Any], Comparison | None]:
    """Return (report.json's entry on two scorings, their comparison or None if not comparable)."""
    outcome = paired(base, other, terms, **may_differ)
    base, other, _ = in_common(base, other)
    comparison = outcome if isinstance(outcome, Comparison) else None
    entry = {
        "not_comparable": outcome.reason if isinstance(outcome, Verdict) else None,
        **(asdict(comparison) if comparison else asdict(terms) | unmeasured()),
        "thinking": bool(other.conditions.get("generation", {}).get("thinking")),
        "made_with": other.made_with,
        "bf16_counts": counts(base.rows) | by_kind(base.rows),
        "quantized_counts": counts(other.rows) | by_kind(other.rows),
    }
    del entry["health_pp"]  # each sign has its limit
    return entry, comparison


def write_scoring(folder: Path, scoring: Scoring) -> None:
    """Write a scoring's rows, then its conditions; conditions of older rows are removed first."""
    about = folder / f"{scoring.task}.conditions.json"
    about.unlink(missing_ok=True)
    rows = [json.dumps(asdict(row), ensure_ascii=False) for row in scoring.rows]
    write_text(folder / f"{scoring.task}.jsonl", "\n".join(rows) + "\n")
    write_json(about, _conditions(folder, scoring.task, scoring.conditions, scoring.made_with))


def _conditions(folder: Path, task: str, compared: Any, made_with: Any) -> dict[str, Any]:
    """Return what a conditions file holds, with a sha256 over it and over the rows on disk."""
    digest = hashlib.sha256((folder / f"{task}.jsonl").read_bytes())
    digest.update(json.dumps([compared, made_with], sort_keys=True).encode())
    return {"compared": compared, "made_with": made_with, "sha256": digest.hexdigest()}


def read_scoring(folder: Path, task: str) -> Scoring:
    """Return a scoring that evaluate wrote; InputError: it is missing, or was changed since."""
    path, about = folder / f"{task}.jsonl", folder / f"{task}.conditions.json"
    if not path.exists() or not about.exists():
        raise InputError(f"{path}: missing or unfinished; run `quantize evaluate` first")
    try:
        lines = path.read_text("utf-8").split("\n")  # answers may hold other line ends: U+2028
        rows = [Row(**json.loads(line)) for line in lines if line]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: a line is no scored sample ({error}); {REDO}") from error
    stated = read_json(about, "compared", "made_with", "sha256")
    if stated != _conditions(folder, task, stated["compared"], stated["made_with"]):
        raise InputError(f"{path}: not what was scored under {about.name}; {REDO}")
    return Scoring(task, rows, stated["compared"], stated["made_with"])


def scored_tasks(run: RunDir) -> list[str]:
    """Return the tasks of a finished evaluation; InputError: it is not finished."""
    done = run.evaluation / "done.json"
    if not done.exists():
        made = {"verify": run.verification_json, "fidelity": run.fidelity_json, "evaluate": done}
        missing = ", ".join(name for name, path in made.items() if not path.exists())
        way = continued_by(run, f"quantize evaluate {run.path}")
        raise InputError(f"{run.path}: not finished, without {missing}; `{way}` goes on")
    return read_json(done, "tasks")["tasks"]


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a report's figures on samples, tokens and steps; figures on steps are None if unknown."""
    steps = [step for row in rows for step in row.denoising_steps]
    tokens = sum(row.tokens for row in rows)
    return {
        "samples": len(rows),
        "no_answer": sum(not row.answered for row in rows),
        "truncated": sum(row.truncated for row in rows),
        "loops": sum("loop" in row.signs_of_text for row in rows),
        "empty": sum("empty" in row.signs_of_text for row in rows),
        "tokens_per_sample": round(tokens / len(rows), 4),
        "tokens_per_forward": round(tokens / sum(steps), 4) if steps else None,
        "steps_per_canvas": round(mean(steps), 4) if steps else None,
        "steps_p90": sorted(steps)[(9 * len(steps) - 1) // 10] if steps else None,
        "canvases_per_sample": round(len(steps) / len(rows), 4) if steps else None,
        "canvases_by_steps": {str(s): n for s, n in sorted(Counter(steps).items())},
    }


def by_kind(rows: Sequence[Row]) -> dict[str, Any]:
    """Return {"by_kind": kind of prompt -> its counts}, {} where no question says its kind."""
    kinds = sorted({row.kind for row in rows if row.kind})
    of_kind = {kind: counts([row for row in rows if row.kind == kind]) for kind in kinds}
    return {"by_kind": of_kind} if kinds else {}
