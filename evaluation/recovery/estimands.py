"""How far chance may move a paired difference: two estimands, their p-values and limits.

Answer j to question i scores x_ij (base) and y_ij (quantized), with the same noise; let
d_ij = y_ij - x_ij. There are n questions with k answers each. "Is it worse?" has two meanings, and
the effect of chance differs between them:

  these_questions   Is it worse on THESE n questions? The questions are fixed, and the unit of
                    chance is the answer. Var(sum of d) = sum over questions of k s_i^2, with s_i^2
                    the variance of d_i1..d_ik: differences between questions do not count. For
                    k = 1, s_i^2 is not known; then n / (n - 1) times the sum of (d_i - mean d)^2
                    replaces Var; on average it is at least Var (Jensen).
  such_questions    Is it worse on questions LIKE these? The questions are a sample, and the unit of
                    chance is the question: there are n observations mean_j d_ij, for any k.

Losses are rare events: each moves the sum by a whole unit, so the sum is skewed. A normal interval
(or a bootstrap, or Student's t) is too narrow if few losses were seen, and has no width if none
was. Let V be the variance of the sum and u the size of one event. The hypothesis that the true sum
lies g away from the observed sum then has the p-value

    p = P(Gamma(V/u^2 + 1) > V/u^2 + g/u)

For u = 1 this is P(Poisson(V + g) <= V). It is exact if only losses were seen. Without any event it
is exp(-g), and with many events it is the normal p-value, corrected for skewness. The + 1 is one
more event than was seen, as in Fay and Feuer's gamma interval (1997, Stat. Med. 16:791). For
these_questions, and whenever k = 1, u is one answer. For such_questions with k > 1, u is
sum |e|^3 / sum e^2 over the centred observations e: about one question if some questions are lost
outright, else less. If Student's t gives a wider interval (few observations), t is used.

A true loss may also be of a kind that was not seen: units lost outright. If a share q of all units
were lost in this way, N units would show no such loss with probability exp(-q N). Let L be
-log(1 - confidence) / N, which is 3 / N at 95 %. `margin_p_values` excludes a loss only if the loss
is at least L, and exceeds the observed loss by at least L. `limits` demands only the latter. For
such_questions, 30 questions can exclude a loss of 10 points; for these_questions, 30 x 64 answers
can exclude 0.16 points.

Units not seen may also be gains that make up for the losses that were seen. If 20 questions each lose
a fifth of their answers, they show no variance, and a kind of question that is one in 25 and wins all
may be missing. A true loss of at most the margin needs a share of such gains of at least
(loss - margin) / (1 + loss). FAIL needs the probability that N units hold none of them to be small.

Measured coverage and error rates: docs/evaluation.md. Arrays [..., n, k] of many simulated rounds
are accepted too, and give results [...], one per round (tests/recovery/test_simulation.py).
Bootstraps are left out, since they give an unseen loss no width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc, gammainccinv, stdtr, stdtrit

Estimand = Literal["these_questions", "such_questions"]
ESTIMANDS: tuple[Estimand, ...] = get_args(Estimand)
IN_WORDS: dict[Estimand, str] = {
    "these_questions": "on these questions",
    "such_questions": "on questions like these",
}
ROUNDING = 1e-12  # rounding error of p-values: 1 - 0.9 is a little under 0.1

Floats = NDArray[np.float64]
Number: TypeAlias = Any  # a float, or an array with one value per round


@dataclass(frozen=True)
class Total:
    """A sum of scores or differences over the units (answers or questions) of one estimand."""

    units: int  # number of answers, or of questions
    value: Number  # the sum, in units
    variance: Number  # its estimated variance, in units squared
    jump: Number  # size of the events that make it up, in units
    freedom: Number  # degrees of freedom of the variance

    @property
    def mean(self) -> Number:
        """The sum divided by the number of units."""
        return self.value / self.units

    def p(self, gap: Number) -> Number:
        """Return the one-sided p-value of a true sum at least `gap` units from the observed one."""
        shape = self.variance / self.jump**2
        gamma = gammaincc(shape + 1, np.maximum(0.0, shape + gap / self.jump))
        with np.errstate(divide="ignore", invalid="ignore"):
            students = stdtr(self.freedom, -gap / np.sqrt(self.variance))
        return np.where(self.variance == 0, gamma, np.maximum(gamma, students))[()]

    def reach(self, level: float) -> Number:
        """Return the gap in units from the observed sum to a true sum with p-value 1 - `level`."""
        shape = self.variance / self.jump**2
        gamma = self.jump * (gammainccinv(shape + 1, 1 - level) - shape)
        return np.maximum(gamma, stdtrit(self.freedom, level) * np.sqrt(self.variance))

    def times(self, factor: float) -> "Total":
        """Return the total expected for `factor` times as many units, like those observed."""
        units, freedom = (math.ceil(count * factor) for count in (self.units, self.freedom))
        return Total(units, self.value * factor, self.variance * factor, self.jump, freedom)


def units(estimand: Estimand, questions: int, repeats: int) -> int:
    """Return the number of units: questions for `such_questions`, answers for `these_questions`."""
    return questions if estimand == "such_questions" else questions * repeats


def total(values: Floats, estimand: Estimand) -> Total:
    """Return the `Total` of values [..., n questions, k answers], in [-1, 1] unless scaled."""
    n, k = values.shape[-2:]
    largest = np.maximum(1.0, np.abs(values).max((-2, -1)))  # more where a ratio scales one side
    if estimand == "these_questions" and k > 1:
        variance, freedom = k * values.var(axis=-1, ddof=1).sum(-1), n * (k - 1)
        return Total(n * k, values.sum((-2, -1)), variance, largest, freedom)
    means = values.mean(axis=-1)
    variance = n * means.var(axis=-1, ddof=1)
    still = variance < 1e-18  # it comes only from rounding
    off = np.abs(means - means.mean(axis=-1, keepdims=True))
    squares = np.where(still, 1.0, (off**2).sum(-1))
    jump = largest if k == 1 else np.where(still, largest, (off**3).sum(-1) / squares)[()]
    return Total(n, means.sum(-1), np.where(still, 0.0, variance)[()], jump, n - 1)


def margin_p_values(
    difference: Total, margin_pp: Number, allowed_pp: Number | None = None
) -> tuple[Number, Number]:
    """Return one-sided p-values of "loss at least the margin" and of "loss at most the margin".

    `allowed_pp` is the loss that a verdict excludes, if `difference` was raised by part of it
    already; by default it is the margin. Even so much, lost outright, might be unseen.
    """
    gap = difference.value + difference.units * margin_pp / 100
    allowed = margin_pp if allowed_pp is None else allowed_pp
    no_loss = unseen_p(difference.units, np.minimum(allowed, 100 * gap / difference.units))
    no_gain = unseen_p(difference.units, -100 * gap / _room(difference))
    return np.maximum(difference.p(gap), no_loss), np.maximum(difference.p(-gap), no_gain)


def _room(difference: Total) -> Number:
    """Return by how much the sum would rise, in units, were every unit a gain (at most 2 each)."""
    return np.clip(difference.units - difference.value, 1.0, 2.0 * difference.units)


def unseen_p(units: int, share_pp: Number) -> Number:
    """Return the probability that `units` units hold none of a kind that `share_pp` % of all are."""
    return np.exp(-units * np.maximum(0.0, share_pp) / 100)


def needed(
    difference: Total, margin_pp: float, looks: Sequence[tuple[float, float]]
) -> float | None:
    """Return how many times as many units would give a verdict; None if more than 2^19 times.

    `looks` are (multiple of the units, p-value that decides), ascending. If none of them decides, a
    longer run might, whose last look has the level of the last of these.
    """
    level = looks[-1][1]

    def is_open(factor: float, level: float = level) -> bool:
        return min(margin_p_values(difference.times(factor), margin_pp)) > level + ROUNDING

    if planned := next((factor for factor, level in looks if not is_open(factor, level)), None):
        return planned
    low, high = looks[-1][0], 2 * looks[-1][0]
    while is_open(high):
        low, high = high, 2 * high
        if high > 1e6:
            return None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_open(middle) else (low, middle)
    return high


def limits(difference: Total, level: float) -> tuple[Number, Number]:
    """Return the mean's one-sided limits (low, high) at `level`; they allow for unseen units."""
    reach, unseen = difference.reach(level), -math.log(1 - level)
    gained = unseen * _room(difference) / difference.units
    low, high = (
        difference.value - np.maximum(reach, unseen),
        difference.value + np.maximum(reach, gained),
    )
    return low / difference.units, high / difference.units


def ratio_limits(
    base: Floats, quantized: Floats, ratio: float, estimand: Estimand, level: float
) -> tuple[Number, Number]:
    """Return `limits` of mean(quantized - ratio * base); `ratio` is plausible if 0 is between them."""
    jump = total(quantized - base, estimand).jump * max(1.0, ratio)
    return limits(replace(total(quantized - ratio * base, estimand), jump=jump), level)
