"""Compares two runs: their quantized models on the same questions, paired.

A recipe's author asks: did this change of scheme, calibration or ignore list matter? Two recovery
figures do not tell. The interval of the paired difference does, for questions like those asked.

A run may have ended at an interim look, because of the very scores that are compared. So each
interval has the nominal level of the last look that both runs completed (repeated confidence
intervals, Jennison and Turnbull 1989).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.files import read_json
from quantize.recovery.pairing import in_common
from quantize.recovery.rows import Scoring
from quantize.recovery.sequential import nominal_levels
from quantize.recovery.terms import Terms
from quantize.reports.questions import differing, question_counts, question_row
from quantize.reports.scores import pair, read_scoring, scored_tasks
from quantize.reports.table import cell
from quantize.runs.folder import RunDir
from quantize.runs.models import CANDIDATE
from quantize.runs.weights import Weights

CONFIDENCE = 0.95
SAME_QUESTIONS = (
    "runs are compared on the same questions, asked in the same way: run or judge one of them again "
    "with the other's --task, --limit and `evaluation` of the recipe; a sampler's settings come from "
    "the checkpoint's generation_config.json"
)


@dataclass(frozen=True)
class RunComparison:
    """Run B compared with run A."""

    tasks: dict[str, dict[str, Any]]  # task -> entry as in report.json, A in the place of BF16
    # Task -> entries of its differing questions, as in report.json; [] if it is not comparable.
    questions: dict[str, list[dict[str, Any]]]
    # Figure -> its values in A and in B, None for a run without it.
    facts: dict[str, tuple[float | None, float | None]]
    not_comparable: str | None  # why the scores cannot be compared, None when they can


def compare_runs(a: RunDir, b: RunDir) -> RunComparison:
    """Return a comparison of two runs' candidates.

    Raise InputError if a run has no finished scores, or scores of other weights than it verified.
    """
    tasks_of = [sorted(scored_tasks(run)) for run in (a, b)]
    figures = [_figures(run) for run in (a, b)]
    names = figures[0] | figures[1]
    facts = {name: (figures[0].get(name), figures[1].get(name)) for name in names}
    if tasks_of[0] != tasks_of[1]:
        lists = " and ".join(", ".join(tasks) for tasks in tasks_of)
        return RunComparison({}, {}, facts, f"tasks differ: {lists}; {SAME_QUESTIONS}")
    entries: dict[str, dict[str, Any]] = {}
    questions: dict[str, list[dict[str, Any]]] = {}
    for task in tasks_of[0]:
        ours, theirs = (_scoring(run, task) for run in (a, b))
        fractions, level = [look.fraction for look in in_common(ours, theirs)[2]], 1 - CONFIDENCE
        if fractions not in ([], [1.0]):
            level = 2 * nominal_levels(tuple(fractions), level / 2)[-1]
        terms = Terms(estimand="such_questions", margin_pp=100, confidence=1 - level)
        entries[task], _ = pair(ours, theirs, terms)
        questions[task] = [] if entries[task]["not_comparable"] else differing(ours, theirs)
    reasons = (
        f"{t}: {e['not_comparable']}; {SAME_QUESTIONS}"
        for t, e in entries.items()
        if e["not_comparable"]
    )
    return RunComparison(entries, questions, facts, next(reasons, None))


def _scoring(run: RunDir, task: str) -> Scoring:
    """Return the candidate's scores; those of weights that a run had before compare nothing."""
    scoring = read_scoring(run.evaluation / CANDIDATE, task)
    is_verified = run.verification_json.exists()  # evaluate runs without verify too
    if is_verified and (why := Weights.of(run).fault(CANDIDATE, scoring.made_with)):
        raise InputError(f"{run.path}: {task}: {why}; `quantize evaluate {run.path}`")
    return scoring


def comparison_table(comparison: RunComparison, a: Path, b: Path) -> Table:
    """Return the comparison of runs A and B, two folders, as a table for the terminal."""
    names = (f"{x} {run if a.name == b.name else run.name}" for x, run in (("A", a), ("B", b)))
    table = Table(
        "", *map(escape, names), "difference", title="B against A",
        caption=f"{CONFIDENCE:.0%} intervals of B minus A that hold whenever the runs ended, so wider "
        "than a report's of a run minus BF16",
    )  # fmt: skip
    for task, entry in comparison.tasks.items():
        if entry["not_comparable"]:
            table.add_row(task, "", "", "not comparable")
            continue
        table.add_row(
            f"{task}, {entry['questions']} x {entry['repeats']}",
            f"{entry['base']:.3f}",
            f"{entry['quantized']:.3f}",
            cell(entry, "difference_pp", "+.2f", " pp"),
        )
        steps = [entry[side]["steps_per_canvas"] for side in ("bf16_counts", "quantized_counts")]
        table.add_row(f"{task}, steps per canvas", *map(_number, steps), "")
    for name, values in comparison.facts.items():
        table.add_row(name, *map(_number, values), "")
    return table


def question_tables(comparison: RunComparison, most: int) -> Iterator[Table]:
    """Yield a table for each task with questions that differ; it lists the first `most` of them."""
    for task, entries in comparison.questions.items():
        if not entries:
            continue
        more = f"; the first {most} of {len(entries)}" if len(entries) > most else ""
        table = Table(
            "question", "outcome", "target", "A", "B", "steps A / B",
            title=f"{task}: {question_counts(entries)}{more}",
        )  # fmt: skip
        for entry in entries[:most]:
            table.add_row(*map(escape, question_row(entry)))
        yield table


def _figures(run: RunDir) -> dict[str, float]:
    figures: dict[str, float] = {}
    if run.report_json.exists():  # as the report says: all tensors, without the files' headers
        nbytes = read_json(run.report_json, "sizes")["sizes"]["quantized_bytes"]
        figures["checkpoint, MB"] = nbytes / 1e6
    elif run.checkpoint.is_dir():
        figures["checkpoint, MB"] = Checkpoint.open(run.checkpoint).nbytes / 1e6
    if run.fidelity_json.exists():
        for mode, replayed in read_json(run.fidelity_json, "activations")["activations"].items():
            figures[f"KL from BF16, nats, activations {mode}"] = replayed["kl_nats"]["mean"]
            if shares := replayed["routing_overlap"]:
                figures[f"BF16's experts, worst layer, activations {mode}"] = min(shares)
        if cost := read_json(run.fidelity_json).get("routing_cost"):
            name = f"KL that choosing otherwise adds, nats, activations {cost['activations']}"
            figures[name] = cost["choices_add"]["mean"]
    return figures


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
