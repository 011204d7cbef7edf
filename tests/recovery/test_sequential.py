"""Looks at a run: known boundaries, nested decisions, and what stopping early errs and costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from quantize.recipe.reading import load_recipe
from quantize.recovery import sequential
from quantize.recovery.estimands import ESTIMANDS, Estimand, margin_p_values, total
from quantize.recovery.gate import judge, judge_task
from quantize.recovery.sequential import (
    FRACTIONS,
    Plan,
    at_looks,
    crossing,
    nominal_levels,
    sequential_p,
    spent,
    still_open,
    until_decided,
)
from quantize.recovery.statistics import compare
from quantize.recovery.terms import Sign, StepInflation, Terms
from quantize.stages.plan.estimate import tokens_by_task
from tests.support.worlds import (
    CERTAIN,
    DAMAGE,
    RECIPES,
    SHIPPED,
    Bench,
    World,
    by_name,
    many_answers,
    three_sigma,
)

EVENLY = (0.2, 0.4, 0.6, 0.8, 1.0)
ALPHA, BLOCK = 0.05, 50


def test_levels_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lan and DeMets' O'Brien-Fleming bounds for five even looks, one-sided 2.5 %, in any textbook."""

    def of_obrien_and_fleming(fraction: float, alpha: float) -> float:
        return 2 * ndtr(ndtri(alpha / 2) / np.sqrt(fraction))

    monkeypatch.setattr(sequential, "spent", of_obrien_and_fleming)
    bounds = -ndtri(np.array(nominal_levels.__wrapped__(EVENLY, 0.025)))
    assert bounds == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=1e-3)


def test_all_of_alpha_is_spent_at_the_end() -> None:
    assert nominal_levels((1.0,), ALPHA)[0] == pytest.approx(ALPHA)
    assert spent(1.0, ALPHA) == pytest.approx(ALPHA)
    assert (spent(0.5, ALPHA), spent(0.2, ALPHA)) == pytest.approx((ALPHA / 4, 0.002))
    of_runs = [0.0020, 0.0033, 0.0055, 0.0082, 0.0116, 0.0157, 0.0247, 0.0345]
    assert nominal_levels(FRACTIONS, ALPHA) == pytest.approx(of_runs, abs=5e-5)


def test_a_motion_without_drift_crosses_as_often_as_stated() -> None:
    """At each look, cumulated, in 200,000 random motions."""
    rounds = 200_000
    steps = np.diff(FRACTIONS, prepend=0.0)
    motion = np.random.default_rng(0).normal(size=(rounds, len(FRACTIONS))) * np.sqrt(steps)
    z = motion.cumsum(1) / np.sqrt(FRACTIONS)
    crossed = z >= -ndtri(np.array(nominal_levels(FRACTIONS, ALPHA)))
    for look, fraction in enumerate(FRACTIONS):
        share = crossed[:, : look + 1].any(1).mean()
        assert abs(share - spent(fraction, ALPHA)) <= three_sigma(spent(fraction, ALPHA), rounds)


@pytest.mark.parametrize("alpha", [0.001, 0.0166, 0.05, 0.2])
def test_the_sequential_p_value_decides_as_the_levels_do(alpha: float) -> None:
    levels = nominal_levels(FRACTIONS[:3], alpha)
    for look, level in enumerate(levels):
        p_values = [1.0] * 3
        p_values[look] = level * 0.999
        assert sequential_p(FRACTIONS[:3], p_values) <= alpha
        p_values[look] = level * 1.001
        assert sequential_p(FRACTIONS[:3], p_values) > alpha


def test_looking_on_never_raises_the_sequential_p_value() -> None:
    first = sequential_p(FRACTIONS[:2], (0.4, 0.001))
    assert sequential_p(FRACTIONS[:3], (0.4, 0.001, 0.9)) == pytest.approx(first)
    assert sequential_p(FRACTIONS[:3], (0.4, 0.001, 1e-6)) < first
    assert sequential_p((1.0,), (0.03,)) == 0.03
    assert sequential_p(FRACTIONS[:1], (spent(0.2, 0.03),)) == pytest.approx(0.03)
    assert sequential_p(FRACTIONS[:1], (1.0,)) == 1.0


