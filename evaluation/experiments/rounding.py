"""What each choice of an NVFP4 recipe costs on the bundled model: the tables of docs/rounding.md.

    PYTHONPATH=evaluation python -m experiments.rounding OUT [make] [replay] [answers] [table]

make      a checkpoint a variant: calibrated, rounded and converted as `quantize run` does it
replay    KL from BF16 on held-out trajectories, teacher-forced, in float32, in every activation mode
answers   held-out problems, several answers each, the same noise for every model
table     what is measured so far; right answers of another server (OUT/served/VARIANT.json, `right` a
          string of 0 and 1, one a problem) are paired with the first of ours

One file a measurement: a killed run goes on. `--only VARIANT` shares the answers among processes.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import click
import torch

from experiments.bundled.score import FINAL_ANSWER
from experiments.held_out import BATCH, kl_of
from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.host.files import read_json, write_json
from quantize.host.progress import say
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Quantization, Recipe
from quantize.recovery.samples import Request, Waiting, sample_seed
from quantize.runtime import Placement
from quantize.runtime.sampler.sampler import Sampler
from quantize.schemes.modes import ACTIVATION_MODES, ActivationMode
from quantize.stages.calibrate.calibrate import SCALES, calibrate
from quantize.stages.convert.convert import convert
from quantize.stages.evaluate.local_model import Answerer
from quantize.stages.fidelity.fidelity import bootstrap_interval
from quantize.stages.round_weights.round_weights import round_weights

MEASURES = ("make", "replay", "answers", "table")
TOKENS = 128  # the most an answer may take


@dataclass(frozen=True)
class Variant:
    """The schemes of a layer's parts, and how their weights are rounded."""

    experts: str = "NVFP4"
    mlp: str = "NVFP4"
    attention: str = "NVFP4"
    rounding: str = "nearest"

    def quantization(self) -> Quantization:
        """Return the section of a recipe that gives these schemes."""
        scheme: dict[str, list[str]] = {}
        for part, name in (
            ("experts", self.experts), ("mlp", self.mlp), ("self_attn", self.attention),
        ):  # fmt: skip
            scheme.setdefault(name, []).append(rf"re:.*\.{part}\..*")
        ignore = load_recipe("nvfp4").quantization.ignore
        return Quantization.model_validate(
            {"scheme": scheme, "ignore": ignore, "rounding": self.rounding}
        )


VARIANTS = {
    "w4a4": Variant(),
    "w4a4-gptq": Variant(rounding="gptq"),
    "a16": Variant(attention="NVFP4A16"),
    "a16-gptq": Variant(attention="NVFP4A16", rounding="gptq"),
    "a16dense-gptq": Variant(attention="NVFP4A16", mlp="NVFP4A16", rounding="gptq"),
    "fp8": Variant(attention="FP8_DYNAMIC"),
    "fp8-gptq": Variant(attention="FP8_DYNAMIC", rounding="gptq"),
    "fp8-a16mlp-gptq": Variant(attention="FP8_DYNAMIC", mlp="NVFP4A16", rounding="gptq"),
    "fp8mlp": Variant(attention="FP8_DYNAMIC", mlp="FP8_DYNAMIC"),
    "fp8mlp-gptq": Variant(attention="FP8_DYNAMIC", mlp="FP8_DYNAMIC", rounding="gptq"),
    "allfp8": Variant(*3 * ["FP8_DYNAMIC"]),
    "allfp8-gptq": Variant(*3 * ["FP8_DYNAMIC"], rounding="gptq"),
    "int8": Variant(*3 * ["INT8_DYNAMIC"]),
    "int8-gptq": Variant(*3 * ["INT8_DYNAMIC"], rounding="gptq"),
}
# What answers problems, the most telling first.
ANSWERED: tuple[tuple[str, ActivationMode], ...] = (
    ("bf16", "none"), ("w4a4", "per_layer"), ("a16-gptq", "per_layer"), ("a16", "per_layer"),
    ("fp8-gptq", "per_layer"), ("a16dense-gptq", "per_layer"), ("fp8-a16mlp-gptq", "per_layer"),
    ("w4a4-gptq", "per_layer"), ("a16-gptq", "none"), ("a16dense-gptq", "none"), ("w4a4", "none"),
    ("a16-gptq", "per_expert"), ("w4a4", "per_expert"), ("fp8mlp-gptq", "per_layer"),
    ("fp8mlp", "per_layer"), ("fp8mlp", "none"), ("a16-gptq", "fp8"), ("fp8mlp", "fp8"),
    ("w4a4", "fp8"),
)  # fmt: skip


