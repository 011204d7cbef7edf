"""Paired statistics of two scorings of the same questions: difference, interval, p-values, recovery.

  difference  quantized - base in percentage points, paired by question and answer.
  p-values    one-sided, of "the loss is at least the margin" and "the loss is at most the margin".
              Each bound of the difference comes from the distribution of one of these p-values, so
              the bound excludes the margin if and only if the p-value is at most 1 - confidence.
  recovery    100 mean y / mean x; y are the quantized model's scores, x the base's. Its interval
              holds the ratios r for which mean(y - r x) = 0 is not excluded (as in Fieller 1954).
  flips       questions that only one of the models answers right, with McNemar's exact test (1947;
              binomial, two-sided); only if each question has one answer.

Clustering by question follows arXiv 2411.00640. Unpaired tests are left out: they need several
times as many questions for the same power.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr

from quantize.recovery.estimands import (
    Estimand,
    Floats,
    Total,
    limits,
    margin_p_values,
    needed,
    ratio_limits,
    total,
)
from quantize.recovery.terms import Comparison, Interval, Terms

Name = TypeVar("Name")
Scores = Mapping[str, Sequence[float]]  # question -> its k scores, 0..1


def compare(
    base: Scores, quantized: Scores, terms: Terms, looks: Sequence[tuple[float, float]] = ()
) -> Comparison:
    """Return the comparison of two models' scores on the same questions, under `terms`.

    `looks` are this look and the later ones: (multiple of the scored units, p-value that decides).

    Raise ValueError if questions or numbers of answers differ, or there are fewer than two questions.
    """
    x, y = tables(base, quantized)
    looks = looks or [(1.0, 1 - terms.confidence)]
    estimand, confidence = terms.estimand, terms.confidence
    other: Estimand = "such_questions" if estimand == "these_questions" else "these_questions"
    difference, level = total(y - x, estimand), (1 + confidence) / 2
    at_least, at_most = margin_p_values(difference, terms.margin_pp)
    # Where BF16 hardly does better, a candidate that answers nothing right would pass.
    can_show = 100 * x.mean() > terms.margin_pp
    repeats, single = x.shape[1], x.shape[1] == 1
    lost, won = (int(((a > 0.5) & (b <= 0.5)).sum()) for a, b in ((x, y), (y, x)))
    return Comparison(
        **vars(terms),
        questions=len(x),
        repeats=repeats,
        units=difference.units,
        base=float(x.mean()),
        base_interval=_accuracy(total(x, estimand), level),
        quantized=float(y.mean()),
        quantized_interval=_accuracy(total(y, estimand), level),
        difference_pp=float(100 * difference.mean),
        difference_interval=_interval(difference, level),
        difference_bounds=_bounds(difference, confidence),
        bounds_at_look=_bounds(difference, 1 - looks[0][1]),
        other_interval=_interval(total(y - x, other), level),
        p_at_least_margin=float(at_least) if can_show else 1.0,
        p_at_most_margin=float(at_most),
        needed=needed(difference, terms.margin_pp, looks) if can_show else None,
        recovery=float(100 * y.mean() / x.mean()) if x.mean() > 0 else None,
        recovery_interval=_recovery(x, y, estimand, level),
        lost=lost if single else None,
        won=won if single else None,
        mcnemar_p=mcnemar(lost, won) if single else None,
    )


def mcnemar(lost: int, won: int) -> float:
    """Return McNemar's exact two-sided p-value for `lost` and `won` discordant pairs."""
    return min(1.0, 2 * float(bdtr(min(lost, won), lost + won, 0.5)))


def holm(
    p_values: Mapping[Name, float], weights: Mapping[Name, float] | None = None
) -> dict[Name, float]:
    """Return name -> Holm's step-down adjusted p-value, which bounds the family-wise error.

    With `weights` (Holm 1979), each hypothesis' share of the error is proportional to its weight.
    """
    weight = weights or dict.fromkeys(p_values, 1.0)
    adjusted: dict[Name, float] = {}
    largest, rest = 0.0, math.fsum(weight[name] for name in p_values)
    for name, p in sorted(p_values.items(), key=lambda item: item[1] / weight[item[0]]):
        largest = max(largest, min(1.0, rest / weight[name] * p))
        adjusted[name] = largest
        rest -= weight[name]
    return adjusted


def tables(base: Scores, quantized: Scores) -> tuple[Floats, Floats]:
    """Return both models' scores as float64 arrays [n questions, k answers], sorted by question.

    Raise ValueError if questions or numbers of answers differ, or there are fewer than two questions.
    """
    if base.keys() != quantized.keys():
        odd = sorted(base.keys() ^ quantized.keys())
        raise ValueError(f"{len(odd)} questions are scored on one side only, {odd[0]!r} among them")
    counts = {len(scores) for side in (base, quantized) for scores in side.values()}
    if len(base) < 2:
        raise ValueError(f"{len(base)} questions cannot be compared; two are the least")
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"questions have differing numbers of repeats: {sorted(counts)}")
    names = sorted(base)
    x, y = (np.array([side[name] for name in names], np.float64) for side in (base, quantized))
    return x, y


def _interval(difference: Total, level: float) -> Interval:
    low, high = limits(difference, level)
    return Interval(100 * max(float(low), -1.0), 100 * min(float(high), 1.0))


def _bounds(difference: Total, confidence: float) -> Interval:
    """Return the gate's bounds in percentage points; a gain does not offset a loss not seen."""
    low, high = limits(difference, confidence)
    never = math.log(1 - confidence) / difference.units
    return Interval(100 * max(min(float(low), never), -1.0), 100 * min(float(high), 1.0))


def _accuracy(correct: Total, level: float) -> Interval:
    half = float(correct.reach(level)) / correct.units
    mean = float(correct.mean)
    return Interval(max(0.0, mean - half), min(1.0, mean + half))


def _recovery(x: Floats, y: Floats, estimand: Estimand, level: float) -> Interval:
    """Return the interval of ratios r, in per cent, for which mean(y - r x) = 0 is not excluded."""

    def limit(r: float, side: int) -> float:
        return ratio_limits(x, y, r, estimand, level)[side]

    base = replace(total(x, estimand), jump=total(y - x, estimand).jump)
    if base.value <= base.reach(level):
        return Interval(None, None)  # the base may score nothing
    above = 1.0
    while limit(above, 1) >= 0:
        above *= 2
    root: Any = brentq  # its stub allows for a report that this call does not ask for
    low = root(limit, 0, above, args=(0,)) if limit(0, 0) > 0 else 0.0
    return Interval(100 * low, 100 * root(limit, 0, above, args=(1,)))
