"""What the number of denoising steps buys: accuracy and speed of the bundled model on a GPU.

    python evaluation/denoising_steps.py [--problems 800] [--checkpoint FOLDER]

Fixed numbers of steps never stop early; "adaptive" is the model's own stopping rule, at most 48 steps.
The same held-out problems, prompts and noise for every row; the answer counts when the number behind
#### is right. The fused runtime answers all rows; the last one is the reference runtime (transformers'
modules, counter noise) with the adaptive rule, for which accuracy must agree within noise: the paired
difference and its 95 % t-interval are printed below the table.
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
from quantize.load import load
from quantize.runtime import Sample, Sampler, generate
from quantize.runtime.chat import encode_chat, load_tokenizer
from quantize.runtime.engine import complete
from quantize.runtime.fused_engine import FusedEngine
from quantize.runtime.packed import load_packed

NEVER = 1e-30
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
def main(problems: int, checkpoint: Path) -> None:
    """Print the table."""
    tokenizer, own = load_tokenizer(checkpoint), Sampler.from_checkpoint(checkpoint)
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:problems]]
    prompts = [
        encode_chat(tokenizer, [{"role": "user", "content": row["question"]}], thinking=False)
        for row in rows
    ]
    numbers, seeds = [str(row["answer_number"]) for row in rows], list(range(problems))
    engine = FusedEngine(load_packed(checkpoint, "cuda"), capacity=BATCH, max_context=1024)
    budget = own.max_new_tokens
    print("| steps | runtime | accuracy | tokens/forward | ms/canvas of 32 | tokens/s |")
    print("|---|---|---:|---:|---:|---:|")
    found: dict[str, list[bool]] = {}

    def report(steps: str, runtime: str, samples: list[Sample], seconds: float) -> None:
        found[f"{steps} {runtime}"] = correct = right(samples, numbers, tokenizer.decode)
        canvases = sum(sample.canvases for sample in samples)
        tokens = sum(sample.new_tokens for sample in samples)
        forwards = sum(sample.denoising_steps for sample in samples)
        mean = statistics.mean(correct)
        half = 1.96 * (mean * (1 - mean) / len(correct)) ** 0.5
        print(
            f"| {steps} | {runtime} | {mean:.3f} +- {half:.3f} | {tokens / forwards:.2f} "
            f"| {seconds / canvases * BATCH * 1e3:.1f} | {tokens / seconds:,.0f} |",
            flush=True,
        )

    for steps in ("10", "20", "48", "adaptive"):
        fixed = {} if steps == "adaptive" else {"confidence_threshold": NEVER}
        count = own.max_denoising_steps if steps == "adaptive" else int(steps)
        sampler = replace(own, max_denoising_steps=count, **fixed)
        complete(engine, prompts[:BATCH], seeds, max_new_tokens=budget, sampler=sampler)
        started = time.perf_counter()
        samples = complete(engine, prompts, seeds, max_new_tokens=budget, sampler=sampler)
        report(steps, "fused", samples, time.perf_counter() - started)
    model = load(checkpoint, dtype=torch.float32, device="cuda")
    started, samples = time.perf_counter(), list[Sample]()
    for start in range(0, problems, BATCH):
        part = slice(start, start + BATCH)
        samples += generate(model, prompts[part], seeds[part], max_new_tokens=budget, sampler=own)
    report("adaptive", "reference, float32", samples, time.perf_counter() - started)
    pairs = zip(found["adaptive fused"], found["adaptive reference, float32"], strict=True)
    differences = [float(a) - float(b) for a, b in pairs]
    half = 1.96 * statistics.stdev(differences) / problems**0.5
    mean = statistics.mean(differences)
    print(f"fused minus reference: {mean * 100:+.2f} points [{(mean - half) * 100:+.2f}, "
          f"{(mean + half) * 100:+.2f}]")  # fmt: skip


if __name__ == "__main__":
    main()
