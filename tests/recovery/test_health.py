"""Health of answers: what is a sign, planted faults, and error rates together with accuracy's."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from scipy.special import gammaincc, stdtr

from quantize.recovery.estimands import ESTIMANDS, Estimand, Floats, margin_p_values, total, units
from quantize.recovery.gate import judge
from quantize.recovery.health import SIGNS, compare_sign, limits_of, sign_p_values, text_signs
from quantize.recovery.pairing import paired
from quantize.recovery.rows import Scoring
from quantize.recovery.sequential import Plan, nominal_levels
from quantize.recovery.statistics import holm
from quantize.recovery.terms import Comparison, Terms
from tests.support.faulty import scoring
from tests.support.worlds import RECIPES, Bench, World, many_answers, questions, three_sigma

LOOP = "Then Ruth gives away 19 coins and sells 6. " * 3
NINE = "a b c d e f g h i "


def words(count: int) -> str:
    return "".join(f"{number} " for number in range(count))


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        ("3 + 4 = 7\n#### 7<turn|>", []),
        ("", ["empty"]),
        (" \n<eos><turn|>", ["empty"]),
        ("<|channel>thought\nwell<channel|>\n#### 7", []),
        ("<|channel>thought\nwell<channel|> <turn|>", ["empty"]),
        ("<|channel>thought\nwell, well", ["empty", "open_thought"]),
        (LOOP + "#### 7", ["stutter"]),
        ("the " * 15, []),  # too short to tell
        ("the " * 16, ["stutter", "loop"]),  # 64 characters; the line above has 60
        ("the " * 17 + "\n<turn|>", ["stutter", "loop"]),
        ("<|channel>thought\n" + LOOP, ["empty", "open_thought", "stutter", "loop"]),
        ("We add. " + LOOP + "Then Ruth gives<turn|>", ["stutter", "loop"]),  # cut within a turn
        ("It is very, very far. " + words(40), []),
        (words(40) + "no no no", []),
        ("!" * 64, ["loop"]),  # what NaN logits give, and not one word
        (words(300) * 2, ["stutter"]),  # two turns are no cycle
        (words(300) * 3, ["stutter", "loop"]),  # no sequence of a few words finds how long it is
        (NINE + words(8) + NINE, ["stutter"]),  # 2 of 19 sequences of eight words come again
        (NINE + words(10) + NINE, []),  # 2 of 21
    ],
)
def test_what_a_text_shows(text: str, signs: list[str]) -> None:
    assert text_signs(text) == signs


def terms(margin_pp: float, estimand: Estimand = "such_questions", **limits: Any) -> Terms:
    return Terms(estimand=estimand, margin_pp=margin_pp, health_pp=limits)


def compared(base: Scoring, other: Scoring, margin_pp: float = 5, **limits: Any) -> Comparison:
    found = paired(base, other, terms(margin_pp, **limits))
    assert isinstance(found, Comparison)
    return found


NEVER: dict[str, Any] = {"denoising_steps": [48]}


@pytest.mark.parametrize(
    ("base", "fault", "limits", "outcome", "says"),
    [
        ({}, {}, {}, "PASS", "answers as many correctly"),
        ({}, {"text": ""}, {}, "FAIL", "20.0 % of answers are empty, 0.0 % of BF16's; +20.0 points"),
        ({}, {"text": "<|channel>thought\nso"}, {}, "FAIL", "are with thoughts not closed"),
        ({}, {"text": LOOP}, {}, "FAIL", "are repeating themselves"),
        ({}, {"text": LOOP}, {"loop": 5, "stutter": None}, "FAIL",
         "20.0 % of answers are ending in a loop, 0.0 % of BF16's"),
        ({}, {"text": LOOP}, {"stutter": None}, "PASS", ""),  # counted, and judged if a recipe says so
        ({}, {"truncated": True}, {}, "FAIL", "are cut at the token limit"),
        ({}, {"answer": "[invalid]"}, {}, "FAIL", "are without a final value"),
        ({}, {"text": ""}, dict.fromkeys(SIGNS), "PASS", ""),
        ({"text": ""}, {"text": ""}, {}, "PASS", ""),
        ({"text": "", "every": 20}, {"text": "", "every": 10}, {}, "INCONCLUSIVE", "10.0 % of answers"),
        ({}, NEVER, {}, "PASS", ""),
        ({}, NEVER, {"never_stopped": 10}, "FAIL", "are with a canvas that never stopped"),
        ({}, {"denoising_steps": []}, {"never_stopped": 10}, "INCONCLUSIVE", "is not judged"),
    ],
)  # fmt: skip
def test_planted_faults(
    base: dict[str, Any], fault: dict[str, Any], limits: dict[str, Any], outcome: str, says: str
) -> None:
    """All of them answer the same questions right."""
    found = compared(scoring(**base), scoring(**fault), **limits)
    assert found.difference_pp == 0
    verdict = judge({"t": found})
    assert verdict.outcome == outcome
    assert says in verdict.reason


def test_a_private_task_scored_before_signs_were_kept_is_not_judged_by_its_text() -> None:
    old = scoring()
    private = replace(old, conditions=old.conditions | {"private": True})
    found = compared(private, private)
    assert found.unjudged == ["empty", "open_thought", "stutter"]
    assert "answers do not tell which are empty" in judge({"t": found}).reason
    rows = [replace(row, signs=[]) for row in old.rows]
    told = replace(private, rows=rows)
    assert judge({"t": compared(told, told)}).outcome == "PASS"


def test_limits_are_half_the_margin_or_five_answers_unless_a_recipe_says() -> None:
    found = limits_of(terms(3, cut=0.1, stutter=None), 6336)
    assert found["empty"] == 1.5
    assert (found["cut"], found["stutter"], found["never_stopped"]) == (0.1, None, None)
    assert limits_of(terms(3), 198)["empty"] == pytest.approx(100 * 5 / 198)
    assert limits_of(terms(3), 100)["empty"] == 3


def test_198_questions_can_pass() -> None:
    """Half a margin of 3 points took 200 of them, so GPQA's could not, whatever the answers were."""
    plan = {"planned": asdict(Plan("such_questions", 198, 1, 0))}

    def answers(**fault: Any) -> Scoring:
        found = scoring(**fault).only({(index, 0) for index in range(198)})
        return replace(found, made_with=plan)

    def outcome(base: Scoring, other: Scoring) -> str:
        found = compared(base, other, margin_pp=3)
        assert len(found.looks) == 8
        return judge({"t": found}).outcome

    assert outcome(answers(), answers()) == "PASS"
    one = answers(text="", every=400)
    assert outcome(answers(), one) == "INCONCLUSIVE"  # p 0.040; the last of eight looks asks 0.0345
    assert outcome(answers(text="", every=40), answers(text="", every=20)) == "INCONCLUSIVE"
    assert outcome(answers(), answers(text="")) == "FAIL"


