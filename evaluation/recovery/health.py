"""Health of answers: counts, for both models, the faults that users of damaged models report.

  empty          nothing follows the thoughts
  no_value       no final value is found
  open_thought   thoughts begin and are not closed
  cut            the token limit ended the answer
  never_stopped  a canvas took the most denoising steps allowed
  stutter        16 words or more, and at least a tenth of their 8-grams (of words) are repetitions
  loop           the text ends in a cycle: at least 64 characters, and three times the same piece

Signs of the text (`OF_TEXT`) are found when an answer is made, since a private task keeps no text;
the other signs follow from what is stored of an answer. A sign is judged like accuracy, by the same
estimand and at the same interim looks. Let d be the number of points by which the sign is more
frequent in the candidate's answers than in BF16's. The sign passes if d >= limit is excluded, and
fails if d <= limit is excluded.

A recipe may set the limits. The default is half the task's margin: an empty answer costs as much as
a wrong one, and one sign may not use up the margin. If half the margin is below 5 units (answers
or questions, whichever the estimand counts), the default is the lesser of 5 units and the margin.
With a limit below 5 units, one answer of the candidate with the sign by chance would prevent PASS:
P(Poisson(5) <= 1) is 4.0 %. `never_stopped` and `loop` have no default: `max_step_inflation` judges
the cost of the first, and a text with a loop has the sign `stutter`, or is cut.

Let s be the share of BF16's answers that have the sign. If s / 2 exceeds the limit, s / 2 is the
limit instead. With the smaller limit, healthy models with a frequent sign would stay undecided. The
mean of y - 1.5 x is then judged: x is 1 if BF16's answer has the sign, else 0; y is the same for
the candidate's answer.

For simulated error rates see docs/evaluation.md.
"""

import re

import numpy as np

from quantize.recovery.estimands import (
    Estimand,
    Floats,
    Number,
    limits,
    margin_p_values,
    total,
    unseen_p,
)
from quantize.recovery.terms import Sign, Terms

SIGNS = {
    "empty": "empty",
    "no_value": "without a final value",
    "open_thought": "with thoughts not closed",
    "cut": "cut at the token limit",
    "stutter": "repeating themselves",
    "loop": "ending in a loop",
    "never_stopped": "with a canvas that never stopped",
}
OF_TEXT = {"empty", "open_thought", "stutter", "loop"}
UNJUDGED = {"never_stopped", "loop"}  # unless a recipe names a limit
ROOM = 5  # a default limit is at least this many units, or the margin
MORE = 0.5  # part of its frequency in BF16's answers that a sign may gain, if more than its limit
THINKING, END_OF_THINKING = "<|channel>", "<channel|>"
_CONTROL = re.compile(r"<\|?[a-z_]+\|?>")
_GRAM, _LEAST_WORDS, _REPEATED = 8, 16, 0.1
_LEAST_LOOP, _PERIODS = 64, 3  # characters of a loop, and how often it repeats


def without_thinking(text: str) -> str:
    """Return the text after the last closed thinking channel, and before one that is not closed."""
    return text.rpartition(END_OF_THINKING)[2].partition(THINKING)[0]


def text_signs(text: str) -> list[str]:
    """Return the signs of ill health (of OF_TEXT) in an answer's whole text, thoughts included."""
    words = text.split()
    grams = [tuple(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)]
    shown = {
        "empty": not _CONTROL.sub("", without_thinking(text)).strip(),
        "open_thought": THINKING in text.rpartition(END_OF_THINKING)[2],
        "stutter": len(words) >= _LEAST_WORDS and 1 - len({*grams}) / len(grams) >= _REPEATED,
        "loop": loops(text),
    }
    return [sign for sign, is_shown in shown.items() if is_shown]


def loops(text: str) -> bool:
    """Return whether a text ends in a cycle, whatever its period; the last turn of it may be cut."""
    text = _CONTROL.sub("", text)
    return _ends_in_cycle(text) or _ends_in_cycle(text.rstrip())


def _ends_in_cycle(text: str) -> bool:
    end, start = text[-_LEAST_LOOP // 2 :], len(text)
    while (start := text.rfind(end, 0, start + len(end) - 1)) >= 0:  # the end comes before, too
        period = len(text) - len(end) - start
        if (span := max(_PERIODS * period, _LEAST_LOOP)) > len(text):
            break
        if period and text[-span:-period] == text[period - span :]:
            return True
    return False


def limits_of(terms: Terms, units: int) -> dict[str, float | None]:
    """Return sign -> points by which it may be more frequent than with BF16; None: not judged.

    `units` is the planned number of answers or of questions, whichever the estimand counts.
    """
    default = min(terms.margin_pp, max(terms.margin_pp / 2, 100 * ROOM / max(1, units)))
    limits = dict.fromkeys(SIGNS) if terms.health_pp is None else terms.health_pp
    return {sign: limits.get(sign, None if sign in UNJUDGED else default) for sign in SIGNS}


def compare_sign(base: Floats, quantized: Floats, terms: Terms, limit_pp: float | None) -> Sign:
    """Return a `Sign` for paired answers; tables [n, k] hold 1 if an answer has the sign, else 0."""
    less = total(base - quantized, terms.estimand)  # a sign that is more frequent is a loss
    low, high = (100 * float(end) for end in limits(less, (1 + terms.confidence) / 2))
    judged = (None, None, None)
    if limit_pp is not None:
        judged = tuple(map(float, sign_p_values(base, quantized, terms.estimand, limit_pp)))
    shares = float(base.mean()), float(quantized.mean())
    difference = 100 * (shares[1] - shares[0])
    return Sign(*shares, difference, max(-high, -100.0), min(-low, 100.0), *judged)


def sign_p_values(
    base: Floats, quantized: Floats, estimand: Estimand, limit_pp: float
) -> tuple[Number, Number, Number]:
    """Return the limit in points, then the p-values of "at least the limit" and "at most the limit".

    Tables [..., n, k] hold 1 if an answer has the sign, else 0; results have the shape [...].
    """
    relative_pp = 100 * MORE * base.mean((-2, -1))
    absolute = margin_p_values(total(base - quantized, estimand), limit_pp)
    ratio = total((1 + MORE) * base - quantized, estimand)  # BF16's own frequency is noisy, too
    below, above = margin_p_values(ratio, 0.0, allowed_pp=relative_pp)
    # Questions not seen, in which only BF16 shows the sign, would offset an excess: each by 1 + MORE.
    unseen = unseen_p(ratio.units, 100 * -ratio.mean / (1 + MORE - ratio.mean))
    at_least = np.where(relative_pp > limit_pp, below, absolute[0])[()]
    # BF16's share may be seen too low by chance: only an excess above both limits is above the larger.
    at_most = np.maximum(np.maximum(above, unseen), absolute[1])
    return np.maximum(limit_pp, relative_pp), at_least, at_most
