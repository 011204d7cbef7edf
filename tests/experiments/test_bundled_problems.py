"""The word problems: right arithmetic, disjoint splits, reproducible, templates kept safe."""

import json
import random
import re
from fractions import Fraction
from itertools import pairwise

import pytest
from experiments.bundled.problems import (
    EVALUATION,
    SYNTHETIC,
    TEMPLATE,
    WIDE,
    Problem,
    distinct,
    parse_template,
    perturb,
    split_of,
    steps_hold,
    stream,
    synthetic,
    visible_steps,
)

from quantize.bundled import CALIBRATION, HELDOUT

QUESTION = "Ann has 48 clips and sells half as many in May as the 30 sold in March. How many?"
ANSWER = "She sold 30/2 = <<30/2=15>>15 in May.\nLeft: 48-15 = <<48-15=33>>33.\n#### 33"


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def value(expression: str) -> Fraction:
    """Evaluate + - * / over whole numbers with the usual precedence."""
    tokens = re.findall(r"\d+|[-+*/]", expression)
    total, sign, product = Fraction(0), 1, Fraction(int(tokens[0]))
    for op, number in zip(tokens[1::2], tokens[2::2], strict=True):
        if op in "*/":
            product = product * int(number) if op == "*" else product / int(number)
        else:
            total, sign, product = (
                total + sign * product,
                1 if op == "+" else -1,
                Fraction(int(number)),
            )
    return total + sign * product


@pytest.mark.parametrize("path", [HELDOUT, CALIBRATION], ids=["heldout", "calibration"])
def test_every_shipped_step_is_right(path) -> None:
    checked = 0
    for row in rows(path):
        steps = visible_steps(row["answer"])
        for expression, result in steps:
            assert value(expression) == result, row["answer"]
        checked += len(steps)
        assert row["answer"].endswith(f"\n#### {row['answer_number']}")
        if row["source"] == SYNTHETIC:
            assert len(steps) == row["level"] == row["answer"].count("\n")
            assert steps[-1][1] == row["answer_number"]
    assert checked > 2 * len(rows(path))


def test_splits_are_complete_disjoint_and_half_templates() -> None:
    heldout, calibration = rows(HELDOUT), rows(CALIBRATION)
    asked = [{r["question"] for r in part} for part in (heldout, calibration)]
    assert [len(a) for a in asked] == [2000, 512]
    assert not asked[0] & asked[1]
    assert {split_of(q) for q in asked[0]} == {"heldout"}
    assert {split_of(q) for q in asked[1]} == {"calibration"}
    templates = sum(r["source"] == TEMPLATE for r in heldout)
    assert 0.40 < templates / 2000 < 0.55
    assert len({r["id"] for r in heldout + calibration}) == 2512
    fields = {"id", "question", "answer", "answer_number", "source", "level"}
    assert all(set(r) == fields for r in heldout + calibration)


def test_training_stream_never_yields_a_shipped_problem() -> None:
    shipped = {r["question"] for r in rows(HELDOUT) + rows(CALIBRATION)}
    training = distinct(stream(3, [], "train", WIDE), 3000)
    assert not shipped & {p.question for p in training}
    assert all(split_of(p.question) == "train" for p in training)


def test_synthetic_problems_are_a_function_of_the_seed() -> None:
    first, second, other = (
        distinct(stream(seed, [], "heldout", EVALUATION), 50) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_each_synthetic_step_starts_from_the_last_result(level: int) -> None:
    for seed in range(200):
        problem = synthetic(random.Random(seed), level, EVALUATION)
        steps = visible_steps(problem.answer)
        assert steps_hold(problem)
        assert len(steps) == problem.level == level
        assert steps[-1][1] == problem.answer_number
        for (_, before), (expression, _) in pairwise(steps):
            assert int(re.split(r"[-+*/]", expression)[0]) == before


def test_template_varies_numbers_and_follows_the_calculation() -> None:
    template = parse_template(QUESTION, ANSWER)
    assert template is not None
    assert template.numbers == (48, 30)
    problem = perturb(template, random.Random(1), EVALUATION)
    assert problem is not None
    have, sold = (int(n) for n in re.findall(r"\d+", problem.question))
    assert (have, sold) != (48, 30)
    assert problem.answer_number == have - sold // 2
    assert f"{sold}/2 = {sold // 2}" in problem.answer


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (QUESTION.replace("half", "part"), ANSWER),  # nothing in the prose says the 2
        (QUESTION.replace("48", "48%"), ANSWER),
        (QUESTION.replace("48", "4.8"), ANSWER),
        (QUESTION.replace("30", "48"), ANSWER),  # which 48?
        (QUESTION + " He has 2.", ANSWER),  # 2 would vary, "half" would not
        (QUESTION, ANSWER.replace("30/2=15", "30/2=16")),
        (QUESTION, ANSWER.replace("#### 33", "#### 34")),
        (QUESTION, ANSWER.replace("#### 33", "#### 15")),  # not the last result
        (QUESTION, ANSWER.replace("\nLeft", "\nOr 48-33=<<48-33=15>>15.\nLeft")),  # which 15?
        (QUESTION, ANSWER.replace("Left:", "Left of 99:")),  # an unexplained number
        (QUESTION, ANSWER.replace("48-15=", "48-int(15)=")),
    ],
)
def test_unsafe_templates_are_dropped(question: str, answer: str) -> None:
    assert parse_template(question, answer) is None


def test_a_wrong_step_is_seen_and_units_are_not_mistaken_for_one() -> None:
    answer = "She is 34-6 = 28, he is 28 + $4 - 2=30, 3 hours x 4 = 12 in all.\n5*2x3= $30"
    assert visible_steps(answer) == [("34-6", 28), ("28 + 4 - 2", 30), ("5*2*3", 30)]
    assert steps_hold(Problem("q", answer, 30, TEMPLATE, 2))
    assert not steps_hold(Problem("q", answer.replace("28,", "27,"), 30, TEMPLATE, 2))
