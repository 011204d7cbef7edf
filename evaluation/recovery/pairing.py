"""Pairs two scorings of a task question by question, as far as both models have answered.

If interim looks were planned, answers count up to the last look that both models completed. The
p-values allow for all looks (`sequential`) if these were planned for the gate's estimand.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from quantize.recovery.estimands import units
from quantize.recovery.gate import Verdict, not_comparable
from quantize.recovery.health import OF_TEXT, SIGNS, Sign, compare_sign, limits_of
from quantize.recovery.rows import Row, Scoring
from quantize.recovery.sequential import Look, Plan, at_looks
from quantize.recovery.statistics import Comparison, compare, tables
from quantize.recovery.steps import StepInflation, step_inflation
from quantize.recovery.terms import Terms


def in_common(base: Scoring, other: Scoring) -> tuple[Scoring, Scoring, list[Look]]:
    """Return both scorings, cut to the looks that both completed (if any), and these looks."""
    plan = _plan(base)
    looks = plan.taken(base.answered, other.answered) if plan else []
    if plan and looks:
        seen = plan.first(looks[-1]).answers
        base, other = base.only(seen), other.only(seen)
    return base, other, looks


def paired(
    base: Scoring,
    other: Scoring,
    terms: Terms,
    *,
    other_seed: bool = False,
    other_settings: Collection[str] = (),
) -> Comparison | Verdict:
    """Return a task's scoring compared with the baseline's, or else the verdict NOT COMPARABLE.

    Seeds must be equal or, if `other_seed` (for the noise floor), all different. `other_settings`
    names sampler settings that may differ: an operating point has its own. ValueError: there are
    fewer than two questions, or questions have differing numbers of answers.
    """
    base, other, looks = in_common(base, other)
    if differs := _differs(base, other, other_seed=other_seed, other_settings=other_settings):
        return differs
    plan = _plan(base)
    if plan and not looks:
        return Verdict("NOT COMPARABLE", "no look is complete on both sides")

    questions = plan.questions if plan else len(base.names)
    repeats = plan.repeats if plan else len(base.rows) // max(1, questions)
    limits = limits_of(terms, units(terms.estimand, questions, repeats))

    def compared(base: Scoring, other: Scoring) -> Comparison:
        signs = _health(base, other, terms, limits)
        return replace(
            compare(base.by_question(), other.by_question(), terms),
            step_inflation=_steps(base, other, terms),
            health=signs,
            unjudged=[sign for sign, limit in limits.items() if limit and sign not in signs],
            length=_length(base, other, terms.confidence),
        )

    if plan is None or plan.estimand != terms.estimand or len(plan.looks) == 1:
        return compared(base, other)
    seen = [plan.first(look).answers for look in looks]
    return at_looks([compared(base.only(part), other.only(part)) for part in seen], looks)


def _plan(scoring: Scoring) -> Plan | None:
    planned = scoring.made_with.get("planned")
    return None if planned is None else Plan(**planned)


def _steps(base: Scoring, other: Scoring, terms: Terms) -> StepInflation | None:
    """Return how many more steps `other` takes, None if an answer does not report its steps."""
    both = base, other
    if any(not row.denoising_steps for each in both for row in each.rows):
        return None
    never_stopped = [
        fmean(step >= most_steps(each) for row in each.rows for step in row.denoising_steps)
        for each in both
    ]
    costs, limit = (_costs(base), _costs(other)), terms.max_step_inflation
    return step_inflation(*costs, never_stopped, confidence=terms.confidence, limit=limit)


def most_steps(scoring: Scoring) -> float:
    """Return the most denoising steps a canvas may take, inf if the scoring states no limit."""
    return scoring.conditions.get("sampler", {}).get("max_denoising_steps", math.inf)


def _health(
    base: Scoring, other: Scoring, terms: Terms, limits_pp: Mapping[str, float | None]
) -> dict[str, Sign]:
    rows, unknown = [*base.rows, *other.rows], set[str]()
    if base.private and any(row.signs is None for row in rows):
        unknown |= OF_TEXT
    if math.isinf(most_steps(base)) or not all(row.denoising_steps for row in rows):
        unknown.add("never_stopped")
    shown = [
        each.by_question(partial(Row.health, most_steps=most_steps(each))) for each in (base, other)
    ]
    found: dict[str, Sign] = {}
    for sign in (sign for sign in SIGNS if sign not in unknown):
        both = [
            {q: [float(sign in signs) for signs in answers] for q, answers in each.items()}
            for each in shown
        ]
        found[sign] = compare_sign(*tables(*both), terms, limits_pp[sign])
    return found


def _length(base: Scoring, other: Scoring, confidence: float) -> list[float] | None:
    """Return [ratio of mean tokens per answer to the base's, low end of its interval, high end]."""
    ours, theirs = ({q: (t, 1) for q, (_, t) in _costs(s).items()} for s in (base, other))
    found = step_inflation(ours, theirs, (), confidence=confidence)
    return [found.ratio, found.low, found.high] if found else None


def _costs(side: Scoring) -> dict[str, tuple[int, int]]:
    costs = side.by_question(lambda row: (sum(row.denoising_steps), row.tokens))
    return {q: (sum(s for s, _ in each), sum(t for _, t in each)) for q, each in costs.items()}


def _differs(
    base: Scoring, other: Scoring, *, other_seed: bool, other_settings: Collection[str]
) -> Verdict | None:
    ignored = {"seed", "seeds"} if other_seed else set[str]()

    def kept(facts: Mapping[str, Any], *unlike: str) -> dict[str, Any]:
        found = {key: value for key, value in facts.items() if key not in ignored.union(unlike)}
        if other_settings and isinstance(sampler := found.get("sampler"), Mapping):
            found["sampler"] = {k: v for k, v in sampler.items() if k not in other_settings}
        return found

    if other_seed and any(a.seed == b.seed for a, b in zip(base.rows, other.rows, strict=False)):
        return Verdict("NOT COMPARABLE", "both sides have the same seed: no noise is between them")
    return not_comparable(kept(base.conditions), kept(other.conditions)) or not_comparable(
        kept(base.made_with, "model"), kept(other.made_with, "model")
    )
