"""What lowers `nvfp4`'s damage at equal bytes: other Hessians, learned scales, learned codes.

    PYTHONPATH=evaluation:tests/support python -m experiments.learned OUT [--on tell --commit HASH]

An arm starts from codes and scales (rounded to nearest, or by GPTQ on Hessians whose rows are weighted
in some way), may learn from there by gradients straight through the rounding, and ends as a checkpoint
that the product's `convert` writes and this replays. Fit, choose and tell are three disjoint sets of
trajectories: arms fit on calibration prompts, are chosen on held-out problems that were looked at
before, and are told on 384 or more others, drawn with their noise by the hash of a commit.

One file a measurement, OUT/SET/SEED-ARM.json; a killed run goes on.
"""

import json
import random
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import click
import torch
from fused_dequant.formats import (
    FP8_MAX,
)
from modules_oracle.opening import open_modules
from safetensors.torch import save_file

from experiments.damage import Model, Rows, distances, kl_of, rows_of
from experiments.learning import (
    Arm,
    Learning,
    Rowing,
    Student,
    bf16_model,
    dequantized,
    key_of,
    learn_end,
    learn_layers,
    observed,
    weight_of,
)
from experiments.rounding import Variant, differing, recipe_of
from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.host.files import read_json, write_json
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.record.trajectory import Prompt, Trajectory, record
from quantize.runtime.sampler.sampler import Sampler
from quantize.schemes.rounding import E2M1_MAX, global_scale
from quantize.stages.calibrate.calibrate import INPUT_SCALE, SCALES
from quantize.stages.convert.convert import convert
from quantize.stages.prompts import load_prompts
from quantize.stages.round_weights.round_weights import (
    Done,
    Unit,
    round_unit,
    units_of,
    write_layer,
)

CHOOSE = range(1000, 1384)  # of the held-out problems: those that earlier tables were made on
TELL = range(1384, 2000)
SHARE = 16  # trajectories that a process records at once
FACTORS = (0.5, 0.71, 1.41, 2.0, 4.0)  # of input scales that are tried


ARMS = {
    "w4a4": Arm("NVFP4", rows=None),
    "nearest": Arm(rows=None),
    "nvfp4": Arm(),
    "nvfp4-512": Arm(prompts=512),
    # Rows of Hessians, and inputs as the quantized model has them.
    **{name: Arm(rows=name) for name in get_args(Rowing) if name != "plain"},
    "mix-half": Arm(mix=0.5),
    "mix": Arm(mix=1.0),
    # Scales alone.
    "nearest-scales-layer": Arm(rows=None, learn="scales", by="layer"),
    "nearest-scales-end": Arm(rows=None, learn="scales"),
    "scales-layer": Arm(learn="scales", by="layer"),
    "kept-layer": Arm(learn="kept", by="layer"),
    "scales-end": Arm(learn="scales"),
    "kept-end": Arm(learn="kept"),
    # Scales and codes.
    "both-layer-bf16": Arm(learn="both", by="layer", follow=0.0),
    "both-layer-half": Arm(learn="both", by="layer", follow=0.5),
    "both-layer": Arm(learn="both", by="layer"),
    "both-end": Arm(learn="both"),
    "both-end-fast": Arm(learn="both", rate=3.0),
    "both-end-512": Arm(learn="both", prompts=512, copies=2),
    "both-layer-512": Arm(learn="both", by="layer", prompts=512, copies=2),
    "inputs": Arm(inputs=True),
    # For 3 % more bytes.
    "fp8": Arm("FP8_DYNAMIC"),
    "fp8-scales-end": Arm("FP8_DYNAMIC", learn="scales"),
    "fp8-both-layer": Arm("FP8_DYNAMIC", learn="both", by="layer"),
    "fp8-both-end": Arm("FP8_DYNAMIC", learn="both"),
    "fp8-both-end-512": Arm("FP8_DYNAMIC", learn="both", prompts=512, copies=2),
}  # fmt: skip


# Trajectories.


