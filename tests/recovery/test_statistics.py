"""Statistics and gate: known answers, textbook inversions, and verdicts at the border."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recovery.gate import judge, judge_task, not_comparable
from recovery.statistics import (
    Comparison,
    Floats,
    compare,
    fieller,
    holm,
    mcnemar,
    questions_needed,
    unseen_loss_p,
)
from scipy import stats


def scores(values: list[float]) -> dict[str, list[float]]:
    return {f"q{i:04}": [value] for i, value in enumerate(values)}


def flips(n: int, both: int, lost: int, won: int, margin_pp: float = 5) -> Comparison:
    """N questions, of which `both` are right on both sides, `lost` on the base's only, and so on."""
    base = [1.0] * (both + lost) + [0.0] * (n - both - lost)
    quantized = [1.0] * both + [0.0] * lost + [1.0] * won + [0.0] * (n - both - lost - won)
    return compare(scores(base), scores(quantized), margin_pp=margin_pp)


def test_t_interval_by_hand() -> None:
    """D = -10, 0, 10, 20 pp: mean 5, s = sqrt(500/3), t(3, .975) = 3.18245."""
    base = {name: [0.5, 0.5] for name in "abcd"}
    quantized = {"a": [0.4, 0.4], "b": [0.5, 0.5], "c": [0.6, 0.6], "d": [0.7, 0.7]}
    found = compare(base, quantized, margin_pp=3)
    half = 3.182446 * math.sqrt(500 / 3) / 2
    assert found.difference_pp == pytest.approx(5)
    assert found.difference_interval.low == pytest.approx(5 - half, abs=1e-4)
    assert found.difference_interval.high == pytest.approx(5 + half, abs=1e-4)
    assert found.mcnemar_p is None
    assert found.lost is None


def test_repeats_are_averaged_within_a_question_first() -> None:
    base = {"a": [1.0, 0.0], "b": [1.0, 1.0]}
    quantized = {"a": [1.0, 1.0], "b": [0.0, 1.0]}
    found = compare(base, quantized, margin_pp=3)
    assert (found.questions, found.repeats, found.difference_pp) == (2, 2, 0)
    assert found.deviation_pp == pytest.approx(math.sqrt(2) * 50)


def test_mcnemar_is_the_exact_binomial() -> None:
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert mcnemar(0, 0) == 1


def test_holm_steps_down_and_never_decreases() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"only": 0.04}) == {"only": 0.04}
    assert holm({"a": 0.9, "b": 0.8})["a"] == 1


def test_fieller_is_the_set_of_ratios_that_a_t_test_does_not_reject() -> None:
    generator = np.random.default_rng(3)
    x = generator.uniform(0.3, 0.9, 30)
    y = x + generator.normal(-0.02, 0.1, 30)
    found = fieller(x, y, 0.975)
    ratios = np.linspace(0.5, 1.5, 200_001)
    kept = ratios[_not_rejected(x, y, ratios)]
    assert found.low == pytest.approx(100 * kept.min(), abs=0.01)
    assert found.high == pytest.approx(100 * kept.max(), abs=0.01)


def _not_rejected(x: Floats, y: Floats, ratios: Floats) -> Floats:
    residual = y[None] - ratios[:, None] * x[None]  # [ratios, questions]
    t = residual.mean(1) / (residual.std(1, ddof=1) / math.sqrt(len(x)))
    return np.abs(t) <= stats.t.ppf(0.975, len(x) - 1)


def test_bootstrap_interval_agrees_with_the_normal_one_on_many_questions() -> None:
    found = flips(1000, both=600, lost=60, won=40)
    half = 1.96 * found.deviation_pp / math.sqrt(1000)
    assert found.difference_pp == pytest.approx(-2)
    assert found.difference_interval.low == pytest.approx(-2 - half, abs=0.1)
    assert found.difference_interval.high == pytest.approx(-2 + half, abs=0.1)
    assert found.recovery == pytest.approx(100 * 640 / 660)
    assert (found.lost, found.won) == (60, 40)


def test_the_same_scores_give_the_same_numbers_whatever_their_order() -> None:
    base, quantized = scores([1, 0, 1, 1] * 20), scores([1, 1, 0, 1] * 20)
    turned = dict(reversed(base.items())), dict(reversed(quantized.items()))
    assert compare(base, quantized, margin_pp=3) == compare(*turned, margin_pp=3)


def test_a_base_that_scores_nothing_has_no_recovery() -> None:
    for n in (10, 100):
        found = compare(scores([0.0] * n), scores([1.0] + [0.0] * (n - 1)), margin_pp=3)
        assert found.recovery is None
        assert (found.recovery_interval.low, found.recovery_interval.high) == (None, None)
        assert judge_task("t", found).outcome in ("PASS", "INCONCLUSIVE")


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(5, 120),
    seed=st.integers(0, 10_000),
    margin=st.sampled_from([1, 2, 2.5, 3, 5, 10, 20]),
    confidence=st.sampled_from([0.8, 0.9, 0.95, 0.99]),
)
def test_bounds_and_p_values_never_disagree(
    n: int, seed: int, margin: float, confidence: float
) -> None:
    generator = np.random.default_rng(seed)
    base, quantized = (list(generator.integers(0, 2, n).astype(float)) for _ in range(2))
    quantized = [b if generator.random() < 0.8 else q for b, q in zip(base, quantized, strict=True)]
    found = compare(scores(base), scores(quantized), margin_pp=margin, confidence=confidence)
    low, high = found.difference_bounds.low, found.difference_bounds.high
    assert low is not None
    assert high is not None
    alpha = 1 - confidence + 1e-12
    excluded = unseen_loss_p(n, margin) <= alpha
    assert (found.p_at_least_margin <= alpha) == (low > -margin + 1e-9 and excluded)
    assert (found.p_at_most_margin <= alpha) == (high < -margin - 1e-9)


