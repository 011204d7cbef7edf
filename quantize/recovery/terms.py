"""The terms on which a model is judged on one task: a recipe's gate states them before the run."""

from collections.abc import Mapping
from dataclasses import dataclass

from quantize.recovery.estimands import Estimand


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is judged of one task, and how much loss, step inflation and ill health are allowed."""

    estimand: Estimand  # what is judged, `these_questions` or `such_questions`
    margin_pp: float  # loss that is allowed, in percentage points
    confidence: float = 0.95  # confidence of every interval and test
    # Share of more denoising steps that is allowed; None judges none.
    max_step_inflation: float | None = None
    # Sign of ill health -> points by which it may be more frequent, in place of
    # `health.limits_of`'s; None judges no sign.
    health_pp: Mapping[str, float | None] | None = None
