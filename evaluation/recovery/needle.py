"""A needle in a haystack: questions about a number that a long text states once, at varying depth.

A text depends only on its index, its length and the number of questions, so all machines ask the
same questions. A word has one token or more, and a prompt is some words longer than its text.
So the prompt of a text of 1,024 words exceeds the sliding window of 1,024 tokens.
"""

import random
from typing import Any

import datasets

WORDS = [
    "river", "house", "light", "morning", "paper", "table", "garden", "window", "story", "music",
    "letter", "summer", "market", "bridge", "teacher", "captain", "forest", "silver", "winter",
    "carries", "follows", "remembers", "between", "under", "slowly", "often", "quiet", "the",
]  # fmt: skip
ASKED = "In the text below one number belongs to the name {name}. Remember it.\n\n{text}\n\n"
QUESTION = "Which number belongs to the name {name}? Answer with the number alone."


def questions(words: int, questions: int, **_: Any) -> dict[str, datasets.Dataset]:
    """Return lm-eval's `custom_dataset`: `questions` documents on texts of about `words` words."""
    rows = [_question(index, words, index / max(questions - 1, 1)) for index in range(questions)]
    return {"test": datasets.Dataset.from_list(rows)}


def _question(index: int, words: int, depth: float) -> dict[str, str]:
    """Return prompt and number of one text; `depth` 0 puts the number first, 1 puts it last."""
    drawn = random.Random(f"needle {words} {index}")
    name = f"{drawn.choice(WORDS)}-{drawn.choice(WORDS)}"
    number = str(drawn.randrange(1_000_000, 10_000_000))
    sentences = [" ".join(drawn.choices(WORDS, k=8)).capitalize() + "." for _ in range(words // 8)]
    needle = f"The number of the name {name} is {number}."
    sentences.insert(round(depth * len(sentences)), needle)
    asked = ASKED.format(name=name, text=" ".join(sentences)) + QUESTION.format(name=name)
    return {"prompt": asked, "number": number}
