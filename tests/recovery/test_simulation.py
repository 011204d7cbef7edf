"""Coverage of the intervals and error rates of the gate, on answers whose truth is known (`worlds`).

The functions that the product judges with (`recovery.estimands`) take many rounds at once; that
`compare` and the gate say the same of each is a test of its own. Rounds come in blocks with seeds of
their own, so the first so many rounds of a world are the same however many follow.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import bdtr, ndtr, stdtrit

from quantize.recovery.estimands import (
    ESTIMANDS,
    Estimand,
    Floats,
    Total,
    limits,
    margin_p_values,
    ratio_limits,
    total,
)
from quantize.recovery.gate import judge_task
from quantize.recovery.statistics import compare
from quantize.recovery.terms import Interval, Terms
from tests.support.worlds import (
    CERTAIN,
    DAMAGE,
    FEW,
    RECIPES,
    Bench,
    World,
    by_name,
    many_answers,
    questions,
    three_sigma,
)

BLOCK = 100  # rounds
ROUNDS = 1000


def blocks(world: World, rounds: int) -> Iterator[tuple[Floats, Floats]]:
    """Yield the scores [100, n, k] of base and quantized."""
    for block in range(rounds // BLOCK):
        seed = [world.bench.questions, int(world.loss_pp * 10), DAMAGE.index(world.damage), block]
        found = many_answers(world, np.random.default_rng(seed), BLOCK)
        yield found[0].astype(np.float64), found[1].astype(np.float64)


def true_ratio(world: World) -> float:
    """Return quantized accuracy over the base's."""
    accuracy = world.bench.accuracy
    if world.estimand == "these_questions":  # of questions that stay the same
        accuracy = float(questions(world, np.random.default_rng(0))[0].mean())
    return 1 - world.loss_pp / 100 / accuracy


def outcomes(world: World, base: Floats, quantized: Floats) -> dict[str, np.ndarray]:
    """Return of each round: intervals that cover the truth, and verdicts."""
    difference = total(quantized - base, world.estimand)
    at_least, at_most = margin_p_values(difference, world.bench.margin_pp)
    correct = total(base, world.estimand)
    nothing = correct.value <= _with_jump(correct, difference).reach(0.975)
    ratio = ratio_limits(base, quantized, true_ratio(world), world.estimand, 0.975)
    return {
        "difference": _within(limits(difference, 0.975), -world.loss_pp / 100),
        "recovery": nothing | _within(ratio, 0),
        "PASS": at_least <= 0.05,
        "FAIL": (at_least > 0.05) & (at_most <= 0.05),
    }


def _with_jump(correct: Total, difference: Total) -> Total:
    return replace(correct, jump=difference.jump)


def _within(ends: tuple[np.ndarray, np.ndarray], value: float) -> np.ndarray:
    return (ends[0] - 1e-9 <= value) & (value <= ends[1] + 1e-9)


def rates(world: World, rounds: int) -> dict[str, float]:
    """Return the share of rounds with each outcome."""
    found = [outcomes(world, *scores) for scores in blocks(world, rounds)]
    return {name: float(np.concatenate([each[name] for each in found]).mean()) for name in found[0]}


def covers(interval: Interval, value: float) -> bool:
    low, high = interval.low, interval.high
    assert low is not None
    assert high is not None
    return low - 1e-9 <= value <= high + 1e-9


def check(world: World, rounds: int) -> None:
    """Hold the reached rates against the stated 95 % and 5 %, within their binomial limits."""
    share = rates(world, rounds)
    print(f"{world}, {rounds} rounds: " + ", ".join(f"{k} {v:.2%}" for k, v in share.items()))
    stated = 0.05 + three_sigma(0.05, rounds)
    assert share["difference"] >= 1 - stated
    assert share["recovery"] >= 1 - stated
    assert share["PASS"] <= (stated if world.loss_pp >= world.bench.margin_pp else 1)
    assert share["FAIL"] <= (stated if world.loss_pp <= world.bench.margin_pp else 1)
    if world.loss_pp == 0:
        assert share["FAIL"] <= 0.02 + three_sigma(0.02, rounds)


def at_the_margin(benches: list[Bench]) -> list[World]:
    return [World(b, e, d, b.margin_pp) for b in benches for e in ESTIMANDS for d in DAMAGE]


