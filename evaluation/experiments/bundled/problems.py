"""Word problems with worked steps: what the bundled model is trained, calibrated and scored on.

Two sources, mixed half and half:

* ``synthetic``: stories of one to four steps (gains, losses, products, equal shares), one line a
  step: ``12+7=19``.
* ``gsm8k-train-template``: problems of GSM8K's training split (MIT) with new numbers. GSM8K marks
  each calculation as ``<<48/2=24>>``, so a problem whose every number is explained by the question,
  by an earlier result or by a word ("half", "week") can be evaluated again for other numbers.

A template is dropped when new numbers could contradict its prose: fractions, percentages, decimals,
two equal numbers in the question, or a number that is also written as a word ("2 ... both").

Every answer ends ``#### N``. A question's split is a hash of its text (2 % held out, 1 %
calibration), so no problem is in two splits, whatever the seed. Held-out problems share their
templates with training and differ in numbers: the score measures this model against its quantized
self, and says nothing about GSM8K.

    PYTHONPATH=evaluation python -m experiments.bundled.problems gsm8k_train.jsonl

writes both data files again, byte for byte. GSM8K: github.com/openai/grade-school-math,
``grade_school_math/data/train.jsonl``, sha256 in ``GSM8K_SHA256``.
"""

import ast
import hashlib
import json
import operator
import random
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from quantize.bundled import HELDOUT

GSM8K_SHA256 = "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
SYNTHETIC, TEMPLATE = "synthetic", "gsm8k-train-template"
TEMPLATE_SHARE = 0.5
LARGEST = 999  # no result above: three digits
# Characters. Longer templates would not fit the trainer's 112 prompt and 2 x 64 answer tokens.
LONGEST_QUESTION, LONGEST_ANSWER = 240, 230
DATA_SEED = 2026
HELDOUT_PROBLEMS, CALIBRATION_PROBLEMS = 2000, 512
Split = Literal["train", "heldout", "calibration"]


@dataclass(frozen=True)
class Numbers:
    """The most steps of a synthetic story, and how large numbers in stories and templates may be."""

    levels: int  # a story has 1 to this many steps
    step: int  # a gain or loss is at most this
    boxes: int  # a product is at most this x 12
    quotients: tuple[int, int]  # least and largest result of an equal share
    factor: int  # a template's number lies within this factor of GSM8K's


# Training begins narrow, then widens. Evaluation reaches beyond training, so that the model errs
# often enough for quantization damage to show: within training's numbers it solves 96.5 % (n = 800).
NARROW = Numbers(levels=3, step=60, boxes=12, quotients=(0, 12), factor=2)
WIDE = Numbers(levels=4, step=200, boxes=25, quotients=(2, 400), factor=3)
EVALUATION = Numbers(levels=4, step=250, boxes=25, quotients=(2, 500), factor=6)


@dataclass(frozen=True)
class Problem:
    """A question, its worked steps ending ``#### N``, and N."""

    question: str
    answer: str
    answer_number: int
    source: str
    level: int  # worked steps


def split_of(question: str) -> Split:
    """Which split a question belongs to, by its text alone."""
    bucket = zlib.crc32(question.encode()) % 100
    return "heldout" if bucket < 2 else "calibration" if bucket < 3 else "train"


# --- synthetic stories

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Zoe",
         "Leo", "Eva", "Dan", "Ruth", "Omar", "Nina", "Paul", "Kate")  # fmt: skip
ITEMS = ("apples", "books", "coins", "pens", "cards",
         "eggs", "shells", "stamps", "marbles", "cookies")  # fmt: skip
GAINS = ("buys {b} more", "finds {b} more", "gets {b} more from a friend", "picks {b} more")
LOSSES = ("gives away {b}", "loses {b}", "sells {b}", "uses {b}")
QUESTIONS = (
    "How many {item} does {name} have now?",
    "How many {item} are left with {name} in the end?",
    "What is the number of {item} {name} has now?",
)


