"""The terms on which a model is judged on one task: a recipe's gate states them before the run."""

from collections.abc import Mapping
from dataclasses import dataclass

from quantize.recovery.estimands import Estimand


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is judged of a task, and what is allowed.

    Attributes:
        estimand: what is judged, `these_questions` or `such_questions`.
        margin_pp: loss that is allowed, in percentage points.
        confidence: confidence of every interval and test.
        max_step_inflation: share of more denoising steps that is allowed; None judges none.
        health_pp: sign of ill health -> points by which it may be more frequent, in place of
            `health.limits_of`'s; None judges no sign.
    """

    estimand: Estimand
    margin_pp: float
    confidence: float = 0.95
    max_step_inflation: float | None = None
    health_pp: Mapping[str, float | None] | None = None