def test_looks_are_planned_in_the_unit_of_the_estimand() -> None:
    these = Plan("these_questions", 30, 64, 0).looks
    assert [(each.questions, each.repeats) for each in these] == [
        (30, 13), (30, 20), (30, 26), (30, 32), (30, 39), (30, 45), (30, 55), (30, 64)
    ]  # fmt: skip
    assert [each.fraction for each in these] == [each.repeats / 64 for each in these]
    such = Plan("such_questions", 198, 32, 0).looks
    assert [(each.questions, each.repeats) for each in such][:2] == [(40, 32), (60, 32)]
    assert Plan("these_questions", 1319, 1, 0).looks == Plan("such_questions", 1319, 1, 0).looks
    assert [each.repeats for each in Plan("these_questions", 30, 3, 0).looks] == [2, 3]
    assert len(Plan("such_questions", 12, 1, 0).looks) == 1
    for estimand in ESTIMANDS:
        last = Plan(estimand, 30, 64, 0).looks[-1]
        assert (last.questions, last.repeats, last.fraction) == (30, 64, 1)


def test_questions_come_in_an_order_of_the_seed_alone() -> None:
    order = Plan("such_questions", 50, 1, 7).order
    assert sorted(order) == list(range(50)) != order
    assert order != Plan("such_questions", 50, 1, 8).order
    assert [index for index in Plan("such_questions", 80, 1, 7).order if index < 50] == order


@pytest.mark.parametrize("estimand", [*ESTIMANDS, None])
@pytest.mark.parametrize(("questions", "repeats"), [(30, 64), (30, 3), (100, 1), (7, 2)])
def test_the_parts_of_a_plan_are_its_looks(
    estimand: Estimand | None, questions: int, repeats: int
) -> None:
    """Each part is new, and the parts up to a look are the answers that it has."""
    plan = Plan(estimand, questions, repeats, 3)
    seen: set[tuple[int, int]] = set()
    for number, (look, part) in enumerate(zip(plan.looks, plan.parts, strict=True), 1):
        assert not part.answers & seen
        assert list(part.questions) == sorted(part.questions)
        seen |= part.answers
        assert seen == plan.first(look).answers
        assert list(plan.first(look).questions) == sorted(plan.first(look).questions)
        assert plan.taken(seen, seen | {(0, 0)}) == plan.looks[:number]
    assert len(seen) == questions * repeats
    assert plan.taken(seen - {(plan.order[0], 0)}, seen) == []
    assert len(plan.taken(seen - plan.parts[-1].answers, seen)) == len(plan.looks) - 1


