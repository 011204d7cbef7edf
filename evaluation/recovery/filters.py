r"""Filters and scores that lm-eval lacks: equal numbers, chosen letters, last matches, GPQA's options.

What an answer states is read by `extraction` and `letters`; lm-eval's own filters take the first or
the last match of an expression, whether or not it holds an answer. Numbers are compared by value:
"070", "70.0", "70^\circ", "m+n=70" and "70" are one answer. (lm-eval's aime25 compares strings, and
takes only "70" as right.) GPQA's options are ordered by a hash of question and option. lm-eval
shuffles them with the global random state, so two machines would ask different questions. Only the
letter of a GPQA answer is kept, because the data set's terms ask that its questions are not shown in
plain text.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from quantize.recovery.extraction import boxed_number, final_number, last_match, seven_digits
from quantize.recovery.letters import final_letter
from quantize.recovery.numerals import rational, stated_number
from quantize.recovery.rows import NO_ANSWER

LETTERS = "ABCD"
_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@register_filter("stated_answer")
class StatedAnswer(Filter):
    r"""The filter of our tasks and of recipes' own: what each answer states, "[invalid]" if nothing.

    `form` is what the prompt asks for: "final_number" (`#### N`), "boxed_number" (`\boxed{N}`),
    "seven_digits", "option" (one of `letters`), or "match" (of `regex_pattern`, its one group).
    """

    def __init__(self, form: str, letters: str = "", regex_pattern: str = "()") -> None:
        self.read: Callable[[str], str | None] = {
            "final_number": final_number,
            "boxed_number": boxed_number,
            "seven_digits": seven_digits,
            "option": partial(final_letter, letters=letters),
            "match": partial(last_match, regex_pattern),
        }[form]

    def apply(self, resps: Iterable[Sequence[str]], docs: Any) -> list[list[str]]:
        """Return what is read of each document's answers."""
        return [[self.read(text) or NO_ANSWER for text in texts] for texts in resps]


def boxed_integer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return exact_match 1 if `results[0]` states the right integer, else 0 (as `process_results`).

    Raise ValueError: the data set's answer is not an integer.
    """
    gold = integer(str(doc["answer"]))
    if gold is None:
        raise ValueError(f"the data set's answer {doc['answer']!r} is no integer")
    return {"exact_match": float(integer(results[0]) == gold)}


def equal_numbers(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return exact_match 1 if `results[0]` is the right number, else 0 (as `process_results`).

    Raise ValueError: the data set's answer is not a number.
    """
    target = str(doc["answer"] if "answer" in doc else doc["Answer"])
    gold = _number(target)
    if gold is None:
        raise ValueError(f"the data set's answer {target!r} is no number")
    return {"exact_match": float(_number(results[0]) == gold)}


def integer(text: str) -> int | None:
    """Return the integer that `text` states, for example 70 for "m+n=70" or "70°"; else None."""
    number = _number(text)
    return int(number) if number is not None and number.denominator == 1 else None


def _number(text: str) -> Fraction | None:
    return rational(stated_number(text) or "")


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
    """Return the option that an answer to GPQA chooses as "(X)", or ""."""
    letter = final_letter(answer, LETTERS)
    return f"({letter})" if letter else ""
