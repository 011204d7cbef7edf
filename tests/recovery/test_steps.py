"""Step inflation: the ratio, its interval, and the outcomes against a limit."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from quantize.recovery.estimands import ESTIMANDS, Estimand, Floats
from quantize.recovery.gate import judge
from quantize.recovery.sequential import Plan, nominal_levels
from quantize.recovery.statistics import compare
from quantize.recovery.steps import exceeds_p, log_ratio, step_inflation
from quantize.recovery.terms import Comparison, Terms
from tests.support.worlds import RECIPES, Bench, are_fixed, by_name, many_costs, three_sigma

NEVER, LIMIT = (0.0, 0.0), 0.1


def answers(
    rng: np.random.Generator, count: int, factor: float
) -> list[dict[str, list[tuple[int, int]]]]:
    """Draw steps and tokens of `count` questions on both sides; the second takes `factor` as many."""
    tokens = rng.integers(20, 400, count)
    rate = rng.lognormal(-2.0, 0.5, count)  # steps a token: hard questions take more on both sides
    sides = []
    for scale in (1.0, factor):
        noise = rng.lognormal(0.0, 0.3, count)
        steps = np.maximum(1, np.round(tokens * rate * scale * noise)).astype(int)
        sides.append(
            {str(i): [(int(s), int(t))] for i, (s, t) in enumerate(zip(steps, tokens, strict=True))}
        )
    return sides


def test_a_model_that_takes_7_percent_more_everywhere_has_no_uncertainty() -> None:
    base = {str(i): [(100 * i, 1000 + i)] for i in range(1, 20)}
    more = {q: [(steps * 107 // 100, tokens)] for q, [(steps, tokens)] in base.items()}
    inflation = step_inflation(base, more, NEVER, confidence=0.95)
    assert inflation.ratio == pytest.approx(1.07, rel=1e-12)
    assert inflation.low == pytest.approx(inflation.high, rel=1e-9)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    rounds, factor = 1000, 1.05
    truth = [
        step_inflation(*answers(rng, 40_000, factor), NEVER, confidence=0.95).ratio
        for _ in range(3)
    ]
    held = sum(
        inflation.low <= np.mean(truth) <= inflation.high
        for _ in range(rounds)
        for inflation in [step_inflation(*answers(rng, 150, factor), NEVER, confidence=0.95)]
    )
    assert (
        930 <= held <= 970
    )  # 99 % of such experiments: 950 +- 2.6 * 6.9, and 2 for the truth's error


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("beyond", [True, False])
def test_the_p_value_and_the_bound_say_the_same(beyond: bool, sampled: bool) -> None:
    """Of the limit a little below the bound, and a little above."""
    costs = answers(np.random.default_rng(3), 60, 1.1)
    if not sampled:
        other = answers(np.random.default_rng(4), 60, 1.1)
        costs = [
            {q: [*of, *more[q]] for q, of in side.items()}
            for side, more in zip(costs, other, strict=True)
        ]
    bound = step_inflation(*costs, NEVER, confidence=0.95, sampled=sampled).bound
    limit = bound - 1 + (-1e-6 if beyond else 1e-6)
    inflation = step_inflation(*costs, NEVER, confidence=0.95, limit=limit, sampled=sampled)
    assert inflation.bound < inflation.ratio
    assert (inflation.low < inflation.bound) != sampled
    assert inflation.p_at_most_limit is not None
    assert (inflation.p_at_most_limit <= 0.05) == beyond


def test_the_error_is_of_the_ratio_without_each_question() -> None:
    base, more = answers(np.random.default_rng(5), 6, 1.2)
    inflation = step_inflation(base, more, NEVER, confidence=0.95)
    without = np.log([
        step_inflation(
            *({q: c for q, c in side.items() if q != out} for side in (base, more)),
            NEVER, confidence=0.95,
        ).ratio
        for out in base
    ])  # fmt: skip
    error = np.sqrt(((without - without.mean()) ** 2).sum())
    assert inflation.high / inflation.ratio == pytest.approx(np.exp(stats.t.ppf(0.975, 5) * error))


def compared(
    inflation: float | None, *, passes: bool = True, limit: float | None = 0.1
) -> Comparison:
    """40 questions, 20 % margin: no loss or an undecided one, and steps that take so many more."""
    right = by_name(np.ones(40))
    other = right if passes else by_name(np.arange(40) >= 8)
    comparison = compare(right, other, Terms(estimand="such_questions", margin_pp=20))
    steps = None
    if inflation is not None:
        costs = many_costs(Bench(40, 1, 1, 20), np.random.default_rng(0), 1, inflation)[0, :, 0]
        table = {str(i): row for i, row in enumerate(costs.astype(int).tolist())}
        pair = ({q: [tuple(row[at : at + 2])] for q, row in table.items()} for at in (0, 2))
        steps = step_inflation(*pair, NEVER, confidence=0.95, limit=limit)
    return replace(comparison, step_inflation=steps, max_step_inflation=limit)


def test_a_failure_tells_by_how_much_more_steps_are_taken() -> None:
    comparison = compared(0.9)
    inflation = comparison.step_inflation
    assert inflation is not None
    ratio, bound = (100 * (x - 1) for x in (inflation.ratio, inflation.bound))
    assert 10 < bound < ratio < 200
    told = f"takes {ratio:.1f} % more denoising steps a token; at 95% it is above {bound:.1f} %"
    assert told in judge({"a": comparison}).reason


@pytest.mark.parametrize(
    ("seen", "outcome", "says"),
    [
        ({"a": compared(0.0)}, "PASS", "a: "),
        ({"a": compared(0.9)}, "FAIL", " % more denoising steps a token; at 95% it is above "),
        ({"a": compared(0.9, passes=False)}, "FAIL", "; 10 % are allowed (40 questions x 1)"),
        ({"a": compared(0.9), "b": None}, "FAIL", "a: "),
        ({"a": compared(0.9, limit=None)}, "PASS", "a: "),
        ({"a": compared(None, limit=None)}, "PASS", "a: "),
        ({"a": compared(None)}, "INCONCLUSIVE", "a: an answer does not tell its denoising steps"),
        ({"a": compared(0.0), "b": compared(None)}, "INCONCLUSIVE", "b: an answer does not tell"),
        ({"a": compared(0.9), "b": compared(None)}, "FAIL", "a: "),
    ],
)
def test_steps_decide_beside_accuracy(
    seen: dict[str, Comparison | None], outcome: str, says: str
) -> None:
    """A limit that cannot be judged lets nothing pass: it failed open."""
    verdict = judge(seen)
    assert verdict.outcome == outcome
    assert says in verdict.reason


@pytest.mark.parametrize(("tasks", "fails"), [(1, True), (2, False)])
def test_many_tasks_make_no_false_alarm_likely(tasks: int, fails: bool) -> None:
    """Holm's correction is over the tasks, and over both ways to fail: 0.05 / 2 and 0.05 / 4."""
    comparison = compared(0.0)
    assert comparison.step_inflation is not None
    inflation = replace(comparison.step_inflation, p_at_most_limit=0.02)
    weak = replace(comparison, step_inflation=inflation)
    seen = {"a": weak} | {f"b{i}": compared(0.0) for i in range(tasks - 1)}
    assert judge(seen).outcome == ("FAIL" if fails else "PASS")


