"""Every figure of a comparison and every sentence of a verdict, on tables small enough to work out."""

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from quantize.recovery.estimands import (
    ESTIMANDS,
    ROUNDING,
    Estimand,
    Total,
    limits,
    margin_p_values,
    needed,
    total,
    unseen_p,
)
from quantize.recovery.gate import Verdict, judge, judge_task, not_comparable
from quantize.recovery.health import sign_p_values
from quantize.recovery.limits import limits_on
from quantize.recovery.sequential import Plan, out_of_reach
from quantize.recovery.statistics import compare
from quantize.recovery.terms import Comparison, Interval, Sign, StepInflation, Terms

# 40 questions, 3 answers each: base, quantized; 6 questions lose some answers, 2 win one.
BASE = np.ones((40, 3))
BASE[30:] = 0
BASE[28:30, 2] = 0
QUANTIZED = BASE.copy()
QUANTIZED[:4, 0] = QUANTIZED[4:6] = 0
QUANTIZED[28:30, 2] = 1


def by_name(values: np.ndarray) -> dict[str, list[float]]:
    return {f"q{i:03}": row.tolist() for i, row in enumerate(values)}


def compared(
    estimand: Estimand,
    base: np.ndarray = BASE,
    quantized: np.ndarray = QUANTIZED,
    margin_pp: float = 5,
) -> Comparison:
    return compare(by_name(base), by_name(quantized), Terms(estimand=estimand, margin_pp=margin_pp))


def one_answer(lost: int, won: int, same: int) -> Comparison:
    base = np.array([[1.0]] * (same + lost) + [[0.0]] * won)
    quantized = np.array([[1.0]] * same + [[0.0]] * lost + [[1.0]] * won)
    return compared("these_questions", base, quantized)


@pytest.mark.parametrize("estimand", ESTIMANDS)
def test_every_figure_of_a_comparison(estimand: Estimand) -> None:
    found, both = compared(estimand), total(QUANTIZED - BASE, estimand)
    other = total(QUANTIZED - BASE, ESTIMANDS[1 - ESTIMANDS.index(estimand)])
    assert (found.base, found.quantized) == (BASE.mean(), QUANTIZED.mean())
    assert found.difference_pp == pytest.approx(100 * (QUANTIZED - BASE).mean())
    assert found.recovery == pytest.approx(100 * QUANTIZED.mean() / BASE.mean())
    for interval, sum_, level in (
        (found.difference_interval, both, 0.975),
        (found.difference_bounds, both, 0.95),
        (found.other_interval, other, 0.975),
    ):
        assert asdict(interval) == pytest.approx(
            dict(zip(("low", "high"), 100 * np.array(limits(sum_, level)), strict=True))
        )
    for interval, values in ((found.base_interval, BASE), (found.quantized_interval, QUANTIZED)):
        correct = total(values, estimand)
        half = correct.reach(0.975) / correct.units
        assert interval.low == pytest.approx(values.mean() - half)
        assert interval.high == pytest.approx(values.mean() + half)
    assert (found.p_at_least_margin, found.p_at_most_margin) == margin_p_values(both, 5)
    assert (found.lost, found.won, found.mcnemar_p) == (None, None, None)


def test_two_answers_a_question_have_a_variance_of_their_own() -> None:
    """Half of the answers to each of 10 questions are lost: chance to these questions."""
    values = np.array([[0.0, -1.0]] * 10)
    assert total(values, "these_questions").variance == pytest.approx(10 * 2 * 0.5)
    assert total(values, "such_questions").variance == 0


@pytest.mark.parametrize("estimand", ESTIMANDS)
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_many_rounds_give_what_each_gives_alone(estimand: Estimand, repeats: int) -> None:
    """Simulations pass all rounds at once: what they show must hold for a run, which is one."""
    drawn = np.random.default_rng(5).choice([-1.0, 0.0, 0.0, 1.0], (4, 7, repeats))
    together = total(drawn, estimand)
    for index, values in enumerate(drawn):
        alone = total(values, estimand)
        assert (alone.units, alone.freedom) == (together.units, together.freedom)
        for name in ("value", "variance", "jump"):
            of_round = np.broadcast_to(getattr(together, name), 4)[index]
            assert getattr(alone, name) == pytest.approx(of_round, abs=1e-12), name


def test_a_spread_that_is_rounding_alone_is_none() -> None:
    """Means that differ in their last bit are equal: the size of an event is one, not 1e-17."""
    values = np.array([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]] * 10)
    assert 0 < values.mean(axis=1).var() < 1e-30
    with np.errstate(all="raise"):
        spread, same = (total(each, "such_questions") for each in (values, np.zeros((20, 3))))
    assert (spread.variance, spread.jump) == (same.variance, same.jump) == (0, 1)


