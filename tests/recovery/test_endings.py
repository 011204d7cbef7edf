r"""How answers end, and what is read from them: 60 endings a task as models write them.

The last lines only, made up; no question of any benchmark. A box or phrase that comes later overrides
an earlier one; what cannot be read is no answer rather than a guess. `test_battery.py` has answers of
all tasks, with the value that a careful human reads in them.
"""

import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quantize.recovery.filters import boxed_integer, final_choice, integer
from quantize.recovery.rows import Row
from quantize.recovery.samples import Completion, Finished, SampleStore, Waiting
from quantize.recovery.scoring import score, size
from quantize.recovery.sequential import Part

GOLD = 336  # of every AIME ending below; None: no answer, False: another one
AIME: list[tuple[str, bool | None]] = [
    (r"\boxed{336}", True), (r"$\boxed{336}$", True), (r"$$\boxed{336}$$", True),
    (r"\[\boxed{336}\]", True), (r"\(\boxed{336}\).", True), (r"**\boxed{336}**", True),
    (r"Thus the sum is $\boxed{336}.$", True), (r"\boxed{336}" + "\n\nI hope this helps.", True),
    (r"\boxed{336^\circ}", True), (r"$\boxed{336^{\circ}}$", True), (r"\boxed{336°}", True),
    (r"\boxed{336\degree}", True), (r"\boxed{336 \text{ degrees}}", True),
    (r"\boxed{336\text{ cm}}", True), (r"\boxed{336\,\mathrm{units}}", True),
    (r"\boxed{0336}", True), (r"\boxed{336.0}", True), (r"\boxed{336.}", True),
    (r"\boxed{ 336 }", True), (r"\boxed {336}", True), (r"\boxed{+336}", True),
    (r"\boxed{\text{336}}", True), (r"\boxed{\textbf{336}}", True), (r"\boxed{\mathbf{336}}", True),
    (r"\boxed{\textbf{(336)}}", True), (r"\boxed{\mathbf{\text{336}}}", True),
    (r"\boxed{{336}}", True), (r"\boxed{\displaystyle 336}", True), (r"\fbox{336}", True),
    (r"\boxed{m+n=336}", True), (r"\boxed{m + n = 320 + 16 = 336}", True),
    (r"\boxed{x = 336}", True), (r"\boxed{a+b+c=336^\circ}", True),
    (r"\boxed{\text{Answer: }336}", True), (r"\boxed{$336$}", True),
    (r"\boxed{\left(336\right)}", True),
    (r"First \boxed{12}, but corrected: \boxed{336}", True),
    (r"\boxed{336}" + "\n\n**Final answer:** " + r"$\boxed{336}$", True),
    (r"Since $\boxed{x}$ is a box, $\boxed{336}$", True), (r"\boxed{\!336}", True),
    (r"\boxed{337}", False), (r"\boxed{33}", False), (r"\boxed{3360}", False), (r"\boxed{-336}", False),
    (r"\boxed{336.5}", False), (r"\boxed{336/1}", True), (r"\boxed{\frac{336}{1}}", True),
    (r"\boxed{2^{336}}", False), (r"\boxed{336\sqrt{2}}", False), (r"\boxed{336\pi}", False),
    (r"\boxed{336, 337}", None), (r"\boxed{336}, no: \boxed{12}", False), (r"\boxed{m+n}", None),
    (r"\boxed{?}", None), (r"\boxed{}", None),
    ("The answer is 336.", True), ("**336**", True), ("336", True), (r"\boxed{336", None), ("", None),
]  # fmt: skip

