r"""Filters and scores that lm-eval lacks: boxed and equal numbers, GPQA's options and letters.

AIME answers are integers from 0 to 999, so they are compared as integers: "070", "70.0", "70^\circ",
"m+n=70" and "70" are one answer. (lm-eval's aime25 compares strings, and takes only "70" as right.)
GPQA's options are ordered by a hash of question and option. lm-eval shuffles them with the global
random state, so two machines would ask different questions. Only the letter of a GPQA answer is
kept, because the data set's terms ask that its questions are not shown in plain text.
"""

import hashlib
import re
from typing import Any

LETTERS = "ABCD"
# What may come between "answer is" or a box and the letter: spaces, Markdown, brackets, TeX.
# The match never backtracks (*+), since a damaged model may write asterisks for pages.
_MARKUP = r"(?:[\s*_$:({\[\"'`]|\\[(\[]|\\(?:boxed|fbox|text\w*|math\w+)\b)*+"
# A capital that begins no word or formula, or a small letter that ends its phrase (not "a bit").
_LETTER = r"([A-D](?![\w'’-])(?!\s*=)|[a-d](?=\s*(?:[)\]}*$.,;`\"]|\\[)\]]|$)))"
_NOT_ONE_OF_TWO = r"(?![\s)*\]}$]*(?:or|and|/)\s*[*($]*[A-D](?!\w))"
_CHOICE = re.compile(
    r"(?:(?i:answer|option|choice)[\s*_]*+(?::|=|(?i:is|would be|should be|must be))[\s*_]*+"
    r"(?i:option|choice|letter)?|\\(?:boxed|fbox)\s*\{)" + _MARKUP + _LETTER + _NOT_ONE_OF_TWO,
    re.MULTILINE,
)
_ALONE = re.compile(_MARKUP + r"([A-D])[\s*_$)}\]\"'`.]*+(?:\\[)\]])?[\s$.*]*")
_BESIDE_A_NUMBER = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}|\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\bdegrees?\b"
    r"|\\[,;:!() \[\]]|\\(?:text\w*|math\w+|bf|left|right|displaystyle)\b|[\s,$*{}()~]"
)
_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def boxed_integer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    r"""Return exact_match 1 if `results[0]`, a \boxed{} text, states the right integer, else 0.

    lm-eval uses this as `process_results`. ValueError: the data set's answer is not an integer.
    """
    gold = integer(str(doc["answer"]))
    if gold is None:
        raise ValueError(f"the data set's answer {doc['answer']!r} is no integer")
    return {"exact_match": float(integer(results[0]) == gold)}


def equal_numbers(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return exact_match 1 if `results[0]` is the right number, else 0 (as `process_results`)."""
    bare = results[0].replace(",", "").rstrip(".")
    is_number = re.fullmatch(r"-?\d+(\.\d+)?", bare) is not None
    target = doc["answer"] if "answer" in doc else doc["Answer"]
    return {"exact_match": float(is_number and float(bare) == float(target))}


def integer(text: str) -> int | None:
    """Return the integer that `text` states, for example 70 for "m+n=70" or "70°"; else None."""
    bare = _BESIDE_A_NUMBER.sub("", text.rpartition("=")[2]).rstrip(".")
    match = re.fullmatch(r"([+-]?\d{1,1000})(\.0*)?", bare)  # int() refuses more than 4,300
    return int(match[1]) if match else None


def with_sentences(dataset: Any) -> Any:
    """Return IFEval's documents unchanged (as `process_docs`) if NLTK can split sentences.

    ValueError: NLTK lacks punkt_tab, without which IFEval's checks would fail hours later.
    """
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as error:
        raise ValueError("NLTK lacks punkt_tab: `python -m nltk.downloader punkt_tab`") from error
    return dataset


def frozen_options(dataset: Any) -> Any:
    """Return GPQA's documents with options A to D and the right `letter` (as `process_docs`)."""
    return dataset.map(_with_options)


def _with_options(doc: dict[str, str]) -> dict[str, str]:
    options = [doc[name].strip() for name in _OPTIONS]
    order = sorted(options, key=lambda o: hashlib.sha256((doc["Question"] + o).encode()).digest())
    named: dict[str, str] = dict(zip(LETTERS, order, strict=True))
    return named | {"letter": LETTERS[order.index(options[0])]}


def final_choice(answer: str) -> str:
    """Return "(X)" for the last "answer is X" or boxed X; else for a last line "X"; else ""."""
    if letters := _CHOICE.findall(answer):
        return f"({letters[-1].upper()})"
    alone = _ALONE.fullmatch(answer.strip().rpartition("\n")[2])
    return f"({alone[1]})" if alone else ""
