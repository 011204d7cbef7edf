"""A limit of a new kind: one rule, and verdict, looks, correction and points include it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from quantize.recovery import limits
from quantize.recovery.gate import judge, judge_task, passes, passing
from quantize.recovery.limits import Limit, Rule, limits_on
from quantize.recovery.sequential import Plan, at_looks, sequential_p, still_open, until_decided
from quantize.recovery.statistics import compare
from quantize.recovery.terms import Comparison, Sign, Terms

TERMS = Terms(estimand="such_questions", margin_pp=20)
EQUAL = {str(i): [1.0] for i in range(40)}
GOOD = compare(EQUAL, EQUAL, TERMS)


def longer(ratio: float, **changed: object) -> Comparison:
    """A comparison of equally right answers, which are `ratio` times as long."""
    return replace(GOOD, length=[ratio, ratio - 0.1, ratio + 0.1], **changed)


def _length(comparison: Comparison) -> Mapping[str, Limit]:
    ratio = (comparison.length or [1.0])[0]
    p_pass, p_fail = (0.9, 0.001) if ratio > 1.5 else (0.001, 0.9)
    return {"length": Limit(p_pass, p_fail, lambda _: f"answers are {ratio} times as long")}


@pytest.fixture
def rule() -> Iterator[None]:
    """Limit the length of answers."""
    unseen = lambda c: [] if c.length else ["answers have no length"]  # noqa: E731
    limits.RULES.append(Rule(["length"], lambda *_: {}, _length, unseen))
    yield
    limits.RULES.pop()


def test_without_the_rule_long_answers_pass() -> None:
    assert judge({"a": longer(2)}).outcome == "PASS"


@pytest.mark.usefixtures("rule")
def test_a_rule_decides_for_a_task_a_run_and_a_point() -> None:
    assert list(limits_on(longer(2))) == ["margin", *GOOD.health, "length"]
    long, short = longer(2), longer(1)
    assert passes(short)
    assert not passes(long)
    assert judge({"a": short}).outcome == "PASS"
    assert judge_task("a", long).reason == "a: answers are 2 times as long"
    failed = judge({"a": long, "b": short})
    assert (failed.outcome, failed.reason) == ("FAIL", "a: answers are 2 times as long")
    assert still_open({"a": long, "b": short}) == []
    assert passing({"long": [long], "short": [short]}) == {
        "short": pytest.approx(2 * max(0.001, GOOD.p_at_least_margin)),
        "long": 0.9,
    }


@pytest.mark.usefixtures("rule")
def test_a_rule_is_counted_by_holms_correction() -> None:
    """0.03 for the margin fails one task alone; with a second limit, 2 * 0.03 does not."""
    lost = longer(1, p_at_least_margin=0.99, p_at_most_margin=0.03)
    verdict = judge({"a": lost})
    assert verdict.outcome == "INCONCLUSIVE"
    assert verdict.reason.endswith("fails alone, not after Holm's correction over the tasks")
    limits.RULES[-1] = replace(limits.RULES[-1], limits=lambda _: {})
    assert judge({"a": lost}).outcome == "FAIL"


def solving(right: int, questions: int = 40) -> Comparison:
    """Equal answers, of which so many are right: a margin of 20 % is 8 of 40 questions."""
    scores = {str(i): [float(i < right)] for i in range(questions)}
    return compare(scores, scores, TERMS)


@pytest.mark.parametrize(
    ("right", "outcome"), [(0, "INCONCLUSIVE"), (8, "INCONCLUSIVE"), (9, "PASS")]
)
def test_nothing_passes_where_bf16_has_hardly_anything_to_lose(right: int, outcome: str) -> None:
    """A candidate that answers nothing right would pass; run, task, looks and points say the same."""
    comparison = solving(right)
    verdict = judge({"a": comparison})
    assert verdict == judge_task("a", comparison)
    assert verdict.outcome == outcome
    says = f"a: BF16 answers {2.5 * right:.1f} % correctly, so a loss of 20 points cannot show"
    assert (says == verdict.reason) == (outcome != "PASS")
    assert (passing({"p": [comparison]})["p"] < 0.05) == (outcome == "PASS")
    assert still_open({"a": comparison}) == ([] if outcome == "PASS" else ["a"])


@pytest.mark.parametrize(
    ("right", "looks", "outcome"),
    [
        ((9, 12), 1, "PASS"),  # of 40 questions, then of 60
        ((9, 12), 2, "PASS"),
        ((8, 13), 2, "PASS"),
        ((8, 12), 2, "INCONCLUSIVE"),
    ],
)
def test_later_answers_of_bf16_undo_no_pass(
    right: tuple[int, int], looks: int, outcome: str
) -> None:
    plan = Plan("such_questions", 200, 1, 0)
    seen = [solving(count, look.questions) for count, look in zip(right, plan.looks, strict=False)]
    assert judge({"a": at_looks(seen[:looks], plan.looks[:looks])}).outcome == outcome


@pytest.mark.parametrize(("share", "looks"), [(0.0, 1), (0.18, 8), (0.25, 1)])
def test_a_task_that_bf16_cannot_solve_is_given_up(share: float, looks: int) -> None:
    """But not one that more answers may show to be solved; 0.2 are the margin."""
    plan = Plan("such_questions", 200, 1, 0)

    def ask(_: str, count: int) -> tuple[int, Comparison | None]:
        seen = [solving(int(share * look.questions), look.questions) for look in plan.looks[:count]]
        return count, at_looks(seen, plan.looks[:count]) if seen else None

    assert until_decided({"a": plan}, ask)[0] == {"a": looks}


@pytest.mark.usefixtures("rule")
def test_what_a_rule_cannot_see_leaves_a_run_open() -> None:
    verdict = judge({"a": GOOD})
    assert verdict.outcome == "INCONCLUSIVE"
    assert verdict.reason == "a: answers have no length"


def test_every_p_value_of_every_record_becomes_sequential() -> None:
    sign = Sign(0, 0, 0, -1, 1, 5.0, p_at_least_limit=0.2, p_at_most_limit=0.9)
    seen = [
        replace(GOOD, p_at_least_margin=p, health={"cut": replace(sign, p_at_least_limit=p)})
        for p in (0.2, 0.01)
    ]
    looks = Plan("such_questions", 40, 1, 0).looks[:2]
    combined = at_looks(seen, looks)
    expected = sequential_p([look.fraction for look in looks], [0.2, 0.01])
    assert combined.p_at_least_margin == combined.health["cut"].p_at_least_limit == expected
    assert 0.01 < expected < 0.2