def recipe_of(variant: Variant, prompts: int) -> Recipe:
    """Return the bundled model's NVFP4 recipe with a variant's schemes and rounding."""
    base = load_recipe("nvfp4").for_bundled_model()
    assert base.calibration is not None
    calibration = base.calibration.model_copy(update={"prompts": prompts})
    changes = {"quantization": variant.quantization(), "calibration": calibration}
    return base.model_copy(update=changes)


def make(out: Path, variant: Variant, prompts: int, device: str) -> None:
    """Write a variant to OUT/checkpoint, its calibration and rounded weights to folders beside it."""
    recipe = recipe_of(variant, prompts)
    source = Checkpoint.open(CHECKPOINT)
    targets = plan_targets(source.tensors, recipe.quantization)
    if recipe.needs_calibration and not (out / "calibration").exists():
        calibrate(CHECKPOINT, recipe, out / "calibration", Placement(device))
    rounded = out / "rounded" if variant.rounding == "gptq" else None
    if rounded is not None and not rounded.exists():
        round_weights(source, targets, recipe, rounded, Placement(device))
    if not (out / "checkpoint").exists():
        scales = out / "calibration" / SCALES if recipe.needs_calibration else None
        convert(
            source, targets, out / "checkpoint", recipe=recipe, input_scales=scales, rounded=rounded
        )


def replay_all(
    out: Path, names: Sequence[str], modes: Sequence[ActivationMode], count: int, device: str
) -> None:
    """Replay (variant, mode) pairs that have no file yet, all at once; write their KL by trajectory."""
    pairs = [
        (name, mode, out / "replay" / f"{name}-{mode}.json") for name in names for mode in modes
    ]
    waiting = [pair for pair in pairs if not pair[2].exists()]
    models = [(out / name / "checkpoint", mode) for name, mode, _ in waiting]
    (out / "replay").mkdir(exist_ok=True)
    made = kl_of(models, count, device) if models else []
    for (*_, path), kl in zip(waiting, made, strict=True):
        write_json(path, {"kl": kl})


def answer(
    out: Path, name: str, mode: ActivationMode, problems: int, repeats: int, device: str
) -> None:
    """Let a model answer problems; write which answers are right to OUT/answers/NAME-MODE.json."""
    path = out / "answers" / f"{name}-{mode}.json"
    if path.exists():
        return
    rows = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()[:problems]]
    requests = {
        Request(row["question"], sample_seed(0, row["question"], repeat), TOKENS): (repeat, at)
        for repeat in range(repeats)
        for at, row in enumerate(rows)
    }
    folder = CHECKPOINT if name == "bf16" else out / name / "checkpoint"
    place = Placement(device, activations=mode)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    model = Answerer(folder, "", sampler, place, capacity=BATCH)
    right = [[False] * len(rows) for _ in range(repeats)]
    tokens = steps = 0
    started = time.monotonic()
    for request, done in model(Waiting(list(requests), iter(requests))):
        repeat, at = requests[request]
        number = FINAL_ANSWER.search(done.text)
        right[repeat][at] = number is not None and int(number[1]) == rows[at]["answer_number"]
        tokens, steps = tokens + done.tokens, steps + sum(done.denoising_steps)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"right": right, "tokens": tokens, "steps": steps})
    say(f"{name}, {mode}: {len(requests)} answers in {time.monotonic() - started:.0f} s")


def per_problem(right: Sequence[Sequence[bool]]) -> list[float]:
    """Return the share of right answers of each problem, from [repeats][problems]."""
    return [mean(map(float, answers)) for answers in zip(*right, strict=True)]


def differing(mine: Sequence[float], base: Sequence[float], scale: float) -> str:
    """Return the mean of scale x (mine - base) over pairs, and its 95 % bootstrap interval, as text."""
    differences = [scale * (a - b) for a, b in zip(mine, base, strict=True)]
    low, high = bootstrap_interval(differences)
    return f"{mean(differences):+.2f} [{low:+.2f}, {high:+.2f}]"


