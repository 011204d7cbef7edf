"""Which scorings may be compared, which answers of them count, and in what unit limits are judged."""

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from quantize.recovery.gate import Verdict, judge_task
from quantize.recovery.limits import most_steps
from quantize.recovery.pairing import in_common, paired
from quantize.recovery.rows import Scoring
from quantize.recovery.sequential import FRACTIONS, Plan
from quantize.recovery.terms import Comparison, Terms
from tests.support.faulty import scoring

PLAN = Plan("such_questions", 400, 1, 0)
TERMS = Terms(estimand="such_questions", margin_pp=5)


def about(side: Scoring, **facts: Any) -> Scoring:
    """Return a scoring with other facts of how its samples were made."""
    return replace(side, made_with=side.made_with | facts)


def planned(side: Scoring, plan: Plan = PLAN) -> Scoring:
    return about(side, planned=asdict(plan))


def compared(base: Scoring, other: Scoring, terms: Terms = TERMS, **more: Any) -> Comparison:
    found = paired(base, other, terms, **more)
    assert isinstance(found, Comparison)
    return found


def refused(base: Scoring, other: Scoring, **more: Any) -> str:
    found = paired(base, other, TERMS, **more)
    assert isinstance(found, Verdict)
    assert found.outcome == "NOT COMPARABLE"
    return found.reason


def seeded(side: Scoring, seed: int) -> Scoring:
    """Return a scoring whose answers have other noise, as its conditions say too."""
    rows = [replace(row, seed=seed) for row in side.rows]
    conditions = side.conditions | {"seed": seed, "seeds": [seed] * len(rows)}
    return Scoring(side.task, rows, conditions, side.made_with | {"seed": seed})


def test_the_noise_floor_has_other_seeds_and_nothing_else() -> None:
    base, again = (seeded(scoring(), seed) for seed in (0, 1))
    assert compared(base, again, other_seed=True).difference_pp == 0
    assert refused(base, again) == "seed differ: 0 against 1"
    same = "both sides have the same seed: no noise is between them"
    assert refused(base, base, other_seed=True) == same
    one = replace(again, rows=[*again.rows[:-1], replace(again.rows[-1], seed=0)])
    assert refused(base, one, other_seed=True) == same
    warm = replace(again, conditions=again.conditions | {"sampler": {"t_min": 1}})
    assert refused(base, warm, other_seed=True).startswith("sampler differ: max_denoising_steps is")


def test_what_samples_were_made_with_must_be_equal_but_for_the_model() -> None:
    base = about(scoring(), sampler={"t_min": 0.4, "entropy_bound": 0.1}, batch="one")
    assert compared(base, about(base, model="another")).difference_pp == 0
    assert refused(base, about(base, batch="two")) == "batch differ: 'one' against 'two'"
    bound = about(base, sampler={"t_min": 0.4, "entropy_bound": 0.2})
    assert refused(base, bound) == "sampler differ: entropy_bound is 0.1 against 0.2"
    assert compared(base, bound, other_settings={"entropy_bound"}).difference_pp == 0
    assert refused(base, bound, other_settings={"t_min"}).startswith("sampler differ")
    assert refused(base, about(base, sampler="a server's"), other_settings={"t_min"})
    named = replace(base, conditions=base.conditions | {"model": "a"})
    assert refused(named, replace(named, conditions=named.conditions | {"model": "b"}))


def test_answers_count_up_to_the_last_look_of_both() -> None:
    looks = PLAN.looks
    whole, two = planned(scoring()), planned(scoring()).only(PLAN.first(looks[1]).answers)
    base, other, taken = in_common(whole, two)
    assert taken == looks[:2]
    assert base.answered == other.answered == two.answered
    assert len(compared(whole, two).looks) == len(compared(two, whole).looks) == 2
    some = whole.only({(row.doc_id, 0) for row in whole.rows[:100]})
    base, other, taken = in_common(whole, some)
    assert (base, other, taken) == (whole, some, [])
    assert refused(whole, planned(scoring()).only(some.answered)).startswith("documents differ")
    no_look = "no look is complete on both sides"
    assert refused(some, some) == no_look
    unplanned = scoring()
    assert in_common(unplanned, unplanned) == (unplanned, unplanned, [])
    assert compared(unplanned, unplanned).looks == ()


def test_looks_of_another_estimand_or_only_one_are_not_looked_at() -> None:
    side, these = planned(scoring()), replace(TERMS, estimand="these_questions")
    assert [look["fraction"] for look in compared(side, side).looks] == list(FRACTIONS)
    found = compared(side, side, these)
    assert (found.looks, found.questions) == ((), 400)
    few = planned(scoring().only({(n, 0) for n in range(20)}), Plan("such_questions", 20, 1, 0))
    assert (compared(few, few).looks, compared(few, few).questions) == ((), 20)