# --- what it errs -------------------------------------------------------------------------------


def p_values(estimand: Estimand, bench: Bench, rounds: int, inflation: float) -> Floats:
    """Return the p-values of each look [looks, rounds] of a limit of 10 %."""
    blocks: list[Floats] = []
    block = min(rounds, max(1, 300_000 // (bench.questions * bench.repeats)))
    for number in range(math.ceil(rounds / block)):
        generator = np.random.default_rng([bench.questions, round(100 * inflation), number])
        fixed = are_fixed(estimand, bench.repeats)
        costs = many_costs(bench, generator, block, inflation, fixed=fixed)
        blocks.append(at_looks(estimand, costs))
    return np.concatenate(blocks, 1)[:, :rounds]


def at_looks(estimand: Estimand, costs: Floats) -> Floats:
    """Return the p-values [looks, rounds] of costs [rounds, n, k, 4]."""
    sampled = not are_fixed(estimand, costs.shape[2])
    seen = [
        costs[:, : look.questions, : look.repeats]
        for look in Plan(estimand, *costs.shape[1:3], 0).looks
    ]
    return np.stack([exceeds_p(*log_ratio(t, sampled=sampled), LIMIT) for t in seen])


def failures(estimand: Estimand, bench: Bench, p: Floats, alpha: float) -> Floats:
    """Return in which rounds a look decides at its level, looks [looks, rounds] cumulated."""
    looks = Plan(estimand, bench.questions, bench.repeats, 0).looks
    levels = nominal_levels(tuple(look.fraction for look in looks), alpha)
    return np.logical_or.accumulate(p <= np.array(levels)[:, None])


def check(estimand: Estimand, bench: Bench, rounds: int) -> None:
    """At the limit at most 5 % fail, within the binomial limits; twice the limit is told for docs."""
    at, beyond = (p_values(estimand, bench, rounds, times * LIMIT) for times in (1, 2))
    failed = failures(estimand, bench, at, 0.05)
    power = failures(estimand, bench, beyond, 0.05)
    print(
        f"{bench}, {estimand}, {rounds} rounds: at the limit {failed[-1].mean():.2%} over the looks, "
        f"{(at[-1] <= 0.05).mean():.2%} at the last alone; at twice the limit {power[0].mean():.1%} at "
        f"the first look, {power[-1].mean():.1%} over all"
    )
    stated = 0.05 + three_sigma(0.05, rounds)
    assert failed[-1].mean() <= stated
    assert (at[-1] <= 0.05).mean() <= stated


SMALL = [Bench(40, 1, 1, 10), Bench(10, 8, 1, 10), Bench(5, 16, 1, 10)]
LARGE = [*RECIPES, Bench(400, 1, 1, 5), Bench(5, 64, 1, 3), Bench(2, 64, 1, 3)]


@pytest.mark.parametrize(("benches", "rounds"), [
    (SMALL, 1000), pytest.param(LARGE, 5000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
], ids=["short", "long"])  # fmt: skip
@pytest.mark.parametrize("estimand", ESTIMANDS)
def test_error_rates(estimand: Estimand, benches: list[Bench], rounds: int) -> None:
    for bench in benches:
        check(estimand, bench, rounds)


@pytest.mark.parametrize("rounds", [
    200, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
])  # fmt: skip
def test_three_tasks_at_the_limit_fail_no_more_often_than_stated(rounds: int) -> None:
    """Holm's first step of six p-values, three of them accuracy's: any at 0.05 / 6 fails the run."""
    failed = [
        failures(
            "these_questions", bench, p_values("these_questions", bench, rounds, LIMIT), 0.05 / 6
        )
        for bench in RECIPES
    ]
    share = np.any([each[-1] for each in failed], 0).mean()
    print(f"three tasks at the limit, {rounds} rounds: FAIL {share:.2%}")
    assert share <= 0.05 + three_sigma(0.05, rounds)


def check_at_limit(estimand: Estimand, costs: Floats) -> None:
    """At most 5 % of the rounds of costs [rounds, n, k, 4] fail, within the binomial limits."""
    rounds, questions, repeats = costs.shape[:3]
    p = at_looks(estimand, costs)
    failed = failures(estimand, Bench(questions, repeats, 1, 3), p, 0.05)[-1].mean()
    assert failed <= 0.05 + three_sigma(0.05, rounds)


@pytest.mark.parametrize("count", [30, 60, 198])
def test_long_questions_that_no_look_showed_make_no_failure(count: int) -> None:
    """Three of `count` such questions are ten times as long and save a fifth of their steps."""
    rng, rounds, share, longer = np.random.default_rng(count), 2000, 3 / count, 10.0
    long = rng.random((rounds, count)) < share
    length = 200 * np.where(long, longer, 1.0) * rng.lognormal(0.0, 0.4, long.shape)
    weight = share * longer / (1 - share + share * longer)
    factor = (1 + LIMIT) * np.where(long, 0.8, 1.0) / (1 - 0.2 * weight)
    noise = rng.lognormal(0.0, 0.05, long.shape)
    tables = np.stack([length, length, length * factor * noise / np.exp(0.05**2 / 2), length], -1)
    check_at_limit("such_questions", tables[:, :, None])


def test_a_question_with_most_of_the_steps_makes_no_failure() -> None:
    """One of ten fixed questions takes 25 times as many steps: its own noise is nearly all."""
    rng, rounds, repeats = np.random.default_rng(10), 2000, 20
    mean = np.array([50.0] + 9 * [2.0])[:, None, None] * 200 * np.array([1, 1, 1 + LIMIT, 1])
    tables = rng.gamma(5.0, mean / 5, (rounds, 10, repeats, 4))
    check_at_limit("these_questions", tables)


@pytest.mark.parametrize(("questions", "repeats"), [(5, 8), (30, 20), (198, 2), (400, 2)])
def test_answers_that_save_by_chance_and_were_not_seen_make_no_failure(
    questions: int, repeats: int
) -> None:
    """Two of a hundred answers to fixed questions halve their steps; all others take alike more."""
    rng, rounds = np.random.default_rng(questions), 2000
    shape, share = (rounds, questions, repeats), 0.02
    more = (1 + LIMIT) * np.where(rng.random(shape) < share, 0.5, 1.0) / (1 - share / 2)
    noise = rng.lognormal(0.0, 0.01, shape)
    even = np.ones(shape)
    check_at_limit("these_questions", 200 * np.stack([even, even, more * noise, even], -1))


@pytest.mark.parametrize(
    ("base", "quantized"),
    [
        ({"a": [(1, 1)]}, {"a": [(1, 1)]}),
        ({"a": [(0, 1)], "b": [(0, 1)]}, {"a": [(1, 1)], "b": [(1, 1)]}),
        ({"a": [(1, 1)], "b": [(1, 1)]}, {"a": [(1, 0)], "b": [(1, 1)]}),
    ],
)
def test_what_cannot_be_compared_is_not(base, quantized) -> None:
    assert step_inflation(base, quantized, NEVER, confidence=0.95) is None
