"""What denoising steps buy, by their number or with reuse: accuracy and speed of the bundled model.

    PYTHONPATH=evaluation python -m experiments.denoising_steps [--row NAME]

Fixed numbers of steps never stop early; "adaptive" is the model's own stopping rule, at most 48 steps.
Other rows are rules of `experiments.reuse` under that stopping rule; their times say nothing. Problems,
prompts and noise are the same for every row; an answer is right if the number behind #### is. Paired
differences from "adaptive" and their 95 % intervals are printed below the table. With --answers, rows
of another run (a machine with a GPU for some, one without for others) take part.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import click
import torch

from experiments.held_out import prompt_of
from experiments.reuse import Reusing, rule_named
from experiments.rounding import differing
from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.runtime import Sample, Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.generate import generate
from quantize.runtime.engine.interface import complete
from quantize.runtime.prompt.chat import load_tokenizer
from quantize.runtime.weights.load import TextWeights, load_packed

NEVER = 1e-30
ROWS = ("10", "20", "48", "adaptive")
BATCH = 32


def right(
    samples: Sequence[Sample], numbers: Sequence[str], decode: Callable[[list[int]], str]
) -> list[bool]:
    """Whether each sample ends in the right number."""
    texts = [decode(sample.tokens) for sample in samples]
    return [
        "####" in text and text.rsplit("####", 1)[1].strip().replace(",", "") == number
        for text, number in zip(texts, numbers, strict=True)
    ]


def answered(
    weights: TextWeights, prompts: Sequence[list[int]], sampler: Sampler, reusing: Reusing | None
) -> tuple[list[Sample], float]:
    """Return answers and the seconds that they took; `reusing` is the engine, if not the usual one."""
    seeds, how = range(len(prompts)), {"max_new_tokens": sampler.max_new_tokens, "sampler": sampler}
    if reusing is not None:
        torch.set_num_threads(1)
        starts = range(0, len(prompts), reusing.capacity)
        batches = [slice(start, start + reusing.capacity) for start in starts]
        made = [generate(reusing, prompts[some], seeds[some], **how) for some in batches]
        return [sample for batch in made for sample in batch], math.nan
    engine = FusedEngine(weights, capacity=BATCH, max_context=1024)
    if weights.device.type == "cuda":  # kernels are compiled and graphs captured
        complete(engine, prompts[:BATCH], seeds, **how)
    started = time.perf_counter()
    samples = complete(engine, prompts, seeds, **how)
    return samples, time.perf_counter() - started


@click.command()
@click.option("--problems", default=800, show_default=True)
@click.option("--checkpoint", type=click.Path(path_type=Path), default=CHECKPOINT)
@click.option("--row", "rows", multiple=True, default=ROWS, show_default=True)
@click.option("--answers", type=click.Path(path_type=Path), help="JSON: row -> right or wrong.")
def main(problems: int, checkpoint: Path, rows: tuple[str, ...], answers: Path | None) -> None:
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, stated = load_tokenizer(checkpoint), Sampler.from_checkpoint(checkpoint)
    heldout = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:problems]]
    prompts = [prompt_of(problem, False, checkpoint) for problem in heldout]
    numbers = [str(problem["answer_number"]) for problem in heldout]
    weights = load_packed(checkpoint, device)
    rules = {row: rule_named(row, weights) for row in rows if row not in ROWS}
    outcomes: dict[str, list[bool]] = {}
    if answers is not None and answers.exists():
        outcomes = json.loads(answers.read_text())
    print("| steps | accuracy | tokens/forward | ms/canvas of 32 | tokens/s |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        sampler = stated
        if row.isdigit():
            sampler = replace(stated, max_denoising_steps=int(row), confidence_threshold=NEVER)
        reusing = Reusing(weights, sampler, rules[row]) if row in rules else None
        samples, seconds = answered(weights, prompts, sampler, reusing)
        outcomes[row] = right(samples, numbers, tokenizer.decode)
        shown = f"{row} ({reusing.share:.3f} computed)" if reusing is not None else row
        _print_row(shown, outcomes[row], samples, seconds)
    if answers is not None:
        answers.write_text(json.dumps(outcomes))
    for row in outcomes.keys() - {"adaptive"} if "adaptive" in outcomes else ():
        _print_difference(row, outcomes[row], outcomes["adaptive"])


def _print_row(row: str, correct: list[bool], samples: list[Sample], seconds: float) -> None:
    canvases = sum(sample.canvases for sample in samples)
    tokens = sum(sample.new_tokens for sample in samples)
    forwards = sum(sample.denoising_steps for sample in samples)
    accuracy = mean(correct)
    half = 1.96 * (accuracy * (1 - accuracy) / len(correct)) ** 0.5
    print(
        f"| {row} | {accuracy:.3f} +- {half:.3f} | {tokens / forwards:.2f} "
        f"| {seconds / canvases * BATCH * 1e3:.1f} | {tokens / seconds:,.0f} |",
        flush=True,
    )


def _print_difference(row: str, correct: list[bool], adaptive: list[bool]) -> None:
    differ = sum(a != b for a, b in zip(correct, adaptive, strict=True))
    print(f"{row} minus adaptive: {differing(correct, adaptive, 100)} points; {differ} differ")


if __name__ == "__main__":
    main()
