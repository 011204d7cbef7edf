"""What chance may do to a paired difference: two estimands, their p-values and limits.

Answer j to question i scores x_ij (base) and y_ij (quantized), with the same noise; d_ij = y_ij - x_ij,
n questions, k answers each. Two questions can be asked about the loss, and chance enters differently:

  these_questions   Is it worse on THESE n questions? The questions are fixed and the unit of chance is
                    the answer. Var(sum of d) = sum over questions of k s_i^2, s_i^2 the variance of
                    d_i1..d_ik: nothing between questions counts. Of one answer a question s_i^2
                    cannot be known; sum (d_i - mean d)^2, from the discordant pairs, is at least as
                    large (Jensen), so it stands in.
  such_questions    Is it worse on questions LIKE these? They are a sample and the unit of chance is
                    the question: n observations mean_j d_ij, however large k is.

Losses are rare events: each moves the sum by a whole unit, so the sum is skewed, and a normal interval
(or a bootstrap, or Student's t) is too narrow where few were seen, with no width where none was. For a
sum of variance V whose events have size u, a hypothesis at a gap of g from the sum has the p-value

    p = P(Gamma(V/u^2 + 1) > V/u^2 + g/u)

which is P(Poisson(V + g) <= V) for u = 1: exact where losses only were seen, exp(-g) where nothing
was, and normal with a correction for skewness where much was. The + 1 is one more event than was
seen, as in Fay and Feuer's gamma interval (1997, Stat. Med. 16:791). u is one answer on
these_questions, and where k = 1. On such_questions with k > 1 it is sum |e|^3 / sum e^2
of the centred observations, at most about a question, and near it when some questions are lost
outright. Where Student's t is wider (few observations), it counts instead.

A loss of at least the margin may also consist of events that were not seen: units lost outright. If a
share q of all units were lost so, n units would show none with probability exp(-q n). A loss of
-log(1 - confidence) / n is therefore never excluded, nor one that exceeds the observed loss by as much:
3 / n at 95 %. So 30 such questions exclude 10 points, 30 x 64 answers to these questions 0.16.

Reached coverage and error rates: docs/evaluation.md, tests/recovery/test_simulation.py, which calls
these functions on many rounds at once: tables of values [n, k] may stand in arrays [..., n, k], and
sums of them are arrays then. Left out: bootstraps, which give no width to what was not seen.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc, gammainccinv, stdtr, stdtrit

Estimand = Literal["these_questions", "such_questions"]
ESTIMANDS: tuple[Estimand, ...] = get_args(Estimand)
ROUNDING = 1e-12  # rounding error of p-values: 1 - 0.9 is a little under 0.1

Floats = NDArray[np.float64]
Number: TypeAlias = Any  # a float, or an array with one a round


@dataclass(frozen=True)
class Total:
    """A sum of scores or differences over the units of one estimand."""

    units: int  # answers, or questions
    value: Number  # the sum, in units
    variance: Number  # its estimated variance, in units squared
    jump: Number  # size of the events that make it up, in units
    freedom: int  # degrees of freedom of the variance

    @property
    def mean(self) -> Number:
        """The sum divided by the number of units."""
        return self.value / self.units

    def p(self, gap: Number) -> Number:
        """Return the p-value of a hypothesis that lies `gap` units on one side of the sum."""
        shape = self.variance / self.jump**2
        gamma = gammaincc(shape + 1, np.maximum(0.0, shape + gap / self.jump))
        with np.errstate(divide="ignore", invalid="ignore"):
            students = stdtr(self.freedom, -gap / np.sqrt(self.variance))
        return np.where(self.variance == 0, gamma, np.maximum(gamma, students))[()]

    def reach(self, level: float) -> Number:
        """Return the gap, in units, whose p-value is 1 - level."""
        shape = self.variance / self.jump**2
        gamma = self.jump * (gammainccinv(shape + 1, 1 - level) - shape)
        return np.maximum(gamma, stdtrit(self.freedom, level) * np.sqrt(self.variance))

    def times(self, factor: float) -> "Total":
        """Return the sum that `factor` times the units would give, were all as observed."""
        units, freedom = (math.ceil(each * factor) for each in (self.units, self.freedom))
        return Total(units, self.value * factor, self.variance * factor, self.jump, freedom)


def units(estimand: Estimand, questions: int, repeats: int) -> int:
    """Return the number of units: questions for `such_questions`, else all answers to them."""
    return questions if estimand == "such_questions" else questions * repeats


def total(values: Floats, estimand: Estimand) -> Total:
    """Return the sum over an estimand's units of values [..., n, k] in -1..1 (or a little more)."""
    n, k = values.shape[-2:]
    largest = np.maximum(1.0, np.abs(values).max((-2, -1)))  # more where a ratio scales one side
    if estimand == "these_questions" and k > 1:
        variance, freedom = k * values.var(axis=-1, ddof=1).sum(-1), n * (k - 1)
        return Total(n * k, values.sum((-2, -1)), variance, largest, freedom)
    means = values.mean(axis=-1)
    variance = n * means.var(axis=-1, ddof=1)
    still = variance < 1e-18  # it comes from rounding alone
    off = np.abs(means - means.mean(axis=-1, keepdims=True))
    squares = np.where(still, 1.0, (off**2).sum(-1))
    jump = largest if k == 1 else np.where(still, largest, (off**3).sum(-1) / squares)[()]
    return Total(n, means.sum(-1), np.where(still, 0.0, variance)[()], jump, n - 1)


def margin_p_values(difference: Total, margin_pp: float) -> tuple[Number, Number]:
    """Return the p-values of "the loss is at least the margin" and "at most the margin"."""
    gap = difference.value + difference.units * margin_pp / 100
    unseen = unseen_loss_p(difference.units, np.minimum(margin_pp, 100 * gap / difference.units))
    return np.maximum(difference.p(gap), unseen), difference.p(-gap)


def unseen_loss_p(units: int, share_pp: Number) -> Number:
    """Return how likely `units` show no loss when `share_pp` per cent of all are lost outright."""
    return np.exp(-units * np.maximum(0.0, share_pp) / 100)


def needed(difference: Total, margin_pp: float, confidence: float) -> float | None:
    """Return how many times as many units would reach a verdict; None above a million."""

    def is_open(factor: float) -> bool:
        return min(margin_p_values(difference.times(factor), margin_pp)) > 1 - confidence + ROUNDING

    low, high = 0.0, 1.0
    while is_open(high):
        low, high = high, 2 * high
        if high > 1e6:
            return None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_open(middle) else (low, middle)
    return high


def limits(difference: Total, level: float) -> tuple[Number, Number]:
    """Return limits of a mean difference, each at `level`, with room for a loss not seen."""
    reach, unseen = difference.reach(level), -math.log(1 - level)
    low = (difference.value - np.maximum(reach, unseen)) / difference.units
    return low, (difference.value + reach) / difference.units


def ratio_limits(
    base: Floats, quantized: Floats, ratio: float, estimand: Estimand, level: float
) -> tuple[Number, Number]:
    """Return the limits of mean(quantized - ratio base): around 0 where the ratio is not excluded."""
    jump = total(quantized - base, estimand).jump * max(1.0, ratio)
    return limits(replace(total(quantized - ratio * base, estimand), jump=jump), level)
