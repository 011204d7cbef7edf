"""The verdict: PASS, FAIL or INCONCLUSIVE against a margin declared before the run.

Per task, with L and U the one-sided lower and upper confidence bounds of the paired difference:
  PASS          L > -margin: a loss as large as the margin is excluded (non-inferiority)
  FAIL          U < -margin: a loss larger than the margin is shown
  INCONCLUSIVE  neither; the verdict estimates how many questions or answers would decide
At 95 % confidence a model that loses exactly the margin passes at most one time in twenty, and
fails at most one time in twenty. "Not significantly worse" is not enough for PASS: that would
reward small evaluations. An interval of width 0 over a few questions is not enough either: PASS
also needs enough units (`estimands`) for a loss as large as the margin to show. Before a run,
`sequential.out_of_reach` warns if a recipe asks for fewer units.

Two p-values decide; without interim looks the bounds give the same verdict. With interim looks the
p-values are sequential (`sequential`): no later answer changes what a look has decided. So the
verdict shows difference and bounds at that look, then those over all answers.

Step inflation (`steps`) and signs of ill health (`health`) are judged together with accuracy, at
the same looks and under the same correction. A task passes only if every sign is also shown to be
below its limit. The run fails if step inflation or a sign is shown to exceed its limit. If answers
lack what a limit judges (a server may not report its steps), a run that does not fail is
INCONCLUSIVE.

Over all tasks: PASS if every task passes (an intersection-union test, which needs no correction).
FAIL if some task fails after Holm's correction. Uncorrected, many tasks would make a false alarm
likely. NOT COMPARABLE if questions or conditions of baseline and candidate differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantize.recovery.estimands import ROUNDING, Estimand
from quantize.recovery.limits import RULES, Outcome, limits_on, weights
from quantize.recovery.statistics import holm
from quantize.recovery.terms import Comparison

EXIT_CODES: dict[Outcome, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4, "NOT COMPARABLE": 4}


@dataclass(frozen=True)
class Verdict:
    """An outcome and the sentence that explains it."""

    outcome: Outcome
    reason: str
    estimand: Estimand | None = None  # what was judged; None when nothing was compared

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this verdict."""
        return EXIT_CODES[self.outcome]


def decides(p_value: float, confidence: float) -> bool:
    """Return whether a p-value excludes what it tests, at a confidence; the rule of every verdict."""
    return p_value <= 1 - confidence + ROUNDING


def _within(p_value: float, comparison: Comparison) -> bool:
    return decides(p_value, comparison.confidence)


def passes(comparison: Comparison) -> bool:
    """Return whether a task passes by itself: in accuracy and in each judged sign of ill health."""
    return all(_within(limit.p_pass, comparison) for limit in limits_on(comparison).values())


def _with_budget(task: str, comparison: Comparison) -> str:
    """Return a task's name with the most tokens of an answer, which move scores more than formats."""
    tokens = comparison.max_tokens
    return task if tokens is None else f"{task} at {tokens:,} tokens"


def judge_task(task: str, comparison: Comparison) -> Verdict:
    """Return a task's own verdict, without step inflation and Holm's correction over tasks."""
    limits = limits_on(comparison)
    margin = limits["margin"]

    def because(outcome: Outcome, *sentences: str) -> Verdict:
        named = _with_budget(task, comparison)
        reason = "; ".join(f"{named}: {sentence}" for sentence in sentences)
        return Verdict(outcome, reason, comparison.estimand)

    if passes(comparison):
        return because("PASS", margin.sentence("PASS"))
    for limit in limits.values():
        if _within(limit.p_fail, comparison) and not limit.of_run:
            return because("FAIL", limit.sentence("FAIL"))
    if not _within(margin.p_pass, comparison):
        return because("INCONCLUSIVE", margin.sentence("INCONCLUSIVE"))
    still_open = [limit for limit in limits.values() if not _within(limit.p_pass, comparison)]
    sentences = [limit.sentence("INCONCLUSIVE") for limit in still_open]
    return because("INCONCLUSIVE", margin.sentence("PASS"), *sentences)


