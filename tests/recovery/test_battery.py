"""Written answers, by task, and the value that a careful human reads in each.

The texts are our own, in the forms that models write; no question of any benchmark. A value was
given to each text before any code read it, but for some of the last 38 of `answers.jsonl`
(docs/evaluation.md says why). `tests/support/extractors.py` says what lm-eval's own definitions and
math-verify read, and makes docs/evaluation.md's table.
"""

import hashlib
import json
import time
from fractions import Fraction
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

from quantize.recovery import extraction
from quantize.recovery.extraction import boxed_number, final_number, seven_digits
from quantize.recovery.letters import final_letter
from quantize.recovery.numerals import SEVERAL, rational, stated_number, written
from tests.support.extractors import (
    ANOTHER_HAND,
    BATTERY,
    HELD_OUT,
    HELD_OUT_OF_5,
    HELD_OUT_OF_6,
    HELD_OUT_OF_7,
    HELD_OUT_OF_8,
    PAGE,
    RECORD,
    agree,
    battery,
    lm_evals,
    ours,
    page,
    plain,
    right,
)
from tests.support.scripted import run, write_jsonl

MODULES = ("extraction", "letters", "numerals")
TASKS = list(dict.fromkeys(line["task"] for line in battery()))
RULE = {9: "c80151093314"}  # version of the rule -> digest of its modules


def test_there_are_more_than_200_answers_right_wrong_and_none() -> None:
    assert len({(line["task"], line["text"]) for line in battery()}) == len(battery()) > 200
    for task in TASKS:
        values = [line["value"] for line in battery() if line["task"] == task]
        assert None in values
        assert len({*values}) > 1


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_is_read_as_a_human_reads_it(task: str) -> None:
    read = ours(task)
    lines = [line for line in battery() if line["task"] == task]
    wrong = [
        (line["text"], line["value"], read(line["text"]))
        for line in lines
        if not agree(read(line["text"]), line["value"], task)
    ]
    assert wrong == []


def test_held_out_answers_are_new_and_all_are_read() -> None:
    """Version 5 missed a sum behind a box that holds the fraction."""
    texts = {(line["task"], line["text"]) for line in battery()}
    assert not [line for line in battery(HELD_OUT) if (line["task"], line["text"]) in texts]
    found = right(ours, HELD_OUT)
    assert all(map(all, found.values()))
    kept = json.loads(RECORD.read_text("utf-8"))["held_out"]
    assert {rule: sum(map(sum, kept[rule].values())) for rule in "12"} == {"1": 85, "2": 111}


def test_all_60_answers_that_version_5_had_not_seen_are_read_today() -> None:
    """It read 56 when it first saw them; docs/evaluation.md says so."""
    seen = {(line["task"], line["text"]) for name in (BATTERY, HELD_OUT) for line in battery(name)}
    assert not [line for line in battery(HELD_OUT_OF_5) if (line["task"], line["text"]) in seen]
    marks = right(ours, HELD_OUT_OF_5)
    assert {task: (sum(lines), len(lines)) for task, lines in marks.items()} == {
        "gsm8k": (24, 24), "svamp": (8, 8), "aime25": (16, 16), "gpqa_diamond": (12, 12),
    }  # fmt: skip


def test_of_435_answers_by_another_hand_two_are_read_as_another_value() -> None:
    """Version 5 read 58 so, and 320 of the 435 as a human does."""
    marks = right(ours, ANOTHER_HAND)
    assert {task: (sum(lines), len(lines)) for task, lines in marks.items()} == {
        "gsm8k": (116, 129), "aime25": (138, 147), "gpqa_diamond": (109, 128),
        "mmlu_pro": (17, 18), "needle_1k": (13, 13),
    }  # fmt: skip
    assert _misread(ANOTHER_HAND) == [
        "#### [insert 18]",
        "\\boxed{\\log_{2}2^{70}}",
    ]


def test_of_350_answers_that_version_6_had_not_seen_none_is_read_as_another_value() -> None:
    """Version 6 read 10 so when it first saw them, and 274 as a human does."""
    marks = right(ours, HELD_OUT_OF_6)
    assert {task: (sum(lines), len(lines)) for task, lines in marks.items()} == {
        "gsm8k": (103, 108), "svamp": (9, 9), "aime25": (115, 118), "gpqa_diamond": (115, 115),
    }  # fmt: skip
    assert _misread(HELD_OUT_OF_6) == []


