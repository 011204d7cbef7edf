"""What chance may do to a paired difference: two estimands, their p-values and limits.

Answer j to question i scores x_ij (base) and y_ij (quantized), with the same noise; d_ij = y_ij - x_ij.
There are n questions and k answers to each. "Is it worse?" can mean two things, for which chance
differs:

  these_questions   Is it worse on THESE n questions? The questions are fixed and the unit of chance is
                    the answer. Var(sum of d) = sum over questions of k s_i^2, with s_i^2 the variance
                    of d_i1..d_ik: differences between questions do not count. If k = 1, s_i^2 is not
                    known; sum (d_i - mean d)^2, from the discordant pairs, is at least as large
                    (Jensen) and takes its place.
  such_questions    Is it worse on questions LIKE these? They are a sample and the unit of chance is
                    the question: n observations mean_j d_ij, however large k is.

Losses are rare events: each moves the sum by a whole unit, so the sum is skewed. A normal interval (or
a bootstrap, or Student's t) is too narrow where few losses were seen, and has no width where none was.
Let V be the sum's variance and u the size of its events. A hypothesis at a gap of g from the sum then
has the p-value

    p = P(Gamma(V/u^2 + 1) > V/u^2 + g/u)

For u = 1 this is P(Poisson(V + g) <= V). It is exact where only losses were seen. Without any event it
is exp(-g), and with many the normal p-value, corrected for skewness. The + 1 is one more event than was
seen, as in Fay and Feuer's gamma interval (1997, Stat. Med. 16:791). u is one answer for
these_questions, and where k = 1. For such_questions with k > 1 it is sum |e|^3 / sum e^2 over the
centred observations e. That is about one question when some questions are lost outright, else less.
Where Student's t gives a wider interval (few observations), t is used.

A true loss may also be of a kind that was not seen: units lost outright. If a share q of all units
were lost so, n units would show none of them with probability exp(-q n). So a loss is excluded only if
it is at least -log(1 - confidence) / n (3 / n at 95 %), and exceeds the observed loss by as much. For
such_questions 30 questions can exclude 10 points, for these_questions 30 x 64 answers 0.16 points.

Coverage and error rates that were reached: docs/evaluation.md. tests/recovery/test_simulation.py passes
many rounds at once: values [n, k] may be arrays [..., n, k], and what is computed from them is then an
array [...]. Left out: bootstraps, which give no width to what was not seen.
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
    """A sum of scores or differences over the units (answers or questions) of one estimand."""

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
        """Return the one-sided p-value of a true sum at least `gap` units from the observed one."""
        shape = self.variance / self.jump**2
        gamma = gammaincc(shape + 1, np.maximum(0.0, shape + gap / self.jump))
        with np.errstate(divide="ignore", invalid="ignore"):
            students = stdtr(self.freedom, -gap / np.sqrt(self.variance))
        return np.where(self.variance == 0, gamma, np.maximum(gamma, students))[()]

    def reach(self, level: float) -> Number:
        """Return how far, in units, a true sum is from the observed one at p-value 1 - level."""
        shape = self.variance / self.jump**2
        gamma = self.jump * (gammainccinv(shape + 1, 1 - level) - shape)
        return np.maximum(gamma, stdtrit(self.freedom, level) * np.sqrt(self.variance))

    def times(self, factor: float) -> "Total":
        """Return the sum expected of `factor` times as many units, if they are like those observed."""
        units, freedom = (math.ceil(each * factor) for each in (self.units, self.freedom))
        return Total(units, self.value * factor, self.variance * factor, self.jump, freedom)


def units(estimand: Estimand, questions: int, repeats: int) -> int:
    """Return the number of units: questions for `such_questions`, answers for `these_questions`."""
    return questions if estimand == "such_questions" else questions * repeats


def total(values: Floats, estimand: Estimand) -> Total:
    """Sum values [..., n questions, k answers], each in about [-1, 1], over the units of `estimand`."""
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
    """Return the probability that `units` show no loss if `share_pp` % of all are lost outright."""
    return np.exp(-units * np.maximum(0.0, share_pp) / 100)


def needed(difference: Total, margin_pp: float, confidence: float) -> float | None:
    """Return the multiple of the observed units, all alike, that gives a verdict; None above 2^19."""

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
    """Return the mean's one-sided limits (low, high) at `level`; the lower allows for unseen losses."""
    reach, unseen = difference.reach(level), -math.log(1 - level)
    low = (difference.value - np.maximum(reach, unseen)) / difference.units
    return low, (difference.value + reach) / difference.units


def ratio_limits(
    base: Floats, quantized: Floats, ratio: float, estimand: Estimand, level: float
) -> tuple[Number, Number]:
    """Return limits of mean(quantized - ratio * base); `ratio` is plausible if 0 lies between them."""
    jump = total(quantized - base, estimand).jump * max(1.0, ratio)
    return limits(replace(total(quantized - ratio * base, estimand), jump=jump), level)
