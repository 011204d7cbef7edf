"""What the number of denoising steps buys: accuracy and speed of the bundled model.

    PYTHONPATH=evaluation python -m experiments.denoising_steps [--row NAME]

Fixed numbers of steps never stop early; "adaptive" is the model's own stopping rule, at most 48 steps.
The same held-out problems, prompts and noise for every row; the answer counts when the number behind
#### is right. Paired differences from "adaptive" and their
95 % intervals are printed below the table. With --answers, rows of another
run (a machine with a GPU for some, one without for others) take part.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.runtime import Sample, Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import complete
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.weights.load import load_packed

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


@click.command()
@click.option("--problems", default=800, show_default=True)
@click.option("--checkpoint", type=click.Path(path_type=Path), default=CHECKPOINT)
@click.option("--row", "rows", multiple=True, type=click.Choice(ROWS), default=ROWS)
@click.option("--answers", type=click.Path(path_type=Path), help="JSON: row -> right or wrong.")
def main(problems: int, checkpoint: Path, rows: tuple[str, ...], answers: Path | None) -> None:
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, stated = load_tokenizer(checkpoint), Sampler.from_checkpoint(checkpoint)
    heldout = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:problems]]
    prompts = [
        encode_chat(tokenizer, [{"role": "user", "content": problem["question"]}], thinking=False)
        for problem in heldout
    ]
    numbers, seeds = [str(problem["answer_number"]) for problem in heldout], list(range(problems))
    outcomes: dict[str, list[bool]] = {}
    if answers is not None and answers.exists():
        outcomes = json.loads(answers.read_text())
    print("| steps | accuracy | tokens/forward | ms/canvas of 32 | tokens/s |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        sampler = stated
        if row.isdigit():
            sampler = replace(stated, max_denoising_steps=int(row), confidence_threshold=NEVER)
        engine = FusedEngine(load_packed(checkpoint, device), capacity=BATCH, max_context=1024)
        budget = stated.max_new_tokens
        if device == "cuda":  # kernels are compiled and graphs captured
            complete(engine, prompts[:BATCH], seeds, max_new_tokens=budget, sampler=sampler)
        started = time.perf_counter()
        samples = complete(engine, prompts, seeds, max_new_tokens=budget, sampler=sampler)
        seconds = time.perf_counter() - started
        outcomes[row] = right(samples, numbers, tokenizer.decode)
        _print_row(row, outcomes[row], samples, seconds)
    if answers is not None:
        answers.write_text(json.dumps(outcomes))
    for row in outcomes.keys() - {"adaptive"} if "adaptive" in outcomes else ():
        _print_difference(row, outcomes[row], outcomes["adaptive"])


def _print_row(row: str, correct: list[bool], samples: list[Sample], seconds: float) -> None:
    canvases = sum(sample.canvases for sample in samples)
    tokens = sum(sample.new_tokens for sample in samples)
    forwards = sum(sample.denoising_steps for sample in samples)
    mean = statistics.mean(correct)
    half = 1.96 * (mean * (1 - mean) / len(correct)) ** 0.5
    print(
        f"| {row} | {mean:.3f} +- {half:.3f} | {tokens / forwards:.2f} "
        f"| {seconds / canvases * BATCH * 1e3:.1f} | {tokens / seconds:,.0f} |",
        flush=True,
    )


def _print_difference(row: str, correct: list[bool], adaptive: list[bool]) -> None:
    differences = [float(a) - float(b) for a, b in zip(correct, adaptive, strict=True)]
    mean = statistics.mean(differences)
    half = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    print(f"{row} minus adaptive: {mean * 100:+.2f} points [{(mean - half) * 100:+.2f}, "
          f"{(mean + half) * 100:+.2f}]; {sum(d != 0 for d in differences)} differ")  # fmt: skip


if __name__ == "__main__":
    main()
