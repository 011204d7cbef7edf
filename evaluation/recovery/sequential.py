"""Reaches a verdict early: up to eight interim looks at a run, with the error rates of one test.

Whoever looks often and stops at the first small p-value errs more often than alpha. So the level
alpha is spent over the looks (Lan and DeMets 1983) as the square of the information (Kim and DeMets
1987). The level spent up to information fraction t is

    spent(t) = alpha t^2

a quarter of alpha by half of the information. As information grows, a sum of independent units moves
like a Brownian motion. Look j's nominal level sets a bound, which the motion first crosses at look j
with probability spent(t_j) - spent(t_j-1). To find this level, we integrate the density of the motions
that have crossed no bound yet (Armitage, McPherson and Rowe 1969). PASS and FAIL each have an alpha of
their own.

What a look adds depends on the estimand. Under `these_questions` a look adds repeats of all
questions; each repeat adds the same information. Under `such_questions` it adds questions, with all
their repeats, in a seeded random order, so the questions asked so far are a random sample. If there
is only one repeat, looks add questions under either estimand. The `Plan` is stored with the scores
before the first question is asked. Looks follow from the plan and from which answers exist, so
nobody can choose them afterwards.

A task also ends where more answers would hardly change the verdict. Were the looks to go on, the
estimate in standard errors z at information t would end as a normal number with mean z / sqrt t and
variance (1 - t) / t, if nothing is known of the true value before. It passes the last look's bound b
with probability Phi((z - b sqrt t) / sqrt(1 - t)). A task is given up if this is below `LEAST_CHANCE`
for PASS and FAIL together; once a task ended without PASS, no run passes, and FAIL alone counts. An
early end of this kind gives no verdict but INCONCLUSIVE, so it makes no PASS or FAIL more frequent.

The sequential p-value is the least alpha at which one of the looks so far decides (Liu and Anderson
2008). The verdict, Holm's correction over tasks included, uses it in place of the p-value. Further
looks never increase the sequential p-value.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from quantize.recovery.estimands import (
    IN_WORDS,
    ROUNDING,
    Estimand,
    Floats,
    Number,
    units,
    unseen_p,
)
from quantize.recovery.gate import judge, passes
from quantize.recovery.health import limits_of
from quantize.recovery.limits import limits_on, solved, weights
from quantize.recovery.rows import Answer
from quantize.recovery.terms import Comparison, Terms

# Fractions of the units at the looks. Those of runs until 2026-11-29 (0.3, 0.4, 0.5, 0.7, 1) are
# among them, so what such a run asked ends at a look.
FRACTIONS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
LEAST_CHANCE = 0.02  # chance of a decision below which a task is given up
POINTS = 400  # points of the grid; with twice as many the levels move by less than 1e-5


@dataclass(frozen=True)
class Look:
    """A look at `repeats` answers to each of the first `questions` questions, in the plan's order."""

    questions: int
    repeats: int
    fraction: float  # share of the information of the whole run


@dataclass(frozen=True)
class Part:
    """The answers in `repeats` to `questions` (ascending indices), for example what one look adds."""

    questions: Sequence[int]
    repeats: range

    @property
    def answers(self) -> set[Answer]:
        """(question, repeat) of every answer in the part."""
        return {(question, repeat) for question in self.questions for repeat in self.repeats}


@dataclass(frozen=True)
class Plan:
    """How many questions and answers of one task a run takes at most, fixed before the first answer."""

    estimand: Estimand  # what is judged, and so the unit that looks add
    questions: int  # number of questions: the first ones of the data set
    repeats: int  # number of answers to each question
    seed: int  # seed of the order in which looks take questions

    @property
    def units(self) -> int:
        """Number of units: questions for `such_questions`, answers for `these_questions`."""
        return units(self.estimand, self.questions, self.repeats)

    @property
    def looks(self) -> list[Look]:
        """The interim looks at the run, eight at most; the last look covers the whole run."""
        over_repeats = self.estimand == "these_questions" and self.repeats > 1
        most, least = (
            (self.repeats, 2) if over_repeats else (self.questions, min(20, self.questions))
        )
        counts = sorted({max(least, math.ceil(most * share)) for share in FRACTIONS})
        if over_repeats:
            return [Look(self.questions, n, n / most) for n in counts]
        return [Look(n, self.repeats, n / most) for n in counts]

    def ahead(self, look: Look, alpha: float) -> list[tuple[float, float]]:
        """Return, of `look` and all later ones, (multiple of the look's units, level that decides)."""
        levels = nominal_levels(tuple(at.fraction for at in self.looks), alpha)
        multiples = [at.fraction / look.fraction for at in self.looks]
        return [pair for pair in zip(multiples, levels, strict=True) if pair[0] >= 1]

    @property
    def order(self) -> list[int]:
        """Question indices in a seeded random order; a larger plan keeps a smaller one's order."""
        keys = [hashlib.sha256(f"{self.seed}:{i}".encode()).digest() for i in range(self.questions)]
        return sorted(range(self.questions), key=keys.__getitem__)

    @property
    def parts(self) -> list[Part]:
        """For each look, the part that it adds to the looks before."""
        return [
            Part(sorted(self.order), range(before.repeats, look.repeats))  # all are asked again
            if look.repeats > before.repeats > 0
            else Part(sorted(self.order[before.questions : look.questions]), range(look.repeats))
            for before, look in pairwise([Look(0, 0, 0.0), *self.looks])
        ]

    def first(self, look: Look) -> Part:
        """Return all answers that a look covers, including those of earlier looks, as one part."""
        return Part(sorted(self.order[: look.questions]), range(look.repeats))

    def taken(self, *answered: Set[Answer]) -> list[Look]:
        """Return the looks that all models completed; each of `answered` is one model's answers."""
        pairs = zip(self.looks, self.parts, strict=True)
        whole = takewhile(lambda pair: all(pair[1].answers <= a for a in answered), pairs)
        return [look for look, _ in whole]


