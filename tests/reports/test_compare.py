"""Two runs are compared with intervals that hold whenever they ended."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from quantize.host.files import write_json
from quantize.recovery.rows import Scoring
from quantize.recovery.sequential import Plan
from quantize.recovery.statistics import compare
from quantize.recovery.terms import Terms
from quantize.reports.compare import compare_runs, comparison_table
from quantize.reports.scores import write_scoring
from quantize.runs.folder import RunDir
from tests.support.quick_run import TASK, rows

PLAN = Plan("such_questions", 100, 1, 0)


def scored(folder: Path, right: int, looks: int, plan: Plan = PLAN) -> tuple[RunDir, Scoring]:
    """Return a run that ended after so many looks, whose model has so many more answers right."""
    everything = rows([float(i % 2 or i < right) for i in range(100)])
    asked = plan.first(plan.looks[looks - 1]).answers
    made_with = {"planned": asdict(plan)}
    scoring = Scoring(TASK, everything, {}, made_with).only(asked)
    run = RunDir(folder)
    write_scoring(run.evaluation / "quantized", scoring)
    write_json(run.evaluation / "done.json", {"tasks": [TASK]})
    return run, scoring


@pytest.mark.parametrize(
    ("looks", "wider"),
    [((1, 8), (1.6, 1.9)), ((4, 2), (1.4, 1.8)), ((8, 8), (1.0, 1.12))],
)
def test_an_interval_holds_at_any_look(
    looks: tuple[int, int], wider: tuple[float, float], tmp_path: Path
) -> None:
    """z of 3.1 after 20 of 100 questions, 2.9 after 30, 2.1 after all; Student's is wider."""
    (a, ours), (b, theirs) = (
        scored(tmp_path / name, right, taken)
        for name, right, taken in (("a", 20, looks[0]), ("b", 60, looks[1]))
    )
    entry = compare_runs(a, b).tasks[TASK]
    common = ours.answered & theirs.answered
    alone = compare(
        *(replace(each, made_with={}).only(common).by_question() for each in (ours, theirs)),
        Terms(estimand="such_questions", margin_pp=100),
    )  # fmt: skip
    assert "wider than a report's" in str(
        comparison_table(compare_runs(a, b), a.path, b.path).caption
    )
    assert entry["difference_pp"] == alone.difference_pp
    interval, plain = entry["difference_interval"], alone.difference_interval
    ratio = (interval["high"] - interval["low"]) / ((plain.high or 0) - (plain.low or 0))
    assert wider[0] < ratio < wider[1]


def test_runs_of_differing_limits_are_told_how_they_become_comparable(tmp_path: Path) -> None:
    a, _ = scored(tmp_path / "a", 20, 8)
    b, _ = scored(tmp_path / "b", 20, 7, replace(PLAN, questions=60))
    reason = compare_runs(a, b).not_comparable
    assert reason is not None
    assert reason.startswith(f"{TASK}: documents differ: 100 against 60; ")
    assert "judge one of them again with the other's --task, --limit" in reason
    write_json(b.evaluation / "done.json", {"tasks": []})
    assert "; runs are compared on the same questions" in str(compare_runs(a, b).not_comparable)