def test_of_423_answers_that_version_7_had_not_seen_two_are_read_as_another_value() -> None:
    """It read 13 of the first 263 so when it first saw them, 26 of the next 120, 15 of the last 40."""
    marks = right(ours, HELD_OUT_OF_7)
    assert {task: (sum(lines), len(lines)) for task, lines in marks.items()} == {
        "gsm8k": (166, 176), "svamp": (18, 18), "aime25": (123, 126), "gpqa_diamond": (95, 103),
    }  # fmt: skip
    assert _misread(HELD_OUT_OF_7) == [
        "#### 150 minutes = 2.5 hours",
        "Question 1: 3 * 7 = 21 apples.\n#### 21\nQuestion 2: 5 * 4 = 20 pears.\n#### 20",
    ]


def test_of_294_answers_that_attacked_version_8_fifteen_are_read_as_another_value() -> None:
    """It read 22 so when it first saw them, and 225 as whoever wrote them."""
    marks = right(ours, HELD_OUT_OF_8)
    assert {task: (sum(lines), len(lines)) for task, lines in marks.items()} == {
        "gsm8k": (113, 141), "svamp": (4, 10), "aime25": (66, 78), "gpqa_diamond": (48, 65),
    }  # fmt: skip
    assert len(_misread(HELD_OUT_OF_8)) == 15


