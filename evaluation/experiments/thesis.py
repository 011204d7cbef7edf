"""Does it matter what an NVFP4 checkpoint is calibrated on? Three sources, equal token counts.

    clean text      questions with their answers, through the causal encoder alone
    random canvas   a prompt through the encoder, then one uniformly random canvas through the decoder,
                    not self-conditioned: what an unaware calibration pipeline shows this model
    trajectories    the model's own denoising loop: what `quantize calibrate` and `round` do

Each source and seed gives input scales and Hessians, of which three models are made:

    scales    weights rounded to nearest, activations in 4 bits under the source's scales
    hessians  weights rounded by GPTQ on the source's Hessians, activations in BF16
    both      those weights, activations in 4 bits under the source's scales

All Linears are NVFP4, activations have one scale a layer. The token count of a source is that of the
trajectories of the same seed. Models are compared by their KL from BF16 on the replayed steps of 128
held-out trajectories, averaged over seeds.

    PYTHONPATH=evaluation python -m experiments.thesis OUT   (docs/thesis.md's tables)

One file a measurement: a killed run continues.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from fused_dequant.sampler.canvas import random_tokens
from safetensors.torch import save_file

from experiments.bundled.problems import Problem
from experiments.bundled.tokenizer import response
from experiments.held_out import BATCH, kl_of, prompt_of
from experiments.rounding import VARIANTS, recipe_of
from quantize.bundled import CALIBRATION, CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.host.files import read_json, write_json
from quantize.host.progress import say
from quantize.recipe.sections import Calibration
from quantize.runtime import Sampler, open
from quantize.runtime.engine.interface import Engine
from quantize.runtime.prompt.chat import load_tokenizer
from quantize.runtime.record.ranges import Ranges
from quantize.runtime.record.trajectory import Prompt, record_all
from quantize.schemes.hessians import Hessians
from quantize.schemes.modes import ActivationMode
from quantize.stages.calibrate import calibrate as calibration
from quantize.stages.calibrate.coverage import Coverage
from quantize.stages.convert.convert import convert
from quantize.stages.fidelity.fidelity import bootstrap_interval
from quantize.stages.round_weights.round_weights import round_layers, units_of

SOURCES = ("clean text", "random canvas", "trajectories")
SEEDS = (0, 1, 2)
CANVASES, MIN_TOKENS = 2, 64
# What is made of a source -> how its weights are rounded, and its activations.
MADE: dict[str, tuple[str, ActivationMode]] = {
    "scales": ("nearest", "per_layer"),
    "hessians": ("gptq", "none"),
    "both": ("gptq", "per_layer"),
}
COMPARISONS = len(MADE) * (len(SOURCES) - 1)
RECIPE = recipe_of(VARIANTS["w4a4-gptq"], 1)
SAMPLER = Sampler.from_checkpoint(CHECKPOINT)
TOKENIZER = load_tokenizer(CHECKPOINT)


def shuffled(seed: int) -> list[dict[str, Any]]:
    """Return the calibration problems in a random order that `seed` determines."""
    problems = [json.loads(line) for line in CALIBRATION.read_text("utf-8").splitlines()]
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed)).tolist()
    return [problems[i] for i in order]


def clean_text(engine: Engine, index: int, row: dict[str, Any], _: int, budget: int) -> int:
    """Encode a question with its answer, cut to `budget` tokens; return how many tokens were read."""
    thinking = index % 2 == 1
    problem = Problem(**{k: row[k] for k in Problem.__dataclass_fields__})
    answer = TOKENIZER.encode(response(problem, thinking=thinking), add_special_tokens=False)
    ids = (prompt_of(row, thinking) + answer)[:budget]
    engine.passes([ids])
    return len(ids)


def random_canvas(engine: Engine, index: int, row: dict[str, Any], seed: int, _: int) -> int:
    """Encode a prompt, decode a random canvas after it; return how many tokens were read."""
    prompt = prompt_of(row, index % 2 == 1)
    passes = engine.passes([prompt])
    seeds = torch.tensor([index + (seed << 32)])
    canvas = random_tokens(seeds, 0, passes.canvas_length, passes.vocabulary)
    passes.decode([0], canvas.to(passes.device), None)
    return len(prompt) + passes.canvas_length


def show(engine: Engine, source: str, seed: int, budget: int, prompts: int) -> None:
    """Show a source to the model; the tokens of `trajectories` become the other sources' budget."""
    if source == SOURCES[-1]:
        return trajectories(engine, seed, prompts)
    for index, row in enumerate(shuffled(seed)):
        budget -= (clean_text if source == SOURCES[0] else random_canvas)(
            engine, index, row, seed, budget
        )
        if budget <= 0:
            return None
    raise click.ClickException(f"too few calibration problems: {budget} tokens are missing")


