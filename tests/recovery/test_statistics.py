"""Statistics and gate: known answers, textbook inversions, and verdicts at the border."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quantize.recovery.estimands import ESTIMANDS, Estimand, Total, limits, total, unseen_p
from quantize.recovery.gate import judge, judge_task, not_comparable
from quantize.recovery.sequential import Plan, at_looks, out_of_reach
from quantize.recovery.statistics import compare, holm, mcnemar
from quantize.recovery.terms import Comparison, Terms


def scores(values: list[float]) -> dict[str, list[float]]:
    return {f"q{i:04}": [value] for i, value in enumerate(values)}


def flips(
    n: int, both: int, lost: int, won: int, margin_pp: float = 5, confidence: float = 0.95
) -> Comparison:
    """N questions, of which `both` are right on both sides, `lost` on the base's only, and so on."""
    base = [1.0] * (both + lost) + [0.0] * (n - both - lost)
    quantized = [1.0] * both + [0.0] * lost + [1.0] * won + [0.0] * (n - both - lost - won)
    return compare(
        scores(base),
        scores(quantized),
        Terms(estimand="such_questions", margin_pp=margin_pp, confidence=confidence),
    )


def both(table: list[list[float]], margin_pp: float = 3) -> dict[Estimand, Comparison]:
    """Differences [n][k] from a base that is always right, judged as either estimand."""
    base = {f"q{i:04}": [1.0] * len(row) for i, row in enumerate(table)}
    quantized = {f"q{i:04}": [1 + d for d in row] for i, row in enumerate(table)}
    return {
        estimand: compare(base, quantized, Terms(estimand=estimand, margin_pp=margin_pp))
        for estimand in ESTIMANDS
    }


# --- what chance may do -------------------------------------------------------------------------


def test_the_variance_of_these_questions_lies_within_them() -> None:
    """Question 1 loses half of 4 answers, question 2 all: 4 x (4/3)(1/4) within, nothing between."""
    values = np.array([[-1, 0, -1, 0], [-1, -1, -1, -1]], dtype=float)
    within = total(values, "these_questions")
    assert (within.units, within.value, within.jump, within.freedom) == (8, -6, 1, 6)
    assert within.variance == pytest.approx(4 / 3)
    between = total(values, "such_questions")  # -1/2 and -1: variance 1/8, of the sum 2/8
    assert (between.units, between.value, between.freedom) == (2, -1.5, 1)
    assert between.variance == pytest.approx(1 / 4)
    assert between.jump == pytest.approx(1 / 4)


def test_one_answer_a_question_has_the_bound_of_the_discordant_pairs() -> None:
    """3 lost and 1 won of 10: 4 discordant, 4 - (3 - 1)^2 / 10, over n - 1 instead of n."""
    values = np.array([-1, -1, -1, 1] + [0] * 6, dtype=float)[:, None]
    for estimand in ESTIMANDS:
        found = total(values, estimand)
        assert found.variance == pytest.approx((4 - 0.4) * 10 / 9)
        assert (found.units, found.jump, found.freedom) == (10, 1, 9)


@pytest.mark.parametrize("lost", [0, 1, 3, 10, 60])
def test_p_is_poissons_where_losses_only_were_seen(lost: int) -> None:
    """The chance of no more losses than seen, were a gap more expected. Freedom: t does not matter."""
    seen = Total(10_000, -lost, variance=lost, jump=1, freedom=10_000)
    for gap in (2.0, 5.0, 20.0):
        assert seen.p(gap) >= stats.poisson.cdf(lost, lost + gap)
        if gap**2 > 4 * (lost + 1):  # far out, where Student's t is the narrower
            assert seen.p(gap) == pytest.approx(stats.poisson.cdf(lost, lost + gap))


def test_p_is_students_where_it_is_wider() -> None:
    few = Total(2, -1.5, variance=0.25, jump=0.01, freedom=1)
    assert few.p(1.0) == pytest.approx(stats.t.sf(1 / 0.5, 1))
    assert few.reach(0.95) == pytest.approx(0.5 * stats.t.ppf(0.95, 1))


def test_p_of_many_small_events_is_normal() -> None:
    many = Total(10_000, -100, variance=400, jump=0.01, freedom=10**6)
    assert many.p(30.0) == pytest.approx(stats.norm.sf(1.5), rel=0.01)


@pytest.mark.parametrize("variance", [0.0, 0.3, 4.0, 900.0])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.975])
def test_the_reach_is_where_p_is_the_level(variance: float, level: float) -> None:
    seen = Total(2000, -3.0, variance=variance, jump=0.5, freedom=9)
    assert seen.p(seen.reach(level)) == pytest.approx(1 - level)
    assert seen.p(-1.0) > 0.5
    assert seen.p(1.0) < seen.p(0.5) < seen.p(0.0)