def _misread(name: str) -> list[str]:
    """Return the texts of a battery in which another value is read than a human's."""
    readers = {line["task"]: ours(line["task"]) for line in battery(name)}
    return [
        line["text"]
        for line in battery(name)
        if (value := plain(readers[line["task"]](line["text"])))
        and not agree(value, line["value"], line["task"])
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 12 hundred", "1200"), ("The answer is 5 hundred dollars.", "500"),
        ("The answer is 2 dozen.", None), ("#### 2 gross", None), ("#### The score is 18", "18"),
        ("#### 18 and a half cups", "18.5"), ("#### She walks 2 and a half miles", "2.5"),
        ("#### 1 and 1/2 cups", "1.5"), ("#### 2 hundred and a half", None), ("#### 5 and 6", None),
        ("#### x != 18", None), ("#### 5! = 120", "120"), ("#### x > 18", None),
        ("#### **>= 18**", None), ("#### Answer: > 18", None),
        ("The answer is \u2265 18.", None), ("#### -> 18", "18"), ("#### => 18", "18"),
        ("> #### 18", "18"),
        ("## Answer: -18", "-18"), ("#### 18 \u00b1 1", None), ("#### 1.234.567", "1234567"),
        ("#### 12.345", "12.345"), ("#### <<9*2=18>>18", "18"),
        ("User: Ann has 3. The answer is 12.", "12"),
        ("Question 1: how many? Answer: 3\nQuestion 2: in all? Answer: 12", "12"),
        ("The answer is 18.\n\nQuestion: 5 + 5?\nThe answer is 10.", "18"),
        ("#### 48\n\nActually, 55.", "55"), ("#### 48\n\nEdit: 55", "55"), ("#### 48. No, 55.", "55"),
        ("#### 48\n\nNo, 7 days are in a week.", "48"), ("#### 48\nIt should be 12 a person.", "48"),
    ],
)  # fmt: skip
def test_numbers_behind_marks_are_whole_and_those_that_stand(text: str, value: str | None) -> None:
    assert final_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{x \not= 70}", None), (r"\boxed{\leqslant 70}", None), (r"\boxed{\gg 70}", None),
        (r"\boxed{\dfrac{8 \choose 4}{2}}", "35"), (r"\boxed{{7 \over 2} + 1}", "4.5"),
        (r"\boxed{5 \star 14}", None),
        (r"\boxed{\overline{70}}", "70"),
        (r"\boxed{70 \quad \text{ways}}", "70"), (r"\boxed{m=33 \quad n=37}", None),
        (r"\boxed{m=33, n=37 \quad m+n=70}", "70"), (r"\boxed{\sqrt 49}", "7"),
        (r"\boxed{10^{-2}}", "0.01"),
        (r"\boxed{\sqrt{x^2}}", None), (r"\boxed{70}. So a+b=80.", "70"),
        (r"\boxed{\frac{33}{37}}. So $m+n=70$.", "70"), (r"\boxed{70}. Wait, it should be 69.", "69"),
    ],
)  # fmt: skip
def test_operations_in_boxes_are_computed_or_hide_the_number(text: str, value: str | None) -> None:
    assert boxed_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("So Kylar pays $64.", "64"), ("So Kylar pays $64", None), ("16 + 48 = 64.", None),
        ("So we need to find the cost of 3 pens.", None), ("Step 1: so she spends 36 dollars.", None),
        ("So each of the 3 friends pays $4, and the tip is $2.", None), ("So he needs > 3.", None),
        ("Pears: 7", "7"), ("Apples: 5\n\nPears: 7", None), ("Apples: 5\nPears: 7\nTotal: 12", "12"),
        ("Day 2: 7 miles", None), ("Not sold: 5", None), ("Page 5", None), ("5 pens (9 - 4).", "5"),
        ("#### 50\n\nActually, he asks for the rest. So she has $30 left.", "30"),
        ("#### 50\n\nWait, I check it: 60 - 10 = 50. So 50 is right.", "50"),
        ("#### 50\n\nWait. So I hope 1 example helps.", "50"),
        ("#### 50\n\nRemark: #### 60 would hold for 9 days.", "50"),
        ("It would be #### 15", "15"), ("#### 12 - x apples", None), ("#### 18 -- for 2 days", "18"),
        ("#### 18 - wait, it should be 20", "20"), ("#### 1,80,000", "180000"), ("#### 1,80,00", None),
        ("#### 1080,00 \u20ac", "1080"), ("#### 3/4 or 0.75", "0.75"), ("#### 3/4 or 0.8", None),
        ("#### one hundred twenty (120) dollars", "120"), ("#### $5.00/hr", "5"), ("### 18\nBye", "18"),
        ("The answer is not 20 but 18.", "18"), ("18\n\nConfidence: 95%", "18"),
        ("#### 36\n\nI made an error: each has 10, so the total is 30.", "30"),
        ("So far we have 36 eggs.", None), ("So he still needs 4 eggs.", None),
        ("**Final Answer**\n\nSara spends \\$24.", "24"), ("**Answer.** 70", "70"),
        ("So she has 5, so in total 12 eggs.", "12"), ("36 eggs\n\nHope this helps!", "36"),
        ("Hope has 12 apples", None), ("#### 5 of 7 days", "5"),
        ("So he can give each of his 4 friends 9 cards.", "9"),
    ],
)  # fmt: skip
def test_a_last_line_or_sentence_states_a_number_where_it_is_whole(
    text: str, value: str | None
) -> None:
    number = final_number(text)
    assert (number and rational(number)) == (value and rational(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{16} is right, and \boxed{18} is not.", "16"), (r"\boxed{16} is not.", None),
        (r"\boxed{72} \text{ or } \boxed{144}", None), (r"We conclude that $n = 72$.", "72"),
        (r"It is \boxed{72}, though I cannot rule out \boxed{73}.", "72"),
        (r"\boxed{16} is not only the minimum but the answer.", "16"),
        (r"The answer is \boxed{16} rather than \boxed{18}.", "16"),
        (r"I first got \boxed{18}, but no. So the sum is $3+13 = 16$.", "16"),
        (r"I first show that \boxed{70} works.", "70"), (r"Es ist \boxed{16}, nicht \boxed{61}.", "16"),
        (r"\boxed{33}+\boxed{37}=70", "70"), (r"\boxed{33}+\boxed{37}", None),
        (r"\boxed{10} \times \boxed{10} = 100", "100"),
        ("Case 1: \\boxed{16}\nCase 2: \\boxed{66}\nTotal: $16+66 = 82$.", "82"),
        (r"\boxed{70}. Check: $33 + 37 = 70$. Also $1 + 2 = 3$.", "70"),
        ("\\boxed{70}\n\nRemark: for $n=9$ we get \\boxed{88}.", "70"),
        (r"\boxed{70}. Wait, that would be for even $n$. For all it would be \boxed{88}.", "88"),
        (r"If it had been even, it would be \boxed{18}; it is odd, so \boxed{16}.", "16"),
        ("\\boxed{70}\n\nWait, the total is 35.\n\n\\boxed{35", "35"), (r"So \boxed{7", None),
        (r"We have $n = 71$, so \boxed{7", None), (r"\boxed{12\sqrt{3}}. So $m+n = 12+3 = 15$.", "15"),
        ("\\boxed{70}\n\nI double-check with $n=2$: it gives \\boxed{2}.", "70"),
        (r"\boxed{N = 2070}. The remainder when it is divided by 1000 is 70.", "70"),
        (r"\boxed{70}. The remainder of $N$ by 7 is 0.", "70"),
        (r"So there are $70$. $\blacksquare$", "70"),
        (r"\boxed{\sqrt[3]{343000}}", "70"), (r"\boxed{\sqrt{10^{24}}}", "1000000000000"),
        (r"\boxed{2\left(35\right)}", "70"), (r"\boxed{588_{10}}", "588"), (r"\boxed{a_{10}}", None),
        (r"Hence $m+n=33+37=70$.", "70"), (r"So $n = 4k$.", None), (r"So $x = 3$ or $x = 5$.", None),
    ],
)  # fmt: skip
def test_of_several_boxes_the_one_that_the_text_stands_by_counts(
    text: str, value: str | None
) -> None:
    assert boxed_number(text) == value


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: A \u2192 B (option D)", "D"), ("Answer: A -> B", None), ("\u2234 (C)", "C"),
        ("The answer is a bit subtle: (D).", "D"), ("The answer is not clear, (A).", None),
        ("The answer is compound (C).", None), ("The answer is neither (A) nor (B) but (C).", "C"),
        ("The answer, after a check, is (C).", "C"), ("The answer, as I said, is not (C).", None),
        ("A) False B) True", "B"), ("A) True B) True C) False", None), ("**A**: no\n**C**: yes", "C"),
        ("Result: C", "C"), ("Result: A is larger.", None), ("My guess is (C), but (D) is right.", "D"),
        ("The spectrum matches (A) or (B).", None), ("None matches (A).", None), ("(C) it is.", "C"),
        ("(C) it is not.", None), ("That leaves (B) and (D).", None), ("By elimination, (C).", "C"),
        ("The false statement is (B).", "B"), ("(B) is more precise than (A).", None),
        ("This excludes (A), leaving (D).", "D"), ("La respuesta es la opci\u00f3n (B).", "B"),
        ("So E = 4 eV \u2192 Option (B)", "B"), ("I answer (C).", "C"),
        ("(D)\n\nThe units of (A) and (B) are wrong.", "D"), ("(A)\n3 eV\n(B)\n4 eV", None),
        ("(A)\n\nHmm, that is wrong.", None), ("(A)\n\nWait, no. It is (B).", "B"),
        ("D, because it has the right units.", "D"), ("C.\n\nConfidence: B+", "C"),
    ],
)  # fmt: skip
def test_letters_that_a_sentence_ends_with_or_leaves_are_chosen(
    text: str, letter: str | None
) -> None:
    assert final_letter(text, "ABCD") == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B). No, A is wrong.", "B"), ("The answer is (B). No, A and C are wrong.", "B"),
        ("The answer is (A). No, B is correct.", "B"), ("The answer is (A), no doubt.", "A"),
        ("The answer is (A). Actually (B) also fits but has the wrong sign.", "A"),
        ("The answer is (A). Update: B.", "B"), ("The answer is A. Edit: typo.", "A"),
        ("Answer: A; B and C are wrong", "A"), ("Answer: (A); (B) fails.", "A"),
        ("Answer: A to C", None),
        ("Answer: A\n\nQuestion: are you sure? Yes.\nAnswer: A", "A"),
        ("Question: which?\nA) 1\nB) 2\nAnswer: B", "B"), ("(A) 3.2 eV", "A"),
        ("(A) isn't correct.", None), ("A. Wrong.", None), ("B) Not enough information", "B"),
        ("(A) might be made by heat", None), ("The answer is **B** because", "B"),
    ],
)  # fmt: skip
def test_letters_are_chosen_where_they_stand(text: str, letter: str | None) -> None:
    assert final_letter(text, "ABCD") == letter


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The number is 1234567, not 7654321.", "1234567"), ("1234567 or 7654321", None),
        ("The number is 1234567. No, it is 7654321.", "7654321"),
        ("1234567, again 1,234,567", "1234567"),
    ],
)  # fmt: skip
def test_of_two_needles_the_one_that_is_named_counts(text: str, number: str | None) -> None:
    assert seven_digits(text) == number


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (r"\text{The remainder is } 70", "70"),
        (r"\text{The remainder is: } 70", "70"),
        (r"\text{Answer: } 70", "70"),
        (r"\text{answer is } 70", "70"),
        (r"\text{x = } 70", "70"),
        (r"\textbf{The number of ways equals } 70", "70"),
        (r"\text{There are } 70 \text{ ways}", "70"),
        (r"\text{The sum is about } 70", "70"),
        (r"\text{The value is minus } 7", "-7"),
        (r"\text{minus }7", "-7"),
        (r"\text{The remainder is } \frac{140}{2}", "70"),
        (r"\text{not }70", None),
        (r"\text{The remainder is not } 70", None),
        (r"\text{If the remainder is } 70", None),
        (r"\text{The remainder is at most } 70", None),
        (r"\text{The remainder is twice } 70", None),
        (r"\text{The remainder is } 70 \text{ or } 71", None),
        (r"\text{The base is } 2 \text{ and the exponent is } 70", None),
        (r"\text{twice } 70", None),
        (r"\text{Case } 1", None),
    ],
)
def test_words_before_a_number_in_a_box_hide_it_unless_they_name_it(
    content: str, value: str | None
) -> None:
    assert boxed_number(rf"So \boxed{{{content}}}.") == value