def judge(seen: Mapping[str, Comparison | None]) -> Verdict:
    """Return the verdict over all tasks; `seen` is task -> comparison, None for a task without one.

    Holm's correction counts a task without a comparison as one that does not fail (p-value 1). So
    the answers that this task gets later cannot undo a FAIL.

    Raise ValueError if there is no task, or if tasks have differing estimands.
    """
    if not seen:
        raise ValueError("no task was compared")
    comparisons = {task: c for task, c in seen.items() if c is not None}
    if not comparisons:
        return Verdict("INCONCLUSIVE", f"{', '.join(seen)}: not asked")
    estimand = next(iter(comparisons.values())).estimand
    if odd := [task for task, c in comparisons.items() if c.estimand != estimand]:
        raise ValueError(f"{odd[0]} is not judged on {estimand}, as other tasks are")
    if failures := _failures(seen, comparisons):
        return Verdict("FAIL", "; ".join(failures), estimand)
    verdicts = {task: judge_task(task, c) for task, c in comparisons.items()}
    missing = [f"{task}: not asked" for task in seen if task not in comparisons]
    missing += [
        f"{_with_budget(task, comparison)}: {sentence}"
        for rule in RULES
        for task, comparison in comparisons.items()
        for sentence in rule.unseen(comparison)
    ]
    if not missing and all(verdict.outcome == "PASS" for verdict in verdicts.values()):
        return Verdict("PASS", "; ".join(verdict.reason for verdict in verdicts.values()), estimand)
    corrected = {"FAIL": "; fails alone, not after Holm's correction over the tasks"}
    still_open = [
        verdict.reason + corrected.get(verdict.outcome, "")
        for verdict in verdicts.values()
        if verdict.outcome != "PASS"
    ]
    return Verdict("INCONCLUSIVE", "; ".join([*still_open, *missing]), estimand)


def passing(points: Mapping[str, Sequence[Comparison]]) -> dict[str, float]:
    """Return operating point -> p-value of "the point does not fit", Holm-corrected over points.

    A point fits if no task's loss (by format and sampler settings together) reaches the margin, and
    no sign of ill health reaches its limit. A point's p-value is the largest of all its tests; it is
    1 where a sign has a limit but cannot be seen in the answers, as such a run is INCONCLUSIVE.
    """
    return holm({name: max(map(_p_unfit, tasks)) for name, tasks in points.items()})


def _p_unfit(comparison: Comparison) -> float:
    p_values = (limit.p_pass for limit in limits_on(comparison).values())
    return 1.0 if comparison.unjudged else max(*p_values, 0.0)


def _failures(
    seen: Mapping[str, Comparison | None], comparisons: Mapping[str, Comparison]
) -> list[str]:
    """Return a sentence for each limit that is exceeded, over all tasks, after Holm's correction."""
    limits = {task: limits_on(comparison) for task, comparison in comparisons.items()}
    of_limit = weights(comparisons.values())
    tests = {(task, name): weight for task in seen for name, weight in of_limit.items()}
    p_values = {
        (task, name): limits[task][name].p_fail if name in limits.get(task, {}) else 1.0
        for task, name in tests
    }
    return [
        f"{_with_budget(task, comparisons[task])}: {limits[task][name].sentence('FAIL')}"
        for (task, name), adjusted in holm(p_values, tests).items()
        if name in limits.get(task, {}) and _within(adjusted, comparisons[task])
    ]


def not_comparable(base: Mapping[str, Any], quantized: Mapping[str, Any]) -> Verdict | None:
    """Return NOT COMPARABLE, naming the first condition that differs, or None if none differs."""
    for key in sorted(base.keys() | quantized.keys()):
        ours, theirs = base.get(key), quantized.get(key)
        if ours != theirs:
            return Verdict("NOT COMPARABLE", f"{key} differ: {_unequal(ours, theirs)}")
    return None


def _unequal(base: Any, quantized: Any) -> str:
    """Return text that says where two values differ: of lists, only the first unequal entry."""
    if isinstance(base, list) and isinstance(quantized, list):
        if len(base) != len(quantized):
            return f"{len(base)} against {len(quantized)}"
        pairs = list(zip(base, quantized, strict=True))
        index = next(i for i, (a, b) in enumerate(pairs) if a != b)
        return f"entry {index} is {_unequal(*pairs[index])}"
    if isinstance(base, dict) and isinstance(quantized, dict):
        key = next(k for k in sorted({*base, *quantized}) if base.get(k) != quantized.get(k))
        return f"{key} is {_unequal(base.get(key), quantized.get(key))}"
    return f"{_short(base)} against {_short(quantized)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