def test_whole_questions_lost_are_chance_to_such_questions_only() -> None:
    """One of 30 loses all 64 answers: 3.33 points for certain here, a rare event among such."""
    table = [[0.0] * 64 for _ in range(29)] + [[-1.0] * 64]
    found = both(table)
    these, such = found["these_questions"], found["such_questions"]
    assert these.difference_pp == such.difference_pp == pytest.approx(-100 / 30)
    assert (these.units, such.units) == (1920, 30)
    assert these.other_interval == such.difference_interval
    assert such.other_interval == these.difference_interval
    low, high = these.difference_interval.low, these.difference_interval.high
    assert low is not None
    assert high is not None
    assert high - low < 0.5
    assert judge_task("t", these).outcome == "FAIL"
    assert judge_task("t", such).outcome == "INCONCLUSIVE"


def test_repeats_are_averaged_within_a_question_first() -> None:
    base = {"a": [1.0, 0.0], "b": [1.0, 1.0]}
    quantized = {"a": [1.0, 1.0], "b": [0.0, 1.0]}
    found = compare(base, quantized, Terms(estimand="such_questions", margin_pp=3))
    assert (found.questions, found.repeats, found.units, found.difference_pp) == (2, 2, 2, 0)
    assert found.mcnemar_p is None
    assert found.lost is None


def test_mcnemar_is_the_exact_binomial() -> None:
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert mcnemar(0, 0) == 1


def test_holm_steps_down_and_never_decreases() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"only": 0.04}) == {"only": 0.04}
    assert holm({"a": 0.9, "b": 0.8})["a"] == 1


@pytest.mark.parametrize("estimand", ESTIMANDS)
def test_recovery_holds_the_ratios_that_are_not_excluded(estimand: Estimand) -> None:
    """The interval ends where the limit of mean(y - r x) is 0."""
    generator = np.random.default_rng(3)
    p = generator.uniform(0.3, 0.9, 30)
    x, y = (
        (generator.random((30, 16)) < (p - loss)[:, None]).astype(float) for loss in (0.0, 0.05)
    )
    sides = [{f"{i:02}": list(row) for i, row in enumerate(side)} for side in (x, y)]
    found = compare(sides[0], sides[1], Terms(estimand=estimand, margin_pp=3)).recovery_interval
    assert found.low is not None
    assert found.high is not None
    jump = total(y - x, estimand).jump
    for ratio, side in ((found.low / 100, 0), (found.high / 100, 1)):
        excess = replace(total(y - ratio * x, estimand), jump=jump * max(1, ratio))
        assert limits(excess, 0.975)[side] == pytest.approx(0, abs=1e-9)
        further = replace(total(y - (ratio + (0.02, -0.02)[side]) * x, estimand), jump=excess.jump)
        assert limits(further, 0.975)[0] < 0 < limits(further, 0.975)[1]


@pytest.mark.parametrize("estimand", ESTIMANDS)
def test_a_base_that_may_score_nothing_has_no_interval_of_the_recovery(estimand: Estimand) -> None:
    """2 of 40 right on both sides: less than the next event, 3.7 at 97.5 %."""
    few = scores([1.0, 1.0] + [0.0] * 38)
    found = compare(few, few, Terms(estimand=estimand, margin_pp=3))
    assert found.recovery == 100
    assert found.recovery_interval.low is None


def test_intervals_agree_with_the_normal_one_on_many_questions() -> None:
    """100 of 1,000 differ: wider than the normal interval by the next event, about 15 %."""
    found = flips(1000, both=600, lost=60, won=40)
    half = 1.96 * 100 * math.sqrt(100 / 1000 - 0.02**2) / math.sqrt(1000)
    assert found.difference_pp == pytest.approx(-2)
    low, high = found.difference_interval.low, found.difference_interval.high
    assert low is not None
    assert high is not None
    assert half < -2 - low < 1.2 * half
    assert half < high + 2 < 1.2 * half
    assert found.recovery == pytest.approx(100 * 640 / 660)
    assert (found.lost, found.won) == (60, 40)


def test_the_same_scores_give_the_same_numbers_whatever_their_order() -> None:
    base, quantized = scores([1, 0, 1, 1] * 20), scores([1, 1, 0, 1] * 20)
    turned = dict(reversed(base.items())), dict(reversed(quantized.items()))
    one, other = (
        compare(*sides, Terms(estimand="these_questions", margin_pp=3))
        for sides in ((base, quantized), turned)
    )
    assert one == other