def spent(fraction: float, alpha: float) -> float:
    """Return how much of `alpha` the looks up to information `fraction` may spend together."""
    return alpha * fraction**2


@lru_cache(maxsize=4096)
def nominal_levels(fractions: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """Return for each look the largest p-value that decides; `fractions` are the looks' information."""
    levels: list[float] = []
    at, density = np.zeros(1), np.ones(1)  # before the first look the motion is at 0, weight 1
    before = already = step = bound = 0.0
    for fraction in fractions:
        if levels:
            at, density = _go_on(at, density, step, bound, before)
        step, to_spend = math.sqrt(fraction - before), spent(fraction, alpha) - already
        bound = _bound(at, density, step, to_spend, fraction)
        levels.append(float(ndtr(-bound / math.sqrt(fraction))))
        before, already = fraction, already + to_spend
    return tuple(levels)


def _bound(at: Floats, density: Floats, step: float, to_spend: float, fraction: float) -> float:
    """Return the bound that the motion exceeds with probability `to_spend` after the next step."""

    def excess(bound: float) -> float:
        return float((density * ndtr((at - bound) / step)).sum()) - to_spend

    end = 9 * math.sqrt(fraction)
    if excess(end) > 0:  # what may be spent is too small to tell from 0
        return end
    bound: float = brentq(excess, -end, end)  # type: ignore[assignment]
    return bound


def _go_on(
    at: Floats, density: Floats, step: float, bound: float, fraction: float
) -> tuple[Floats, Floats]:
    """Return a grid below the bound and the motion's weight at each of its points."""
    grid = np.linspace(-9 * math.sqrt(fraction), bound, POINTS + 1)
    width = (grid[1] - grid[0]) / 3  # Simpson's rule: 1 4 2 4 ... 4 1
    weights = width * np.array([1, *([4, 2] * (POINTS // 2 - 1)), 4, 1])
    normal = np.exp(-(((grid[:, None] - at) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
    return grid, weights * (normal @ density)


def sequential_p(fractions: Sequence[float], p_values: Sequence[float]) -> float:
    """Return the least alpha at which one of the looks so far decides, or 1 if it is above 1/2."""

    def crossed(alpha: float) -> bool:
        levels = nominal_levels(tuple(fractions), alpha)
        return any(p <= level for p, level in zip(p_values, levels, strict=True))

    low, high = math.log(1e-9), math.log(0.5)
    if not crossed(0.5):
        return 1.0
    if len(fractions) == 1 and fractions[0] == 1:
        return float(p_values[0])
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if crossed(math.exp(middle)) else (middle, high)
    return math.exp(high)


def out_of_reach(task: str, plan: Plan, terms: Terms) -> str | None:
    """Return a sentence on why no answers can reach PASS, or None if PASS can be reached."""
    limits = limits_of(terms, plan.units).values()
    least = min([terms.margin_pp, *(limit for limit in limits if limit is not None)])
    fractions, level = tuple(look.fraction for look in plan.looks), 1 - terms.confidence
    if len(fractions) > 1:  # the last look excludes the smallest losses
        level = nominal_levels(fractions, level)[-1]
    if unseen_p(plan.units, least) <= level + ROUNDING:
        return None
    what = "questions" if plan.estimand == "such_questions" else "answers"
    return (
        f"{task}: PASS cannot be reached: {plan.units} {what} cannot exclude a loss of {least:g} pp "
        f"{IN_WORDS[terms.estimand]} at {terms.confidence:.0%}, "
        f"about {math.ceil(-math.log(level) / least * 100)} can; FAIL can be reached"
    )


def at_looks(seen: Sequence[Comparison], looks: Sequence[Look]) -> Comparison:
    """Return the last comparison in `seen` (one per look), with sequential p-values and `looks`."""
    fractions = tuple(look.fraction for look in looks)
    levels = nominal_levels(fractions, 1 - seen[-1].confidence)
    return replace(
        _over_looks(fractions, seen),
        looks=tuple(
            {
                **asdict(look),
                "difference_pp": comparison.difference_pp,
                **asdict(comparison.difference_bounds),
                "p_at_least_margin": comparison.p_at_least_margin,
                "p_at_most_margin": comparison.p_at_most_margin,
                "step_inflation": comparison.step_inflation and asdict(comparison.step_inflation),
                "level": level,
            }
            for look, comparison, level in zip(looks, seen, levels, strict=True)
        ),
    )


def _over_looks(fractions: Sequence[float], records: Sequence[Any]) -> Any:
    """Return the last record (one per look), with every `p_at_...` in it made sequential.

    A look without the record counts as p-value 1; a p-value that some look states as None stays so.
    """
    last = records[-1]
    changed: dict[str, Any] = {}
    values: list[Any]
    for name, value in vars(last).items():
        values = [getattr(record, name, 1.0) for record in records]
        if name.startswith("p_at_"):
            changed[name] = None if None in values else sequential_p(fractions, values)
        elif is_dataclass(value):
            changed[name] = _over_looks(fractions, values)
        elif isinstance(value, Mapping) and any(map(is_dataclass, value.values())):
            changed[name] = {
                key: _over_looks(fractions, [table.get(key) for table in values]) for key in value
            }
    return replace(last, **changed)


def still_open(seen: Mapping[str, Comparison | None]) -> list[str]:
    """Return the tasks that need more answers: all that do not pass yet, but none if the run fails.

    `seen` maps every task of the gate to its comparison at the last look, or to None if there is none.
    """
    if judge(seen).outcome == "FAIL":
        return []
    return [task for task, c in seen.items() if c is None or not passes(c)]


def crossing(inside: Number, fractions: Sequence[float], now: float, alpha: float) -> Number:
    """Return the chance that the last of the looks at `fractions` excludes what is tested, at `alpha`.

    At information `now` the estimate is `inside` standard errors on the side that would exclude it.
    """
    bound = -ndtri(nominal_levels(tuple(fractions), alpha)[-1])
    return ndtr((inside - bound * math.sqrt(now)) / math.sqrt(max(1 - now, 1e-9)))


def chance(task: str, plan: Plan, seen: Mapping[str, Comparison | None], *, passing: bool) -> float:
    """Return about the chance that more answers to a task of `seen` still decide the verdict.

    FAIL counts, by any limit and after Holm's correction; PASS counts if `passing`.
    """
    comparison = seen[task]
    if comparison is None or not comparison.looks:
        return 1.0
    fractions, now = [look.fraction for look in plan.looks], comparison.looks[-1]["fraction"]
    alpha, limits = 1 - comparison.confidence, limits_on(comparison)
    of_limit = weights([c for c in seen.values() if c is not None])
    share = alpha / len(seen) / math.fsum(of_limit.values())
    hopes = [
        crossing(-limit.inside, fractions, now, share * of_limit[name])
        for name, limit in limits.items()
    ]
    if passing:  # the margin is kept, and BF16 has so much to lose
        kept = crossing(limits["margin"].inside, fractions, now, alpha)
        hopes.append(min(kept, crossing(solved(comparison), fractions, now, 0.5)))
    return math.fsum(hopes)


def until_decided(
    plans: Mapping[str, Plan],
    ask: Callable[[str, int], tuple[int, Comparison | None]],
    least_chance: float = LEAST_CHANCE,
    affordable: Callable[[str], bool] = lambda _: True,
) -> tuple[dict[str, int], dict[str, Comparison | None]]:
    """Ask one task after the other, look by look, until the verdict is certain, or nearly.

    `ask(task, n)` lets both models answer the task's first n looks. It returns a pair: the number
    of complete looks, an earlier run's included, and the comparison over these looks or None. A
    task whose `chance` to decide is below `least_chance` is given up; of one that is not `affordable`
    no further look is asked. Neither gives PASS or FAIL, whatever it depends on.

    Returns:
        Two mappings: task -> number of complete looks, and task -> comparison, None without one.
    """
    taken: dict[str, int] = {}
    shown: dict[str, Comparison | None] = {}
    for task in plans:
        taken[task], shown[task] = ask(task, 0)
    may_pass = True
    for task, plan in plans.items():
        while taken[task] < len(plan.looks) and task in still_open(shown):
            if chance(task, plan, shown, passing=may_pass) < least_chance or not affordable(task):
                break
            taken[task], shown[task] = ask(task, taken[task] + 1)
        may_pass = may_pass and task not in still_open(shown)
    return taken, shown
