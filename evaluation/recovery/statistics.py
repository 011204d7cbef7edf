"""Paired statistics of two scorings of the same questions.

Question i has k scores on each side, taken with the same noise. Its difference d_i = mean_k(quantized)
- mean_k(base) is one observation: repeats of a question are not independent questions, so everything
is clustered by question.

  difference  mean of d_i, in percentage points. Percentile bootstrap over questions (fixed seed);
              below 40 questions Student's t with n - 1 degrees of freedom; sparse, see below.
  p-values    of "the loss is at least the margin" and "at most the margin", one-sided, from the same
              distribution as the bounds of the difference: a bound is beyond the margin if and only
              if its p-value is at most 1 - confidence. (Bootstrap: bounds are order statistics,
              p = (resamples beyond + 1) / (resamples + 1).)
  recovery    100 * mean(quantized) / mean(base). Bootstrap likewise; else Fieller's interval for a
              ratio of paired means.
  flips       questions right on one side and wrong on the other, when k = 1, and the exact McNemar
              test on them (binomial, two-sided).

Sparse: fewer than 40 questions differ, and fewer than half. The variance then rests on those few
alone, however many questions were asked, and where none happened to go one way the interval is too
narrow, or has no width at all. So two questions are added, one lost and one won by the root mean square
of the differences seen (by one sample, 1/k, if none was), and t is used on n + 2. With k = 1 that is
Bonett and Price's interval for a difference of paired proportions. Coverage of a stated 95 %, 4,000
rounds of 96 questions, k = 1, in %:

  lost   won    bootstrap   Student's t, n - 1   two more questions
  2 %    0           84.7                 85.7                100.0
  5 %    0           94.0                 86.5                 95.4
  10 %   0           95.6                 92.1                 96.2
  3 %    1 %         90.8                 93.5                 99.5
  5 %    5 %         95.8                 95.7                 97.7

Sources: arXiv 2411.00640 (clustered errors of evaluations), Fieller 1954, McNemar 1947, Bonett and
Price 2012 (J. Educ. Behav. Stat. 37:479).
Left out: unpaired tests, which need several times the questions for the same power; bias-corrected
bootstraps, because the plain one covers as stated (tests/recovery/test_simulation.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 9_999  # one less than a round number: (count + 1) / 10,000 hits 0.05 exactly
SMALL_SAMPLE = 40  # below so many questions, or questions that differ, bootstraps are too narrow
SEED = 20260610
ROUNDING_PP = 1e-9  # a loss of the margin is "at least" and "at most" it, whatever its last bit

Floats = NDArray[np.float64]
Scores = Mapping[str, Sequence[float]]  # question -> its k scores, 0..1


@dataclass(frozen=True)
class Interval:
    """A confidence interval; None where there is none (a ratio to zero, say)."""

    low: float | None
    high: float | None


class Pairs(NamedTuple):
    """Mean score of each question, 0..1, on both sides."""

    base: Floats
    quantized: Floats

    @property
    def difference(self) -> Floats:
        """Quantized - base, in percentage points."""
        return 100 * (self.quantized - self.base)


@dataclass(frozen=True)
class Comparison:
    """Base against quantized on one task. Accuracies are 0..1, the rest as named.

    Attributes:
        questions: number of paired questions.
        repeats: scores a question on each side.
        base: accuracy of the base model.
        base_interval: its interval over questions.
        quantized: accuracy of the quantized model.
        quantized_interval: its interval over questions.
        difference_pp: quantized - base in percentage points.
        difference_interval: two-sided, at `confidence`.
        difference_bounds: one-sided lower and upper bounds, each at `confidence`: what the gate uses.
        deviation_pp: standard deviation of the questions' differences.
        margin_pp: loss that the gate allows, declared beforehand.
        p_at_least_margin: p-value of "the loss is at least the margin"; small lets the gate pass.
        p_at_most_margin: p-value of "the loss is at most the margin"; small makes it fail.
        recovery: 100 * quantized / base; None when the base scores 0.
        recovery_interval: two-sided, at `confidence`.
        lost: questions the base answers and the quantized model does not (k = 1), else None.
        won: the other way round.
        mcnemar_p: exact two-sided p of lost against won, None when k > 1.
        confidence: of every interval.
    """

    questions: int
    repeats: int
    base: float
    base_interval: Interval
    quantized: float
    quantized_interval: Interval
    difference_pp: float
    difference_interval: Interval
    difference_bounds: Interval
    deviation_pp: float
    margin_pp: float
    p_at_least_margin: float
    p_at_most_margin: float
    recovery: float | None
    recovery_interval: Interval
    lost: int | None
    won: int | None
    mcnemar_p: float | None
    confidence: float


def compare(
    base: Scores, quantized: Scores, *, margin_pp: float, confidence: float = 0.95
) -> Comparison:
    """Compare two scorings of the same questions.

    Raises:
        ValueError: the questions or the number of repeats differ, or there are fewer than two.
    """
    repeats = _check_paired(base, quantized)
    names = sorted(base)
    x = np.array([np.mean(base[name]) for name in names], dtype=np.float64)
    y = np.array([np.mean(quantized[name]) for name in names], dtype=np.float64)
    difference = 100 * (y - x)
    means = None if len(names) < SMALL_SAMPLE else resampled_means(x, y)  # [resamples, 2]
    pairs, pair_means = Pairs(x, y), means
    if is_sparse(x, y):
        pairs, pair_means = with_two_more(x, y, 1 / repeats), None
    at_least, at_most = _margin_p_values(pairs, pair_means, margin_pp)
    unseen = unseen_loss_p(len(names) * repeats, margin_pp)
    lost, won = _flips(x, y) if repeats == 1 else (None, None)
    return Comparison(
        questions=len(names),
        repeats=repeats,
        base=float(x.mean()),
        base_interval=_mean_interval(x, means, 0, confidence),
        quantized=float(y.mean()),
        quantized_interval=_mean_interval(y, means, 1, confidence),
        difference_pp=float(difference.mean()),
        difference_interval=_difference(pairs, pair_means, (1 + confidence) / 2),
        difference_bounds=_difference(pairs, pair_means, confidence),
        deviation_pp=float(difference.std(ddof=1)),
        margin_pp=margin_pp,
        p_at_least_margin=max(at_least, unseen),
        p_at_most_margin=at_most,
        recovery=float(100 * y.mean() / x.mean()) if x.mean() > 0 else None,
        recovery_interval=_recovery(pairs, pair_means, (1 + confidence) / 2),
        lost=lost,
        won=won,
        mcnemar_p=None if lost is None or won is None else mcnemar(lost, won),
        confidence=confidence,
    )


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided p-value of `lost` against `won` discordant pairs."""
    return 1.0 if lost + won == 0 else float(stats.binomtest(lost, lost + won).pvalue)


