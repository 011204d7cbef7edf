"""Does it matter what NVFP4 input scales are calibrated on? Three arms, equal token counts.

    clean text      questions with their answers, through the causal encoder alone
    random canvas   a prompt through the encoder, then one uniformly random canvas through the decoder,
                    not self-conditioned: what an unaware calibration pipeline shows this model
    trajectories    the model's own denoising loop: what `quantize calibrate` does

Same NVFP4 weights, W4A4 simulated; only the input scales differ. The token count of an arm is that of
the trajectories of the same seed. Each arm and seed is compared with BF16 twice: KL on the replayed
steps of 64 held-out trajectories, and accuracy on 400 held-out word problems with equal noise.

    PYTHONPATH=evaluation python -m experiments.thesis outputs/thesis   prints docs/thesis.md's tables
    ... outputs/thesis replay      one of the two measurements, `replay` or
    ... outputs/thesis problems    `problems`: they can run side by side

One file a measurement: a killed run continues.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion

from experiments.bundled.problems import Problem
from experiments.bundled.tokenizer import response
from quantize.bundled import CALIBRATION, CHECKPOINT, HELDOUT
from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.progress import say, track
from quantize.recipe import ActivationMode, Calibration, load_recipe
from quantize.run_dir import read_json, write_json
from quantize.runtime import Sampler, generate
from quantize.runtime.chat import encode_chat, load_tokenizer
from quantize.runtime.modules.engine import ModelEngine
from quantize.runtime.modules.inputs import watch_inputs
from quantize.runtime.modules.passes import (
    canvas_length,
    decode_canvas,
    encode_prompts,
    text_config,
)
from quantize.runtime.noise import CounterNoise
from quantize.runtime.ranges import Ranges
from quantize.runtime.trajectory import Prompt, Trajectory, record, record_all
from quantize.schemes import SCHEMES
from quantize.simulate import simulate_activations
from quantize.stages.calibrate import (
    calibrated_modules,
    check_scales,
    fall_back,
    input_scales,
)
from quantize.stages.convert import convert
from quantize.stages.coverage import Coverage
from quantize.stages.fidelity import bootstrap_interval, by_trajectory
from quantize.stages.replay import Compared, replay

Model = DiffusionGemmaForBlockDiffusion
ARMS = ("clean text", "random canvas", "trajectories")
SEEDS = (0, 1, 2)
MODES: tuple[ActivationMode, ...] = ("per_expert", "per_layer")
PROMPTS, BATCH, CANVASES, MIN_TOKENS = 64, 32, 2, 64
BATCH_PROBLEMS = 200
PROBLEMS, TRAJECTORIES = 400, 64  # held-out problems 0..399, and 1000..1063
RECIPE = load_recipe("nvfp4").for_bundled_model()
MODULES = calibrated_modules(CHECKPOINT, RECIPE.quantization)
SAMPLER = Sampler.from_checkpoint(CHECKPOINT)
TOKENIZER = load_tokenizer(CHECKPOINT)


def rows(path: Path) -> list[dict[str, Any]]:
    """Read a jsonl file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def prompt_of(row: Mapping[str, Any], thinking: bool) -> list[int]:
    """Tokenize a problem as a chat."""
    chat = [{"role": "user", "content": row["question"]}]
    return encode_chat(TOKENIZER, chat, thinking=thinking)


def shuffled(seed: int) -> list[dict[str, Any]]:
    """The calibration problems in an order of the seed; every second one is asked to think."""
    problems = rows(CALIBRATION)
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed)).tolist()
    return [problems[i] for i in order]


def clean_text(model: Model, seed: int, budget: int) -> None:
    """Questions with answers through the encoder, cut to exactly `budget` tokens."""
    for index, row in enumerate(shuffled(seed)):
        thinking = index % 2 == 1
        fields = {k: row[k] for k in Problem.__dataclass_fields__}
        answer = TOKENIZER.encode(
            response(Problem(**fields), thinking=thinking), add_special_tokens=False
        )
        ids = (prompt_of(row, thinking) + answer)[:budget]
        encode_prompts(model, [ids])
        budget -= len(ids)
        if budget <= 0:
            return
    raise RuntimeError(f"too few calibration problems: {budget} tokens are missing")


