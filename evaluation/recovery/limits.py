"""The limits of the gate: each is one `Limit`, and each rule of `RULES` measures and sets some.

A rule that a recipe's key states has the key's name as a field of `Terms`, and a field of
`Comparison` for what it measured (both in `terms`). Verdict, interim looks, Holm's correction, the
operating points and the report's entry follow from the rule's record here.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

from scipy.special import ndtri

from quantize.recovery.estimands import IN_WORDS, ROUNDING
from quantize.recovery.health import OF_TEXT, SIGNS, compare_sign, limits_of
from quantize.recovery.rows import Row, Scoring
from quantize.recovery.statistics import tables
from quantize.recovery.steps import Costs, step_inflation
from quantize.recovery.terms import Comparison, Sign, Terms

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT COMPARABLE"]


@dataclass(frozen=True)
class Limit:
    """A limit as one task's answers show it: is it kept, is it exceeded, and what was seen."""

    p_pass: float  # p-value of "the limit is reached"; PASS needs a small one
    p_fail: float  # p-value of "the limit is not exceeded"; a small one fails the run
    sentence: Callable[[Outcome], str]  # says what was seen, as the reason of this outcome
    of_run: bool = False  # whether only a whole run fails by it, and never a task by itself
    # Standard errors by which the estimate keeps the limit, below 0 if it does not. With the default a
    # task is asked on in the hope of a FAIL.
    inside: float = 0.0


@dataclass(frozen=True)
class Rule:
    """Measures what its limits judge; those of its `names` that are set share one limit's weight."""

    names: Collection[str]  # names of its limits
    # (baseline, candidate, terms, planned units) -> fields of `Comparison`
    measure: Callable[[Scoring, Scoring, Terms, int], Mapping[str, Any]]
    limits: Callable[[Comparison], Mapping[str, Limit]]  # name -> each limit that is set
    unseen: Callable[[Comparison], list[str]]  # sentences on limits that the answers cannot show


def limits_on(comparison: Comparison) -> dict[str, Limit]:
    """Return name -> limit for all limits that are set on a task, the margin's first."""
    return {name: limit for rule in RULES for name, limit in rule.limits(comparison).items()}


def weights(comparisons: Collection[Comparison]) -> dict[str, float]:
    """Return the weight in Holm's correction of each limit that some task sets, in the rules' order."""
    in_use = {name for comparison in comparisons for name in limits_on(comparison)}
    of_rules = [[name for name in rule.names if name in in_use] for rule in RULES]
    return {name: 1 / len(names) for names in of_rules for name in names}


def most_steps(scoring: Scoring) -> float:
    """Return the most denoising steps a canvas may take, inf if the scoring states no limit."""
    return scoring.conditions.get("sampler", {}).get("max_denoising_steps", math.inf)


def costs(scoring: Scoring) -> Costs:
    """Return question -> (denoising steps, tokens) of each of its answers."""
    return scoring.by_question(lambda row: (sum(row.denoising_steps), row.tokens))


def _margin(comparison: Comparison) -> dict[str, Limit]:
    def sentence(outcome: Outcome) -> str:
        decisive = {"PASS": "p_at_least_margin", "FAIL": "p_at_most_margin"}.get(outcome)
        if not decisive and (right := 100 * comparison.base) <= (margin := comparison.margin_pp):
            return (
                f"BF16 answers {right:.1f} % correctly, so a loss of {margin:g} points cannot show"
            )
        seen = _accuracy_seen(comparison, decisive)
        return seen if decisive else f"{seen}; {_needed(comparison)}"

    p_pass, p_fail = comparison.p_at_least_margin, comparison.p_at_most_margin
    room = comparison.margin_pp + comparison.difference_pp
    inside = _inside(room, comparison.difference_interval, comparison.confidence)
    return {"margin": Limit(p_pass, p_fail, sentence, inside=inside)}


def solved(comparison: Comparison) -> float:
    """Return by how many standard errors BF16 answers more than the margin correctly."""
    room = comparison.base - comparison.margin_pp / 100
    return _inside(room, comparison.base_interval, comparison.confidence)