def test_weights_share_the_error_and_equal_ones_change_nothing() -> None:
    p = {"a": 0.01, "b": 0.02, "c": 0.5}
    assert holm(p, dict.fromkeys(p, 0.2)) == pytest.approx(holm(p))
    assert holm(p, {"a": 1.0, "b": 0.5, "c": 0.5}) == pytest.approx(
        {"a": 0.02, "b": 0.04, "c": 0.5}
    )


@pytest.mark.parametrize(("p", "outcome"), [(0.0049, "FAIL"), (0.0051, "PASS")])
def test_the_signs_of_a_task_share_the_error_of_one_hypothesis(p: float, outcome: str) -> None:
    """Of 5 %, half is accuracy's, and each of five signs has a fifth of the other half."""
    found = compared(scoring(), scoring())
    health = {**found.health, "cut": replace(found.health["cut"], p_at_most_limit=p)}
    assert judge({"t": replace(found, health=health)}).outcome == outcome


def test_a_sign_fails_only_where_unseen_questions_could_not_explain_it() -> None:
    """20 questions without the sign in BF16; the candidate shows it in 2 or 4 of 32 answers to each.

    Each question that only BF16 always answers with the sign offsets one and a half answers with it.
    """
    base, quantized = np.zeros((20, 32)), np.zeros((20, 32))
    quantized[:, :2] = quantized[::2, 2:4] = 1
    for limit in (0.5, 1.0):
        judged = sign_p_values(base, quantized, "such_questions", limit)
        assert judged[::2] == (limit, pytest.approx(np.exp(-20 * 3 / 32 / (1.5 + 3 / 32))))