@pytest.mark.parametrize(
    ("behind", "letter"),
    [
        ("No, that cannot be.", None),
        ("No, that can't be right.", None),
        ("Wait, that is wrong.", None),
        ("Wait, no, this isn't correct.", None),
        ("Hmm, it is impossible.", None),
        ("No, that cannot be: it is (B).", "B"),
        ("Is (B) possible? No, that cannot be.", "A"),
        ("Wait, let me check: that is right.", "A"),
        ("No, that cannot be improved upon.", "A"),
        ("No other option fits.", "A"),
    ],
)
def test_a_letter_that_the_next_sentence_takes_back_is_not_chosen(
    behind: str, letter: str | None
) -> None:
    assert final_letter(f"The answer is (A). {behind}", "ABCD") == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("I would choose (D), but on reflection, the rearrangement makes (B) the answer.", "B"),
        ("The answer is (A)... hmm, actually no, the sign is flipped, therefore (C).", "C"),
        ("The answer is (C) if we neglect spin, but since we must not, it is (D).", "D"),
        ("The answer is (C) if we neglect spin, as the question says.", "C"),
        ("The answer is (B). Wait, (D) has another sign, and that makes (D) impossible.", "B"),
        ("The answer is (A). Actually, this excludes the others too, therefore (A).", "A"),
    ],
)
def test_a_letter_that_is_reconsidered_gives_way_to_the_one_behind_it(
    text: str, letter: str
) -> None:
    assert final_letter(text, "ABCD") == letter