def stored(difference: np.ndarray) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Scores of a base that is always right and of one that differs so [n, k] from it."""
    return by_name(np.ones_like(difference)), by_name(1 + difference)


def compare_at_looks(base: Any, quantized: Any, looks: Any, *, order: Any, **settings: Any) -> Any:
    """Compare what each look covers of stored scores."""
    found = [
        compare(
            *(
                {name: scores[name][: look.repeats] for name in order[: look.questions]}
                for scores in (base, quantized)
            ),
            Terms(**settings),
        )
        for look in looks
    ]
    return at_looks(found, looks)


def test_a_run_is_compared_as_far_as_it_was_looked_at() -> None:
    """30 x 64 equal answers: decided at the third look, 26 repeats of 64; the later ones unread."""
    difference = np.zeros((30, 64))
    difference[:, 40:] = -1  # after the third look
    base, quantized = stored(difference)
    looks = Plan("these_questions", 30, 64, 0).looks[:3]
    settings: dict[str, Any] = {"order": list(base), "estimand": "these_questions", "margin_pp": 3}
    found = compare_at_looks(base, quantized, looks, **settings)
    assert (found.questions, found.repeats, found.difference_pp) == (30, 26, 0)
    assert [look["repeats"] for look in found.looks] == [13, 20, 26]
    p_values = [look["p_at_least_margin"] for look in found.looks]
    assert p_values == pytest.approx([np.exp(-11.7), np.exp(-18), np.exp(-23.4)])
    fractions = [look.fraction for look in looks]
    assert found.p_at_least_margin == sequential_p(fractions, p_values)
    assert judge_task("t", found).outcome == "PASS"


def test_steps_and_signs_are_judged_at_the_looks_that_accuracy_is() -> None:
    """A look without steps decided nothing; a sign without a limit decides nothing at any look."""
    right = by_name(np.ones(40))
    equal = compare(right, right, Terms(estimand="such_questions", margin_pp=20))
    looks = Plan("such_questions", 100, 1, 0).looks[:3]
    p_values = ((None, 0.03), (0.04, 0.02), (0.03, 0.01))
    seen = [
        replace(
            equal,
            step_inflation=of_steps and StepInflation(1.2, 1.1, 1.3, (0, 0), 1.1, of_steps),
            health={
                "cut": Sign(0, 0.5, 50, 20, 80, 10, 1.0, of_sign),
                "stutter": Sign(0, 0.5, 50, 20, 80, None, None, None),
            },
        )
        for of_steps, of_sign in p_values
    ]
    found, fractions = at_looks(seen, looks), [look.fraction for look in looks]
    assert found.step_inflation.p_at_most_limit == sequential_p(fractions, [1, 0.04, 0.03]) > 0.05
    cut, stutter = found.health["cut"], found.health["stutter"]
    assert cut.p_at_most_limit == sequential_p(fractions, [0.03, 0.02, 0.01]) > 0.01
    assert (cut.p_at_least_limit, stutter.p_at_most_limit) == (1.0, None)
    levels = nominal_levels(tuple(fractions), 1 - equal.confidence)
    assert [look["level"] for look in found.looks] == list(levels)


@pytest.mark.parametrize("outcome", ["PASS", "FAIL"])
def test_a_verdict_is_told_by_the_look_that_decided(outcome: str) -> None:
    """Beside a PASS of the first look stood the bounds of all answers, -47 points of 35 allowed."""
    order = Plan("such_questions", 100, 1, 3).order
    difference = np.full((100, 1), -1.0 if outcome == "FAIL" else 0.0)
    difference[order[20:], 0] = np.where(np.arange(80) < 40, -1.0, 0.0)
    base, quantized = stored(difference)
    looks = Plan("such_questions", 100, 1, 0).looks
    names = [str(index) for index in order]
    found = compare_at_looks(
        base, quantized, looks, order=names, estimand="such_questions", margin_pp=35
    )
    verdict = judge_task("t", found)
    first = found.looks[0]
    low, high = first["low"], first["high"]
    assert (low > -35) if outcome == "PASS" else (high < -35)
    assert verdict.outcome == outcome
    began = "as many" if outcome == "PASS" else "100.0 points fewer"
    in_the_end = found.difference_bounds
    assert verdict.reason.startswith(f"t: answers {began} correctly; at 95% the loss is ")
    bound = -in_the_end.low if outcome == "PASS" else -in_the_end.high
    assert verdict.reason.endswith(
        f"; 35 are allowed (20 questions x 1, on questions like these, accuracy decided at look "
        f"1 of 8; all: "
        f"answers {-found.difference_pp:.1f} points fewer correctly, the loss is "
        f"{'below' if outcome == 'PASS' else 'above'} {bound:.1f} points, 100 questions x 1)"
    )
    by_the_last = replace(found, looks=({**first, "level": 0.0}, found.looks[-1]))
    if outcome == "FAIL":
        assert judge_task("t", by_the_last).reason.endswith(", on questions like these, 2 looks)")
        alone = replace(by_the_last, looks=by_the_last.looks[:1])
        assert judge_task("t", alone).reason.endswith(", on questions like these)")


def test_what_no_look_decided_is_told_by_all_answers() -> None:
    difference = np.zeros((100, 1))
    difference[Plan("such_questions", 100, 1, 3).order[95:]] = -1
    base, quantized = stored(difference)
    comparison = compare_at_looks(
        base, quantized, Plan("such_questions", 100, 1, 0).looks, order=list(base),
        estimand="such_questions", margin_pp=5,
    )  # fmt: skip
    verdict = judge_task("t", comparison)
    assert verdict.outcome == "INCONCLUSIVE"
    assert verdict.reason.startswith(
        "t: answers 5.0 points fewer correctly; at 96.55% a loss of 10.4 points is not excluded"
    )
    assert "(100 questions x 1, on questions like these, 8 looks); " in verdict.reason


def test_looks_over_questions_take_them_in_random_order() -> None:
    difference = np.zeros((100, 2))
    order = Plan("such_questions", 100, 1, 3).order
    difference[order[:30]] = -1
    base, quantized = stored(difference)
    looks = Plan("such_questions", 100, 2, 0).looks[:1]
    found = compare_at_looks(
        base,
        quantized,
        looks,
        order=[str(index) for index in order],
        estimand="such_questions",
        margin_pp=3,
    )
    assert (found.questions, found.repeats, found.difference_pp) == (20, 2, -100)
    assert judge_task("t", found).outcome == "FAIL"


def test_a_run_goes_on_until_every_task_passed_or_one_failed() -> None:
    base, equal = stored(np.zeros((200, 4)))
    _, worse = stored(-np.ones((200, 4)))
    looks = Plan("these_questions", 200, 4, 0).looks[:1]
    settings: dict[str, Any] = {"order": list(base), "estimand": "these_questions", "margin_pp": 3}
    good, bad = (compare_at_looks(base, x, looks, **settings) for x in (equal, worse))
    weak = replace(good, p_at_least_margin=0.9, p_at_most_margin=0.03)
    assert still_open({"a": None, "b": None}) == ["a", "b"]
    assert still_open({"a": good, "b": None}) == ["b"]
    assert still_open({"a": good, "b": good}) == []
    assert still_open({"a": bad, "b": None}) == []
    assert still_open({"a": weak}) == []
    assert still_open({"a": weak, "b": None}) == ["a", "b"]  # Holm: 0.03 is one of two tasks'


def test_a_run_asks_the_next_look_of_the_first_task_that_is_open() -> None:
    """Looks that are there already are not asked; a task that passes is asked no further."""
    plans = {task: Plan("such_questions", 200, 1, 0) for task in ("there", "passes", "late")}
    there = {"there": 3, "passes": 0, "late": 0}
    base, equal = stored(np.zeros((200, 1)))
    asked: list[tuple[str, int]] = []

    def ask(task: str, looks: int) -> tuple[int, Any]:
        if looks:
            asked.append((task, looks))
        taken = max(there[task], looks)
        margin = 30 if task != "late" else 0.5  # which 200 questions cannot exclude
        settings: dict[str, Any] = {"estimand": "such_questions", "margin_pp": margin}
        seen = plans[task].looks[:taken]
        found = compare_at_looks(base, equal, seen, order=list(base), **settings) if seen else None
        return taken, found

    taken, seen = until_decided(plans, ask, least_chance=0.0)
    assert asked == [("passes", 1), *(("late", look) for look in range(1, 9))]
    assert taken == {"there": 3, "passes": 1, "late": 8}
    assert judge(seen).outcome == "INCONCLUSIVE"


def run_of(differences: dict[str, np.ndarray], **changes: Any) -> tuple[dict[str, int], Any]:
    """Return the looks taken of tasks [n, k] judged on these questions, and their comparisons."""
    plans = {task: Plan("these_questions", *d.shape, 0) for task, d in differences.items()}

    def ask(task: str, number: int) -> tuple[int, Any]:
        looks = plans[task].looks[:number]
        base, other = stored(differences[task])
        settings: dict[str, Any] = {"estimand": "these_questions", "margin_pp": 3}
        if not looks:
            return number, None
        return number, compare_at_looks(base, other, looks, order=list(base), **settings)

    return until_decided(plans, ask, **changes)


def test_a_task_that_hardly_decides_is_given_up() -> None:
    """At the margin neither PASS nor FAIL is likely; then no run passes, and FAIL alone counts."""
    at_margin = -1.0 * (np.arange(200 * 40) % 33 == 0).reshape(200, 40)
    undecided = -1.0 * (np.random.default_rng(1).random((50, 40)) < 0.02)
    taken, seen = run_of({"open": undecided})
    assert (taken, judge(seen).outcome) == ({"open": 6}, "PASS")
    tasks = {"at": at_margin, "open": undecided}
    taken, seen = run_of(tasks)
    assert taken == {"at": 5, "open": 1}
    assert judge(seen).outcome == "INCONCLUSIVE"
    assert run_of(tasks, least_chance=0.0)[0] == {"at": 8, "open": 6}


def test_a_fail_that_is_likely_is_asked_for_after_another_task_was_given_up() -> None:
    at_margin = -1.0 * (np.arange(200 * 40) % 33 == 0).reshape(200, 40)
    worse = -1.0 * (np.random.default_rng(2).random((200, 40)) < 0.045)
    taken, seen = run_of({"at": at_margin, "worse": worse})
    assert taken["at"] == 5
    assert taken["worse"] > 1
    assert judge(seen).outcome == "FAIL"


def test_the_chance_to_cross_is_that_of_a_motion_whose_drift_is_unknown() -> None:
    """Of motions with drifts as likely as each other, those near z at half the information."""
    generator, rounds, z = np.random.default_rng(0), 400_000, 0.8
    drift = generator.uniform(-12, 12, rounds)
    half = 0.5 * drift + np.sqrt(0.5) * generator.normal(size=rounds)
    end = half + 0.5 * drift + np.sqrt(0.5) * generator.normal(size=rounds)
    near = abs(half / np.sqrt(0.5) - z) < 0.05
    share = (end[near] >= -ndtri(nominal_levels(FRACTIONS, ALPHA)[-1])).mean()
    expected = crossing(z, FRACTIONS, 0.5, ALPHA)
    assert share == pytest.approx(expected, abs=three_sigma(expected, int(near.sum())))


# --- what it errs and costs ---------------------------------------------------------------------


def look_on(world: World, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the verdicts of runs that stop when they are decided, and their shares of the samples."""
    seed = [world.bench.questions, int(world.loss_pp * 10), DAMAGE.index(world.damage), block]
    base, quantized = many_answers(world, np.random.default_rng(seed), BLOCK)
    difference = quantized.astype(float) - base
    plan = Plan(world.estimand, *difference.shape[1:], block)
    looks = plan.looks
    if world.damage == "whole":  # perhaps the first ones; runs shuffle the questions
        difference = difference[:, plan.order]
    levels = nominal_levels(tuple(look.fraction for look in looks), ALPHA)
    verdicts, costs = np.full(BLOCK, "INCONCLUSIVE"), np.ones(BLOCK)
    for look, level in zip(looks, levels, strict=True):
        seen = total(difference[:, : look.questions, : look.repeats], world.estimand)
        at_least, at_most = margin_p_values(seen, world.bench.margin_pp)
        decided = (verdicts == "INCONCLUSIVE") & (np.minimum(at_least, at_most) <= level)
        verdicts[decided] = np.where(at_least <= level, "PASS", "FAIL")[decided]
        costs[decided] = look.fraction
    return verdicts, costs


