"""Step inflation: how many more denoising steps the quantized model takes per token than BF16.

    inflation = (steps' / tokens') / (steps / tokens) - 1      sums over all answers; ' is quantized

A checkpoint that needs 7 % more steps is 7 % slower, whatever its accuracy. Long answers weigh more
because they cost more. The standard error of the ratio's logarithm is the jackknife's: leave out each
unit in turn, and take the root of the summed squares of the logarithm's deviations. The interval uses
Student's t.

If other questions may come (`such_questions`, or looks that add questions), the units are questions.
The jackknife's usual factor (n - 1)/n would make intervals too narrow for five questions and is
omitted. A few long questions that save steps may not be among those seen, and all others then agree on
an inflation that is not there. So the p-value of "the inflation is at most the limit" is the largest of
three: Student's; that of `estimands` for rare events, whose size is sum |e|^3 / sum e^2 over the
deviations e; and the probability that the units hold none of a kind that is as long as the longest of
them, takes half of the steps, and is frequent enough to offset the excess.

If the questions are fixed, the units are answers, and only deviations from a question's own mean count.
Of k answers, one that alone saves steps deviates by (k - 1)/k of them: the size is k/(k - 1) times that
of e. Few questions may take most of the steps, so the degrees of freedom are Welch's. For simulated
error rates see docs/evaluation.md.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import stdtrit

from quantize.recovery.estimands import Floats, Number, Total
from quantize.recovery.terms import StepInflation

# Question -> (denoising steps, tokens) of each of one model's answers to it.
Costs = Mapping[str, Sequence[tuple[int, int]]]


def step_inflation(
    base: Costs,
    quantized: Costs,
    never_stopped: Sequence[float],
    *,
    confidence: float,
    limit: float | None = None,
    sampled: bool = True,
) -> StepInflation | None:
    """Return two models' steps per token, compared on the same questions; `limit` 0.1 is 10 % more.

    `sampled` says whether other questions may come. Return None if one question accounts for all of
    a model's steps, or for all of its tokens.
    """
    sides = [np.array([side[q] for q in base], dtype=np.float64) for side in (base, quantized)]
    table = np.concatenate(sides, -1)
    questions = table.sum(1)
    if (questions == questions.sum(0)).any():
        return None
    ratio, saves = log_ratio(table, sampled=sampled)
    error = math.sqrt(ratio.variance)
    half = float(stdtrit(ratio.freedom, 0.5 + confidence / 2)) * error
    reach = max(float(ratio.reach(confidence)), -math.log(1 - confidence) * saves)
    ends = (ratio.value + np.array([0, -half, half, -reach])) / ratio.units
    middle, low, high, bound = map(float, np.exp(ends))
    p_value = None if limit is None else float(exceeds_p(ratio, saves, limit))
    return StepInflation(middle, low, high, never_stopped, bound, p_value)


def log_ratio(table: Floats, *, sampled: bool) -> tuple[Total, Number]:
    """Return n times log((steps' / tokens') / (steps / tokens)), and what one unit might save.

    That is half of the longest question or, if no question may come, of the longest answer, in mean
    questions. `table` [..., n questions, k answers, 4] has steps, tokens, steps' and tokens'.
    """
    of_units = np.moveaxis(table.sum(-2, keepdims=True), -3, -2) if sampled else table
    count, k = table.shape[-3], of_units.shape[-2]
    sums, signs = table.sum((-3, -2)), np.array([-1, 1, 1, -1])
    without = (np.log(sums[..., None, None, :] - of_units) * signs).sum(-1)  # without each in turn
    moved = count * np.abs(without - without.mean(-1, keepdims=True))
    apart = 1 if sampled else k / (k - 1)  # an answer is a part of the mean it deviates from
    of_each = (moved**2).sum(-1) * apart
    variance = of_each.sum(-1)
    still = variance < 1e-18  # it comes only from rounding
    jump = np.where(still, 1.0, apart**2 * (moved**3).sum((-2, -1)) / (variance + still))
    # A question's variance goes with its share of the cost; seen from two answers it may be near 0.
    cost = (of_units.sum(-2) / sums[..., None, :]).mean(-1) ** 2
    freedom = np.minimum(
        *((k - 1) * v.sum(-1) ** 2 / (v**2).sum(-1) for v in (cost, of_each + 1e-30))
    )
    longest = (of_units / sums[..., None, None, :])[..., 1::2].max((-3, -2, -1))
    value = count * (np.log(sums) * signs).sum(-1)
    return Total(count, value, variance, jump, freedom), count / 2 * longest


def exceeds_p(ratio: Total, saves: Number, limit: float) -> Number:
    """Return the one-sided p-value of "the ratio is at most 1 + limit", from `log_ratio`'s results."""
    gap = np.maximum(ratio.value - ratio.units * math.log1p(limit), 0.0)
    unseen = np.exp(-gap / np.maximum(saves, 1e-9))
    return np.where(gap > 0, np.maximum(ratio.p(gap), unseen), 1.0)[()]
