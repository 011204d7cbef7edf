r"""What lm-eval's own filters cannot do: integers in \boxed{}, and GPQA's options and letters.

AIME answers are integers from 0 to 999, so they are compared as integers: "070", "70.0" and "70" are
one answer (lm-eval's aime25 compares strings and calls the first two wrong). GPQA's options get an
order that depends on their text alone (lm-eval shuffles them with the global random state, so two
machines ask different questions), and of an answer only its letter is ever kept: the data set's terms
ask that its questions are not shown in plain text.
"""

import hashlib
import re
from typing import Any

LETTERS = "ABCD"
_CHOICE = re.compile(r"answer is:?\s*\**\s*\(?([A-D])\b", re.IGNORECASE)
_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def boxed_integer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    r"""Score the content of the last \boxed{} (lm-eval's `process_results`)."""
    return {"exact_match": float(integer(results[0]) == int(doc["answer"]))}


def equal_numbers(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score a number against the document's answer, by value (lm-eval's `process_results`)."""
    bare = results[0].replace(",", "").rstrip(".")
    is_number = re.fullmatch(r"-?\d+(\.\d+)?", bare) is not None
    target = doc["answer"] if "answer" in doc else doc["Answer"]
    return {"exact_match": float(is_number and float(bare) == float(target))}


def integer(text: str) -> int | None:
    """Return the integer that `text` spells, None when it spells none."""
    bare = re.sub(r"\\[,;! ]|\\text|[\s,$*{}]", "", text).rstrip(".")
    match = re.fullmatch(r"([+-]?\d+)(\.0*)?", bare)
    return int(match[1]) if match else None


def frozen_options(dataset: Any) -> Any:
    """Give each GPQA document the fields A, B, C, D and `letter` (lm-eval's `process_docs`)."""
    return dataset.map(_with_options)


def _with_options(doc: dict[str, str]) -> dict[str, str]:
    options = [doc[name].strip() for name in _OPTIONS]
    order = sorted(options, key=lambda o: hashlib.sha256((doc["Question"] + o).encode()).digest())
    return dict(zip(LETTERS, order, strict=True)) | {"letter": LETTERS[order.index(options[0])]}


def final_choice(answer: str) -> str:
    """Return the last "answer is (X)" of an answer as "(X)", or nothing."""
    letters = _CHOICE.findall(answer)
    return f"({letters[-1].upper()})" if letters else ""
