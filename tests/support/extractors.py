r"""Reads the battery of answers by our rule, lm-eval's and math-verify; makes docs' table.

    python tests/support/extractors.py            # docs/evaluation.md's table again
    pip install --target DIR math-verify && PYTHONPATH=DIR python tests/support/extractors.py --record

`tests/data/answers.jsonl` has an answer's text by task, and the value that a careful human reads in
it, null where the answer states none. An extractor is right on a line if it reads this value, or
nothing where there is none. math-verify is no dependency: what it reads is kept in
`tests/data/answers_math_verify.json`, with its version, and made again with --record.
"""

import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from quantize.recovery.catalog import LM_EVAL, shipped
from quantize.recovery.filters import StatedAnswer, final_choice
from quantize.recovery.numerals import rational
from quantize.recovery.rows import NO_ANSWER

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
BEGIN, END = "<!-- extractors: made by tests/support/extractors.py -->\n", "<!-- end -->"
OWN = "own: "  # what a task's name begins with where the rest is a recipe's expression
RECORD = DATA / "answers_math_verify.json"
Read = Callable[[str], str | None]


def battery() -> list[dict[str, Any]]:
    """Return the lines of the battery: task, text, value."""
    return [json.loads(line) for line in (DATA / "answers.jsonl").read_text("utf-8").splitlines()]


def ours(task: str) -> Read:
    """Return what our task reads in an answer: the first step of its first filter."""
    if task.startswith(OWN):
        form: Mapping[str, Any] = {"form": "match", "regex_pattern": task.removeprefix(OWN)}
    elif task == "gpqa_diamond":
        return lambda text: final_choice(text) or None
    else:
        form = {
            k: v for k, v in shipped(task)["filter_list"][0]["filter"][0].items() if k != "function"
        }
    read = StatedAnswer(**form)
    return lambda text: next(v if v != NO_ANSWER else None for v in read.apply([[text]], [])[0])


def lm_evals(task: str) -> Read | None:
    """Return what lm-eval's own definition reads, None where it has no such task."""
    from lm_eval.filters.extraction import MultiChoiceRegexFilter, RegexFilter

    def by(filter_: Any, text: str) -> str | None:
        docs = [{"choices": [f"option {letter}" for letter in "abcd"]}]
        value = next(iter(filter_.apply([[text]], docs)))[0]
        return None if value == NO_ANSWER else value.rstrip(".")

    if task.startswith(OWN):
        return partial(by, RegexFilter(task.removeprefix(OWN), -1))
    if task == "aime25":
        return _aime
    made: dict[str, Any] = {
        "gsm8k": RegexFilter(),
        "mmlu_pro": RegexFilter(r"answer is \(?([ABCDEFGHIJ])\)?"),
        "gpqa_diamond": MultiChoiceRegexFilter(
            r"(\([A-Z]\))", -1, ignore_case=True, ignore_punctuation=True
        ),
    }  # fmt: skip
    return partial(by, made[task]) if task in made else None


def _aime(text: str) -> str | None:
    """Return the string that lm-eval's aime25 compares with the answer."""
    spec = importlib.util.spec_from_file_location("aime_utils", LM_EVAL / "aime" / "utils.py")
    assert spec is not None
    assert spec.loader is not None
    utils: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    dollars = [place for place, sign in enumerate(text) if sign == "$"]
    answer = text[dollars[0] + 1 : dollars[-1]] if len(dollars) > 1 else text
    if (box := utils.last_boxed_only_string(text)) is not None:
        with contextlib.suppress(AssertionError, IndexError):
            answer = utils.remove_boxed(box) or answer
    return utils.strip_string(answer) or None


def math_verify_is_right(line: Mapping[str, Any]) -> bool:
    """Return whether math-verify takes an answer for the human's value, or finds none where none is."""
    from math_verify import parse, verify  # type: ignore
    from math_verify.parser import (  # type: ignore
        ExprExtractionConfig,
        LatexExtractionConfig,
        StringExtractionConfig,
    )

    letters = {"gpqa_diamond": "ABCD", "mmlu_pro": "ABCDEFGHIJ"}.get(line["task"])
    configs: Any = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    if letters:
        configs = [StringExtractionConfig(strings=tuple(letters))]
    found = parse(line["text"], configs)
    if line["value"] is None:
        return not found
    return bool(found) and verify(parse(line["value"].strip("()"), configs), found)


def agree(value: str | None, human: str | None, task: str) -> bool:
    """Return whether an extractor reads what a human reads; lm-eval's aime25 has no "nothing"."""
    if value is None or human is None:
        return value == human or (human is None and task == "aime25" and not _is_number(value))
    return value == human or (_is_number(value) and rational(value) == rational(human))


def _is_number(value: str | None) -> bool:
    return value is not None and rational(value.replace(",", "")) is not None


def shares(read: Callable[[str], Read | None]) -> dict[str, tuple[int, int] | None]:
    """Return task -> (lines on which an extractor is right, lines); None: it has no such task."""
    found: dict[str, tuple[int, int] | None] = {}
    for task in dict.fromkeys(line["task"] for line in battery()):
        lines = [line for line in battery() if line["task"] == task]
        reader = read(task)
        right = reader and sum(agree(plain(reader(x["text"])), x["value"], task) for x in lines)
        found[task] = None if reader is None else (int(right or 0), len(lines))
    return found


def plain(value: str | None) -> str | None:
    """Return a value without thousands separators, as metrics compare numbers."""
    return value.replace(",", "") if value and re.fullmatch(r"-?[\d,]+(\.\d+)?", value) else value


def record() -> None:
    """Write on which lines of the battery math-verify is right, by task."""
    from importlib.metadata import version

    right: dict[str, list[bool]] = {}
    for line in battery():
        if not line["task"].startswith(OWN):
            right.setdefault(line["task"], []).append(math_verify_is_right(line))
    content = {"math-verify": version("math-verify"), "right": right}
    RECORD.write_text(json.dumps(content) + "\n", "utf-8")


def table() -> str:
    """Return docs' table: right readings by task and extractor."""
    record = json.loads(RECORD.read_text("utf-8"))
    theirs = {task: (sum(right), len(right)) for task, right in record["right"].items()}
    columns = [shares(ours), shares(lm_evals), theirs]
    lines = [
        f"| task | answers | ours | lm-eval's own definition | math-verify {record['math-verify']} |",
        "|---|---:|---:|---:|---:|",
    ]
    for task in columns[0]:
        cells = [column.get(task) for column in columns]
        name = f"own, `{task.removeprefix(OWN)}`" if task.startswith(OWN) else f"`{task}`"
        assert cells[0] is not None
        counts = " | ".join("-" if cell is None else str(cell[0]) for cell in cells)
        lines.append(f"| {name} | {cells[0][1]} | {counts} |")
    sums = [sum((column[task] or (0, 0))[0] for task in theirs) for column in (columns[0], theirs)]
    count = sum(number for _, number in theirs.values())
    lines.append(f"| all that math-verify can read | {count} | {sums[0]} | - | {sums[1]} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/evaluation.md with the table of today."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    PAGE.write_text(page(), "utf-8")
