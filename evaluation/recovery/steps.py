"""Step inflation: how many more denoising steps the quantized model takes per token than BF16.

    inflation = (steps' / tokens') / (steps / tokens) - 1      sums over all answers; ' is quantized

A checkpoint that needs 7 % more steps is 7 % slower, whatever its accuracy. The units are
questions; long answers weigh more because they cost more. The standard error of the ratio's
logarithm is the jackknife's: leave out each question in turn, and take the root of the summed
squares of the logarithm's deviations. The usual factor (n - 1)/n would make intervals too narrow
for five questions and is omitted. The interval and the one-sided p-value of "the inflation is at
most the limit" use Student's t.

If interim looks add repeats of the same questions, the units are still questions. Such a look adds
less information than `sequential` assumes: the test decides too rarely (simulated: docs/evaluation.md).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from quantize.recovery.estimands import Floats
from quantize.recovery.terms import StepInflation

# Question -> (denoising steps, tokens), each summed over one model's answers to it.
Costs = Mapping[str, tuple[int, int]]


def step_inflation(
    base: Costs,
    quantized: Costs,
    never_stopped: Sequence[float],
    *,
    confidence: float,
    limit: float | None = None,
) -> StepInflation | None:
    """Return two models' steps per token, compared on the same questions; `limit` 0.1 is 10 % more.

    Return None if one question accounts for all of a model's steps, or for all of its tokens.
    """
    table = np.array([[*base[q], *quantized[q]] for q in base], dtype=np.float64)
    if (table == table.sum(0)).any():
        return None
    middle, error = log_ratio(table)
    freedom = len(table) - 1
    half, lower = (float(stdtrit(freedom, q)) * error for q in (0.5 + confidence / 2, confidence))
    return StepInflation(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        never_stopped=never_stopped,
        bound=math.exp(middle - lower),
        p_at_most_limit=None if limit is None else float(exceeds_p(middle, error, freedom, limit)),
    )


def log_ratio(table: Floats) -> tuple[Any, Any]:
    """Return log((steps' / tokens') / (steps / tokens)), and its standard error.

    `table` [..., n questions, 4] has steps, tokens, steps' and tokens'.
    """
    sums, signs = table.sum(-2), np.array([-1, 1, 1, -1])
    without = (np.log(sums[..., None, :] - table) * signs).sum(-1)  # without each question in turn
    moved = without - without.mean(-1, keepdims=True)
    return (np.log(sums) * signs).sum(-1), np.sqrt((moved**2).sum(-1))


def exceeds_p(middle: Any, error: Any, freedom: int, limit: float) -> Any:
    """Return the one-sided p-value of "the ratio is at most 1 + limit", from `log_ratio`'s results."""
    above = middle - math.log1p(limit)
    with np.errstate(divide="ignore", invalid="ignore"):
        students = stdtr(freedom, -above / error)
    return np.where(error > 0, students, above <= 0)[()]