def _inside(room: float, interval: Any, confidence: float) -> float:
    """Return `room` in standard errors, as the two-sided `interval` (of `low`, `high`) has them."""
    error = (interval.high - interval.low) / 2 / float(ndtri((1 + confidence) / 2))
    return room / max(error, 1e-9)


def _accuracy_seen(comparison: Comparison, decisive: str | None) -> str:
    """Describe the last look, or the first that the p-value `decisive` decided, and all answers."""
    looks, bounds = comparison.looks, comparison.difference_bounds
    last: dict[str, Any] = asdict(comparison) | asdict(bounds)
    at_look: dict[str, Any] = asdict(comparison.bounds_at_look)
    look = _deciding(comparison, lambda look: look[decisive] if decisive else 1.0) or last
    fails, margin = decisive == "p_at_most_margin", comparison.margin_pp
    bound = f"at {comparison.confidence:.0%} {_loss(look, margin, fails)}"
    if decisive is None:
        at = f"{1 - looks[-1]['level']:.2%}" if looks else f"{comparison.confidence:.0%}"
        bound = f"at {at} a loss of {_points(-at_look['low'], margin)} is not excluded"
    seen = (
        f"{_difference(look)}; {bound}; "
        f"{margin:g} are allowed ({_answers(look)}, {IN_WORDS[comparison.estimand]}"
    )
    if look is last or look is looks[-1]:
        return seen + (f", {len(looks)} looks)" if len(looks) > 1 else ")")
    of_all = f"{_difference(last)}, {_loss(last, margin, fails)}, {_answers(last)}"
    return (
        f"{seen}, accuracy decided at look {looks.index(look) + 1} of {len(looks)}; all: {of_all})"
    )


def _difference(look: Mapping[str, Any]) -> str:
    much = f"{abs(look['difference_pp']):.1f}"
    if much == "0.0":
        return "answers as many correctly"
    return f"answers {much} points {'fewer' if look['difference_pp'] < 0 else 'more'} correctly"


def _loss(look: Mapping[str, Any], margin_pp: float, fails: bool) -> str:
    """Describe the bound of the loss that decides, with more digits if it is near the margin."""
    loss = -look["high" if fails else "low"]
    return f"the loss is {'above' if fails else 'below'} {_points(loss, margin_pp)}"


def _points(loss: float, margin_pp: float) -> str:
    return f"{loss:.{2 if abs(loss - margin_pp) < 0.1 else 1}f} points"


def _deciding(
    comparison: Comparison, p_of: Callable[[Mapping[str, Any]], float]
) -> Mapping[str, Any] | None:
    """Return the first look whose own p-value decides, None if no look decides."""
    return next((look for look in comparison.looks if p_of(look) <= look["level"] + ROUNDING), None)


def _answers(look: Mapping[str, Any]) -> str:
    return f"{look['questions']} questions x {look['repeats']}"


def _needed(comparison: Comparison) -> str:
    if comparison.needed is None:
        return "no number of questions decides, were the difference as observed"
    of_questions = comparison.estimand == "such_questions"
    number = comparison.questions if of_questions else comparison.repeats
    what = "questions" if of_questions else "answers a question"
    count = math.ceil(round(number * comparison.needed, 6))
    return f"about {count} {what} would decide, were the difference as observed"


def _measure_steps(base: Scoring, other: Scoring, terms: Terms, _: int) -> dict[str, Any]:
    """Return how many more steps `other` takes, None if an answer does not report its steps."""
    both = base, other
    if any(not row.denoising_steps for side in both for row in side.rows):
        return {"step_inflation": None}
    never_stopped = [
        fmean(step >= most_steps(side) for row in side.rows for step in row.denoising_steps)
        for side in both
    ]
    inflation = step_inflation(
        costs(base),
        costs(other),
        never_stopped,
        confidence=terms.confidence,
        limit=terms.max_step_inflation,
        sampled=terms.estimand == "such_questions" or len(base.rows) == len(base.names),
    )
    return {"step_inflation": inflation}