def table(out: Path, base: str = "w4a4") -> list[str]:
    """Return what is measured as Markdown; KL is compared with that of the variant `base`.

    Raises:
        click.ClickException: nothing is measured yet.
    """
    shown = [
        f"| variant | activations | KL x 1000 | minus {base} | of {base} | minus none |",
        "|---|---|---:|---|---:|---|",
    ]
    kl = {path.stem: read_json(path)["kl"] for path in sorted((out / "replay").glob("*.json"))}
    for name, by_mode in kl.items():
        variant, mode = name.rsplit("-", 1)
        theirs, none = kl.get(f"{base}-{mode}", by_mode), kl.get(f"{variant}-none", by_mode)
        shown.append(
            f"| {variant} | {mode} | {1000 * mean(by_mode):.2f} | {differing(by_mode, theirs, 1000)} | "
            f"{mean(by_mode) / mean(theirs):.3f} | {differing(by_mode, none, 1000)} |"
        )
    shown += [
        "",
        "| variant | activations | accuracy | minus BF16, points | minus none | steps a token |",
        "|---|---|---:|---|---|---:|",
    ]
    made = {path.stem: read_json(path) for path in sorted((out / "answers").glob("*.json"))}
    for name, by_mode in made.items() if "bf16-none" in made else ():
        variant, mode = name.rsplit("-", 1)
        bf16 = made["bf16-none"]
        mine, theirs = per_problem(by_mode["right"]), per_problem(bf16["right"])
        none = per_problem(made.get(f"{variant}-none", by_mode)["right"])
        steps = by_mode["steps"] / by_mode["tokens"] / (bf16["steps"] / bf16["tokens"]) - 1
        shown.append(
            f"| {variant} | {mode} | {mean(mine):.4f} | {differing(mine, theirs, 100)} | "
            f"{differing(mine, none, 100)} | {steps:+.1%} |"
        )
    shown += [
        "",
        "| served elsewhere | accuracy | ours | minus ours, points |",
        "|---|---:|---:|---|",
    ]
    for path in sorted((out / "served").glob("*.json")):
        theirs = [float(bit) for bit in read_json(path)["right"]]
        if by_mode := made.get(f"{path.stem}-none"):
            ours = [float(right) for right in by_mode["right"][0][: len(theirs)]]
            less = differing(theirs, ours, 100)
            shown.append(f"| {path.stem} | {mean(theirs):.4f} | {mean(ours):.4f} | {less} |")
    if not kl and not made:
        raise click.ClickException(f"{out}: nothing is measured there yet")
    return shown


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("measures", nargs=-1, type=click.Choice(MEASURES))
@click.option("--only", multiple=True, type=click.Choice(["bf16", *VARIANTS]))
@click.option(
    "--mode", "modes", multiple=True, type=click.Choice(ACTIVATION_MODES), default=ACTIVATION_MODES
)
@click.option(
    "--base", default="w4a4", show_default=True, help="Variant of the table's differences."
)
@click.option("--prompts", default=256, show_default=True, help="Of the calibration.")
@click.option("--trajectories", default=128, show_default=True)
@click.option("--problems", default=2000, show_default=True)
@click.option("--repeats", default=8, show_default=True, help="Answers a problem.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    out: Path, measures: tuple[str, ...], only: tuple[str, ...], modes: tuple[ActivationMode, ...],
    base: str, prompts: int, trajectories: int, problems: int, repeats: int, device: str,
) -> None:  # fmt: skip
    """Do what `measures` names, in the order make, replay, answers, table; by default all of them."""
    chosen = set(measures or MEASURES)
    names = [name for name in VARIANTS if not only or name in only]
    out.mkdir(parents=True, exist_ok=True)
    for name in names if "make" in chosen else ():
        make(out / name, VARIANTS[name], prompts, device)
    if "replay" in chosen:
        replay_all(out, names, modes, trajectories, device)
    for name, mode in ANSWERED if "answers" in chosen else ():
        if name not in (*names, "bf16") or mode not in modes:
            continue
        if not only or name in only:
            answer(out, name, mode, problems, repeats, device)
    if "table" in chosen:
        print("\n".join(table(out, base)))


if __name__ == "__main__":
    main()
