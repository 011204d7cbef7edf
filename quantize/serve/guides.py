"""Guides an answer of the server: holds it to a form, and records log-probabilities.

For each position, the committed token and the most probable tokens are recorded. Log-probabilities
are at temperature 1, from the logits of the step at which the canvas was committed. They depend on
the whole canvas as it was before that step, not only on the text to the left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.runtime.sampler.known_tokens import GuideVerdict
from quantize.serve.constraint import Constraint

ROWS = 32  # positions whose logits are processed together


@dataclass(frozen=True)
class Scored:
    """A committed token, its log-probability, and `top`: pairs (token, logprob), best first."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


class AnswerGuide:
    """Guides one answer, in canvases of `length` tokens; `constraint` None allows any text.

    It records each committed token and the `top` most probable tokens; nothing if `top` is None.
    """

    def __init__(self, length: int, constraint: Constraint | None, top: int | None) -> None:
        self._length, self.constraint, self.top = length, constraint, top
        self.scored: list[Scored] = []

    def lead(self) -> Sequence[int]:
        """Return the tokens that the next canvas must begin with; [] if it may begin freely."""
        return [] if self.constraint is None else self.constraint.lead(self._length)

    def settle(self, logits: Tensor, tokens: list[int]) -> GuideVerdict:
        """Return the verdict on a finished canvas; if it is committed, record log-probabilities."""
        held = self.constraint
        verdict = GuideVerdict(tokens) if held is None else held.settle(logits, tokens)
        if self.top is not None and verdict.keep is None:
            self.scored += scored(logits, verdict.tokens, self.top)
        return verdict


def scored(logits: Tensor, tokens: Sequence[int], top: int) -> list[Scored]:
    """Return one `Scored` per token, from logits [L, V], with the `top` most probable tokens."""
    scores: list[Scored] = []
    for start in range(0, len(tokens), ROWS):
        drawn = torch.tensor(tokens[start : start + ROWS], device=logits.device)
        chances = logits[start : start + ROWS].float().log_softmax(-1)
        best = chances.topk(top)
        columns = (drawn, chances.gather(-1, drawn[:, None])[:, 0], best.indices, best.values)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        scores += [Scored(t, p, list(zip(ids, ps, strict=True))) for t, p, ids, ps in rows]
    return scores