@pytest.mark.parametrize(
    ("estimand", "plan", "margin_pp", "limit"),
    [  # 5 units of 400 answers, 200 questions, 800 answers planned, 500 questions planned
        ("these_questions", None, 2, 1.25),
        ("such_questions", None, 4, 2.5),
        ("these_questions", Plan("these_questions", 200, 4, 0), 1, 0.625),
        ("such_questions", Plan("such_questions", 500, 2, 0), 1.5, 1),
    ],
)
def test_limits_of_signs_count_the_units_that_were_planned(
    estimand: Any, plan: Plan | None, margin_pp: float, limit: float
) -> None:
    """Not those answered so far: a limit may not move with the looks. Each question has two answers."""
    row, count = scoring().rows[1], plan.questions if plan else 200
    rows = [replace(row, doc_id=n // 2, repeat=n % 2) for n in range(2 * count)]
    side = replace(scoring(), rows=rows)
    if plan:
        side = planned(side, plan).only(plan.first(plan.looks[0]).answers)
    found = compared(side, side, Terms(estimand=estimand, margin_pp=margin_pp, health_pp={}))
    assert found.health["cut"].limit_pp == pytest.approx(limit)


def test_steps_lengths_and_canvases_that_never_stopped_are_compared() -> None:
    base, more = scoring(), scoring(denoising_steps=[9, 48], tokens=120)
    terms = replace(TERMS, max_step_inflation=0.1, health_pp={"never_stopped": 2})
    found = compared(base, more, terms)
    assert found.step_inflation is not None
    steps, tokens = (320 * 9 + 80 * 57) / (400 * 9), (320 * 60 + 80 * 120) / (400 * 60)
    assert found.step_inflation.ratio == pytest.approx(steps / tokens)
    assert list(found.step_inflation.never_stopped) == [0, pytest.approx(80 / 480)]
    assert found.step_inflation.p_at_most_limit is not None
    assert found.length is not None
    assert found.length[0] == pytest.approx(tokens)
    assert found.length[1] < tokens < found.length[2]
    wider = compared(base, more, replace(terms, confidence=0.99))
    assert wider.length is not None
    assert wider.length[2] > found.length[2]
    assert wider.step_inflation is not None
    assert wider.step_inflation.high > found.step_inflation.high
    assert (found.health["never_stopped"].quantized, found.unjudged) == (0.2, [])
    assert compared(base, more, replace(terms, max_step_inflation=None)).step_inflation is not None


def test_a_side_that_tells_no_steps_is_not_judged_by_them() -> None:
    terms = replace(TERMS, health_pp={"never_stopped": 2})
    for faults in ({}, {"denoising_steps": []}), ({"denoising_steps": []}, {}):
        found = compared(*(scoring(**fault) for fault in faults), terms)
        assert (found.step_inflation, found.unjudged) == (None, ["never_stopped"])
    unlimited = replace(scoring(), conditions={})
    assert most_steps(unlimited) == float("inf")
    found = compared(unlimited, unlimited, terms)
    assert found.unjudged == ["never_stopped"]
    assert found.step_inflation is not None


def losing(plan: Plan, every: int, looks: int) -> Comparison:
    """Compare the first looks at a model that loses one question of `every`, in the plan's order."""
    lost = {question for place, question in enumerate(plan.order) if place % every == every - 1}
    kept = [row for row in scoring().rows if row.doc_id < plan.questions]
    base = [replace(row, scores={"exact": 1.0}) for row in kept]
    worse = [replace(row, scores={"exact": float(row.doc_id not in lost)}) for row in kept]
    sides = (planned(replace(scoring(), rows=side), plan) for side in (base, worse))
    answers = plan.first(plan.looks[looks - 1]).answers
    return compared(*(side.only(answers) for side in sides))


def test_what_would_decide_counts_what_looks_share() -> None:
    """Each open look names the planned look that decides, and says what it cannot exclude itself."""
    plan = Plan("such_questions", 200, 1, 0)
    seen = [losing(plan, 50, looks) for looks in range(1, 9)]
    outcomes = [judge_task("t", comparison).outcome for comparison in seen]
    assert outcomes == ["INCONCLUSIVE"] * 7 + ["PASS"]
    for comparison, number in zip(seen[:7], (100, 200, 170, 200, 200, 170, 200), strict=True):
        reason = judge_task("t", comparison).reason
        level = comparison.looks[-1]["level"]
        low = -comparison.bounds_at_look.low
        assert low > 5
        assert f"; at {1 - level:.2%} a loss of {low:.1f} points is not excluded; 5 are" in reason
        assert reason.endswith(
            f"; about {number} questions would decide, were the difference as observed"
        )


def test_a_longer_run_that_would_decide_decides() -> None:
    """So many questions as an undecided run names do decide, for its looks count."""
    short = losing(Plan("such_questions", 180, 1, 0), 36, 8)
    reason = judge_task("t", short).reason
    number = int(re.findall(r"about (\d+) questions", reason)[0])
    assert number > 180
    longer = Plan("such_questions", number, 1, 0)
    assert judge_task("t", losing(longer, 36, len(longer.looks))).outcome == "PASS"