def test_verdicts() -> None:
    assert judge_task("t", flips(800, 600, 20, 20)).outcome == "PASS"
    assert judge_task("t", flips(800, 600, 120, 20)).outcome == "FAIL"
    unclear = judge_task("t", flips(100, 60, 12, 8))
    assert unclear.outcome == "INCONCLUSIVE"
    assert "questions would decide" in unclear.reason
    assert (unclear.exit_code, judge_task("t", flips(800, 600, 120, 20)).exit_code) == (4, 1)


def test_equal_answers_to_a_handful_of_questions_prove_nothing() -> None:
    """At 5 pp 59 questions are the least: 0.95^59 < 0.05 < 0.95^58."""
    assert judge_task("t", flips(58, 40, 0, 0)).outcome == "INCONCLUSIVE"
    assert "about 59 questions" in judge_task("t", flips(58, 40, 0, 0)).reason
    assert judge_task("t", flips(59, 40, 0, 0)).outcome == "PASS"


def test_questions_needed_is_what_then_decides() -> None:
    found = flips(100, 60, 12, 8)
    needed = questions_needed(
        found.difference_pp, found.deviation_pp, found.margin_pp, found.confidence, 1
    )
    assert needed is not None
    times = needed // 100 + 1
    assert judge_task("t", flips(100 * times, 60 * times, 12 * times, 8 * times)).outcome == "PASS"
    assert questions_needed(-5, 30, 5, 0.95, 1) is None


def test_a_run_passes_when_every_task_does() -> None:
    good, unclear = flips(800, 600, 20, 20), flips(100, 60, 12, 8)
    assert judge({"a": good, "b": good}).outcome == "PASS"
    mixed = judge({"a": good, "b": unclear})
    assert mixed.outcome == "INCONCLUSIVE"
    assert mixed.reason.startswith("b:")
    with pytest.raises(ValueError, match="no task"):
        judge({})


def test_a_task_that_fails_alone_may_be_chance_among_many() -> None:
    good = flips(800, 600, 20, 20)
    weak = replace(good, p_at_least_margin=0.99, p_at_most_margin=0.03)
    assert judge({"weak": weak}).outcome == "FAIL"
    many = judge({"weak": weak, "b": good, "c": good})
    assert many.outcome == "INCONCLUSIVE"
    assert "Holm" in many.reason


CONDITIONS = {
    "task": "gsm8k",
    "task_version": 1.0,
    "lm_eval": "0.4.13",
    "generation": {"until": [], "max_gen_toks": 64},
    "limit": 10,
    "repeats": 1,
    "seed": 0,
    "sampler": {"entropy_bound": 0.1, "dtype": "float32"},
    "documents": ["a", "b"],
    "prompts": ["c", "d"],
    "seeds": [5, 6],
}
OTHERWISE = {
    "task": "svamp",
    "task_version": 1.1,
    "lm_eval": "0.4.12",
    "generation": {"until": [], "max_gen_toks": 65},
    "limit": None,
    "repeats": 2,
    "seed": 1,
    "sampler": {"entropy_bound": 0.2, "dtype": "float32"},
    "documents": ["a", "x"],
    "prompts": ["c"],
    "seeds": [5, 7],
}


@pytest.mark.parametrize("key", sorted(CONDITIONS))
def test_every_condition_that_differs_makes_scores_incomparable(key: str) -> None:
    assert not_comparable(CONDITIONS, dict(CONDITIONS)) is None
    verdict = not_comparable(CONDITIONS, CONDITIONS | {key: OTHERWISE[key]})
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code) == ("NOT COMPARABLE", 4)
    assert verdict.reason.startswith(key)
    missing = {k: v for k, v in CONDITIONS.items() if k != key}
    assert key == "limit" or not_comparable(CONDITIONS, missing) is not None


def test_where_conditions_part_is_named() -> None:
    verdict = not_comparable(CONDITIONS, CONDITIONS | {"documents": ["a", "x"]})
    assert verdict is not None
    assert verdict.reason == "documents differ: entry 1 is 'b' against 'x'"


def test_unpaired_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="one side only"):
        compare(scores([1, 0]), scores([1, 0, 1]), margin_pp=3)
    with pytest.raises(ValueError, match="differing numbers of repeats"):
        compare({"a": [1], "b": [1]}, {"a": [1], "b": [1, 0]}, margin_pp=3)
    with pytest.raises(ValueError, match="two are the least"):
        compare(scores([1]), scores([1]), margin_pp=3)