def p_by_formula(values: Floats, gap: float, event: float = 1) -> float:
    """Return the p-value of `estimands` for 100 questions of one answer; `event` is the largest."""
    variance = 100 * values.var(ddof=1)
    shape = variance / event**2
    gamma = gammaincc(shape + 1, shape + gap / event)
    return float(max(gamma, stdtr(99, -gap / np.sqrt(variance)))) if variance else float(gamma)


@pytest.mark.parametrize("estimand", ESTIMANDS)
def test_every_p_value_of_a_sign(estimand: Estimand) -> None:
    """100 questions of one answer: the limit is in points, or half of BF16's share if that is more."""

    def shown(first: int, count: int) -> Floats:
        return np.isin(np.arange(100), range(first, first + count)).astype(float)[:, None]

    def p_values(base: Floats, quantized: Floats, limit: float) -> list[float]:
        return [float(each) for each in sign_p_values(base, quantized, estimand, limit)]

    none, eight = shown(0, 0), shown(0, 8)
    assert p_values(none, none, 3) == pytest.approx([3, np.exp(-3), 1])
    limit, _, fails = p_values(none, eight, 1)
    assert (limit, fails) == pytest.approx((1, p_by_formula(-eight, 7)))
    limit, passes, _ = p_values(eight, shown(0, 9), 6)
    assert (limit, passes) == pytest.approx((6, p_by_formula(eight - shown(0, 9), 5)))
    twenty = shown(0, 20)
    limit, passes, _ = p_values(twenty, twenty, 1)
    assert (limit, passes) == pytest.approx((10, p_by_formula(twenty / 2, 10)))
    ten, thirty = shown(0, 10), shown(50, 30)
    limit, _, fails = p_values(ten, thirty, 1)
    assert (limit, fails) == pytest.approx((5, p_by_formula(1.5 * ten - thirty, 15, 1.5)))


def test_answers_to_one_question_are_units_by_these_questions_alone() -> None:
    """BF16 shows the sign in half of the answers to each of 20 questions, the candidate in none."""
    base, quantized = np.tile([0.0, 1.0], (20, 4)), np.zeros((20, 8))
    limit, passes, _ = sign_p_values(base, quantized, "these_questions", 1)
    variance = 8 * 20 * 1.5**2 * 2 / 7  # of 1.5 x; one event is 1.5
    shape = variance / 1.5**2
    assert (limit, passes) == pytest.approx((25, gammaincc(shape + 1, shape + 120 / 1.5)))
    limit, passes, _ = sign_p_values(base, quantized, "such_questions", 1)
    assert (limit, passes) == pytest.approx((25, np.exp(-20 * 0.25)))  # all questions are alike


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_a_sign_that_nothing_shows_has_an_interval(confidence: float) -> None:
    """It is two-sided: each end is missed with half of what the confidence leaves."""
    none = np.zeros((100, 1))
    sign = compare_sign(none, none, replace(terms(5), confidence=confidence), None)
    reach = -np.log((1 - confidence) / 2)  # of 100 answers, and so points
    assert (sign.low, sign.difference_pp, sign.high) == pytest.approx((-reach, 0, reach))
    assert (sign.limit_pp, sign.p_at_least_limit, sign.p_at_most_limit) == (None, None, None)


def test_canvases_that_took_all_steps_are_counted() -> None:
    steps = compared(scoring(), scoring(**NEVER)).step_inflation
    assert steps is not None
    assert list(steps.never_stopped) == [0, 0.2]


def test_length_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    longer = scoring()
    longer = replace(longer, rows=[replace(row, tokens=66) for row in longer.rows])
    assert compared(scoring(), longer).length == pytest.approx([1.1, 1.1, 1.1])


# --- what it errs, together with accuracy -------------------------------------------------------

RATES = (0.0, 0.001, 0.005, 0.01)  # of four signs that are judged, in BF16's answers


