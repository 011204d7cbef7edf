r"""Reads the battery of answers by our rule, lm-eval's and math-verify; makes docs' table.

    python -m tests.support.extractors            # docs/evaluation.md's table again
    pip install --target DIR math-verify && PYTHONPATH=DIR python -m tests.support.extractors --record

`tests/data/answers.jsonl` has an answer's text by task, and the value that a careful human reads in
it, null where the answer states none. An extractor is right on a line if it reads this value, or
nothing where there is none. `answers_held_out.jsonl` has the same of answers that were written when
version 2 of our rule was done, without looking at it. What cannot be read here again is kept in
`answers_math_verify.json`: what math-verify reads, which is no dependency (made again with
--record), and what versions 1 and 2 of our rule read of the held-out answers, before a mend.
"""

import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantize.recovery.catalog import LM_EVAL, shipped
from quantize.recovery.filters import StatedAnswer, final_choice
from quantize.recovery.numerals import rational
from quantize.recovery.rows import NO_ANSWER

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
BEGIN, END = "<!-- {}: made by tests/support/extractors.py -->\n", "<!-- end -->"
OWN = "own: "  # what a task's name begins with where the rest is a recipe's expression
HELD_OUT, BATTERY = "answers_held_out", "answers"
HELD_OUT_OF_5 = "answers_held_out_of_5"  # written when version 5 of our rule was done
ANOTHER_HAND = (
    "answers_of_another_hand"  # written, for version 5, by somebody who had not mended it
)
HELD_OUT_OF_6 = "answers_held_out_of_6"  # written for version 6 by another hand yet
HELD_OUT_OF_7 = "answers_held_out_of_7"  # written for versions 7 and 8 by the hand that mended them
HELD_OUT_OF_8 = "answers_held_out_of_8"  # written to attack version 8, by one who had seen no code
RECORD = DATA / "answers_math_verify.json"
ROUND = str.maketrans("{}", "()")
Read = Callable[[str], str | None]


def battery(name: str = BATTERY) -> list[dict[str, Any]]:
    """Return the lines of a battery: task, text, value."""
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


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


def lm_evals(task: str, *more: str) -> Read | None:
    """Return what lm-eval's own definition reads in the batteries' texts; None: it has no such task.

    `more` are other texts that will be asked for.
    """
    from lm_eval.filters.extraction import MultiChoiceRegexFilter, RegexFilter

    def by(filter_: Any, *more: str) -> Read:
        """Read all texts of the task in one call: lm-eval makes a table of all signs in each."""
        lines = [line for name in (BATTERY, HELD_OUT) for line in battery(name)]
        texts = [*more, *(line["text"] for line in lines if line["task"] == task)]
        docs = [{"choices": [f"option {letter}" for letter in "abcd"]}] * len(texts)
        values = [value for (value,) in filter_.apply([[text] for text in texts], docs)]
        return {
            text: None if value == NO_ANSWER else value.rstrip(".")
            for text, value in zip(texts, values, strict=True)
        }.__getitem__

    if task.startswith(OWN):
        return by(RegexFilter(task.removeprefix(OWN), -1), *more)
    if task == "aime25":
        return _aime
    made: dict[str, Any] = {
        "gsm8k": RegexFilter(),
        "mmlu_pro": RegexFilter(r"answer is \(?([ABCDEFGHIJ])\)?"),
        "gpqa_diamond": MultiChoiceRegexFilter(
            r"(\([A-Z]\))", -1, ignore_case=True, ignore_punctuation=True
        ),
    }  # fmt: skip
    return by(made[task], *more) if task in made else None


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
    if _is_number(value):
        return rational(value) == rational(human)
    return value.translate(ROUND) == human.translate(ROUND)  # 5\\sqrt(2), or (B)


def _is_number(value: str | None) -> bool:
    return value is not None and rational(value.replace(",", "")) is not None


def right(read: Callable[[str], Read | None], name: str) -> dict[str, list[bool]]:
    """Return task -> on which of a battery's lines an extractor is right; without tasks it lacks."""
    readers: dict[str, Read | None] = {}
    found: dict[str, list[bool]] = {}
    for line in battery(name):
        task = line["task"]
        if task not in readers:
            readers[task] = read(task)
        if reader := readers[task]:
            found.setdefault(task, []).append(
                agree(plain(reader(line["text"])), line["value"], task)
            )
    return found


def plain(value: str | None) -> str | None:
    """Return a value without thousands separators, as metrics compare numbers."""
    return value.replace(",", "") if value and re.fullmatch(r"-?[\d,]+(\.\d+)?", value) else value


def record() -> None:
    """Write on which lines of both batteries math-verify is right, by task."""
    from importlib.metadata import version

    content: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    content["math-verify"] = version("math-verify")
    for name, place in ((BATTERY, content), (HELD_OUT, content["held_out"])):
        place["right"] = {}
        for line in battery(name):
            if not line["task"].startswith(OWN):
                found = place["right"].setdefault(line["task"], [])
                found.append(math_verify_is_right(line))
    RECORD.write_text(json.dumps(content) + "\n", "utf-8")


def table(name: str) -> str:
    """Return docs' table of a battery: right readings by task and extractor."""
    kept = json.loads(RECORD.read_text("utf-8"))
    kept, version = kept["held_out"] if name == HELD_OUT else kept, kept["math-verify"]
    columns = {"ours": right(ours, name)}
    if name == HELD_OUT:
        columns = {
            "ours, when first read": kept["2"], "ours, version 1": kept["1"],
            "ours, today": right(ours, name),
        }  # fmt: skip
    columns |= {
        "lm-eval's own definition": right(lm_evals, name),
        f"math-verify {version}": kept["right"],
    }
    lines = [f"| task | answers | {' | '.join(columns)} |", "|---|" + "---:|" * (1 + len(columns))]
    counts = {task: len(found) for task, found in right(ours, name).items()}
    for task, count in counts.items():
        cells = [str(sum(column[task])) if task in column else "-" for column in columns.values()]
        shown = f"own, `{task.removeprefix(OWN)}`" if task.startswith(OWN) else f"`{task}`"
        lines.append(f"| {shown} | {count} | {' | '.join(cells)} |")
    both = kept["right"].keys()
    sums = [
        str(sum(sum(column[task]) for task in both)) if both <= column.keys() else "-"
        for column in columns.values()
    ]
    total = sum(counts[task] for task in both)
    lines.append(f"| all that math-verify can read | {total} | {' | '.join(sums)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/evaluation.md with the tables of today."""
    text = PAGE.read_text("utf-8")
    for name in (BATTERY, HELD_OUT):
        begin = BEGIN.format(name)
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + table(name) + "\n" + END + rest.partition(END)[2]
    return text


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    PAGE.write_text(page(), "utf-8")
