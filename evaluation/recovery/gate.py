"""The verdict: PASS, FAIL or INCONCLUSIVE against a margin declared before the run.

Per task, with L and U the one-sided lower and upper confidence bounds of the paired difference:
  PASS          L > -margin: a loss as large as the margin is excluded (non-inferiority)
  FAIL          U < -margin: a loss larger than the margin is shown
  INCONCLUSIVE  neither; the verdict says how many questions would decide
At 95 % confidence a model that loses exactly the margin passes one time in twenty, and fails one
time in twenty. "Not significantly worse" is not PASS: that would reward small evaluations.

Over tasks: PASS when every task passes (an intersection-union test, which needs no correction), FAIL
when some task fails after Holm's correction, so that many tasks do not make a false alarm likely.
NOT COMPARABLE when the two sides were not asked the same under the same conditions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from recovery.statistics import Comparison, holm, non_inferiority_p, questions_needed

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT COMPARABLE"]
EXIT_CODES: dict[Outcome, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4, "NOT COMPARABLE": 4}


@dataclass(frozen=True)
class Verdict:
    """An outcome and the sentence that explains it."""

    outcome: Outcome
    reason: str

    @property
    def exit_code(self) -> int:
        """The code that a command ends with."""
        return EXIT_CODES[self.outcome]


def judge_task(task: str, comparison: Comparison, margin_pp: float) -> Verdict:
    """Judge one task."""
    bounds = comparison.difference_bounds
    low, high = bounds.low, bounds.high
    if low is None or high is None:
        return Verdict("INCONCLUSIVE", f"{task}: the difference has no interval")
    seen = (
        f"{task}: {comparison.difference_pp:+.2f} pp "
        f"(one-sided {comparison.confidence:.0%} bounds {low:+.2f} and {high:+.2f}), "
        f"margin {margin_pp:g} pp, {comparison.questions} questions x {comparison.repeats}"
    )
    if low > -margin_pp:
        return Verdict("PASS", seen)
    if high < -margin_pp:
        return Verdict("FAIL", seen)
    needed = questions_needed(
        comparison.difference_pp, comparison.deviation_pp, margin_pp, comparison.confidence
    )
    decide = (
        f"about {needed} questions would decide" if needed else "no number of questions decides"
    )
    return Verdict("INCONCLUSIVE", f"{seen}; {decide}, were the difference as observed")


def judge(
    comparisons: Mapping[str, Comparison], margin_pp: Mapping[str, float], confidence: float
) -> Verdict:
    """Judge a run over all its tasks.

    Raises:
        ValueError: there is no task, or one has no margin.
    """
    if not comparisons:
        raise ValueError("no task was compared")
    if unjudged := sorted(comparisons.keys() - margin_pp.keys()):
        raise ValueError(f"task {unjudged[0]!r} has no margin in the recipe's gate")
    verdicts = {t: judge_task(t, c, margin_pp[t]) for t, c in comparisons.items()}
    # p-value of "the loss is at most the margin", small when a larger loss is shown.
    p_values = {
        task: 1 - non_inferiority_p(c.difference_pp, c.deviation_pp, c.questions, margin_pp[task])
        for task, c in comparisons.items()
    }
    adjusted = holm(p_values)
    failed = [
        task
        for task, verdict in verdicts.items()
        if verdict.outcome == "FAIL" and adjusted[task] <= 1 - confidence
    ]
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    reasons = "; ".join(verdict.reason for verdict in verdicts.values())
    if failed:
        return Verdict("FAIL", "; ".join(verdicts[task].reason for task in failed))
    if outcomes == {"PASS"}:
        return Verdict("PASS", reasons)
    open_tasks = [verdict.reason for verdict in verdicts.values() if verdict.outcome != "PASS"]
    return Verdict("INCONCLUSIVE", "; ".join(open_tasks))


def not_comparable(base: Mapping[str, Any], quantized: Mapping[str, Any]) -> Verdict | None:
    """Return NOT COMPARABLE when the conditions of two scorings differ, naming the first."""
    for key in sorted(base.keys() | quantized.keys()):
        if base.get(key) != quantized.get(key):
            return Verdict(
                "NOT COMPARABLE",
                f"{key} differs: {_short(base.get(key))} for BF16, "
                f"{_short(quantized.get(key))} for quantized",
            )
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
