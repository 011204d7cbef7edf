"""Step inflation: how many more denoising steps a token takes than with BF16.

    inflation = (steps' / tokens') / (steps / tokens) - 1      sums over all answers; ' is quantized

A checkpoint that needs 7 % more steps is 7 % slower, whatever its accuracy. The units are questions:
the logarithm of the ratio is linearised in the four sums of each question (delta method), and its
interval is Student's, so that questions with long answers count as they cost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

Costs = Mapping[
    str, tuple[int, int]
]  # question -> its denoising steps and tokens, summed over answers


@dataclass(frozen=True)
class StepInflation:
    """How many more steps a token takes than with BF16, as a ratio.

    Attributes:
        ratio: steps a token, quantized over BF16; 1.07 is 7 % more.
        low, high: limits of its two-sided interval.
        never_stopped: share of canvases that took the most steps allowed, BF16 and quantized.
    """

    ratio: float
    low: float
    high: float
    never_stopped: Sequence[float]

    def exceeds(self, most: float) -> bool:
        """Whether the whole interval lies above 1 + `most`."""
        return self.low > 1 + most


def step_inflation(
    base: Costs,
    quantized: Costs,
    never_stopped: Sequence[float],
    *,
    confidence: float,
) -> StepInflation:
    """Compare the steps and tokens of the same questions.

    Raises:
        ValueError: there are fewer than two questions, the sides' questions differ, or a side has no
            tokens.
    """
    if base.keys() != quantized.keys() or len(base) < 2:
        raise ValueError("step inflation needs at least two questions, the same on both sides")
    table = np.array([[*base[q], *quantized[q]] for q in base], dtype=np.float64)
    sums = table.sum(0)
    if not sums.all():
        raise ValueError("step inflation needs steps and tokens on both sides")
    signs = np.array([-1, 1, 1, -1])
    share = (table / sums * signs).sum(1)  # each question's part in the logarithm of the ratio
    count = len(share)
    error = math.sqrt(count / (count - 1) * float((share**2).sum()))
    middle = float((np.log(sums) * signs).sum())
    half = float(stats.t.ppf(0.5 + confidence / 2, count - 1)) * error
    low, ratio, high = (math.exp(middle + step) for step in (-half, 0.0, half))
    return StepInflation(ratio, low, high, never_stopped)


def share_at(steps: Sequence[int], most: int) -> float:
    """Return the share of canvases that took `most` steps, the most allowed; 0 without any."""
    return sum(step >= most for step in steps) / len(steps) if steps else 0.0