def test_the_version_is_raised_when_the_rule_changes() -> None:
    """What was scored by another version is read again; where only words changed, none is."""
    folder = Path(extraction.__file__).parent
    code = b"".join((folder / f"{name}.py").read_bytes() for name in MODULES)
    digest = hashlib.sha256(code).hexdigest()[:12]
    assert {extraction.VERSION: digest} == RULE, (
        "raise extraction.VERSION if answers are read otherwise"
    )


@pytest.mark.parametrize("task", ["gsm8k", "svamp", "aime25"])
def test_answers_are_scored_by_their_value_through_the_task(task: str, tmp_path: Path) -> None:
    """Right where the value is the target, wrong where it is not, and without a value otherwise."""
    lines = [line for line in battery() if line["task"] == task and not _is_fraction(line["value"])]
    question = {"aime25": "problem"}.get(task, "question")
    target = {"gsm8k": "#### {}", "svamp": "{}", "aime25": "{}"}[task]
    for wrong in (False, True):
        rows = [
            {question: f"p{i}", "answer": target.format("999" if wrong else line["value"] or "70")}
            for i, line in enumerate(lines)
        ]
        (tmp_path / str(wrong)).mkdir()
        data = write_jsonl(tmp_path / str(wrong) / f"{task}.jsonl", rows)
        found = run(
            task, data.parent, data, lambda r: lines[int(r.prompt.split("\n")[0][1:])]["text"]
        )
        for row, line in zip(found.rows, lines, strict=True):
            assert row.answered == (line["value"] is not None), line
            assert row.score == float(line["value"] is not None and not wrong), line


def _is_fraction(value: str | None) -> bool:
    return value is not None and not value.lstrip("-").isdigit()