@pytest.mark.parametrize("share_pp", [0.0, 0.01, 0.5, 1.0, 3.0])
def test_a_loss_is_unseen_by_all_units_as_the_exponential_says(share_pp: float) -> None:
    assert unseen_p(100, share_pp) == pytest.approx(math.exp(-share_pp))
    assert unseen_p(100, -share_pp) == 1


@pytest.mark.parametrize(("base", "quantized"), [(1.0, 0.0), (0.0, 1.0)])
def test_intervals_end_where_shares_do(base: float, quantized: float) -> None:
    found = compared(
        "such_questions",
        *(np.array([[v]] * 5 + [[1 - v]]) for v in (base, quantized)),
    )
    for interval in (found.difference_interval, found.difference_bounds):
        assert -100 <= (interval.low or 0) < (interval.high or 0) <= 100
        assert (interval.low == -100) if base else (interval.high == 100)
    assert (found.base_interval.high == 1) if base else (found.base_interval.low == 0)


def test_half_a_score_is_wrong() -> None:
    """A question is lost, or won, where it passes from right (above one half) to wrong."""
    base = np.array([[1.0], [0.5], [0.5], [1.0], [0.0]])
    quantized = np.array([[0.5], [1.0], [0.5], [1.0], [0.5]])
    found = compared("these_questions", base, quantized)
    assert (found.lost, found.won) == (1, 1)


def test_mcnemar_is_there_for_one_answer_a_question() -> None:
    assert one_answer(4, 0, 30).mcnemar_p == pytest.approx(2 * 0.5**4)
    assert one_answer(3, 3, 30).mcnemar_p == 1
    assert one_answer(0, 0, 30).mcnemar_p == 1


def test_an_interval_leaves_room_for_questions_that_were_not_among_these() -> None:
    """200 such questions that lose or win one of 10 answers: a whole one may be lost all the same."""
    values = np.zeros((200, 10))
    values[::2, 0], values[1::2, 0] = 0.1, -0.1
    low, high = limits(total(values, "such_questions"), 0.95)
    assert (low, high) == pytest.approx((math.log(0.05) / 200, -math.log(0.05) / 200))


def test_losses_of_all_that_was_seen_may_be_offset_by_gains_that_were_not() -> None:
    """20 questions lose a fifth each: were one in 25 of its kind all won, 20 hold none in 44 %."""
    values = np.full((20, 5), 0.0)
    values[:, 0] = -1
    lost = total(values, "such_questions")
    assert margin_p_values(lost, 15.2)[1] == pytest.approx(math.exp(-20 * 0.04))
    assert margin_p_values(lost, 0.5)[1] == pytest.approx(math.exp(-20 * 0.195 / 1.2))
    assert limits(lost, 1 - math.exp(-20 * 0.04))[1] == pytest.approx(-0.152)
    nothing = np.zeros_like(values)
    assert sign_p_values(nothing, -values, "such_questions", 15.2)[2] == pytest.approx(
        math.exp(-0.8)
    )
    often = values.copy()
    often[:, 1] = -1  # 0.4 of answers where BF16 has 0.2: an excess of 0.1 over the half more
    unseen = math.exp(-20 * 0.1 / 1.6)
    assert sign_p_values(-values, -often, "such_questions", 5)[2] == pytest.approx(unseen)


@pytest.mark.parametrize("estimand", ESTIMANDS)
@pytest.mark.parametrize("margin_pp", [0.5, 5, 12])
def test_what_is_needed_is_the_least_that_decides(estimand: Estimand, margin_pp: float) -> None:
    """With a little less nothing is decided; what is decided needs no more."""
    difference = total(QUANTIZED - BASE, estimand)
    factor = needed(difference, margin_pp, [(1.0, 0.05)])
    assert factor is not None
    assert (factor == 1) == (estimand == "these_questions" and margin_pp != 5)
    if factor == 1:
        assert min(margin_p_values(difference, margin_pp)) <= 0.05
        return
    enough, too_few = (
        min(margin_p_values(difference.times(factor * share), margin_pp)) for share in (1.01, 0.97)
    )
    assert enough <= 0.05 < too_few


def test_more_units_are_more_of_everything_but_the_size_of_an_event() -> None:
    assert Total(10, -2.0, 3.0, 1.5, 9).times(2.5) == Total(25, -5.0, 7.5, 1.5, 23)