def random_canvas(model: Model, seed: int, budget: int) -> None:
    """One random canvas behind each prompt, until `budget` is reached (within one sample)."""
    problems = shuffled(seed)
    noise = CounterNoise(torch.arange(len(problems)) + (seed << 32))
    for index, row in enumerate(problems):
        prefix = encode_prompts(model, [prompt_of(row, index % 2 == 1)])
        length, vocab = canvas_length(model), text_config(model).vocab_size
        decode_canvas(
            model, prefix, noise.initial_canvas(0, torch.tensor([index]), length, vocab), None
        )
        budget -= prefix.columns + length
        if budget <= 0:
            return
    raise RuntimeError(f"too few calibration problems: {budget} tokens are missing")


def trajectories(model: Model, seed: int, budget: int) -> None:
    """The real loop on 64 prompts; it sets the budget of the other arms."""
    prompts = [
        Prompt(tuple(prompt_of(row, i % 2 == 1)), i % 2 == 1)
        for i, row in enumerate(shuffled(seed)[:PROMPTS])
    ]
    settings = Calibration(
        datasets=["bundled"], prompts=PROMPTS, canvases=CANVASES, thinking=0.5, seed=seed,
        batch_size=BATCH,
    )  # fmt: skip
    record_all(ModelEngine(model), prompts, settings, SAMPLER, title=f"trajectories, seed {seed}")


RUN: dict[str, Callable[[Model, int, int], None]] = {
    "clean text": clean_text,
    "random canvas": random_canvas,
    "trajectories": trajectories,
}


def calibrate_arm(arm: str, seed: int, budget: int) -> dict[str, Any]:
    """Return scales by module, tokens seen, and the experts that fell back."""
    model = load(CHECKPOINT)
    experts: int = text_config(model).num_experts
    ranges, coverage = Ranges(experts), Coverage(experts)
    with watch_inputs(model, ranges.see, coverage.see):
        RUN[arm](model, seed, budget)
    scales, fallbacks = fall_back(input_scales(ranges, MODULES), coverage.tokens, MIN_TOKENS)
    check_scales(scales)
    first = next(iter(coverage.tokens.values()))
    return {
        "tokens": sum(first) // text_config(model).top_k_experts,
        "fallbacks": len(fallbacks),
        "scales": {module: scale.item() for module, scale in scales.items()},
    }


def all_scales(out: Path) -> dict[str, dict[str, Any]]:
    """Calibrate every arm and seed, the trajectories first: they set the token count."""
    path = out / "scales.json"
    if path.exists():
        return read_json(path)
    result: dict[str, dict[str, Any]] = {}
    for seed in SEEDS:
        budget = 0
        for arm in reversed(ARMS):
            found = calibrate_arm(arm, seed, budget)
            budget = budget or found["tokens"]
            result[f"{arm}/{seed}"] = found
            say(f"{arm}, seed {seed}: {found['tokens']} tokens, {found['fallbacks']} fallbacks")
    write_json(path, result)
    return result


def answers(model: Model, title: str) -> list[bool]:
    """Which of the 400 problems the model gets right; every model meets the same noise."""
    problems = rows(HELDOUT)[:PROBLEMS]
    prompts = [prompt_of(row, False) for row in problems]
    order = sorted(range(PROBLEMS), key=lambda i: len(prompts[i]))
    right = [False] * PROBLEMS
    for start in track(range(0, PROBLEMS, BATCH_PROBLEMS), title):
        batch = order[start : start + BATCH_PROBLEMS]
        samples = generate(
            ModelEngine(model),
            [prompts[i] for i in batch],
            batch,
            max_new_tokens=128,
            sampler=SAMPLER,
        )
        for i, sample in zip(batch, samples, strict=True):
            text: str = TOKENIZER.decode(sample.tokens, skip_special_tokens=False)
            number = text.rpartition("####")[2].strip()
            right[i] = "####" in text and number == str(problems[i]["answer_number"])
    return right