GPQA: list[tuple[str, str]] = [
    ("The answer is (C)", "C"), ("The answer is (C).", "C"), ("the answer is C", "C"),
    ("The answer is C.", "C"), ("The answer is: C", "C"), ("The answer is **C**", "C"),
    ("The answer is **(C)**.", "C"), ("**The answer is (C)**", "C"), ("The answer is *C*", "C"),
    ("The answer is `C`", "C"), ('The answer is "C"', "C"), ("The answer is [C]", "C"),
    (r"The answer is \(C\)", "C"), (r"The answer is \(\text{C}\).", "C"), ("The answer is $C$", "C"),
    (r"The answer is $\boxed{C}$", "C"), (r"The answer is \boxed{(C)}", "C"),
    (r"The answer is $\mathbf{(C)}$", "C"), ("The answer is (C) 3.5 eV", "C"),
    ("The answer is C) the second one", "C"), ("The answer is option C", "C"),
    ("The correct answer is choice (C).", "C"), ("The correct option is C", "C"),
    ("Correct choice: C", "C"), ("Answer: C", "C"), ("**Answer:** C", "C"), ("**Answer**: (C)", "C"),
    ("### Answer: **C**", "C"), ("Final Answer: C", "C"), ("ANSWER: C", "C"), ("Answer = C", "C"),
    ("The answer should be (C)", "C"), ("The answer would be C.", "C"), ("the Answer is: c.", "C"),
    ("The answer is (c)", "C"), (r"$\boxed{C}$", "C"), (r"\boxed{C}", "C"),
    (r"\[\boxed{\text{C}}\]", "C"),
    (r"So $\boxed{\textbf{(C)}}$", "C"), (r"\(C\)", "C"), ("Therefore:\n(C)", "C"),
    ("So:\n\n**C**", "C"),
    ("Thus\n$C$", "C"), ("The answer is (A). No: the answer is (C)", "C"),
    (r"\boxed{A} was wrong. The answer is (C)", "C"), (r"The answer is (A)? No, \boxed{C}", "C"),
    ("The answer is C because A is unstable", "C"), ("The answer is\n\n(C)", "C"),
    ("The answer is a bit subtle; I think C", ""), ("The answer is a matter of taste", ""),
    ("The answer is not (C)", ""), ("The answer is (B) or (C)", ""), ("The answer is Cobalt", ""),
    ("The answer is CO2", ""), ("The answer is C-H activation", ""), (r"\boxed{C = 3}", ""),
    (r"\boxed{\text{Cobalt}}", ""), ("A or C", ""), ("I choose the third one.", ""), ("", ""),
]  # fmt: skip


def test_there_are_60_endings_a_task() -> None:
    for table in (AIME, GPQA):
        assert len(table) == len({text for text, _ in table}) == 60


def test_aime_endings(tmp_path: Path) -> None:
    data = tmp_path / "aime25.jsonl"
    rows = [{"problem": f"p{i}", "answer": r"336^\circ"} for i in range(len(AIME))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = _score("aime25", tmp_path, data, lambda i: AIME[i][0])
    read = [None if not row.answered else bool(row.score) for row in found]
    wrong = [(text, r) for (text, right), r in zip(AIME, read, strict=True) if r is not right]
    assert wrong == []


@pytest.mark.parametrize(("text", "letter"), GPQA)
def test_gpqa_endings(text: str, letter: str) -> None:
    assert final_choice(f"(A) is unstable, (B) too.\n{text}") == (f"({letter})" if letter else "")


def test_gpqa_endings_are_scored_by_their_letter(tmp_path: Path) -> None:
    """Through the task itself: an ending that says C is right where C is."""
    data = tmp_path / "gpqa_diamond.csv"
    names = ["Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    with data.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([f"p{i}", *(f"o{i}.{j}" for j in range(4))] for i in range(60))
    found = _score("gpqa_diamond", tmp_path, data, lambda i: GPQA[i][0])
    for row, (_, letter) in zip(found, GPQA, strict=True):
        assert row.score == float(bool(letter) and row.target == f"({letter})")
        assert row.answered == bool(letter)


def _score(task: str, folder: Path, data: Path, answer: Callable[[int], str]) -> list[Row]:
    def generate(requests: Waiting) -> Iterator[Finished]:
        for request in requests:
            asked = int(request.prompt.split("\n")[0][1:])
            yield request, Completion(answer(asked), 5, [1], False)

    found = score(
        task,
        SampleStore(folder / "samples.jsonl", {}),
        generate,
        Part(range(size(task, data)[0]), range(1)),
        data_file=data,
        seed=0,
        sampler={},
        progress=lambda finished, _: finished,
    )
    assert found is not None
    return found.rows


def test_a_gold_answer_that_is_no_integer_is_a_fault_of_the_data() -> None:
    assert boxed_integer({"answer": r"336^\circ"}, ["336"]) == {"exact_match": 1.0}
    assert boxed_integer({"answer": 336}, ["336"]) == {"exact_match": 1.0}
    with pytest.raises(ValueError, match="'x' is no integer"):
        boxed_integer({"answer": "x"}, ["x"])
    assert integer("") is None


@pytest.mark.parametrize(
    "text",
    [
        "1" * 5000, "0." + "0" * 5000, "The answer is" + "*" * 20_000, "Answer: " + " " * 20_000 + "x",
        "A" + "*" * 20_000 + "x", "A" + " $" * 10_000 + "x", r"\boxed{" * 1000,
    ],
    ids=["digits", "zeros", "asterisks", "spaces", "a letter", "dollars", "boxes"],
)  # fmt: skip
def test_what_a_damaged_model_repeats_is_no_answer_at_once(text: str) -> None:
    """Not a ValueError of int(), which takes 4,300 digits, and no minutes of backtracking."""
    began = time.process_time()
    assert integer(text) in (None, 0)
    assert final_choice(text) == ""
    assert time.process_time() - began < 1