def test_a_base_that_scores_nothing_has_no_recovery() -> None:
    for n in (10, 100):
        found = compare(
            scores([0.0] * n),
            scores([1.0] + [0.0] * (n - 1)),
            Terms(estimand="these_questions", margin_pp=3),
        )
        assert found.recovery is None
        assert (found.recovery_interval.low, found.recovery_interval.high) == (None, None)
        assert judge_task("t", found).outcome in ("PASS", "INCONCLUSIVE")


@settings(max_examples=100)
@given(
    n=st.integers(2, 120),
    k=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    estimand=st.sampled_from(ESTIMANDS),
    margin=st.sampled_from([1, 2, 2.5, 3, 5, 10, 20]),
    confidence=st.sampled_from([0.8, 0.9, 0.95, 0.99]),
)
def test_bounds_and_p_values_never_disagree(
    n: int, k: int, seed: int, estimand: Estimand, margin: float, confidence: float
) -> None:
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 2, (n, k)).astype(float)
    kept = generator.random((n, k)) < generator.choice([0.5, 0.8, 1.0])
    quantized = np.where(kept, base, generator.integers(0, 2, (n, k)))
    sides = [{f"{i}": list(row) for i, row in enumerate(x)} for x in (base, quantized)]
    found = compare(
        sides[0], sides[1], Terms(estimand=estimand, margin_pp=margin, confidence=confidence)
    )
    low, high = found.difference_bounds.low, found.difference_bounds.high
    assert low is not None
    assert high is not None
    alpha = 1 - confidence
    if abs(low + margin) > 1e-9 and low > -100:
        assert (found.p_at_least_margin <= alpha) == (low > -margin)
    if abs(high + margin) > 1e-9:
        assert (found.p_at_most_margin <= alpha) == (high < -margin)
    assert found.base_interval.low is not None
    assert found.base_interval.low <= found.base
    assert (
        found.recovery is None
        or found.recovery_interval.low is None
        or (found.recovery_interval.low <= found.recovery + 1e-9)
    )


def test_verdicts() -> None:
    assert judge_task("t", flips(800, 600, 20, 20)).outcome == "PASS"
    assert judge_task("t", flips(800, 600, 120, 20)).outcome == "FAIL"
    unclear = judge_task("t", flips(100, 60, 12, 8))
    assert unclear.outcome == "INCONCLUSIVE"
    assert "questions would decide" in unclear.reason
    assert "x 1, on questions like these)" in unclear.reason
    assert (unclear.exit_code, judge_task("t", flips(800, 600, 120, 20)).exit_code) == (4, 1)


def test_equal_answers_to_a_handful_of_questions_prove_nothing() -> None:
    """At 5 points 60 questions are the least: exp(-0.05 x 60) < 0.05 < exp(-0.05 x 59)."""
    assert judge_task("t", flips(59, 40, 0, 0)).outcome == "INCONCLUSIVE"
    assert "about 60 questions" in judge_task("t", flips(59, 40, 0, 0)).reason
    assert judge_task("t", flips(60, 40, 0, 0)).outcome == "PASS"


def test_equal_answers_count_in_the_unit_of_the_estimand() -> None:
    """Two questions x 64 equal answers: 128 answers exclude 3 points on these, 2 questions nothing."""
    found = both([[0.0] * 64] * 2)
    assert judge_task("t", found["these_questions"]).outcome == "PASS"
    assert judge_task("t", found["such_questions"]).outcome == "INCONCLUSIVE"
    assert found["such_questions"].p_at_least_margin == pytest.approx(math.exp(-0.06))
    assert "about 100 questions" in judge_task("t", found["such_questions"]).reason


def test_a_gain_does_not_make_up_for_a_loss_that_was_not_seen() -> None:
    """30 questions better by half their answers still say nothing of one in 33 that is lost."""
    gained = compare(
        {f"{i}": [0.0, 1.0] * 32 for i in range(30)},
        {f"{i}": [1.0, 1.0] * 32 for i in range(30)},
        Terms(estimand="such_questions", margin_pp=3),
    )
    assert gained.difference_pp == 50
    assert gained.p_at_least_margin == pytest.approx(math.exp(-0.9))
    assert gained.difference_bounds.low == pytest.approx(100 * math.log(0.05) / 30)
    assert judge_task("t", gained).outcome == "INCONCLUSIVE"


