"""Health of answers: what is a sign, planted faults, and error rates together with accuracy's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from faulty import scoring
from recovery.estimands import Estimand, Floats, margin_p_values, total
from recovery.gate import judge
from recovery.health import SIGNS, compare_sign, least_limit, limit_of, text_signs
from recovery.pairing import paired
from recovery.scoring import Scoring
from recovery.sequential import nominal_levels, plan_looks
from recovery.statistics import Comparison, holm
from worlds import RECIPES, Bench, World, many_answers, questions, three_sigma

LOOP = "Then Ruth gives away 19 coins and sells 6. " * 3


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
        ("the " * 16, ["stutter"]),
        ("<|channel>thought\n" + LOOP, ["empty", "open_thought", "stutter"]),
    ],
)
def test_what_a_text_shows(text: str, signs: list[str]) -> None:
    assert text_signs(text) == signs


def compared(base: Scoring, other: Scoring, margin_pp: float = 5, **limits: Any) -> Comparison:
    found = paired(
        base,
        other,
        estimand="such_questions",
        margin_pp=margin_pp,
        confidence=0.95,
        health_pp=limits,
    )
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


def test_limits_are_half_the_margin_unless_a_recipe_says() -> None:
    assert limit_of("empty", {}, 3) == 1.5
    assert limit_of("never_stopped", {}, 3) is None
    assert limit_of("empty", {"empty": None}, 3) is None
    assert least_limit({}, 3) == 1.5
    assert least_limit(dict.fromkeys(SIGNS), 3) == 3


def test_weights_share_the_error_and_equal_ones_change_nothing() -> None:
    p = {"a": 0.01, "b": 0.02, "c": 0.5}
    assert holm(p, dict.fromkeys(p, 0.2)) == pytest.approx(holm(p))
    assert holm(p, {"a": 1.0, "b": 0.5, "c": 0.5}) == pytest.approx(
        {"a": 0.02, "b": 0.04, "c": 0.5}
    )


def test_length_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    longer = scoring()
    longer = replace(longer, rows=[replace(row, tokens=66) for row in longer.rows])
    assert compared(scoring(), longer).length == pytest.approx([1.1, 1.1, 1.1])


# --- what it errs, together with accuracy -------------------------------------------------------

RATES = (0.0, 0.001, 0.005, 0.01, 0.02)  # of the five signs that are judged, in BF16's answers


def verdicts(
    bench: Bench, estimand: Estimand, rounds: int, rate: float, more_pp: float = 0
) -> tuple[Floats, Floats, Floats]:
    """Return in which rounds accuracy passes, everything passes, and the run fails, over the looks.

    Every world is accuracy's: a sign that an answer does not have is a right answer. The last sign
    has the share `rate` of BF16's answers, and is `more_pp` points more frequent.
    """
    looks = plan_looks(estimand, bench.questions, bench.repeats)
    fractions = tuple(look.fraction for look in looks)
    weights = np.array([1, *[1 / len(RATES)] * len(RATES)]) / 2
    worlds = [World(bench, estimand, "single", 0)]
    worlds += [
        World(replace(bench, accuracy=1 - p), estimand, "single", more)
        for p, more in [*((p, 0.0) for p in RATES[:-1]), (rate, more_pp)]
    ]
    passed: list[Floats] = []
    failed: list[Floats] = []
    for number, (world, weight) in enumerate(zip(worlds, weights, strict=True)):
        generator = np.random.default_rng([bench.questions, number, int(10 * more_pp)])
        right = [each.astype(np.float64) for each in many_answers(world, generator, rounds)]
        p_values = np.array(
            [
                p_of(
                    [each[:, : look.questions, : look.repeats] for each in right],
                    estimand,
                    bench,
                    number,
                )
                for look in looks
            ]
        )  # [looks, 2, rounds]
        levels = [np.array(nominal_levels(fractions, a))[:, None] for a in (0.05, 0.05 * weight)]
        passed.append((p_values[:, 0] <= levels[0]).any(0))
        failed.append((p_values[:, 1] <= levels[1]).any(0))
    return passed[0], np.all(passed, 0), np.any(failed, 0)


def p_of(right: list[Floats], estimand: Estimand, bench: Bench, number: int) -> Floats:
    """Return the p-values [2, rounds] of accuracy (number 0) or of a sign, of each round alone."""
    if number == 0:
        return np.array(margin_p_values(total(right[1] - right[0], estimand), bench.margin_pp))
    found = [
        compare_sign(1 - x, 1 - y, estimand, 0.95, bench.margin_pp / 2)
        for x, y in zip(*right, strict=True)
    ]
    return np.array([[sign.p_at_least_limit, sign.p_at_most_limit] for sign in found]).T


@pytest.mark.parametrize(  # share of the margin: BF16's own share of the last sign
    ("rounds", "share"),
    [(100, 1), *(pytest.param(1000, share, marks=pytest.mark.slow) for share in (0.25, 1, 3))],
)
@pytest.mark.parametrize(
    ("bench", "estimand"),
    [(RECIPES[0], "these_questions"), (RECIPES[2], "these_questions"),
     (Bench(400, 1, 0.75, 5), "such_questions")], ids=str,
)  # fmt: skip
def test_error_rates(bench: Bench, estimand: Estimand, share: float, rounds: int) -> None:
    rate = share * bench.margin_pp / 100
    if estimand == "these_questions":  # they have a share of their own
        world = World(replace(bench, accuracy=1 - rate), estimand, "single", 0)
        shown = 1 - float(questions(world, np.random.default_rng(0))[0].mean())
    else:
        shown = rate
    limit, stated = 50 * max(shown, bench.margin_pp / 100), 0.05 + three_sigma(0.05, rounds)
    alone, healthy, false_alarm = verdicts(bench, estimand, rounds, rate)
    _, at_the_limit, wrong = verdicts(bench, estimand, rounds, rate, limit)
    _, twice, failed = verdicts(bench, estimand, rounds, rate, 2 * limit)
    print(
        f"{bench}, {estimand}, BF16 {100 * rate:g} %, {rounds} rounds: accuracy alone passes "
        f"{alone.mean():.1%}, with signs {healthy.mean():.1%}, fails {false_alarm.mean():.1%}; one "
        f"sign at its limit passes {at_the_limit.mean():.1%}, fails {wrong.mean():.1%}; twice it "
        f"passes {twice.mean():.1%} and fails {failed.mean():.1%}"
    )
    assert at_the_limit.mean() <= stated
    assert max(false_alarm.mean(), wrong.mean()) <= stated
    assert healthy.mean() >= alone.mean() - 0.25