def unseen_loss_p(samples: int, margin_pp: float) -> float:
    """Return how likely `samples` show no loss at all when each is lost with probability margin.

    The floor of the p-value that lets a gate pass. Where no score differs there is no variance to go
    by, and an interval of width 0 over 10 questions would exclude anything.
    """
    return (1 - min(margin_pp, 100) / 100) ** samples


def questions_needed(
    difference_pp: float, deviation_pp: float, margin_pp: float, confidence: float, repeats: int
) -> int | None:
    """Return how many questions would decide, were the difference as observed; None if none would."""
    gap = abs(difference_pp + margin_pp)
    if gap < ROUNDING_PP:
        return None
    by_variance = (float(stats.norm.ppf(confidence)) * deviation_pp / gap) ** 2
    unseen = math.log(1 - confidence) / math.log1p(-min(margin_pp, 99) / 100) / repeats
    return math.ceil(max(by_variance, unseen, 2))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's step-down adjusted p-values: family-wise error over several tasks."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = largest
    return adjusted


def _check_paired(base: Scores, quantized: Scores) -> int:
    if base.keys() != quantized.keys():
        odd = sorted(base.keys() ^ quantized.keys())
        raise ValueError(f"{len(odd)} questions are scored on one side only, {odd[0]!r} among them")
    counts = {len(scores) for side in (base, quantized) for scores in side.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"questions have differing numbers of repeats: {sorted(counts)}")
    if len(base) < 2:
        raise ValueError(f"{len(base)} questions cannot be compared; two are the least")
    return counts.pop()


def _flips(x: Floats, y: Floats) -> tuple[int, int]:
    return int(((x > 0.5) & (y <= 0.5)).sum()), int(((x <= 0.5) & (y > 0.5)).sum())


def resampled_means(x: Floats, y: Floats) -> Floats:
    """Return means [RESAMPLES, 2] of x and y over questions drawn with replacement, paired.

    Equal pairs (x_i, y_i) are drawn together: how often each distinct pair comes is multinomial.
    """
    pairs, counts = np.unique(np.stack([x, y], axis=1), axis=0, return_counts=True)  # [U, 2], [U]
    generator = np.random.default_rng(SEED)
    means = np.empty((RESAMPLES, 2))
    for start in range(0, RESAMPLES, 1000):  # [1000, U] at a time bounds the memory
        rows = len(means[start : start + 1000])
        drawn = generator.multinomial(len(x), counts / len(x), size=rows)
        means[start : start + rows] = drawn @ pairs / len(x)
    return means