def looked_at(world: World, limit_pp: float | None, seed: int, rounds: int) -> tuple[Any, Any]:
    """Return in which rounds one thing passes and in which it fails, over the looks.

    Every world is accuracy's: a sign that an answer does not have is a right answer. Accuracy has no
    limit, and half of the error of failing; the five signs share the other half.
    """
    bench, estimand = world.bench, world.estimand
    looks = Plan(estimand, bench.questions, bench.repeats, 0).looks
    generator = np.random.default_rng([bench.questions, seed, int(10 * world.loss_pp)])
    x, y = (each.astype(np.float64) for each in many_answers(world, generator, rounds))
    p_values = np.array(
        [
            p_of(x[:, : look.questions, : look.repeats], y[:, : look.questions, : look.repeats],
                 estimand, bench.margin_pp, limit_pp)
            for look in looks
        ]
    )  # fmt: skip  # [looks, 2, rounds]
    weight = 1 / 2 if limit_pp is None else 1 / 2 / (len(RATES) + 1)
    levels = [
        np.array(nominal_levels(tuple(look.fraction for look in looks), alpha))[:, None]
        for alpha in (0.05, 0.05 * weight)
    ]
    return (p_values[:, 0] <= levels[0]).any(0), (p_values[:, 1] <= levels[1]).any(0)


def p_of(
    x: Floats, y: Floats, estimand: Estimand, margin_pp: float, limit_pp: float | None
) -> Floats:
    """Return the p-values [2, rounds] of accuracy, or of a sign with a limit, of one look alone."""
    if limit_pp is None:
        return np.array(margin_p_values(total(y - x, estimand), margin_pp))
    found = np.array(sign_p_values(1 - x, 1 - y, estimand, limit_pp)[1:])
    first = compare_sign(1 - x[0], 1 - y[0], terms(margin_pp, estimand), limit_pp)
    assert [first.p_at_least_limit, first.p_at_most_limit] == pytest.approx(found[:, 0].tolist())
    return found


@pytest.mark.parametrize(  # share of the margin: BF16's own share of the last sign
    ("rounds", "share"),
    [(100, 1), *(pytest.param(1000, share, marks=pytest.mark.slow) for share in (0.25, 1, 3))],
)
@pytest.mark.parametrize(
    ("bench", "estimand"),
    [(RECIPES[0], "these_questions"), (RECIPES[1], "such_questions"), (RECIPES[2], "these_questions"),
     (Bench(198, 1, 0.641, 3), "these_questions"), (Bench(400, 1, 0.75, 5), "such_questions")], ids=str,
)  # fmt: skip
def test_error_rates(bench: Bench, estimand: Estimand, share: float, rounds: int) -> None:
    limit = limits_of(terms(bench.margin_pp), units(estimand, bench.questions, bench.repeats))[
        "empty"
    ]
    assert limit is not None

    def world(rate: float, more_pp: float = 0) -> World:
        return World(replace(bench, accuracy=1 - rate), estimand, "single", more_pp)

    rate = share * bench.margin_pp / 100
    shown = 100 * rate
    if estimand == "these_questions":  # they have a share of their own
        shown = 100 - 100 * float(questions(world(rate), np.random.default_rng(0))[0].mean())
    most = max(limit, shown / 2)
    alone, alarm = looked_at(World(bench, estimand, "single", 0), None, 0, rounds)
    signs = [looked_at(world(each), limit, n, rounds) for n, each in enumerate(RATES, 1)]
    rest, alarms = alone & np.all([p for p, _ in signs], 0), [alarm, *(f for _, f in signs)]
    last = {
        more: looked_at(world(rate, more), limit, 5, rounds) for more in (0, most, 2 * most, shown)
    }
    passed = {more: float((rest & p).mean()) for more, (p, _) in last.items()}
    failed = {more: float(np.any([*alarms, f], 0).mean()) for more, (_, f) in last.items()}
    at_the_limit = last[most][0].mean()
    print(
        f"{bench}, {estimand}, limit {limit:.2f}, BF16 {shown:.2f} %, {rounds} rounds: accuracy alone "
        f"passes {alone.mean():.1%}, with signs {passed[0]:.1%}, fails {failed[0]:.1%}; one sign at "
        f"its limit passes {at_the_limit:.1%}, the run fails {failed[most]:.1%}; twice it passes "
        f"{last[2 * most][0].mean():.1%} and fails {failed[2 * most]:.1%}; twice as often passes "
        f"{last[shown][0].mean():.1%}, the run {passed[shown]:.1%}"
    )
    stated = 0.05 + three_sigma(0.05, rounds)
    assert at_the_limit <= stated
    assert max(failed[0], failed[most]) <= stated
    assert passed[0] >= alone.mean() - 0.25
    assert passed[0] > 0
    assert shown < limit or last[shown][0].mean() <= stated