def test_unseen_losses_make_up_the_rest_of_the_margin() -> None:
    """All of 100 questions lose 1.5 points: 1.5 % of them lost outright is all that is missing."""
    table = [[-0.014] * 4, [-0.016] * 4] * 50
    found = both(table)["such_questions"]
    assert found.p_at_least_margin == pytest.approx(unseen_p(100, 1.5))
    assert judge_task("t", found).outcome == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("estimand", "questions", "repeats", "margin", "says"),
    [
        ("such_questions", 30, 64, 3, "30 questions cannot exclude a loss of 3 pp; 112"),
        ("these_questions", 30, 64, 3, None),
        ("such_questions", 112, 1, 3, "112 questions; 113"),  # of one look 100 were enough
        ("such_questions", 113, 1, 3, None),
        ("these_questions", 34, 3, 3, "102 answers cannot exclude; 106"),
        ("these_questions", 26, 4, 3, "104 answers cannot exclude; 109"),
        ("these_questions", 53, 2, 3, None),
        ("such_questions", 19, 2, 15, "19 questions; 20"),  # so few are looked at once
        ("such_questions", 20, 1, 15, None),
    ],
)
def test_it_is_said_beforehand_when_pass_is_out_of_reach(
    estimand: Estimand, questions: int, repeats: int, margin: float, says: str | None
) -> None:
    plan = Plan(estimand, questions, repeats, 0)
    found = out_of_reach("aime25", plan, Terms(estimand=estimand, margin_pp=margin, health_pp={}))
    assert (says is None) == (found is None)
    if says and found:
        told, can = says.split("; ")
        assert told in found
        assert found.endswith(f"at 95%, about {can} can; FAIL can be reached")
    seen = [both([[0.0] * look.repeats] * look.questions, margin)[estimand] for look in plan.looks]
    perfect = at_looks(seen, plan.looks)
    assert (judge_task("t", perfect).outcome == "PASS") == (found is None)


def test_the_least_of_all_limits_must_be_in_reach() -> None:
    plan = Plan("these_questions", 300, 1, 0)
    limits: dict[str, Any] = {"estimand": "these_questions", "margin_pp": 3.0}
    assert out_of_reach("t", plan, Terms(health_pp={"cut": 1.5}, **limits)) is None
    assert "a loss of 1 pp" in str(out_of_reach("t", plan, Terms(health_pp={"cut": 1}, **limits)))
    assert out_of_reach("t", plan, Terms(health_pp={"cut": None, "empty": 4}, **limits)) is None


def test_fail_can_be_reached_where_pass_cannot() -> None:
    lost = both([[0.0] * 64] * 20 + [[-1.0] * 64] * 10)["such_questions"]
    assert judge_task("t", lost).outcome == "FAIL"


@pytest.mark.parametrize("estimand", ESTIMANDS)
def test_what_would_decide_then_decides(estimand: Estimand) -> None:
    table = [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, -1.0], [0.0, 0.0], [1.0, 0.0]] * 10
    found = both(table, margin_pp=10)[estimand]
    assert judge_task("t", found).outcome == "INCONCLUSIVE"
    assert found.needed is not None
    times = math.ceil(found.needed)
    wider = [row * times for row in table] if estimand == "these_questions" else table * times
    assert judge_task("t", both(wider, margin_pp=10)[estimand]).outcome == "PASS"
    assert both([[-1.0]] * 10 + [[0.0]] * 10, margin_pp=50)[estimand].needed is None


def test_a_run_passes_when_every_task_does() -> None:
    good, unclear = flips(800, 600, 20, 20), flips(100, 60, 12, 8)
    assert judge({"a": good, "b": good}).outcome == "PASS"
    mixed = judge({"a": good, "b": unclear})
    assert mixed.outcome == "INCONCLUSIVE"
    assert mixed.reason.startswith("b:")
    assert mixed.estimand == good.estimand == "such_questions"
    with pytest.raises(ValueError, match="no task"):
        judge({})
    with pytest.raises(ValueError, match="b is not judged on such_questions"):
        judge({"a": good, "b": replace(good, estimand="these_questions")})


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


@pytest.mark.parametrize(
    ("base", "quantized", "message"),
    [
        (scores([1, 0]), scores([1, 0, 1]), "1 questions are scored on one side only, 'q0002'"),
        ({"a": [1], "b": [1]}, {"a": [1], "b": [1, 0]}, "differing numbers of repeats"),
        ({"a": [], "b": []}, {"a": [], "b": []}, "differing numbers of repeats"),
        (scores([1]), scores([1]), "two are the least"),
        ({}, {}, "two are the least"),
    ],
)
def test_unpaired_scores_are_refused(
    base: dict[str, list[float]], quantized: dict[str, list[float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(base, quantized, Terms(estimand="these_questions", margin_pp=3))