def _steps(comparison: Comparison) -> dict[str, Limit]:
    if comparison.max_step_inflation is None:
        return {}
    inflation = comparison.step_inflation
    p_fail = inflation.p_at_most_limit if inflation else None
    p_fail, sentence = 1.0 if p_fail is None else p_fail, partial(_steps_seen, comparison)
    room, inside = 1 + comparison.max_step_inflation, math.inf
    if inflation is not None:
        inside = _inside(room - inflation.ratio, inflation, comparison.confidence)
    return {"steps": Limit(0.0, p_fail, sentence, of_run=True, inside=inside)}


def _steps_seen(comparison: Comparison, _: Outcome) -> str:
    """Say by how much the steps exceed BF16's at the look that decided, else over all answers."""

    def p_of(look: Mapping[str, Any]) -> float:
        return look["step_inflation"]["p_at_most_limit"] if look["step_inflation"] else 1.0

    look = _deciding(comparison, p_of) or asdict(comparison)
    ratio, bound = (100 * (look["step_inflation"][key] - 1) for key in ("ratio", "bound"))
    return (
        f"takes {ratio:.1f} % more denoising steps a token; at {comparison.confidence:.0%} it is "
        f"above {bound:.1f} %; {100 * (comparison.max_step_inflation or 0):g} % are allowed "
        f"({_answers(look)})"
    )


def _steps_unseen(comparison: Comparison) -> list[str]:
    if comparison.max_step_inflation is None or comparison.step_inflation is not None:
        return []
    return ["an answer does not tell its denoising steps, so max_step_inflation is not judged"]


def _measure_health(base: Scoring, other: Scoring, terms: Terms, units: int) -> dict[str, Any]:
    limits_pp = limits_of(terms, units)
    signs = _signs(base, other, terms, limits_pp)
    hidden = [sign for sign, limit_pp in limits_pp.items() if limit_pp and sign not in signs]
    return {"health": signs, "unjudged": hidden}


def _signs(
    base: Scoring, other: Scoring, terms: Terms, limits_pp: Mapping[str, float | None]
) -> dict[str, Sign]:
    rows, unknown = [*base.rows, *other.rows], set[str]()
    if base.private and any(row.signs is None for row in rows):
        unknown |= OF_TEXT
    if math.isinf(most_steps(base)) or not all(row.denoising_steps for row in rows):
        unknown.add("never_stopped")
    shown = [
        side.by_question(partial(Row.health, most_steps=most_steps(side))) for side in (base, other)
    ]
    compared: dict[str, Sign] = {}
    for sign in (sign for sign in SIGNS if sign not in unknown):
        both = [
            {q: [float(sign in signs) for signs in answers] for q, answers in side.items()}
            for side in shown
        ]
        compared[sign] = compare_sign(*tables(*both), terms, limits_pp[sign])
    return compared


def _health(comparison: Comparison) -> dict[str, Limit]:
    return {
        name: Limit(
            _or_1(sign.p_at_least_limit),
            _or_1(sign.p_at_most_limit),
            partial(_sign_seen, name, sign),
            inside=_inside(sign.limit_pp - sign.difference_pp, sign, comparison.confidence),
        )
        for name, sign in comparison.health.items()
        if sign.limit_pp is not None
    }


def _or_1(p_value: float | None) -> float:
    return 1.0 if p_value is None else p_value


def _sign_seen(name: str, sign: Sign, outcome: Outcome) -> str:
    # The interval is of this sign alone; its test has a part of the error, so it may exclude less.
    shared = ", and more is not excluded: signs and looks share the error"
    return (
        f"{100 * sign.quantized:.1f} % of answers are {SIGNS[name]}, {100 * sign.base:.1f} % of "
        f"BF16's; {sign.difference_pp:+.1f} points [{sign.low:+.1f}, {sign.high:+.1f}], "
        f"{sign.limit_pp:+.3g} are allowed{shared if outcome == 'INCONCLUSIVE' else ''}"
    )


def _health_unseen(comparison: Comparison) -> list[str]:
    return [
        f"answers do not tell which are {SIGNS[sign]}, so that is not judged"
        for sign in comparison.unjudged
    ]


RULES = [
    Rule(["margin"], lambda *_: {}, _margin, lambda _: []),
    Rule(["steps"], _measure_steps, _steps, _steps_unseen),
    Rule(SIGNS, _measure_health, _health, _health_unseen),
]
