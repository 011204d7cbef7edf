"""The terms on which a model is judged on one task: a recipe's gate states them before the run."""

from collections.abc import Mapping
from dataclasses import dataclass

from quantize.recovery.estimands import Estimand


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is judged on one task, and how much loss, step inflation and ill health are allowed."""

    estimand: Estimand  # what is judged, `these_questions` or `such_questions`
    margin_pp: float  # loss that is allowed, in percentage points
    confidence: float = 0.95  # confidence of every interval and test
    # Allowed increase in denoising steps per token (0.1 is 10 %); if None, steps are not judged.
    max_step_inflation: float | None = None
    # Sign of ill health -> points by which it may be more frequent than with BF16; a missing sign
    # has the default of `health.limits_of`. None, for one sign or for all, means: not judged.
    health_pp: Mapping[str, float | None] | None = None
