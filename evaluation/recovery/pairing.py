"""Pairs two scorings of a task question by question, as far as both models have answered.

If interim looks were planned, answers count up to the last look that both models completed. The
p-values allow for all looks (`sequential`) if these were planned for the gate's estimand.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from quantize.recovery.estimands import units
from quantize.recovery.gate import Verdict, not_comparable
from quantize.recovery.limits import RULES
from quantize.recovery.rows import Scoring
from quantize.recovery.sequential import Look, Plan, at_looks
from quantize.recovery.statistics import compare
from quantize.recovery.steps import step_inflation
from quantize.recovery.terms import Comparison, Terms


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
    planned = units(terms.estimand, questions, repeats)

    def compared(base: Scoring, other: Scoring, look: Look | None = None) -> Comparison:
        ahead = plan.ahead(look, 1 - terms.confidence) if plan and look else ()
        accuracy = compare(base.by_question(), other.by_question(), terms, ahead)
        measured = [rule.measure(base, other, terms, planned).items() for rule in RULES]
        return replace(
            accuracy,
            length=_length(base, other, terms.confidence),
            max_tokens=base.conditions.get("generation", {}).get("max_gen_toks"),
            **dict(chain(*measured)),
        )

    if plan is None or plan.estimand != terms.estimand or len(plan.looks) == 1:
        return compared(base, other)
    seen = [(plan.first(look).answers, look) for look in looks]
    at = [compared(base.only(part), other.only(part), look) for part, look in seen]
    return at_looks(at, looks)


def _plan(scoring: Scoring) -> Plan | None:
    planned = scoring.made_with.get("planned")
    return None if planned is None else Plan(**planned)


def _length(base: Scoring, other: Scoring, confidence: float) -> list[float] | None:
    """Return [ratio of mean tokens per answer to the base's, low end of its interval, high end]."""
    ours, theirs = (s.by_question(lambda row: (row.tokens, 1)) for s in (base, other))
    longer = step_inflation(ours, theirs, (), confidence=confidence)
    return [longer.ratio, longer.low, longer.high] if longer else None


def _differs(
    base: Scoring, other: Scoring, *, other_seed: bool, other_settings: Collection[str]
) -> Verdict | None:
    ignored = {"seed", "seeds"} if other_seed else set[str]()

    def kept(facts: Mapping[str, Any], *unlike: str) -> dict[str, Any]:
        rest = {key: value for key, value in facts.items() if key not in ignored.union(unlike)}
        if other_settings and isinstance(sampler := rest.get("sampler"), Mapping):
            rest["sampler"] = {k: v for k, v in sampler.items() if k not in other_settings}
        return rest

    if other_seed and any(a.seed == b.seed for a, b in zip(base.rows, other.rows, strict=False)):
        return Verdict("NOT COMPARABLE", "both sides have the same seed: no noise is between them")
    return not_comparable(kept(base.conditions), kept(other.conditions)) or not_comparable(
        kept(base.made_with, "model"), kept(other.made_with, "model")
    )
