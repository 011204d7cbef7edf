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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quantize.recovery.estimands import ROUNDING, Estimand
from quantize.recovery.health import SIGNS
from quantize.recovery.statistics import Comparison, holm

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT COMPARABLE"]
EXIT_CODES: dict[Outcome, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4, "NOT COMPARABLE": 4}
IN_WORDS: dict[Estimand, str] = {
    "these_questions": "on these questions",
    "such_questions": "on questions like these",
}


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
    return _within(comparison.p_at_least_margin, comparison) and not _unhealthy(comparison)


def _p_within(comparison: Comparison | None, what: str) -> float:
    """Return the p-value of "within its limit" for a sign, "steps" or accuracy (""), else 1."""
    if comparison is None:
        return 1.0
    found = comparison.step_inflation if what == "steps" else comparison.health.get(what)
    p = found.p_at_most_limit if found else None if what else comparison.p_at_most_margin
    return 1.0 if p is None else p


def _unhealthy(comparison: Comparison) -> list[str]:
    return [
        name
        for name, sign in comparison.health.items()
        if sign.p_at_least_limit is not None and not _within(sign.p_at_least_limit, comparison)
    ]


def judge_task(task: str, comparison: Comparison) -> Verdict:
    """Return a task's own verdict, without step inflation and Holm's correction over tasks."""
    estimand = comparison.estimand
    if passes(comparison):
        return Verdict("PASS", _seen(task, comparison, "p_at_least_margin"), estimand)
    if _within(comparison.p_at_most_margin, comparison):
        return Verdict("FAIL", _seen(task, comparison, "p_at_most_margin"), estimand)
    for sign in comparison.health:
        if _within(_p_within(comparison, sign), comparison):
            return Verdict("FAIL", _sign_seen(task, comparison, sign), estimand)
    if _within(comparison.p_at_least_margin, comparison):
        told = [_sign_seen(task, comparison, name) for name in _unhealthy(comparison)]
        seen = _seen(task, comparison, "p_at_least_margin")
        return Verdict("INCONCLUSIVE", "; ".join([seen, *told]), estimand)
    return Verdict("INCONCLUSIVE", f"{_seen(task, comparison)}; {_needed(comparison)}", estimand)


