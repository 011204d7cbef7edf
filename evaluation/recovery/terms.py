"""Records of a judgement: the `Terms` that a recipe's gate states, and the `Comparison` under them."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

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


@dataclass(frozen=True)
class Interval:
    """A confidence interval; a limit that does not exist (of a ratio to zero, say) is None."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class StepInflation:
    """The ratio of the quantized model's denoising steps per token to BF16's."""

    ratio: float  # steps per token, quantized over BF16; 1.07 is 7 % more
    low: float  # limits of the ratio's two-sided interval
    high: float
    never_stopped: Sequence[float]  # shares of canvases that took all steps: [BF16, quantized]
    bound: float  # one-sided lower bound of the ratio
    # P-value of "the inflation is at most the limit"; a small one fails the gate. None: no limit.
    p_at_most_limit: float | None


@dataclass(frozen=True)
class Sign:
    """How often both models' answers show a sign; if unjudged, its limit and p-values are None."""

    base: float  # share of BF16's answers that have the sign, 0 to 1
    quantized: float  # share of the candidate's answers
    difference_pp: float  # quantized - base in points; `low` and `high` are its interval's ends
    low: float
    high: float
    limit_pp: float | None  # points by which the sign may be more frequent
    p_at_least_limit: float | None  # p-value of "difference at least the limit"; small: sign passes
    p_at_most_limit: float | None  # p-value of "difference at most the limit"; small: run fails


@dataclass(frozen=True, kw_only=True)
class Comparison(Terms):
    """A quantized model compared with its base model on one task, and the comparison's terms.

    Accuracies are 0 to 1; differences, their intervals and bounds are in percentage points.
    Intervals have the terms' confidence and estimand; only `other_interval` has the other estimand.
    Fields named `p_at_...`, here and in the records within, are the p-values that decide: over
    interim looks `sequential` replaces every one.
    """

    questions: int  # number of paired questions
    repeats: int  # number of answers per question from each model
    units: int  # number of answers or of questions, whichever the estimand counts
    base: float  # accuracy of the base model
    base_interval: Interval  # interval of `base`
    quantized: float  # accuracy of the quantized model
    quantized_interval: Interval  # interval of `quantized`
    difference_pp: float  # quantized - base in percentage points
    difference_interval: Interval  # its two-sided interval
    difference_bounds: Interval  # its one-sided bounds, each at `confidence`, which the gate uses
    bounds_at_look: Interval  # the same, each at the level that decides at this look
    other_interval: Interval  # like `difference_interval`, but of the other estimand
    p_at_least_margin: float  # p-value of "the loss is at least the margin"; PASS needs a small one
    p_at_most_margin: float  # p-value of "the loss is at most the margin"; FAIL needs a small one
    needed: (
        float | None
    )  # multiple of `units` that at which a look decides, were all alike; None if none
    recovery: float | None  # 100 * quantized / base; None when the base scores 0
    recovery_interval: Interval  # its two-sided interval
    lost: int | None  # questions that only the base answers right, None if repeats > 1
    won: int | None  # questions that only the quantized model answers right, None if repeats > 1
    mcnemar_p: float | None  # exact two-sided p of lost against won, None if repeats > 1
    # One entry per interim look (`sequential`), with this look's own difference, one-sided bounds
    # (`low`, `high`) and p-values. If there are any, the p-values above are sequential, while the
    # bounds above are only the last look's.
    looks: tuple[Mapping[str, Any], ...] = ()
    step_inflation: StepInflation | None = None  # None if an answer does not report its steps
    # Sign of ill health -> how often both models' answers have it (`recovery.health`).
    health: Mapping[str, Sign] = field(default_factory=dict[str, Sign])
    unjudged: Sequence[str] = ()  # signs that have a limit, but cannot be seen in what is stored
    length: Sequence[float] | None = None  # ratio of mean tokens to the base's, its interval's ends
    max_tokens: int | None = None  # the most tokens of an answer; None if the scoring does not say


def unmeasured() -> dict[str, Any]:
    """Return the fields that rules of the gate measure, as they are where nothing was measured."""
    measured = fields(Comparison)[[of.name for of in fields(Comparison)].index("looks") + 1 :]
    return {
        of.name: of.default if of.default_factory is MISSING else of.default_factory()
        for of in measured
    }