def test_a_p_value_of_just_what_is_stated_decides() -> None:
    """1 - 0.9 is a little below 0.1, and nobody means that."""
    open_ = replace(one_answer(16, 0, 384), confidence=0.9)
    exactly = {"p_at_least_margin": 0.1, "p_at_most_margin": 1.0}
    assert judge_task("t", replace(open_, **exactly)).outcome == "PASS"
    exactly = {"p_at_least_margin": 1.0, "p_at_most_margin": 0.1}
    assert judge_task("t", replace(open_, **exactly)).outcome == "FAIL"


def test_a_loss_of_nothing_is_never_needed() -> None:
    exactly_the_margin = total(np.array([[-1.0]] * 5 + [[0.0]] * 95), "these_questions")
    assert needed(exactly_the_margin, 5, [(1.0, 0.05)]) is None


# --- sentences ----------------------------------------------------------------------------------


def test_sentences_of_one_task() -> None:
    outcomes = {
        "PASS": (2, "0.5", "the loss is below 1.6 points"),
        "FAIL": (60, "15.0", "the loss is above 11.6 points"),
        "INCONCLUSIVE": (16, "4.0", "a loss of 6.0 points is not excluded"),
    }
    for outcome, (lost, fewer, loss) in outcomes.items():
        verdict = judge_task("t", one_answer(lost, 0, 400 - lost))
        assert (verdict.outcome, verdict.estimand) == (outcome, "these_questions")
        seen = (
            f"t: answers {fewer} points fewer correctly; at 95% {loss}; 5 are "
            f"allowed (400 questions x 1, on these questions)"
        )
        assert verdict.reason.startswith(seen)
        assert verdict.reason == seen or outcome == "INCONCLUSIVE"
    for won, much in ((2, "0.5 points more correctly"), (0, "as many correctly")):
        reason = judge_task("t", one_answer(0, won, 400 - won)).reason
        assert reason.startswith(f"t: answers {much}; at 95% the loss is below ")


def test_a_loss_a_tenth_of_a_point_from_the_margin_has_one_digit() -> None:
    """Nearer ones have two, so that no loss reads as the margin that it is below or above."""
    passed = replace(one_answer(2, 0, 398), margin_pp=0.1, p_at_least_margin=0.001)
    for low, words in ((-0.2, "below 0.2 points"), (-0.19, "below 0.19 points")):
        near = replace(passed, difference_bounds=Interval(low, 1.0))
        assert f"the loss is {words}; 0.1 are allowed" in judge_task("t", near).reason


def test_the_look_that_decided_is_numbered_and_an_open_task_is_told_by_all_answers() -> None:
    """The second of three looks decides PASS; while nothing is decided, no look is named."""
    passed = one_answer(2, 0, 398)
    last = asdict(passed) | asdict(passed.difference_bounds)
    looks = tuple(
        last | {"questions": 100 * number, "level": 0.02, "p_at_least_margin": p}
        for number, p in ((1, 0.5), (2, 0.001), (3, 0.4))
    )
    seen = replace(passed, looks=looks)
    reason = judge_task("t", seen).reason
    assert (
        "(200 questions x 1, on these questions, accuracy decided at look 2 of 3; all: " in reason
    )
    undecided = judge_task("t", replace(seen, p_at_least_margin=0.5))
    assert undecided.outcome == "INCONCLUSIVE"
    assert "(400 questions x 1, on these questions, 3 looks); " in undecided.reason


def test_it_is_said_what_would_decide() -> None:
    these, such = compared("these_questions"), compared("such_questions")
    assert these.needed is not None
    assert such.needed is not None
    answers, questions = math.ceil(3 * these.needed), math.ceil(40 * such.needed)
    would = "would decide, were the difference as observed"
    assert judge_task("t", these).reason.endswith(f"; about {answers} answers a question {would}")
    assert judge_task("t", such).reason.endswith(f"; about {questions} questions {would}")
    never = judge_task("t", one_answer(20, 0, 380))
    assert never.reason.endswith(
        "; no number of questions decides, were the difference as observed"
    )


def test_sentences_of_a_run() -> None:
    """PASS names all tasks, FAIL those that failed, INCONCLUSIVE those that are open."""
    passed, failed, open_ = (one_answer(n, 0, 400 - n) for n in (2, 60, 16))
    for tasks, outcome, named in (
        ({"a": passed, "b": passed}, "PASS", ["a", "b"]),
        ({"a": failed, "b": passed, "c": failed}, "FAIL", ["a", "c"]),
        ({"a": open_, "b": passed, "c": open_}, "INCONCLUSIVE", ["a", "c"]),
    ):
        verdict = judge(tasks)
        assert (verdict.outcome, verdict.estimand) == (outcome, "these_questions")
        alone = [judge_task(name, tasks[name]).reason for name in named]
        assert verdict.reason == "; ".join(alone)
    with pytest.raises(ValueError, match=r"^no task was compared$"):
        judge({})
    unknown = judge({"a": replace(passed, max_step_inflation=0.1)})
    assert (unknown.outcome, unknown.reason) == (
        "INCONCLUSIVE",
        "a: an answer does not tell its denoising steps, so max_step_inflation is not judged",
    )
    assert judge({"a": None, "b": None}) == Verdict("INCONCLUSIVE", "a, b: not asked")