def _quantiles(values: Floats, level: float) -> Interval:
    """Return the order statistics that leave (1 - level) * (RESAMPLES + 1) - 1 values outside."""
    outside = max(1, math.floor((1 - level) * (RESAMPLES + 1) + 1e-6))
    ordered = np.sort(values)
    return Interval(float(ordered[outside - 1]), float(ordered[-outside]))


def is_sparse(x: Floats, y: Floats) -> bool:
    """Return whether so few questions differ that two are added: under 40, and under half."""
    differ = int(_differ(x, y).sum())
    return differ < SMALL_SAMPLE and 2 * differ < len(x)


def _differ(x: Floats, y: Floats) -> NDArray[np.bool_]:
    return 100 * np.abs(y - x) > ROUNDING_PP


def with_two_more(x: Floats, y: Floats, least: float) -> Pairs:
    """Return the pairs with a question more that is lost and one more that is won.

    On the base's side both have its mean, so that the recovery's denominator stays. They differ by
    the root mean square of the differences that are not 0, by `least` where there is none.
    """
    seen = (y - x)[_differ(x, y)]
    size = math.sqrt(float((seen**2).mean())) if len(seen) else least
    both = np.full(2, x.mean())
    return Pairs(np.append(x, both), np.append(y, both + np.array([-size, size])))


def _margin_p_values(pairs: Pairs, means: Floats | None, margin_pp: float) -> tuple[float, float]:
    """Return the p-values of "the loss is at least" and "at most the margin"."""
    if means is None:
        return _t_tails(pairs.difference, -margin_pp)
    drawn = 100 * (means[:, 1] - means[:, 0])
    at_least = (int((drawn <= -margin_pp + ROUNDING_PP).sum()) + 1) / (RESAMPLES + 1)
    at_most = (int((drawn >= -margin_pp - ROUNDING_PP).sum()) + 1) / (RESAMPLES + 1)
    return at_least, at_most


def _t_tails(difference: Floats, value: float) -> tuple[float, float]:
    """Return the one-sided p-values of "mean <= value" and "mean >= value"."""
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    gap = float(difference.mean()) - value
    if error == 0:
        return float(gap <= ROUNDING_PP), float(gap >= -ROUNDING_PP)
    t, freedom = gap / error, len(difference) - 1
    return float(stats.t.sf(t, freedom)), float(stats.t.cdf(t, freedom))


def _difference(pairs: Pairs, means: Floats | None, level: float) -> Interval:
    """Return the `1 - level` and `level` bounds of the mean difference in pp."""
    if means is not None:
        return _quantiles(100 * (means[:, 1] - means[:, 0]), level)
    return Interval(*_t_limits(pairs.difference, level))


def _t_limits(values: Floats, level: float) -> tuple[float, float]:
    half = float(stats.t.ppf(level, len(values) - 1)) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def _mean_interval(
    values: Floats, means: Floats | None, column: int, confidence: float
) -> Interval:
    level = (1 + confidence) / 2
    if means is not None:
        return _quantiles(means[:, column], level)
    low, high = _t_limits(values, level)
    return Interval(max(0.0, low), min(1.0, high))


def _recovery(pairs: Pairs, means: Floats | None, level: float) -> Interval:
    if means is None:
        return fieller(*pairs, level)
    if (means[:, 0] <= 0).any():
        return Interval(None, None)
    return _quantiles(100 * means[:, 1] / means[:, 0], level)


def fieller(x: Floats, y: Floats, level: float) -> Interval:
    """Return Fieller's interval for 100 * mean(y) / mean(x) of paired observations.

    The ratios r for which mean(y - r x) does not differ from 0 by a t-test: the roots of
    (X² - t²a) r² - 2 (XY - t²c) r + (Y² - t²b) = 0, with a, b, c the variances and covariance of the
    means. No interval where the denominator may be 0.
    """
    n, t = len(x), float(stats.t.ppf(level, len(x) - 1))
    covariance = np.cov(np.stack([x, y])) / n
    a, b, c = covariance[0, 0], covariance[1, 1], covariance[0, 1]
    mean_x, mean_y = x.mean(), y.mean()
    quadratic, half = mean_x**2 - t**2 * a, mean_x * mean_y - t**2 * c
    root = half**2 - quadratic * (mean_y**2 - t**2 * b)
    if quadratic <= 0 or root < 0:
        return Interval(None, None)
    low, high = (half - math.sqrt(root)) / quadratic, (half + math.sqrt(root)) / quadratic
    return Interval(float(100 * low), float(100 * high))