def test_lm_evals_own_definitions_read_less() -> None:
    """The forms for which our definitions differ; docs/evaluation.md says why."""
    forms = {
        "gsm8k": {"#### 1. Eggs\n2 + 2\n#### 4": "1"},
        "aime25": {r"\boxed{m+n=70}": "m+n=70"},
        "gpqa_diamond": {"The answer is B.": None},
    }
    for task, texts in forms.items():
        read: Any = lm_evals(task, *texts)
        assert {text: read(text) for text in texts} == texts
    aime: Any = lm_evals("aime25")
    assert aime(r"\boxed{70}, which stands within \boxed{}") != "70"


def test_docs_have_the_table_of_today() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.support.extractors"
    kept = json.loads(RECORD.read_text("utf-8"))
    for name, found in ((BATTERY, kept["right"]), (HELD_OUT, kept["held_out"]["right"])):
        assert {task: len(lines) for task, lines in found.items()} == {
            task: sum(line["task"] == task for line in battery(name)) for task in found
        }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,250", "1250"), ("1 250", "1250"), (r"1\,250", "1250"), ("3 1/2", "3.5"),
        (r"3\frac12", "3.5"),
        (r"\frac{7}{3}", "7/3"), ("-0.50", "-0.5"), (".5", "0.5"), ("007", "7"), ("7 0", "70"),
        (r"\binom{8}{4}", "70"), (r"\sqrt{4900}", "70"), (r"7\sqrt{2}", r"7sqrt"), ("2^10", "1024"),
        ("3 or 4", SEVERAL), ("3, 4", SEVERAL), ("13-15", SEVERAL), ("m=50, n=20", SEVERAL),
        ("m=50, n=20, m+n=70", "70"), ("x < 70", None), ("2x", None), (r"\theta", None), ("", None),
        ("1 000 000", "1000000"), ("1'234", "1234"), ("1_000", "1000"), ("1_0", None), ("½", "0.5"),
        ("2½", "2.5"), ("12k", "12000"), ("3.5 million", "3500000"), ("1.2e3", "1200"), ("3x4", "12"),
        ("1.234,50", "1234.5"), ("11.6, rounded to 12", "12"), ("pi, rounded to 2 places", None),
        ("seventy-two", "72"), (r"\text{ten}", "10"), ("ten men", None),
        ("9^9^9^9", None), ("1/0", None), ("1" * 2000, None), ("a" * 100, None), ("1 1 1 1 1", SEVERAL),
    ],
)  # fmt: skip
def test_numbers(text: str, value: str | None) -> None:
    found = stated_number(text)
    assert found == value or (value == "7sqrt" and found is not None and rational(found) is None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It froze.\n#### \u22124 °C", "-4"),
        ("#### \u22121,250 dollars", "-1250"),
        ("#### minus 9", "-9"),
        ("#### Negative $15", "-15"),
        ("#### 31 minus 9", None),
        ("#### 9", "9"),
    ],
)
def test_a_sign_is_read_as_it_is_written(text: str, value: str | None) -> None:
    assert final_number(text) == value


def test_numbers_are_written_as_they_are_read() -> None:
    for value in starmap(
        Fraction, [(70, 1), (-3, 2), (7, 3), (0, 1), (1, 1000), (-1, 3), (5, 6), (1, 2**60)]
    ):
        assert rational(written(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "#### " * 5000, "#### 1\n" * 5000, "answer to " * 3000, "(A) or " * 5000, r"\boxed{1+" * 3000,
        r"\boxed{" * 3000 + "}" * 3000, "#### " + "1," * 5000, "#### " + "(" * 600, "if " * 9000,
        "$" * 20_000, "<a" * 10_000, "1. " * 9000, "#### 1 " + "a " * 590, "the answer is " * 3000,
        r"would \boxed{1} " * 3000, "so 1 " * 9000, r"\boxed{1}" + "1+" * 9000, r"\boxed{1} + " * 3000,
        "result: A, " * 4000, "matches (A) " * 4000, "seventy " * 150 + "(70)", "Total 5 " * 5000,
        "#### 1 a\n#### 2 b\n" * 3000, r"Case 1: \boxed{1}. Case 2: \boxed{2}. " * 2000,
        "The answer is 5. Wait, let me " * 3000,
    ],
    ids=range(25),
)  # fmt: skip
def test_what_a_damaged_model_repeats_is_read_at_once(text: str) -> None:
    began = time.process_time()
    for read in (boxed_number, final_number):
        read(text)
    final_letter(text, "ABCDEFGHIJ")
    assert time.process_time() - began < 2