def trajectories(engine: Engine, seed: int, prompts: int) -> None:
    """Denoise `prompts` problems."""
    chosen = [
        Prompt(tuple(prompt_of(row, i % 2 == 1)), i % 2 == 1)
        for i, row in enumerate(shuffled(seed)[:prompts])
    ]
    settings = Calibration(
        datasets=["bundled"], prompts=prompts, canvases=CANVASES, thinking=0.5, seed=seed,
        batch_size=min(BATCH, prompts),
    )  # fmt: skip
    record_all(engine, chosen, settings, SAMPLER, title=f"trajectories, seed {seed}")


def calibrate(folder: Path, source: str, seed: int, budget: int, prompts: int, device: str) -> int:
    """Write scales, GPTQ codes and two models from a source to `folder`; return its token count."""
    engine = open(CHECKPOINT, device=device, activations="none", capacity=BATCH)
    checkpoint = Checkpoint.open(CHECKPOINT)
    text = checkpoint.config["text_config"]
    experts: int = text["num_experts"]
    targets = plan_targets(checkpoint.tensors, RECIPE.quantization)
    units = units_of(targets)
    hessians = Hessians([unit.reads for unit in units], experts)
    ranges, coverage = Ranges(experts), Coverage(experts)
    with torch.no_grad(), engine.watching(ranges.see, coverage.see, hessians.see):
        show(engine, source, seed, budget, prompts)
    modules = calibration.calibrated_modules(CHECKPOINT, RECIPE.quantization)
    made = calibration.input_scales(ranges, modules)
    scales, fallbacks = calibration.fall_back(made, coverage.tokens, MIN_TOKENS)
    calibration.check_scales(scales)
    folder.mkdir(parents=True)
    path = folder / calibration.SCALES
    save_file({f"{m}.{calibration.INPUT_SCALE}": s for m, s in scales.items()}, path)
    round_layers(folder, units, checkpoint, repeat(hessians))
    for rounding, rounded in (("nearest", None), ("gptq", folder)):
        convert(
            checkpoint, targets, folder / rounding, recipe=RECIPE, input_scales=path, rounded=rounded
        )  # fmt: skip
    tokens = sum(next(iter(coverage.tokens.values()))) // text["top_k_experts"]
    facts = {"tokens": tokens, "fallbacks": len(fallbacks)}
    write_json(folder / "seen.json", facts)
    say(f"{source}, seed {seed}: {tokens} tokens, {len(fallbacks)} experts fell back")
    return tokens


def arms() -> Iterator[tuple[str, str, int]]:
    """Yield (key of MADE, source, seed) for every model that is compared with BF16."""
    for what in MADE:
        for source in SOURCES:
            for seed in SEEDS:
                yield what, source, seed


def folder_of(out: Path, source: str, seed: int) -> Path:
    """Return where the calibration of a source lies."""
    return out / f"{source.replace(' ', '-')}-{seed}"