def check(world: World, rounds: int) -> float:
    """Hold the error rates against the stated 5 %, within its limits; return the mean cost."""
    found = [look_on(world, block) for block in range(rounds // BLOCK)]
    verdicts, costs = (np.concatenate(each) for each in zip(*found, strict=True))
    passed, failed = ((verdicts == verdict).mean() for verdict in ("PASS", "FAIL"))
    cost = float(costs.mean())
    print(f"{world}, {rounds} rounds: PASS {passed:.2%}, FAIL {failed:.2%}, cost {cost:.1%}")
    stated = ALPHA + three_sigma(ALPHA, rounds)
    assert passed <= (stated if world.loss_pp >= world.bench.margin_pp else 1)
    assert failed <= (stated if world.loss_pp <= world.bench.margin_pp else 1)
    return cost


@pytest.mark.parametrize("estimand", ESTIMANDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_error_rates_in_short(estimand: Estimand, damage: str) -> None:
    """Few rounds where every loss is a rare event: catches a wrong spending, not a small bias."""
    for bench in CERTAIN:
        check(World(bench, estimand, damage, bench.margin_pp), 200)


def test_an_undamaged_run_is_decided_by_half_of_its_samples() -> None:
    for loss in (0.0, 6.0):
        assert check(World(RECIPES[1], "these_questions", "single", loss), 100) <= 0.5


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_share_of_samples_that_shipped_recipes_need() -> None:
    """Without giving up; weighted by the most tokens of each task, 66 % without loss."""
    recipe, needed = load_recipe("nvfp4"), 0.0
    tokens = tokens_by_task(recipe)
    for bench, (task, most) in zip(SHIPPED, tokens.items(), strict=True):
        world = World(bench, recipe.gate.estimand, "single", 0)
        assert bench.margin_pp == recipe.gate.margin_pp[task]
        assert bench.repeats == recipe.evaluation.repeats[task]
        needed += check(world, 1000) * most
        for times in (0.5, 1, 2):
            check(replace(world, loss_pp=times * bench.margin_pp), 1000)
    assert needed / sum(tokens.values()) == pytest.approx(0.66, abs=0.015)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("estimand", ESTIMANDS)
@pytest.mark.parametrize("bench", RECIPES + CERTAIN, ids=str)
def test_error_rates_and_cost(bench: Bench, estimand: Estimand) -> None:
    for times in (0, 0.5, 1, 2):
        for damage in DAMAGE if times else DAMAGE[:1]:
            check(World(bench, estimand, damage, times * bench.margin_pp), 2000)
