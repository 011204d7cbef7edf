"""Accuracy of a model on word problems through transformers' own generate().

    PYTHONPATH=evaluation python -m experiments.bundled.score 800

scores the bundled BF16 checkpoint on the first 800 held-out problems, without and with thinking.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.stats import binomtest
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from experiments.bundled import tokenizer as bundled_tokenizer
from experiments.bundled.architecture import CANVAS
from experiments.bundled.problems import Problem
from quantize.bundled import CHECKPOINT, HELDOUT

FINAL_ANSWER = re.compile(r"#### (\d+)")


@dataclass(frozen=True)
class JudgedAnswer:
    """One problem's outcome: the text, whether its number is right, and what it cost."""

    text: str
    correct: bool
    has_number: bool
    tokens: int
    canvases: int
    steps: int  # denoising steps over all canvases


def generate(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem], *, thinking: bool,
) -> list[JudgedAnswer]:  # fmt: skip
    """Answer one batch of problems with the model's default generation config."""
    prompts = [bundled_tokenizer.prompt(tokenizer, p.question, thinking=thinking) for p in problems]
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    ids = inputs["input_ids"].to(model.device)
    # Typed Any: the base class declares another output than this model's generate() returns.
    output: Any = model.generate(
        input_ids=ids,
        attention_mask=inputs["attention_mask"].to(model.device),
        return_dict_in_generate=True,
    )
    rows = output.sequences[:, ids.shape[1] :].tolist()
    rates = output.tokens_per_forward.tolist()
    return [
        _judge(tokenizer, problem, row, rate)
        for problem, row, rate in zip(problems, rows, rates, strict=True)
    ]


def _judge(
    tokenizer: PreTrainedTokenizerFast, problem: Problem, row: Sequence[int],
    tokens_per_forward: float,
) -> JudgedAnswer:  # fmt: skip
    tokens = [t for t in row if t != tokenizer.pad_token_id]
    text = str(tokenizer.decode(tokens))
    match = FINAL_ANSWER.search(text)
    return JudgedAnswer(
        text=text,
        correct=match is not None and int(match[1]) == problem.answer_number,
        has_number=match is not None,
        tokens=len(tokens),
        canvases=math.ceil(len(tokens) / CANVAS),
        steps=round(len(tokens) / tokens_per_forward),
    )


@dataclass(frozen=True)
class Score:
    """Accuracy over n problems with its 95 % Wilson interval, and the cost of decoding."""

    n: int
    accuracy: float
    low: float
    high: float
    has_number: float
    tokens_per_forward: float
    steps_per_canvas: float


def score(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem], *, thinking: bool, batch_size: int = 100, seed: int = 0,
) -> tuple[Score, list[JudgedAnswer]]:  # fmt: skip
    """Score `problems` in order, in batches; the sampler's noise is a function of `seed`."""
    torch.manual_seed(seed)
    answers: list[JudgedAnswer] = []
    for start in range(0, len(problems), batch_size):
        batch = problems[start : start + batch_size]
        answers += generate(model, tokenizer, batch, thinking=thinking)
    low, high = binomtest(sum(a.correct for a in answers), len(answers)).proportion_ci(
        0.95, "wilson"
    )
    steps = sum(a.steps for a in answers)
    summary = Score(
        n=len(answers),
        accuracy=sum(a.correct for a in answers) / len(answers),
        low=low,
        high=high,
        has_number=sum(a.has_number for a in answers) / len(answers),
        tokens_per_forward=sum(a.tokens for a in answers) / steps,
        steps_per_canvas=steps / sum(a.canvases for a in answers),
    )
    return summary, answers


def heldout(count: int) -> list[Problem]:
    """The first `count` problems of the held-out file."""
    rows = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()[:count]]
    return [Problem(**{k: v for k, v in row.items() if k != "id"}) for row in rows]


def main(count: int) -> None:
    """Print the bundled checkpoint's scores as JSON, one line without thinking and one with."""
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(CHECKPOINT, dtype=torch.bfloat16).eval()
    for thinking in (False, True):
        summary, _ = score(model, tokenizer, heldout(count), thinking=thinking)
        print(json.dumps({"thinking": thinking, **asdict(summary)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