def held_out(reference: Model) -> list[Trajectory]:
    """Record BF16 on problems that nothing was calibrated or scored on."""
    chosen = rows(HELDOUT)[1000 : 1000 + TRAJECTORIES]
    prompts = [
        Prompt(tuple(prompt_of(row, i % 2 == 1)), i % 2 == 1) for i, row in enumerate(chosen)
    ]
    seeds = list(range(1000, 1000 + TRAJECTORIES))
    return record(
        ModelEngine(reference), prompts, seeds, sampler=SAMPLER, canvases=CANVASES, held_out=True
    )


def settings() -> Iterator[tuple[str, str | None, ActivationMode]]:
    """(name of the result, key of its scales, mode): BF16, weights only, then every arm."""
    yield "bf16", None, "none"
    yield "weights only", None, "none"
    for mode in MODES:
        for arm in ARMS:
            for seed in SEEDS:
                yield f"{mode}/{arm}/{seed}", f"{arm}/{seed}", mode


def run(out: Path, measurements: Sequence[str]) -> None:
    """Calibrate, measure what is not measured yet."""
    (out / "results").mkdir(parents=True, exist_ok=True)
    scales = all_scales(out)
    with tempfile.TemporaryDirectory() as folder:
        quantized = Path(folder) / "nvfp4"
        convert_once(quantized, scales["trajectories/0"]["scales"], Path(folder))

        def build(name: str) -> Model:
            key, mode = next((key, mode) for each, key, mode in settings() if each == name)
            model = load(CHECKPOINT if name == "bf16" else quantized)
            if key is not None:
                inputs = {m: (SCHEMES["NVFP4"], s) for m, s in scales[key]["scales"].items()}
                simulate_activations(model, inputs, mode)  # pyright: ignore[reportArgumentType]
            return model

        if "replay" in measurements:
            replay_all(out, build)
        if "problems" in measurements:
            for name in missing(out, "problems"):
                right = answers(build(name), f"{name}: problems")
                write_json(result_file(out, name, "problems"), {"right": right})


def missing(out: Path, measurement: str) -> list[str]:
    """The models that have no result yet."""
    return [n for n, _, _ in settings() if not result_file(out, n, measurement).exists()]


def replay_all(out: Path, build: Callable[[str], Model]) -> None:
    """KL and top-1 agreement by trajectory of every model that is missing, side by side."""
    names = missing(out, "replay")
    if not names:
        return
    reference = load(CHECKPOINT)
    compared = [Compared(ModelEngine(build(name))) for name in names]
    found = replay(ModelEngine(reference), compared, held_out(reference), SAMPLER)
    for name, distances in zip(names, found, strict=True):
        kl = by_trajectory(distances, lambda d: d.kl.mean().item())
        top1 = by_trajectory(distances, lambda d: d.agrees.double().mean().item())
        result = {"kl": list(kl.values()), "top1": list(top1.values())}
        write_json(result_file(out, name, "replay"), result)


def result_file(out: Path, name: str, measurement: str) -> Path:
    """Where one measurement of one model lies."""
    return out / "results" / f"{name.replace('/', '-').replace(' ', '-')}.{measurement}.json"


def read_results(out: Path) -> dict[str, Any]:
    """Both measurements of every model."""
    return {
        name: read_json(result_file(out, name, "replay"))
        | read_json(result_file(out, name, "problems"))
        for name, _, _ in settings()
    }


def convert_once(quantized: Path, scales: Mapping[str, float], folder: Path) -> None:
    """Write the NVFP4 checkpoint whose weights all arms share."""
    from safetensors.torch import save_file

    path = folder / "scales.safetensors"
    save_file({f"{m}.input_global_scale": torch.tensor([s]) for m, s in scales.items()}, path)
    source = Checkpoint.open(CHECKPOINT)
    targets = plan_targets(source.tensors, RECIPE.quantization)
    convert(source, targets, quantized, recipe=RECIPE, input_scales=path)