def synthetic(rng: random.Random, level: int, numbers: Numbers) -> Problem:
    """A story of `level` steps: an optional product, gains and losses, an optional equal share."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    story: list[str] = []
    lines: list[str] = []
    if level > 1 and rng.random() < 0.4:
        boxes, per_box = rng.randint(2, numbers.boxes), rng.randint(2, 12)
        story.append(f"{name} has {boxes} boxes with {per_box} {item} each.")
        lines.append(f"{boxes}*{per_box}={boxes * per_box}")
        total = boxes * per_box
    else:
        total = rng.randint(2, numbers.step)
        story.append(f"{name} has {total} {item}.")
    while len(lines) < level:
        low, high = numbers.quotients
        divisors = [k for k in range(2, 10) if total % k == 0 and low <= total // k <= high]
        if len(lines) == level - 1 and divisors and rng.random() < 0.2:
            friends = rng.choice(divisors)
            story.append(f"{name} shares them equally among {friends} friends.")
            story.append(f"How many {item} does each friend get?")
            lines.append(f"{total}/{friends}={total // friends}")
            total //= friends
            break
        subject = name if len(story) == 1 else f"Then {name}"
        if rng.random() < 0.5 or total < 2:
            change = rng.randint(1, numbers.step)
            story.append(f"{subject} {rng.choice(GAINS).format(b=change)}.")
            lines.append(f"{total}+{change}={total + change}")
            total += change
        else:
            change = rng.randint(1, min(numbers.step, total))
            story.append(f"{subject} {rng.choice(LOSSES).format(b=change)}.")
            lines.append(f"{total}-{change}={total - change}")
            total -= change
    if not story[-1].endswith("?"):
        story.append(rng.choice(QUESTIONS).format(item=item, name=name))
    answer = "\n".join([*lines, f"#### {total}"])
    return Problem(" ".join(story), answer, total, SYNTHETIC, level)


# --- GSM8K templates

# The words that state a number without its digits. A constant of a calculation needs one of them in
# the question; a number that is to vary must have none.
WORDS = {
    1: r"one|single|once",
    2: r"two|twice|doubles?|doubled|half|halves|both|pairs?|couple|second|twins?",
    3: r"three|triples?|tripled|third|thirds|thrice",
    4: r"four|quarters?|fourth", 5: r"five|fifth", 6: r"six|sixth", 7: r"seven|weeks?|weekly",
    8: r"eight|eighth", 9: r"nine|ninth", 10: r"ten|tenth", 11: r"eleven",
    12: r"twelve|dozens?|years?|annual|annually", 20: r"twenty", 24: r"days?|daily",
    30: r"thirty|months?|April|June", 52: r"years?|annual|annually",
    60: r"sixty|hours?|minutes?", 100: r"hundred|cents?", 365: r"years?",
}  # fmt: skip
NUMBER = re.compile(r"(\d+)")
CALCULATION = re.compile(r"<<([^=<>]+)=([^<>]+)>>")
UNSAFE_QUESTION = re.compile(r"\d[.,/:-]\d|\d-?[A-Za-z]|%|percent|[A-Za-z]\d|-\d")
UNSAFE_ANSWER = re.compile(r"\d[.,:]\d|%")
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def states_number(text: str, number: int) -> bool:
    """Whether `text` says `number` in words, or in a word that implies it."""
    words = WORDS.get(number)
    return words is not None and re.search(rf"\b({words})\b", text, re.IGNORECASE) is not None


def evaluate(node: ast.expr, values: dict[str, Fraction]) -> Fraction:
    """The exact value of an expression of + - * / over numbers and named values.

    Raises:
        ZeroDivisionError: a divisor is zero.
        ValueError: anything else stands in the expression.

    """
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right):
            return OPERATORS[type(op)](evaluate(left, values), evaluate(right, values))
        case ast.Name(name):
            return values[name]
        case ast.Constant(int(value)):
            return Fraction(value)
        case _:
            raise ValueError(f"not arithmetic: {ast.unparse(node)}")


@dataclass(frozen=True)
class Template:
    """A GSM8K problem whose numbers are variables: q0, q1, ... in the question, r0, r1, ... as results.

    `question` and `answer` alternate text with a variable's name or a fixed number.
    """

    question: tuple[str, ...]
    answer: tuple[str, ...]
    numbers: tuple[int, ...]
    calculations: tuple[ast.expr, ...]


def parse_template(question: str, answer: str) -> Template | None:
    """The template of a GSM8K problem, or None when its numbers cannot be varied safely."""
    body, _, final = answer.rpartition("####")
    prose = CALCULATION.sub("", body).strip()
    numbers = NUMBER.findall(question)
    if len(question) > LONGEST_QUESTION or len(prose) > LONGEST_ANSWER:
        return None
    if UNSAFE_QUESTION.search(question) or UNSAFE_ANSWER.search(prose):
        return None
    if len(set(numbers)) != len(numbers) or not 2 <= len(numbers) <= 6:
        return None  # a repeated number could be either of two variables
    if any(int(n) < 2 or states_number(f"{question} {prose}", int(n)) for n in numbers):
        return None
    names = {n: f"q{i}" for i, n in enumerate(numbers)}
    parsed = _parse_calculations(question, CALCULATION.findall(body), names)
    if parsed is None or names.get(final.strip()) != f"r{len(parsed) - 1}":
        return None
    answer_parts = NUMBER.split(f"{prose}\n#### {final.strip()}")
    fixed = {n for n in answer_parts[1::2] if n not in names}
    if any(not states_number(question, int(n)) for n in fixed):
        return None
    question_parts = NUMBER.split(question)
    return Template(
        question=tuple(names.get(p, p) for p in question_parts),
        answer=tuple(names.get(p, p) for p in answer_parts),
        numbers=tuple(map(int, numbers)),
        calculations=tuple(parsed),
    )


def _parse_calculations(
    question: str, marked: Sequence[tuple[str, str]], names: dict[str, str]
) -> list[ast.expr] | None:
    """Expressions over variables, one a ``<<...>>``; adds each result's name to `names`."""
    if not 1 <= len(marked) <= 3:
        return None
    parsed: list[ast.expr] = []
    for expression, result in marked:
        result = result.strip()
        if not re.fullmatch(r"[\d\s+\-*/()]+", expression) or not result.isdecimal():
            return None
        constants = {n for n in NUMBER.findall(expression) if n not in names}
        if result in names or any(not states_number(question, int(n)) for n in constants):
            return None
        try:
            if evaluate(ast.parse(expression.strip(), mode="eval").body, {}) != int(result):
                return None
            renamed = NUMBER.sub(lambda m: names.get(m[0], m[0]), expression.strip())
            parsed.append(ast.parse(renamed, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None
        names[result] = f"r{len(parsed) - 1}"
    return parsed


def perturb(
    template: Template, rng: random.Random, numbers: Numbers, tries: int = 20
) -> Problem | None:
    """The template with new numbers, each at most `numbers.factor` times larger or smaller.

    Returns None if no try gives distinct numbers and positive whole results of at most `LARGEST`.
    """
    for _ in range(tries):
        drawn = [
            rng.randint(max(2, n // numbers.factor), max(4, n * numbers.factor))
            for n in template.numbers
        ]
        if len(set(drawn)) < len(drawn):
            continue
        values = {f"q{i}": Fraction(n) for i, n in enumerate(drawn)}
        for i, calculation in enumerate(template.calculations):
            value = evaluate(calculation, values)
            if value.denominator != 1 or not 0 < value <= LARGEST:
                break
            values[f"r{i}"] = value
        else:
            final = values[f"r{len(template.calculations) - 1}"]
            question, answer = (
                "".join(str(values[p]) if p in values else p for p in parts)
                for parts in (template.question, template.answer)
            )
            level = len(template.calculations)
            return Problem(question, answer, int(final), TEMPLATE, level)
    return None


def load_templates(gsm8k_train: Path, numbers: Numbers) -> list[Template]:
    """Every template of GSM8K's training file that `perturb` can fill with new `numbers`.

    Raises:
        ValueError: the file is not the training split that the data files were made from.

    """
    data = gsm8k_train.read_bytes()
    if (digest := hashlib.sha256(data).hexdigest()) != GSM8K_SHA256:
        raise ValueError(f"{gsm8k_train}: sha256 {digest}, expected {GSM8K_SHA256}")
    rows = [json.loads(line) for line in data.decode().splitlines()]
    parsed = [parse_template(row["question"], row["answer"]) for row in rows]
    usable = [t for t in parsed if t is not None]
    return [t for t in usable if perturb(t, random.Random(0), numbers, tries=200) is not None]


def stream(
    seed: int, templates: Sequence[Template], split: Split, numbers: Numbers
) -> Iterator[Problem]:
    """An endless stream of one split's problems, determined by the seed; problems may repeat."""
    rng = random.Random(seed)
    while True:
        if templates and rng.random() < TEMPLATE_SHARE:
            problem = perturb(rng.choice(templates), rng, numbers)
        else:
            problem = synthetic(rng, rng.randint(1, numbers.levels), numbers)
        if problem is not None and split_of(problem.question) == split:
            yield problem


# `12 + 7 - 3 = 16`, alone: what stands in an answer's prose as a plain calculation
VISIBLE_STEP = re.compile(
    r"(?<![\w.*/+x-])(?<![*/+x-] )\$?(\d+(?: ?[-+*/x] ?\$?\d+)+) ?= ?\$?(\d+)(?!\d)"
)


def visible_steps(answer: str) -> list[tuple[str, int]]:
    """The calculations in an answer's prose, such as `12 + 7 = 19`, as (expression, stated result)."""
    steps = VISIBLE_STEP.findall(answer)
    return [(e.replace("x", "*").replace("$", ""), int(result)) for e, result in steps]


def steps_hold(problem: Problem) -> bool:
    """Whether every calculation in the answer's prose has the result that the answer states.

    In a few GSM8K solutions the prose calculates something else than the ``<<...>>`` marks. Training
    still uses their templates, as the shipped model's training did; the shipped problems do not.
    """
    steps = visible_steps(problem.answer)
    return all(evaluate(ast.parse(e, mode="eval").body, {}) == result for e, result in steps)


def distinct(problems: Iterator[Problem], count: int) -> list[Problem]:
    """The first `count` problems with different questions."""
    by_text: dict[str, Problem] = {}
    while len(by_text) < count:
        problem = next(problems)
        by_text.setdefault(problem.question, problem)
    return list(by_text.values())


def write_jsonl(path: Path, split: Split, problems: Sequence[Problem]) -> None:
    """One problem a line, with an id ``<split>-<index>``."""
    rows = ({"id": f"{split}-{i:04d}", **asdict(p)} for i, p in enumerate(problems))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def main(gsm8k_train: Path, folder: Path) -> None:
    """Write ``heldout.jsonl`` and ``calibration.jsonl`` into `folder`."""
    templates = load_templates(gsm8k_train, WIDE)
    sizes: dict[Split, int] = {"heldout": HELDOUT_PROBLEMS, "calibration": CALIBRATION_PROBLEMS}
    for split, size in sizes.items():
        candidates = stream(DATA_SEED, templates, split, EVALUATION)
        problems = distinct(filter(steps_hold, candidates), size)
        write_jsonl(folder / f"{split}.jsonl", split, problems)
    print(f"{len(templates)} templates; {sizes} written to {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m experiments.bundled.problems gsm8k_train.jsonl")
    main(Path(sys.argv[1]), HELDOUT.parent)