def judge(seen: Mapping[str, Comparison | None]) -> Verdict:
    """Return the verdict over all tasks; `seen` is task -> comparison, None for a task without one.

    Holm's correction counts a task without a comparison as one that does not fail (p-value 1). So
    the answers that this task gets later cannot undo a FAIL.

    Raise ValueError if there is no task, or if tasks have differing estimands.
    """
    if not seen:
        raise ValueError("no task was compared")
    comparisons = {task: each for task, each in seen.items() if each is not None}
    if not comparisons:
        return Verdict("INCONCLUSIVE", f"{', '.join(seen)}: not asked")
    estimand = next(iter(comparisons.values())).estimand
    if odd := [task for task, c in comparisons.items() if c.estimand != estimand]:
        raise ValueError(f"{odd[0]} is not judged on {estimand}, as other tasks are")
    verdicts = {task: judge_task(task, c) for task, c in comparisons.items()}
    if failed := _failures(seen, verdicts):
        return Verdict("FAIL", "; ".join(failed), estimand)
    missing = [f"{task}: not asked" for task in seen if task not in comparisons]
    missing += [
        f"{task}: an answer does not tell its denoising steps, so max_step_inflation is not judged"
        for task, c in comparisons.items()
        if c.max_step_inflation is not None and c.step_inflation is None
    ]
    missing += [
        f"{task}: answers do not tell which are {SIGNS[sign]}, so that is not judged"
        for task, c in comparisons.items()
        for sign in c.unjudged
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
    return holm({name: max(map(_p_unfit, each)) for name, each in points.items()})


def _p_unfit(comparison: Comparison) -> float:
    signs = (sign.p_at_least_limit or 0.0 for sign in comparison.health.values())
    return 1.0 if comparison.unjudged else max(comparison.p_at_least_margin, *signs, 0.0)


def _failures(seen: Mapping[str, Comparison | None], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return a sentence for each loss, excess of steps or sign of ill health that fails the run."""
    comparisons = [each for each in seen.values() if each is not None]
    of_steps = any(c.max_step_inflation is not None for c in comparisons)
    # Holm's correction covers all these limits; the signs of a task share the weight of one limit.
    judged = {name for c in comparisons for name, s in c.health.items() if s.limit_pp is not None}
    signs = [sign for sign in SIGNS if sign in judged]
    limits = ["", *(["steps"] if of_steps else []), *signs]
    weights = {(t, what): 1 / len(signs) if what in signs else 1.0 for t in seen for what in limits}
    p_values = {(task, what): _p_within(seen[task], what) for task, what in weights}
    return [
        verdicts[task].reason if not what
        else _steps_seen(task, c) if what == "steps"
        else _sign_seen(task, c, what)
        for (task, what), adjusted in holm(p_values, weights).items()
        if (c := seen[task]) and _within(adjusted, c)
    ]  # fmt: skip


def _sign_seen(task: str, comparison: Comparison, name: str) -> str:
    sign = comparison.health[name]
    return (
        f"{task}: {100 * sign.quantized:.1f} % of answers are {SIGNS[name]}, {100 * sign.base:.1f} % "
        f"of BF16's; {sign.difference_pp:+.1f} points [{sign.low:+.1f}, {sign.high:+.1f}], "
        f"{sign.limit_pp:+g} are allowed"
    )


def not_comparable(base: Mapping[str, Any], quantized: Mapping[str, Any]) -> Verdict | None:
    """Return NOT COMPARABLE, naming the first condition that differs, or None if none differs."""
    for key in sorted(base.keys() | quantized.keys()):
        ours, theirs = base.get(key), quantized.get(key)
        if ours != theirs:
            return Verdict("NOT COMPARABLE", f"{key} differ: {_unequal(ours, theirs)}")
    return None


def _seen(task: str, comparison: Comparison, decisive: str | None = None) -> str:
    """Describe the last look, or the first that the p-value `decisive` decided, and all answers."""
    looks, bounds = comparison.looks, comparison.difference_bounds
    last: dict[str, Any] = asdict(comparison) | asdict(bounds)
    look = _deciding(comparison, lambda look: look[decisive] if decisive else 1.0) or last
    fails, margin = decisive == "p_at_most_margin", comparison.margin_pp
    seen = (
        f"{task}: {_difference(look)}; at {comparison.confidence:.0%} {_loss(look, margin, fails)}; "
        f"{margin:g} are allowed ({_answers(look)}, {IN_WORDS[comparison.estimand]}"
    )
    if look is last or look is looks[-1]:
        return seen + (f", {len(looks)} looks)" if len(looks) > 1 else ")")
    of_all = f"{_difference(last)}, {_loss(last, margin, fails)}, {_answers(last)}"
    return f"{seen}, decided at look {looks.index(look) + 1} of {len(looks)}; all: {of_all})"


def _difference(look: Mapping[str, Any]) -> str:
    much = f"{abs(look['difference_pp']):.1f}"
    if much == "0.0":
        return "answers as many correctly"
    return f"answers {much} points {'fewer' if look['difference_pp'] < 0 else 'more'} correctly"


def _loss(look: Mapping[str, Any], margin_pp: float, fails: bool) -> str:
    """Describe the bound of the loss that decides, with more digits if it is near the margin."""
    loss = -look["high" if fails else "low"]
    digits = 2 if abs(loss - margin_pp) < 0.1 else 1
    return f"the loss is {'above' if fails else 'below'} {loss:.{digits}f} points"


def _deciding(
    comparison: Comparison, p_of: Callable[[Mapping[str, Any]], float]
) -> Mapping[str, Any] | None:
    """Return the first look whose own p-value decides, None if no look decides."""
    return next((look for look in comparison.looks if p_of(look) <= look["level"] + ROUNDING), None)


def _steps_seen(task: str, comparison: Comparison) -> str:
    """Say by how much the steps exceed BF16's at the look that decided, else over all answers."""

    def p_of(look: Mapping[str, Any]) -> float:
        return look["step_inflation"]["p_at_most_limit"] if look["step_inflation"] else 1.0

    look = _deciding(comparison, p_of) or asdict(comparison)
    ratio, bound = (100 * (look["step_inflation"][key] - 1) for key in ("ratio", "bound"))
    return (
        f"{task}: takes {ratio:.1f} % more denoising steps a token; at {comparison.confidence:.0%} "
        f"it is above {bound:.1f} %; {100 * (comparison.max_step_inflation or 0):g} % are allowed "
        f"({_answers(look)})"
    )


def _answers(look: Mapping[str, Any]) -> str:
    return f"{look['questions']} questions x {look['repeats']}"


def _needed(comparison: Comparison) -> str:
    if comparison.needed is None:
        return "no number of questions decides, were the difference as observed"
    of_questions = comparison.estimand == "such_questions"
    number = comparison.questions if of_questions else comparison.repeats
    what = "questions" if of_questions else "answers a question"
    return (
        f"about {math.ceil(number * comparison.needed)} {what} would decide, were the difference as "
        f"observed"
    )


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