@pytest.mark.parametrize("world", at_the_margin(RECIPES + CERTAIN + FEW), ids=str)
@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(20_000, marks=pytest.mark.slow)])
def test_error_rates(world: World, rounds: int) -> None:
    check(world, rounds)


@pytest.mark.parametrize("estimand", ESTIMANDS)
@pytest.mark.parametrize("bench", RECIPES, ids=str)
@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(20_000, marks=pytest.mark.slow)])
def test_power(bench: Bench, estimand: Estimand, rounds: int) -> None:
    """What the caution costs: no loss passes, thrice the margin fails, where the units allow it."""
    units = bench.questions * (bench.repeats if estimand == "these_questions" else 1)
    for loss, decided in ((0.0, "PASS"), (3 * bench.margin_pp, "FAIL")):
        world = World(bench, estimand, "single", loss)
        check(world, rounds)
        if units > 1000 or (units > 100 and loss):
            assert rates(world, ROUNDS)[decided] > 0.8


@pytest.mark.parametrize("world", at_the_margin([RECIPES[0], RECIPES[2], FEW[3], FEW[11]]), ids=str)
def test_a_comparison_says_the_same_of_every_round(world: World) -> None:
    """`compare` and the gate, one round after the other."""
    base, quantized = next(blocks(world, BLOCK))
    together = outcomes(world, base, quantized)
    recovery = 100 * true_ratio(world)
    for round_, (x, y) in enumerate(zip(base[:25], quantized[:25], strict=True)):
        found = compare(
            by_name(x), by_name(y), Terms(estimand=world.estimand, margin_pp=world.bench.margin_pp)
        )
        verdict = judge_task("t", found).outcome
        assert (verdict == "PASS", verdict == "FAIL") == (
            together["PASS"][round_], together["FAIL"][round_],
        )  # fmt: skip
        assert covers(found.difference_interval, -world.loss_pp) == together["difference"][round_]
        unknown = found.recovery_interval.low is None
        assert together["recovery"][round_] == (
            unknown or covers(found.recovery_interval, recovery)
        )


def test_the_simulated_error_of_counting_answers_for_such_questions() -> None:
    """What this replaces: 30 questions x 64 answers, each question lost outright with 3 %, margin 3.

    Counted in answers such a run passes in about 0.97^30 = 40 % of rounds; in questions never.
    """
    world = World(CERTAIN[0], "such_questions", "whole", 3)
    assert rates(world, ROUNDS)["PASS"] == 0


@pytest.mark.parametrize(("count", "repeats"), [(20, 48), (30, 64)])
def test_a_gain_that_no_question_showed_is_no_failure(count: int, repeats: int) -> None:
    """Of such questions 95 % lose a fifth of their answers, and 5 % are won: the loss is 14 points.

    Without room for gains that were not seen, 32 % of runs of 20 questions FAIL a margin of 14 points.
    """
    generator = np.random.default_rng([count, 51])
    shape = (ROUNDS, count, repeats)
    is_won = np.broadcast_to(generator.random((ROUNDS, count, 1)) < 0.05, shape)
    base, kept = (~is_won).astype(np.float64), generator.random(shape) < 0.8
    at_most = margin_p_values(total((is_won | kept) - base, "such_questions"), 14)[1]
    assert (at_most <= 0.05).mean() <= 0.05 + three_sigma(0.05, ROUNDS)


SPARSE = [(0.02, 0.0), (0.05, 0.0), (0.1, 0.0), (0.03, 0.01), (0.05, 0.05), (0.0, 0.02)]


@pytest.mark.parametrize(("lost", "won"), SPARSE)
def test_intervals_cover_when_few_questions_differ(lost: float, won: float) -> None:
    """96 questions, k = 1, each lost or won with a small probability: 2 to 10 differ.

    So few differences take few values, so coverage cannot be 95 % exactly; it must not be less.
    """
    generator = np.random.default_rng([int(1000 * lost), 7])
    shares = [lost, won, 0.7 - lost]  # and the others are wrong on both sides
    kind = np.searchsorted(np.cumsum(shares), generator.random((ROUNDS, 96, 1)))
    base, quantized = (np.isin(kind, right).astype(np.float64) for right in ([0, 2], [1, 2]))
    world = World(Bench(96, 1, 0.7, 5), "such_questions", "single", 100 * (lost - won))
    share = {name: each.mean() for name, each in outcomes(world, base, quantized).items()}
    print(f"lost {lost}, won {won}, {ROUNDS} rounds: {share}")
    stated = 0.05 + three_sigma(0.05, ROUNDS)
    assert min(share["difference"], share["recovery"]) >= 1 - stated
    assert share["PASS" if lost - won >= 0.05 else "FAIL"] <= stated