@dataclass(frozen=True)
class Split:
    """A set of `count` trajectories; `name` is `fit-SEED-COPY`, `choose` or `tell-HASH`."""

    name: str
    count: int

    def prompts(self) -> tuple[list[Prompt], list[int]]:
        """Return prompts, and seeds of their noise."""
        kind, _, rest = self.name.partition("-")
        if kind == "fit":
            seed, copy = map(int, rest.split("-"))
            settings = recipe_of(Variant(), self.count).calibration
            assert settings is not None
            settings = settings.model_copy(update={"seed": seed})
            found = load_prompts(CHECKPOINT, settings, self.count)
            return found, [(seed << 32) + (copy << 20) + at for at in range(self.count)]
        draw = random.Random(rest)
        problems = list(CHOOSE if kind == "choose" else TELL)
        if kind == "tell":
            draw.shuffle(problems)
        tokenizer, lines = load_tokenizer(CHECKPOINT), HELDOUT.read_text("utf-8").splitlines()
        chats = [
            [{"role": "user", "content": json.loads(lines[at])["question"]}]
            for at in problems[: self.count]
        ]
        prompts = [
            Prompt(tuple(encode_chat(tokenizer, chat, thinking=at % 2 == 1)), at % 2 == 1)
            for at, chat in enumerate(chats)
        ]
        return prompts, [draw.getrandbits(40) for _ in prompts]

    def shares(self) -> range:
        """Return the index of each share's first trajectory; a share has at most SHARE."""
        return range(0, self.count, SHARE)

    def file(self, out: Path, start: int) -> Path:
        """Return the path of the recorded share that begins at trajectory `start`."""
        return out / "trajectories" / f"{self.name}-{self.count}-{start:05}.pt"

    def record(self, out: Path, start: int) -> None:
        """Record BF16 denoising a share, on the CPU in float32: every machine then records the same."""
        path = self.file(out, start)
        if path.exists():
            return
        prompts, seeds = self.prompts()
        prompts, seeds = prompts[start : start + SHARE], seeds[start : start + SHARE]
        reference, sampler = _reference(), Sampler.from_checkpoint(CHECKPOINT)
        found = record(reference, prompts, seeds, sampler=sampler, canvases=2, held_out=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_suffix(".partial")
        torch.save([(t.prompt.ids, t.steps, t.committed) for t in found], partial_path)
        partial_path.replace(path)

    def trajectories(self, out: Path) -> list[Trajectory]:
        """Return the recorded trajectories of all shares."""
        found = [each for start in self.shares() for each in torch.load(self.file(out, start))]
        return [Trajectory(Prompt(ids, False), 0, False, *rest) for ids, *rest in found]


@cache
def _reference() -> Any:
    return open_modules(CHECKPOINT, capacity=SHARE)


@cache
def _rows(splits: tuple[Split, ...], out: Path, device: str) -> Rows:
    found = [each for split in splits for each in split.trajectories(out)]
    return rows_of(bf16_model(device), found, Sampler.from_checkpoint(CHECKPOINT))


# Arms.


@dataclass(frozen=True)
class Work:
    """The settings that every process gets."""

    out: Path
    device: str
    steps: int
    split: Split
    threads: int

    def begin(self) -> None:
        """Set the process's threads, and turn TF32 off."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.matmul.allow_tf32 = False


def plan_of(arm: Arm) -> tuple[Any, list[Any]]:
    """Return an arm's recipe and plan."""
    recipe = recipe_of(Variant(attention=arm.attention, rounding="gptq"), arm.prompts)
    return recipe, plan_targets(Checkpoint.open(CHECKPOINT).tensors, recipe.quantization)


def start_file(work: Work, arm: Arm, seed: int) -> Path:
    """Return the path of the codes and scales from which an arm starts."""
    name = f"{arm.attention}-{arm.rows}-{arm.mix:g}-{arm.prompts}.pt"
    return work.out / f"seed-{seed}" / "starts" / name


def start(work: Work, arm: Arm, seed: int) -> None:
    """Round every unit, to nearest or by GPTQ; write all units' tensors and the input scales."""
    work.begin()
    path = start_file(work, arm, seed)
    if path.exists():
        return
    _, targets = plan_of(arm)
    units = units_of(targets)
    rows = _rows((Split(f"fit-{seed}-0", arm.prompts),), work.out, work.device)
    bf16 = bf16_model(work.device)
    plain = observed(bf16, rows, "plain")
    scales = {key: FP8_MAX * E2M1_MAX / amax for key, amax in plain.amax.items()}
    sums = plain if arm.rows in (None, "plain") else observed(bf16, rows, arm.rows)
    student, done = Student(units, scales, work.device), list[Done]()
    for layer in sorted({unit.layer for unit in units}):
        hessians = sums.hessians()
        if arm.mix and layer:
            behind = observed(student.model, rows, arm.rows or "plain", layer)
            hessians = sums.hessians(behind, arm.mix)
        for unit in (own for own in units if own.layer == layer):
            done.append(nearest(unit) if arm.rows is None else rounded(unit, hessians))
            student.install(unit, dequantized(done[-1]).to(work.device))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(([own.tensors for own in done], scales), path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def rounded(unit: Unit, hessians: Any) -> Done:
    """Round a unit by GPTQ."""
    source = Checkpoint.open(CHECKPOINT)
    return round_unit(unit, [source.read(target.name) for target in unit.targets], hessians)


def nearest(unit: Unit) -> Done:
    """Round a unit to nearest."""
    weight = weight_of(unit).contiguous()
    ranges = unit.scheme.observe(weight, "memoryless_minmax")
    shared = global_scale([ranges]) if unit.scheme.shares_global_scale else None
    return Done(unit, unit.scheme.quantize(weight, ranges, shared, None), {})


def run(work: Work, name: str, arm: Arm, seed: int) -> None:
    """Make an arm's checkpoint and measure it."""
    work.begin()
    path = work.out / work.split.name / f"{seed}-{name}.json"
    if path.exists():
        return
    began = time.monotonic()
    recipe, targets = plan_of(arm)
    units = units_of(targets)
    tensors, scales = torch.load(start_file(work, arm, seed))
    done = [Done(unit, own, {}) for unit, own in zip(units, tensors, strict=True)]
    student = Student(units, scales, work.device)
    for own in done:
        student.install(own.unit, dequantized(own).to(work.device))
    facts: dict[str, Any] = {}
    if arm.learn:
        splits = tuple(Split(f"fit-{seed}-{copy}", arm.prompts) for copy in range(arm.copies))
        rows = _rows(splits, work.out, work.device)
        bases = [weight_of(d.unit).float() if arm.rows is None else dequantized(d) for d in done]
        learned = [
            Learning(d, base, arm.learn, work.device) for d, base in zip(done, bases, strict=True)
        ]
        torch.backends.cuda.matmul.allow_tf32 = True
        if arm.by == "end":
            facts["course"] = learn_end(student, learned, rows, work.steps, arm.rate)
        else:
            facts["course"] = learn_layers(student, learned, rows, work.steps // 2, arm)
        torch.backends.cuda.matmul.allow_tf32 = False
        before, done = done, [own.done() for own in learned]
        facts["moved"] = mean(moved(a, b) for a, b in zip(before, done, strict=True))
    if arm.inputs:
        rows = _rows((Split(f"fit-{seed}-0", arm.prompts),), work.out, work.device)
        facts["factors"] = search_inputs(
            student, scales, rows.select(torch.arange(48, device=rows.of.device))
        )
    facts["learned_s"] = time.monotonic() - began
    facts["error"] = max(relative_error(own) for own in done)
    checkpoint = write(work.out / f"seed-{seed}" / name, done, scales, recipe, targets)
    model, sampler = Model(checkpoint, work.device), Sampler.from_checkpoint(CHECKPOINT)
    facts |= distances(model, _rows((work.split,), work.out, work.device), sampler)
    facts["seconds"] = time.monotonic() - began
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, facts)
    print(
        f"{time.monotonic() - began:5.0f} s  {seed} {name}: {1000 * mean(facts['kl']):.2f}",
        flush=True,
    )


def moved(before: Done, after: Done) -> float:
    """Return the fraction of code bytes that learning changed."""
    (a, *_), (b, *_) = before.tensors.values(), after.tensors.values()
    return (a.view(torch.uint8) != b.view(torch.uint8)).float().mean().item()


def relative_error(done: Done) -> float:
    """Return the largest |W - Q| / |W| of a unit's matrices."""
    weight = weight_of(done.unit).float()
    return ((weight - dequantized(done)).norm(dim=(1, 2)) / weight.norm(dim=(1, 2))).max().item()


@torch.no_grad()
def search_inputs(
    student: Student, scales: dict[tuple[int, str], float], rows: Rows
) -> dict[str, float]:
    """Multiply each input scale in turn, in place, by the factor of least KL; return factors not 1."""
    model, chosen = student.model, dict[str, float]()
    best = kl_of(model, rows).mean().item()
    for unit in student.units:
        key = key_of(unit.reads)
        for factor in FACTORS if unit.scheme.calibrated else ():
            model.round(key, unit.scheme, scales[key] * factor)
            if (found := kl_of(model, rows).mean().item()) < best:
                best, chosen[unit.reads] = found, factor
        scales[key] *= chosen.get(unit.reads, 1.0)
        if unit.scheme.calibrated:
            model.round(key, unit.scheme, scales[key])
    return chosen


def write(
    folder: Path,
    done: Sequence[Done],
    scales: dict[tuple[int, str], float],
    recipe: Any,
    targets: Any,
) -> Path:
    """Write rounded units as a checkpoint with the product's own `convert`; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = folder / "layers"
    layers.mkdir(exist_ok=True)
    for number in sorted({own.unit.layer for own in done}):
        layer = [own for own in done if own.unit.layer == number]
        write_layer(layers, [own.unit for own in layer], layer)
    found = {
        f"{module}.{INPUT_SCALE}": torch.tensor([scales[key_of(own.unit.reads)]])
        for own in done if own.unit.scheme.calibrated
        for target in own.unit.targets for module in target.modules
    }  # fmt: skip
    save_file(found, folder / SCALES)
    convert(
        Checkpoint.open(CHECKPOINT), targets, folder / "checkpoint", recipe=recipe,
        input_scales=folder / SCALES, rounded=layers, overwrite=True,
    )  # fmt: skip
    return folder / "checkpoint"


def generated(work: Work, name: str, seed: int, at: int) -> None:
    """Denoise a share with an arm's checkpoint, not as a replay; write steps and tokens by answer."""
    work.begin()
    path = work.out / work.split.name / "free" / f"{seed}-{name}-{at}.json"
    if path.exists():
        return
    prompts, seeds = work.split.prompts()
    prompts, seeds = prompts[at : at + SHARE], seeds[at : at + SHARE]
    folder = CHECKPOINT if name == "bf16" else work.out / f"seed-{seed}" / name / "checkpoint"
    engine = open_modules(folder, "none" if name == "bf16" else "per_layer", capacity=SHARE)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    found = record(engine, prompts, seeds, sampler=sampler, canvases=2, held_out=True)
    steps = [sum(map(len, own.steps)) for own in found]
    pad = sampler.pad_token_id
    tokens = [sum(token != pad for token in own.committed.flatten().tolist()) for own in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"steps": steps, "tokens": tokens})


# The command.


def table(folder: Path, base: str = "w4a4", default: str = "nvfp4") -> list[str]:
    """Return a Markdown table of a set's measurements, one row for all seeds of an arm.

    Differences are paired by trajectory, after each trajectory is averaged over the seeds.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        name = path.stem.partition("-")[2]
        found.setdefault(name, []).append(read_json(path))
    lines = [
        "| arm | seeds | KL x 1000 | by seed | of w4a4 | minus nvfp4 | flips, % | Jaccard | commits, % "
        "| steps a token | error |",
        "|---|---:|---:|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in sorted(found, key=lambda own: list(ARMS).index(own)):
        own = found[name]
        kl = averaged(own, "kl")
        ratio = share(kl, averaged(found[base], "kl")) if base in found else ""
        less = differing(kl, averaged(found[default], "kl"), 1000) if default in found else ""
        seeds = ", ".join(f"{1000 * mean(each['kl']):.2f}" for each in own)
        lines.append(
            f"| {name} | {len(own)} | {1000 * mean(kl):.2f} | {seeds} | {ratio} | {less} "
            f"| {beside_kl(own)} "
            f"| {inflation(folder / 'free', name)} | {max(each['error'] for each in own):.3f} |"
        )
    return lines


def beside_kl(own: Sequence[dict[str, Any]]) -> str:
    """Return three table cells, each a mean: flips in %, Jaccard, equal commits in %."""
    flips, jaccard, commits = (mean(averaged(own, key)) for key in ("flips", "jaccard", "commits"))
    return f"{100 * flips:.2f} | {jaccard:.3f} | {100 * commits:.2f}"


def averaged(own: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Return the measure `key` of each trajectory, averaged over the seeds."""
    return [mean(each) for each in zip(*(found[key] for found in own), strict=True)]


def share(mine: Sequence[float], base: Sequence[float]) -> str:
    """Return mean(mine) / mean(base) and its 95 % paired bootstrap interval, as text."""
    both = torch.tensor([mine, base], dtype=torch.float64)
    picks = torch.randint(
        both.shape[1], (10_000, both.shape[1]), generator=torch.Generator().manual_seed(0)
    )
    means = both[:, picks].mean(-1)
    low, high = torch.quantile(
        means[0] / means[1], torch.tensor([0.025, 0.975], dtype=torch.float64)
    ).tolist()
    return f"{mean(mine) / mean(base):.3f} [{low:.3f}, {high:.3f}]"


def inflation(folder: Path, name: str) -> str:
    """Return an arm's step inflation over BF16 in %, of all shares and seeds; "" if not measured."""

    def rate(pattern: str) -> float:
        found = [read_json(path) for path in folder.glob(pattern)]
        return sum(sum(own["steps"]) for own in found) / max(
            1, sum(sum(own["tokens"]) for own in found)
        )

    base, mine = rate("*-bf16-[0-9]*.json"), rate(f"?-{name}-[0-9]*.json")
    return f"{mine / base - 1:+.1%}" if base and mine else ""


def in_pool(pool: ProcessPoolExecutor, calls: Sequence[tuple[Any, ...]]) -> None:
    """Run the calls in the pool; a call that fails is printed and does not stop the others."""
    waiting = {pool.submit(*call): call for call in calls}
    for future, call in waiting.items():
        try:
            future.result()
        except Exception:
            print(f"failed: {call[2:]}\n{traceback.format_exc()[-1500:]}", flush=True)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--on", type=click.Choice(["choose", "tell"]), default="choose")
@click.option("--commit", default="", help="Hash that the trajectories of `tell` are drawn by.")
@click.option("--trajectories", default=256, show_default=True)
@click.option("--arm", "arms", multiple=True, type=click.Choice(list(ARMS)))
@click.option(
    "--free", multiple=True, type=click.Choice(["bf16", *ARMS]), help="Whose steps are counted."
)
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,), show_default=True)
@click.option("--steps", default=300, show_default=True, help="Of learning; half as many a layer.")
@click.option("--prompts", type=int, help="Of the calibration of every arm, for a quick look.")
@click.option("--workers", default=1, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    out: Path, on: str, commit: str, trajectories: int, arms: tuple[str, ...], free: tuple[str, ...],
    seeds: tuple[int, ...], steps: int, prompts: int | None, workers: int, threads: int, device: str,
) -> None:  # fmt: skip
    """Record, start, learn and measure; print a Markdown table."""
    split = Split(f"tell-{commit}" if on == "tell" else "choose", trajectories)
    work = Work(out.resolve(), device, steps, split, threads)
    if prompts:
        for name, arm in ARMS.items():
            ARMS[name] = replace(arm, prompts=prompts)
    names = list(arms or ARMS)
    chosen = [(name, ARMS[name], seed) for name in names for seed in seeds]
    splits = {split, *(
        Split(f"fit-{seed}-{copy}", arm.prompts)
        for _, arm, seed in chosen for copy in range(arm.copies if arm.learn else 1)
    )}  # fmt: skip
    starts = {start_file(work, arm, seed): (start, work, arm, seed) for _, arm, seed in chosen}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        shares = [
            (each, at) for each in sorted(splits, key=lambda own: own.name) for at in each.shares()
        ]
        in_pool(pool, [(record_share, work, each, at) for each, at in shares])
        print("recorded", flush=True)
        in_pool(pool, list(starts.values()))
        print("started", flush=True)
        in_pool(pool, [(run, work, *each) for each in chosen])
        in_pool(pool, [
            (generated, work, name, seed, at)
            for name in free
            for seed in (seeds[:1] if name == "bf16" else seeds)
            for at in split.shares()
        ])  # fmt: skip
    lines = table(out / split.name)
    (out / f"{split.name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def record_share(work: Work, split: Split, at: int) -> None:
    """Record a share of a split."""
    work.begin()
    split.record(work.out, at)


if __name__ == "__main__":
    main()