def calibrate_all(out: Path, prompts: int, device: str) -> None:
    """Calibrate every source and seed, the trajectories first: they set the token count."""
    for seed in SEEDS:
        budget = 0
        for source in reversed(SOURCES):
            folder = folder_of(out, source, seed)
            if (folder / "seen.json").exists():
                tokens = read_json(folder / "seen.json")["tokens"]
            else:
                tokens = calibrate(folder, source, seed, budget, prompts, device)
            budget = budget or tokens


def replay_all(out: Path, count: int, device: str) -> dict[str, list[float]]:
    """Return each model's KL in nats on every trajectory; a model's key is like 'both/clean text/0'."""
    path = out / "kl.json"
    if path.exists():
        return read_json(path)
    models: list[tuple[Path, ActivationMode]] = []
    for what, source, seed in arms():
        rounding, mode = MADE[what]
        models.append((folder_of(out, source, seed) / rounding, mode))
    names = ("/".join(map(str, arm)) for arm in arms())
    result = dict(zip(names, kl_of(models, count, device), strict=True))
    write_json(path, result)
    return result


def over_seeds(kl: dict[str, list[float]], what: str, source: str) -> list[float]:
    """Return each trajectory's KL from BF16, averaged over the seeds; `what` is a key of MADE."""
    by_seed = [kl[f"{what}/{source}/{seed}"] for seed in SEEDS]
    return [mean(values) for values in zip(*by_seed, strict=True)]


def interval(values: Sequence[float], confidence: float = 0.95, digits: int = 2) -> str:
    """Return the bootstrap interval of a mean over trajectories."""
    low, high = bootstrap_interval(values, confidence)
    return f"[{low:+.{digits}f}, {high:+.{digits}f}]"


def table(kl: dict[str, list[float]]) -> list[str]:
    """Return Markdown with a row for each key of MADE and source; differences are paired."""
    strict = 1 - 0.05 / COMPARISONS
    lines = [
        f"| made | source | KL x 1000 | trajectories minus this, 95 % | {100 * strict:.2f} % | "
        "ratio of geometric means | by seed |",
        "|---|---|---:|---|---|---|---|",
    ]
    for what in MADE:
        last = over_seeds(kl, what, SOURCES[-1])
        for source in SOURCES:
            ratios = over_seeds(kl, what, source)
            by_seed = [mean(kl[f"{what}/{source}/{seed}"]) for seed in SEEDS]
            seeds = ", ".join(f"{1000 * nats:.2f}" for nats in by_seed)
            row = f"| {what} | {source} | {1000 * mean(ratios):.2f} |"
            if source == SOURCES[-1]:
                lines.append(f"{row} | | | {seeds} |")
                continue
            less = [1000 * (a - b) for a, b in zip(last, ratios, strict=True)]
            logs = [math.log(a / b) for a, b in zip(last, ratios, strict=True)]
            low, high = map(math.exp, bootstrap_interval(logs))
            ratio = f"{math.exp(mean(logs)):.2f} [{low:.2f}, {high:.2f}]"
            lines.append(
                f"{row} {mean(less):+.2f} {interval(less)} | {interval(less, strict)} | {ratio} | "
                f"{seeds} |"
            )
    return lines


def seen_table(out: Path) -> list[str]:
    """Return Markdown: how many tokens each source had, and how many experts fell back, by seed."""
    lines = ["| source | tokens | experts that fell back |", "|---|---|---|"]
    for source in SOURCES:
        facts = [read_json(folder_of(out, source, seed) / "seen.json") for seed in SEEDS]
        columns = (", ".join(str(f[key]) for f in facts) for key in ("tokens", "fallbacks"))
        lines.append(f"| {source} | {' | '.join(columns)} |")
    return lines


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--prompts", default=128, show_default=True, help="Of the trajectories.")
@click.option("--trajectories", "count", default=128, show_default=True, help="Held out.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(out: Path, prompts: int, count: int, device: str) -> None:
    """Calibrate, replay, print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    calibrate_all(out, prompts, device)
    print("\n".join([*table(replay_all(out, count, device)), "", *seen_table(out)]))


if __name__ == "__main__":
    main()