def test_sentences_of_a_sign() -> None:
    """A task fails by a sign above its limit, and is open by one that may be above it."""
    passed = one_answer(2, 0, 398)
    sign = Sign(0.1, 0.35, 25.0, 20.5, 29.5, 2.5, p_at_least_limit=1.0, p_at_most_limit=0.001)
    told = (
        "t: 35.0 % of answers are cut at the token limit, 10.0 % of BF16's; +25.0 points "
        "[+20.5, +29.5], +2.5 are allowed"
    )
    above = replace(passed, health={"cut": sign})
    failed = Verdict("FAIL", told, "these_questions")
    assert judge_task("t", above) == judge({"t": above}) == failed
    open_ = replace(passed, health={"cut": replace(sign, p_at_most_limit=0.9)})
    seen = judge_task("t", passed).reason
    shared = ", and more is not excluded: signs and looks share the error"
    undecided = Verdict("INCONCLUSIVE", f"{seen}; {told}{shared}", "these_questions")
    assert judge_task("t", open_) == judge({"t": open_}) == undecided


def test_steps_are_told_by_the_look_that_decided() -> None:
    """The first look has no steps; the second decides; the third and the last shares are others'."""
    passed = one_answer(2, 0, 398)

    def steps(ratio: float, p: float) -> StepInflation:
        return StepInflation(ratio, ratio - 0.1, ratio + 0.1, (0, 0), ratio - 0.05, p)

    inflations = [None, steps(1.3, 0.02 + ROUNDING), steps(1.4, 0.001)]
    looks = tuple(
        {
            **asdict(passed) | asdict(passed.difference_bounds),
            "step_inflation": inflation and asdict(inflation),
            "questions": 100 * (number + 1),
            "level": 0.02,
        }
        for number, inflation in enumerate(inflations)
    )
    told = (
        "t: takes {} % more denoising steps a token; at 95% it is above {} %; 10 % are allowed "
        "({} questions x 1)"
    )
    for seen, words in (
        ((), ("50.0", "45.0", "400")),
        (looks, ("30.0", "25.0", "200")),
    ):
        run = replace(passed, looks=seen, step_inflation=steps(1.5, 0.01), max_step_inflation=0.1)
        assert judge({"t": run}) == Verdict("FAIL", told.format(*words), "these_questions")
    none = replace(run, looks=(), max_step_inflation=0.0)
    assert "; 0 % are allowed (400 questions x 1)" in judge({"t": none}).reason
    unknown = limits_on(replace(run, step_inflation=None))["steps"]
    assert (unknown.p_pass, unknown.p_fail) == (0.0, 1.0)
    undecided = replace(
        run, p_at_least_margin=0.5
    )  # by steps a run fails, and never one task of it
    assert (judge_task("t", undecided).outcome, judge({"t": undecided}).outcome) == (
        "INCONCLUSIVE",
        "FAIL",
    )


def test_reach_at_its_border() -> None:
    """10 answers, looked at once, leave a loss of 30 points unseen with a probability of just 5 %."""
    exact, plan = 1 - math.exp(-3.0), Plan("these_questions", 10, 1, 0)
    reach: dict[str, Any] = {"estimand": plan.estimand, "margin_pp": 30.0, "health_pp": {}}
    assert out_of_reach("t", plan, Terms(confidence=exact, **reach)) is None
    assert out_of_reach("t", plan, Terms(confidence=exact + 1e-9, **reach))
    assert out_of_reach("t", plan, Terms(confidence=0.5, **{**reach, "margin_pp": 7})) is None


def test_where_settings_part_is_named_in_few_words() -> None:
    def differ(a: Any, b: Any) -> str:
        found = not_comparable({"k": a}, {"k": b})
        assert found is not None
        return found.reason

    settings = {"same": 1, "t": 1, "z": 5}
    assert differ(settings, settings | {"t": 2}) == "k differ: t is 1 against 2"
    assert differ({"a": 1}, {"a": 1, "b": 2}) == "k differ: b is None against 2"
    assert differ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}) == (
        "k differ: a is b is entry 1 is 2 against 3"
    )
    assert differ("x" * 58, "y") == f"k differ: {'x' * 58!r} against 'y'"
    assert differ("x" * 59, "y") == f"k differ: {repr('x' * 59)[:57]}... against 'y'"