VARYING = [[2, 3, 3, 7, 7], [1, 1, 1, 3, 3, 4, 5, 5, 5, 6, 6, 7]]


@pytest.mark.parametrize("estimand", ESTIMANDS)
@pytest.mark.parametrize("right", VARYING, ids=lambda right: f"{len(right)} vary")
def test_a_model_is_not_declared_different_by_a_few_questions(
    right: list[int], estimand: Estimand
) -> None:
    """96 questions, few of them right in some of 8 repeats only, dealt to two sides of 4.

    On the first table a bootstrap declares 9 % different, for a stated 5 %.
    """
    table = np.ones((96, 8))
    for question, times in enumerate(right):
        table[question, times:] = 0
    dealt = np.random.default_rng(0).permuted(np.tile(table, (ROUNDS, 1, 1)), axis=2)
    difference = total(dealt[..., 4:] - dealt[..., :4], estimand)
    different = 1 - _within(limits(difference, 0.975), 0).mean()
    print(f"{len(right)} vary: {different:.2%} of {ROUNDS} rounds declared different")
    assert different <= 0.05 + three_sigma(0.05, ROUNDS)


def beside_another_gate(world: World, rounds: int) -> dict[str, float]:
    """Return how often the rules of NeMo Evaluator 0.3.0 and ours say what, on the same answers.

    `nel gate` judges by Student's 95 % interval of problems' mean differences: GO where all of it is
    within the tolerance, here the margin, NO-GO where none of it is, else INCONCLUSIVE. `nel compare`
    says BLOCK where the observed loss exceeds the margin and any loss is shown on problems' means (5 %,
    one side): by McNemar's exact test where each has one answer, else by a permutation test, whose
    normal approximation stands here.
    """
    found: list[Floats] = []
    for base, quantized in blocks(world, rounds):
        loss = 100 * (base - quantized).mean(-1)
        mean, margin = loss.mean(-1), world.bench.margin_pp
        n = loss.shape[-1]
        half = stdtrit(n - 1, 0.975) * loss.std(-1, ddof=1) / math.sqrt(n)
        with np.errstate(invalid="ignore"):
            shown = ndtr(-loss.sum(-1) / np.sqrt((loss**2).sum(-1))) < 0.05
        if world.bench.repeats == 1:
            lost, won = (loss > 0).sum(-1), (loss < 0).sum(-1)
            shown = bdtr(won, lost + won, 0.5) < 0.05
        ours = outcomes(world, base, quantized)
        go, no_go = mean + half <= margin, mean - half > margin
        found.append(np.stack([go, no_go, shown & (mean > margin), ours["PASS"], ours["FAIL"]]))
    shares = np.concatenate(found, 1).mean(1)
    return dict(zip(("GO", "NO-GO", "BLOCK", "PASS", "FAIL"), map(float, shares), strict=True))


@pytest.mark.parametrize("bench", RECIPES, ids=str)
@pytest.mark.parametrize("rounds", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_beside_another_gate(bench: Bench, rounds: int) -> None:
    """Ours passes a model that loses the margin as rarely as stated, whole questions lost too."""
    worlds: list[tuple[Estimand, str]] = [
        ("these_questions", "single"),
        ("such_questions", "whole"),
    ]
    for estimand, damage in worlds:
        for loss in (0.0, bench.margin_pp, 2 * bench.margin_pp):
            share = beside_another_gate(World(bench, estimand, damage, loss), rounds)
            told = ", ".join(f"{name} {value:.1%}" for name, value in share.items())
            print(f"{bench}, {estimand}, {damage}, {loss:g} pp lost, {rounds} rounds: {told}")
            if loss == bench.margin_pp:
                assert share["PASS"] <= 0.05 + three_sigma(0.05, rounds)