def mean_over_seeds(results: Mapping[str, Any], mode: str, arm: str, what: str) -> list[float]:
    """Mean of a measurement over seeds, by trajectory or problem."""
    by_seed = [results[f"{mode}/{arm}/{seed}"][what] for seed in SEEDS]
    return [sum(map(float, values)) / len(SEEDS) for values in zip(*by_seed, strict=True)]


def cell(values: Sequence[float], scale: float = 1.0, digits: int = 4) -> str:
    """Mean and 95 % bootstrap interval over trajectories or problems."""
    low, high = bootstrap_interval(values)
    mean = sum(values) / len(values)
    return f"{mean * scale:.{digits}f} [{low * scale:.{digits}f}, {high * scale:.{digits}f}]"


def tables(scales: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Markdown: one row a model and mode; differences are paired with the trajectories arm."""
    lines = [
        "| activations | calibrated on | KL, nats x 1000 | minus trajectories | top-1, % | "
        "accuracy, % | minus trajectories, points |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("bf16", "weights only"):
        found = results[name]
        right = [float(value) for value in found["right"]]
        lines.append(
            f"| none | {name} | {cell(found['kl'], 1000, 2)} | | {cell(found['top1'], 100, 2)} | "
            f"{cell(right, 100, 1)} | |"
        )
    for mode in MODES:
        for arm in ARMS:
            mine = {w: mean_over_seeds(results, mode, arm, w) for w in ("kl", "top1", "right")}
            base = {w: mean_over_seeds(results, mode, ARMS[2], w) for w in mine}
            less = {w: [a - b for a, b in zip(mine[w], base[w], strict=True)] for w in mine}
            own = arm == ARMS[2]
            lines.append(
                f"| {mode.replace('_', ' ')} | {arm} | {cell(mine['kl'], 1000, 2)} | "
                f"{'' if own else cell(less['kl'], 1000, 2)} | {cell(mine['top1'], 100, 2)} | "
                f"{cell(mine['right'], 100, 1)} | {'' if own else cell(less['right'], 100, 1)} |"
            )
    lines += ["", "| activations | calibrated on | KL by seed, nats x 1000 | accuracy by seed, % |"]
    lines += ["|---|---|---|---|"]
    for mode in MODES:
        for arm in ARMS:
            found = [results[f"{mode}/{arm}/{seed}"] for seed in SEEDS]
            kls = ", ".join(f"{1000 * sum(f['kl']) / len(f['kl']):.2f}" for f in found)
            right = ", ".join(f"{100 * sum(f['right']) / len(f['right']):.1f}" for f in found)
            lines.append(f"| {mode.replace('_', ' ')} | {arm} | {kls} | {right} |")
    return "\n".join([*lines, "", *scale_table(scales)])


def scale_table(scales: Mapping[str, Any]) -> list[str]:
    """How the calibrated amax of the other arms compares with the trajectories' own, by module."""
    lines = [
        "| calibrated on | tokens | fallbacks | amax / trajectories' amax: 1 %, median, 99 % | "
        "modules below 1/2 | above 2 |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        found = [scales[f"{arm}/{seed}"] for seed in SEEDS]
        base = [scales[f"{ARMS[2]}/{seed}"] for seed in SEEDS]
        ratio = torch.tensor(
            [
                b["scales"][m] / f["scales"][m]
                for f, b in zip(found, base, strict=True)
                for m in MODULES
            ]
        )
        ordered = ratio.sort().values
        quantiles = ", ".join(
            f"{ordered[int(q * (len(ordered) - 1))]:.2f}" for q in (0.01, 0.5, 0.99)
        )
        below, above = (ratio < 0.5).float().mean(), (ratio > 2).float().mean()
        lines.append(
            f"| {arm} | {', '.join(str(f['tokens']) for f in found)} | "
            f"{', '.join(str(f['fallbacks']) for f in found)} | {quantiles} | {100 * below:.1f} % | "
            f"{100 * above:.1f} % |"
        )
    return lines


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/thesis")
    if len(sys.argv) > 2:
        run(folder, [sys.argv[2]])
    else:
        run(folder, ["replay", "problems"])
        print(tables(read_json(folder / "scales.json"), read_results(folder)))
