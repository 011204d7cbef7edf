"""Scored samples: a `Row` is one answer to a document, a `Scoring` all rows of a task and model."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quantize.recovery.catalog import is_private
from quantize.recovery.health import loops, text_signs

Answer = tuple[int, int]  # (index of a question in its data set, index of a repeat)
NO_ANSWER = "[invalid]"  # lm-eval's regex filter returns this when nothing matches


@dataclass(frozen=True)
class Row:
    """One scored sample; `scores` maps each lm-eval filter to its score, 0 to 1."""

    doc_id: int
    repeat: int
    doc_hash: str
    prompt_hash: str
    target: str
    answer: str
    scores: dict[str, float]
    seed: int
    text: str
    tokens: int
    denoising_steps: list[int]
    truncated: bool
    signs: list[str] | None = None
    kind: str | None = None  # what kind of prompt its question says that it is

    def health(self, most_steps: float) -> set[str]:
        """Return the answer's signs of ill health; `most_steps` is the limit on a canvas' steps."""
        in_row = {
            "no_value": not self.answered,
            "cut": self.truncated,
            "never_stopped": any(steps >= most_steps for steps in self.denoising_steps),
        }
        return {*self.signs_of_text, *(sign for sign, shown in in_row.items() if shown)}

    @cached_property
    def signs_of_text(self) -> set[str]:
        """The signs that the text shows; samples of earlier versions name no loops."""
        signs = text_signs(self.text) if self.signs is None else self.signs
        return {*signs, *(["loop"] if loops(self.text) else [])}

    @property
    def score(self) -> float:
        """The task's score of this sample, 0 to 1: the one of lm-eval's first filter."""
        return next(iter(self.scores.values()))

    @property
    def answered(self) -> bool:
        """Whether an answer could be extracted from the text."""
        return self.answer.strip() not in ("", NO_ANSWER)


@dataclass(frozen=True)
class Scoring:
    """All rows of a task on one model."""

    task: str  # name of the task
    rows: list[Row]  # scored samples, by document, then repeat
    conditions: dict[str, Any]  # what must be equal for two scorings to be compared
    made_with: dict[str, Any]  # what made the samples: model, activations, hardware

    @property
    def private(self) -> bool:
        """Whether the task's questions and answers must not be shown."""
        return is_private(self.task) or bool(self.conditions.get("private"))

    def by_question(
        self, value: Callable[[Row], Any] = lambda row: row.score
    ) -> dict[str, list[Any]]:
        """Return document's name -> list of `value(row)`, one per repeat; by default the scores."""
        values: dict[str, list[Any]] = {}
        for row in self.rows:
            values.setdefault(self.names[row.doc_id], []).append(value(row))
        return values

    @cached_property
    def names(self) -> dict[int, str]:
        """Index of a document in its data set -> the document's name, "INDEX-HASH"."""
        return {row.doc_id: f"{row.doc_id}-{row.doc_hash}" for row in self.rows}

    @property
    def answered(self) -> set[Answer]:
        """(index of the document, repeat) of every row."""
        return {(row.doc_id, row.repeat) for row in self.rows}

    def only(self, answers: Set[Answer]) -> "Scoring":
        """Return a scoring with only the rows of `answers`, which are (document, repeat) pairs."""
        return self._of([row for row in self.rows if (row.doc_id, row.repeat) in answers])

    def and_more(self, other: "Scoring") -> "Scoring":
        """Return a scoring with the rows of both; `other` has further answers to the same task."""
        rows = sorted([*self.rows, *other.rows], key=lambda row: (row.doc_id, row.repeat))
        return self._of(rows)

    def _of(self, rows: list[Row]) -> "Scoring":
        return replace(self, rows=rows, conditions=self.conditions | asked(rows))


def asked(rows: Sequence[Row]) -> dict[str, Any]:
    """Return conditions of a comparison: the rows' seeds, and hashes of documents and prompts."""
    first = {row.doc_id: row for row in reversed(rows)}
    return {
        "documents": [first[doc].doc_hash for doc in sorted(first)],
        "prompts": [first[doc].prompt_hash for doc in sorted(first)],
        "seeds": [row.seed for row in rows],
    }
