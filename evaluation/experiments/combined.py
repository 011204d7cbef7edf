"""What lowers `nvfp4`'s damage when small gains are combined: rows, pairs of inputs, learning.

    PYTHONPATH=evaluation:tests/support python -m experiments.combined OUT [--on tell --commit HASH]

Sets of trajectories are `learned`'s. Every arm is made and replayed in one process, without a
checkpoint on disk. A line of JSON an arm and seed is written to SET.jsonl as soon as it is known: a run
that was cut goes on, and `--until` begins nothing that would end later. Arms that learn are run with
the first seed; then, those of `best` first, with the others.

Models lie in OUT/made, so that `tell` measures those that were chosen from. Which arms it compares
with `w4a4` is said by `best` before it looks; then it measures all the others that were made. Files are
known by the names of arms: where ARMS was changed, OUT must be a new folder.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import click
import torch
from fused_dequant.formats import FP8_MAX
from torch import Tensor

from experiments.damage import Model, Rows, Stream, distances, kl_of
from experiments.folding import folded
from experiments.learned import Split, averaged, beside_kl
from experiments.learning import Learning, Student, bf16_model, dequantized, key_of, observed
from experiments.pairs import Pairs, Weighing, forget, install, paired, rounded_by, weights_in
from experiments.rounding import Variant, recipe_of
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.runtime.sampler.sampler import Sampler
from quantize.schemes.rounding import E2M1_MAX, global_scale
from quantize.stages.round_weights.round_weights import Done, Unit, units_of

PROMPTS = 512  # that a seed records; an arm of fewer takes the first
COPIES = 4  # noise seeds a prompt, of arms that learn
CHOOSE = Split("choose", 256)
LAST = 15  # seconds that an arm takes behind its rounding or learning
PACE = 30  # steps of learning after which its end is foretold
DENSE = ("mlp.gate_proj", "mlp.down_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ALL = (*DENSE, *EXPERTS)
LAYERS = range(6)  # of the bundled model


@dataclass(frozen=True)
class Learn:
    """Which parameters learn BF16's logits, by straight-through gradients, and at which rates.

    Attributes:
        codes: as `learning.Arm.learn`; None leaves codes and scales as they are.
        gains: whether norms, routers and scalars learn; they are stored in BF16.
        steps: number of Adam's steps.
        rates: Adam's, for log scales, unrounded values (in code steps) and gains (over their RMS).
        copies: number of noise seeds per prompt in the training set.
        looks: evaluations of KL on CHOOSE, besides the one at the end; the best parameters are kept.
        batch: number of trajectories in one step of Adam.
        drawn: how many denoising steps are drawn from each trajectory; 0 takes all, about 5.
    """

    codes: Literal["scales", "kept", "both"] | None = "both"
    gains: bool = False
    steps: int = 500
    copies: int = COPIES
    looks: int = 4
    batch: int = 16
    drawn: int = 2
    rates: tuple[float, float, float] = (1e-3, 5e-3, 1e-3)


@dataclass(frozen=True)
class Arm:
    """How a model is made.

    Attributes:
        attention: scheme of attention.
        how: weights of rows, and targets, of GPTQ; None rounds to nearest.
        prompts: number of calibration prompts.
        copies: number of noise seeds per prompt; GPTQ sums the rows of all.
        fold: Linears whose input channels are evened out by factors: down projections (`down`), those
            behind norms too (`norms`), or both by factors not rounded to powers of two (`exact`).
        plain: names of inputs that stay in BF16, in all layers, or in layer N where `N.` comes first.
        learn: what learns after rounding; None for nothing.
    """

    attention: str = "NVFP4A16"
    how: Weighing | None = field(default_factory=Weighing)
    prompts: int = PROMPTS
    copies: int = 1
    fold: Literal["down", "norms", "exact"] | None = None
    plain: tuple[str, ...] = ()
    learn: Learn | None = None


UNSURE = Weighing("unsure")
PLAIN = Arm(prompts=256)
BASE = Arm(how=UNSURE)
MLP = replace(BASE, plain=DENSE)
FP8 = Arm("FP8_DYNAMIC", how=UNSURE)
FP8_MLP = replace(FP8, plain=DENSE)
FOUR = {
    "four": replace(BASE, copies=COPIES),
    "mlp-four": replace(MLP, copies=COPIES),
    "fp8-four": replace(FP8, copies=COPIES),
    "fp8-mlp-four": replace(FP8_MLP, copies=COPIES),
}


def experts(arm: Arm, *layers: int) -> Arm:
    """Return an arm that also leaves the inputs of the experts of some layers in BF16."""
    return replace(arm, plain=(*arm.plain, *(f"{at}.{name}" for at in layers for name in EXPERTS)))


LEARN = Learn(gains=True)
GAINS = replace(LEARN, codes=None)
KEPT = replace(LEARN, codes="kept")
# For a GPU, where launches cost more than rows.
WIDE = replace(LEARN, rates=(3e-4, 1.5e-3, 3e-4), batch=32, drawn=0)
SLOW = replace(LEARN, rates=(3e-4, 1.5e-3, 1e-3))
ARMS = {
    "w4a4": Arm("NVFP4", how=None, prompts=256),
    "nvfp4": PLAIN,
    "base": BASE,
    # The MLP's inputs in BF16 (NVFP4A16), and all inputs, which tells what activations cost.
    "mlp": MLP,
    "fp8-base": FP8,
    "fp8-mlp": FP8_MLP,
    "512": Arm(),
    "fp8": replace(PLAIN, attention="FP8_DYNAMIC"),
    "weights": replace(BASE, plain=ALL),
    # The inputs of the experts of some layers in BF16 as well.
    **{f"mlp-experts-{at}": experts(MLP, at) for at in LAYERS},
    "mlp-experts-345": experts(MLP, 3, 4, 5),
    "fp8-mlp-experts-5": experts(FP8_MLP, 5),
    "fp8-mlp-experts-345": experts(FP8_MLP, 3, 4, 5),
    # Rows by what their block's output is worth; weights that make up for rounded inputs.
    "relative": replace(BASE, how=replace(UNSURE, relative=True)),
    "gates": replace(BASE, how=replace(UNSURE, gates=True)),
    "gates-relative": replace(BASE, how=replace(UNSURE, gates=True, relative=True)),
    "mlp-gates-relative": replace(MLP, how=replace(UNSURE, gates=True, relative=True)),
    "aimed": replace(BASE, how=replace(UNSURE, aim=1.0)),
    "aimed-behind-half": replace(BASE, how=replace(UNSURE, aim=0.5, follow=True)),
    "aimed-behind": replace(BASE, how=replace(UNSURE, aim=1.0, follow=True)),
    # Channels evened out.
    "down": replace(BASE, fold="down"),
    "exact": replace(BASE, fold="exact"),
    "norms": replace(BASE, fold="norms"),
    "mlp-down": replace(MLP, fold="down"),
    "fp8-down": replace(FP8, fold="down"),
    # Without GPTQ.
    "nearest": Arm(how=None),
    "nearest-down": Arm(how=None, fold="down"),
    # More rows, and what learns from there; the longest first, for all wait for it.
    **FOUR,
    "learn-mlp-long": replace(MLP, learn=replace(LEARN, steps=2000)),
    "learn-mlp-kept": replace(MLP, learn=KEPT),
    "learn-fp8-mlp-kept": replace(FP8_MLP, learn=KEPT),
    "learn-mlp-wide": replace(MLP, learn=WIDE),
    "learn-fp8-mlp-wide": replace(FP8_MLP, learn=WIDE),
    "learn-mlp-kept-wide": replace(MLP, learn=replace(WIDE, codes="kept")),
    "learn-fp8-mlp-kept-wide": replace(FP8_MLP, learn=replace(WIDE, codes="kept")),
    "learn-mlp-wide-fast": replace(MLP, learn=replace(WIDE, rates=LEARN.rates)),
    "learn-mlp": replace(MLP, learn=LEARN),
    "learn-fp8-mlp": replace(FP8_MLP, learn=LEARN),
    "learn-mlp-gains": replace(MLP, learn=GAINS),
    "learn-mlp-slow": replace(MLP, learn=SLOW),
    "learn-mlp-fast": replace(MLP, learn=replace(LEARN, rates=(3e-3, 1.5e-2, 3e-3))),
    "learn-kept": replace(BASE, learn=KEPT),
    "learn": replace(BASE, learn=LEARN),
}  # fmt: skip


# Learning.


class Gains:
    """A student's weights that no unit rounds, with a gradient; the forward reads them in BF16."""

    def __init__(self, student: Student) -> None:
        rounded = {key_of(target.name) for unit in student.units for target in unit.targets}
        self._layers = student.model.layers
        self._start = {
            (layer, name): weight.clone()
            for layer, own in enumerate(self._layers)
            for name, weight in own.items()
            if (layer, name) not in rounded
        }
        self.moved = {k: torch.zeros_like(v, requires_grad=True) for k, v in self._start.items()}

    def install(self) -> None:
        """Put the weights, as learned so far, into the student."""
        for (layer, name), start in self._start.items():
            wanted = start + self.moved[layer, name] * start.square().mean().sqrt()
            self._layers[layer][name] = wanted + (
                wanted.detach().bfloat16().float() - wanted.detach()
            )


def learned_by(
    how: Learn,
    student: Student,
    done: Sequence[Done],
    rows: Rows,
    until: float,
    stop: Rows | None = None,
) -> tuple[list[Done], list[float], list[float]]:
    """Train rounded units and gains; return units, the loss per tenth of steps, KL per look at `stop`.

    Raises:
        TimeoutError: at its pace, training would end later than LAST seconds before `until`.
    """
    device = str(student.model.device)
    units = [Learning(own, dequantized(own), how.codes, device) for own in done if how.codes]
    gains = Gains(student) if how.gains else None
    groups = [group for own in units for group in own.groups(1.0)]
    for group in groups:
        group["lr"] = how.rates[0 if any(group["params"][0] is own.p for own in units) else 1]
    if gains is not None:
        groups.append({"params": list(gains.moved.values()), "lr": how.rates[2]})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, slowing(how.steps))
    generator, losses, began = torch.Generator().manual_seed(0), list[Tensor](), time.time()
    looks, kept = list[float](), list[Tensor]()
    moved = [param for group in optimizer.param_groups for param in group["params"]]
    torch.backends.cuda.matmul.allow_tf32 = True
    for step in range(how.steps):
        if step and not step % PACE and foretold(began, step / how.steps) > until - LAST:
            raise TimeoutError
        chosen = torch.randperm(len(rows.tokens), generator=generator)[: how.batch].sort().values
        if stop is not None and step % math.ceil(how.steps / how.looks) == 0:
            looks.append(looked(student, units, gains, stop))
            print(f"{step} of {how.steps} steps: {looks[-1]:.6f}", flush=True)
            if not kept or looks[-1] == min(looks):
                kept = [own.detach().clone() for own in moved]
        given(student, units, gains)
        part = rows.select(chosen.to(rows.of.device), how.drawn, generator)
        found = kl_of(student.model, part).mean()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        schedule.step()
        losses.append(found.detach())
    torch.backends.cuda.matmul.allow_tf32 = False
    if stop is not None:
        looks.append(looked(student, units, gains, stop))
        with torch.no_grad():
            for own, best_seen in zip(moved, kept, strict=True):
                own.copy_(own if looks[-1] == min(looks) else best_seen)
    with torch.no_grad():
        given(student, units, gains)
    tenths = [own.mean().item() for own in torch.stack(losses).tensor_split(10)]
    return [own.done() for own in units] or list(done), tenths, looks


@torch.no_grad()
def looked(student: Student, units: Sequence[Learning], gains: Gains | None, rows: Rows) -> float:
    """Install what was learned so far; return its KL on `rows`, as a mean over trajectories."""
    given(student, units, gains)
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    return mean(distances(student.model, rows, sampler)["kl"])


def foretold(began: float, share: float) -> float:
    """Return the extrapolated end time of work: it began at `began`, and a `share` of it is done."""
    return began + (time.time() - began) / share


def given(student: Student, units: Sequence[Learning], gains: Gains | None) -> None:
    """Put units and gains, as learned so far, into a student."""
    for own in units:
        student.install(own.unit, own.weight())
    if gains is not None:
        gains.install()


def slowing(steps: int) -> Callable[[int], float]:
    """Return step -> factor of the rate, a warm-up of 10 steps times a cosine down to 0."""
    return lambda step: min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))


# Arms.


@dataclass(frozen=True)
class Work:
    """The arguments that every process gets; `until` is the deadline, a time of `time.time()`."""

    out: Path
    device: str
    split: Split
    until: float


def stream(work: Work, *splits: Split) -> Stream:
    """Return the trajectories of some sets, those of the first set first."""
    found = [each for own in splits for each in own.trajectories(work.out)]
    return Stream(bf16_model(work.device), found, Sampler.from_checkpoint(CHECKPOINT))


def fits_of(seed: int, copies: int) -> list[Split]:
    """Return the sets of trajectories that arms of a seed are fitted on, one for each copy."""
    return [Split(f"fit-{seed}-{copy}", PROMPTS) for copy in range(copies)]


def fitted(work: Work, seed: int, arm: Arm) -> Stream:
    """Return the trajectories that an arm's rounding is fitted on."""
    found = stream(work, *fits_of(seed, arm.copies))
    return replace(found, trajectories=found.trajectories[: arm.prompts * arm.copies])


@lru_cache(2)
def summed(work: Work, seed: int, arm: Arm) -> Pairs:
    """Return the sums of BF16's inputs; cached, since arms that differ only in formats share them."""
    bf16 = bf16_model(work.device)
    return paired(arm.how or Weighing(), bf16, bf16, fitted(work, seed, arm))


@lru_cache(2)
def measured(work: Work, split: Split) -> Rows:
    """Return the trajectories of a set on which arms are measured, or their best look is chosen."""
    return stream(work, split).rows()


def student_of(work: Work, arm: Arm, scales: dict[tuple[int, str], float]) -> Student:
    """Return a student with BF16 weights and input `scales`; `arm` says what inputs it rounds."""
    recipe = recipe_of(Variant(attention=arm.attention, rounding="gptq"), arm.prompts)
    units = units_of(plan_targets(Checkpoint.open(CHECKPOINT).tensors, recipe.quantization))
    student = Student(units, scales, work.device)
    forget(student, arm.plain)
    return student


def started(work: Work, arm: Arm, seed: int) -> tuple[Model, Student, Pairs | None]:
    """Return BF16 with the arm's factors folded in, a student with the same weights, and sums for GPTQ.

    The student's inputs are rounded, with one scale a layer. Sums are None if GPTQ must make its own.
    """
    bf16, alike = bf16_model(work.device), None
    if arm.fold is None and (arm.how is None or arm.how.aim is None):
        same = Arm(how=arm.how or Weighing(), prompts=arm.prompts, copies=arm.copies)
        alike = summed(work, seed, same)
        amax = alike.own.amax
    else:
        rows = fitted(work, seed, arm)
        sums = observed(bf16, rows, "plain")
        if arm.fold is not None:
            exact, norms = arm.fold == "exact", arm.fold != "down"
            bf16 = folded(bf16, sums.sums, sums.counts, norms=norms, exact=exact)
            sums = observed(bf16, rows, "plain")
        amax = sums.amax
    student = student_of(work, arm, {key: FP8_MAX * E2M1_MAX / own for key, own in amax.items()})
    student.model.layers = [dict(own) for own in bf16.layers]
    return bf16, student, alike


def made(work: Work, arm: Arm, seed: int) -> tuple[Student, dict[str, Any]]:
    """Return an arm's model, and what is worth telling of how it came about."""
    bf16, student, sums = started(work, arm, seed)
    if arm.how is None:
        done = [nearest(unit, weights_in(bf16, unit)) for unit in student.units]
        install(student, done)
    else:
        done = rounded_by(arm.how, bf16, student, fitted(work, seed, arm), sums)
    facts: dict[str, Any] = {"error": max(error_of(bf16, own) for own in done)}
    if arm.learn is not None:
        rows = stream(work, *fits_of(seed, arm.learn.copies)).rows()
        stop = measured(work, CHOOSE)
        done, course, looks = learned_by(arm.learn, student, done, rows, work.until, stop)
        error = max(error_of(bf16, own) for own in done)
        facts |= {"learned_error": error, "course": course, "looks": looks}
    return student, facts


def nearest(unit: Unit, weights: Sequence[Tensor]) -> Done:
    """Round a unit's weights to nearest."""
    weight = torch.cat([own if own.dim() == 3 else own[None] for own in weights], 1)
    ranges = unit.scheme.observe(weight, "memoryless_minmax")
    shared = global_scale([ranges]) if unit.scheme.shares_global_scale else None
    return Done(unit, unit.scheme.quantize(weight, ranges, shared, None), {})


def error_of(model: Model, done: Done) -> float:
    """Return the largest |W - Q| / |W| of a unit's matrices."""
    each = [own if own.dim() == 3 else own[None] for own in weights_in(model, done.unit)]
    weight = torch.cat(each, 1).float()
    return ((weight - dequantized(done)).norm(dim=(1, 2)) / weight.norm(dim=(1, 2))).max().item()


def kept(work: Work, name: str, arm: Arm, seed: int) -> tuple[Student, dict[str, Any]]:
    """Return an arm's model from its file in OUT/made; if there is none, make and save it."""
    path = work.out / "made" / f"{name}-{seed}.pt"
    if path.exists():
        layers, scales, facts = torch.load(path, map_location=work.device)
        student = student_of(work, arm, scales)
        student.model.layers = layers
        return student, facts
    student, facts = made(work, arm, seed)
    path.parent.mkdir(exist_ok=True)
    torch.save((student.model.layers, student.scales, facts), path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)
    return student, facts


def run(work: Work, name: str, arm: Arm, seed: int) -> dict[str, Any]:
    """Make an arm's model and measure it on the work's split.

    Raises:
        TimeoutError: there is no time left for it.
    """
    began = time.time()
    if began > work.until - LAST:
        raise TimeoutError
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False  # an arm that ran out of time may have left it on
    torch.cuda.empty_cache()
    student, facts = kept(work, name, arm, seed)
    found = distances(
        student.model, measured(work, work.split), Sampler.from_checkpoint(CHECKPOINT)
    )
    return {
        "arm": name, "seed": seed, "seconds": round(time.time() - began, 1), **facts, **found
    }  # fmt: skip


def all_run(
    work: Work, tasks: Iterable[tuple[ProcessPoolExecutor, str, int]], file: Path
) -> dict[str, float]:
    """Run and add each (pool, arm, seed) that `file` lacks; return arm -> mean KL over its seeds."""
    known = {(own["arm"], own["seed"]) for own in read(file)}
    waiting = dict[Future[dict[str, Any]], tuple[str, int]]()
    for pool, name, seed in tasks:
        if (name, seed) not in known:
            waiting[pool.submit(run, work, name, ARMS[name], seed)] = name, seed
    for future in as_completed(waiting):
        if (failed := future.exception()) is not None:
            print(json.dumps([*waiting[future], repr(failed)[:300]]), flush=True)
            continue
        own = future.result()
        with file.open("a") as lines:
            lines.write(f"\n{json.dumps(own)}\n")  # a line that a kill cut stays by itself
        short = {key: round(mean(own[key]), 6) for key in ("kl", "flips", "jaccard", "commits")}
        print(json.dumps(own | short), flush=True)
    return {name: mean(average(seeds)) for name, seeds in by_arm(read(file)).items()}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the results in a file, one from each line that is whole; [] if it does not exist."""
    found = list[dict[str, Any]]()
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def by_arm(found: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return arm -> seed -> its result."""
    by: dict[str, dict[int, dict[str, Any]]] = {}
    for own in found:
        by.setdefault(own["arm"], {})[own["seed"]] = own
    return by


def best(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the arm of least KL for each pair of attention scheme and kind of MLP inputs."""
    kl = {name: mean(average(seeds)) for name, seeds in by_arm(found).items()}
    kl = {name: own for name, own in kl.items() if name in ARMS and math.isfinite(own)}
    groups = [(own, plain) for own in ("NVFP4A16", "FP8_DYNAMIC") for plain in ((), DENSE)]
    alike = [[n for n in kl if (ARMS[n].attention, ARMS[n].plain) == group] for group in groups]
    return [min(names, key=kl.__getitem__) for names in alike if names]


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was measured as Markdown, each arm's seeds together.

    Ratios and differences are paired by seed and trajectory, over the seeds that both arms have.
    """
    by = by_arm(found)
    lines = [
        "| arm | KL x 1000 | by seed | of w4a4 | minus nvfp4 "
        "| flips, % | Jaccard | commits, % | error |",
        "|---|---:|---|---|---|---:|---:|---:|---:|",
    ]

    def beside(name: str, base: str) -> tuple[str, str]:
        seeds = sorted(by[name].keys() & by.get(base, {}).keys())
        kl = torch.tensor([[by[each][seed]["kl"] for seed in seeds] for each in (name, base)])
        return compared(*kl) if seeds else ("", "")

    for name, seeds in sorted(by.items(), key=lambda own: mean(average(own[1]))):
        own = [seeds[seed] for seed in sorted(seeds)]
        (ratio, _), (_, less) = beside(name, "w4a4"), beside(name, "nvfp4")
        each = ", ".join(f"{1000 * mean(one['kl']):.2f}" for one in own)
        lines.append(
            f"| {name} | {1000 * mean(average(seeds)):.2f} | {each} | {ratio} | {less} "
            f"| {beside_kl(own)} | {max(one['error'] for one in own):.3f} |"
        )
    return lines


def compared(mine: Tensor, base: Tensor) -> tuple[str, str]:
    """Return mean(mine) / mean(base), and 1000 x their difference, as texts with 95 % intervals.

    `mine` and `base` are KL [seeds, trajectories]; each bootstrap draw takes the same ones of both.
    """
    both, noise = torch.stack([mine, base]).double(), torch.Generator().manual_seed(0)
    _, seeds, count = both.shape
    picks = torch.randint(count, (4000, count), generator=noise)
    drawn = torch.randint(seeds, (4000, seeds), generator=noise)
    by_seed = both[:, :, picks].mean(-1)  # [2, seeds, 4000]
    means = by_seed.gather(1, drawn.T.expand(2, -1, -1)).mean(1)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    ours, theirs = both.mean((1, 2)).tolist()
    low, high = (means[0] / means[1]).quantile(ends).tolist()
    less, more = (1000 * (means[0] - means[1])).quantile(ends).tolist()
    return (
        f"{ours / theirs:.3f} [{low:.3f}, {high:.3f}]",
        f"{1000 * (ours - theirs):+.2f} [{less:+.2f}, {more:+.2f}]",
    )


def average(seeds: dict[int, dict[str, Any]]) -> list[float]:
    """Return the KL of each trajectory, its mean over the seeds."""
    return averaged(list(seeds.values()), "kl")


def record(out: Path, split: Split, at: int) -> None:
    """Record, on one thread, the share of a split that begins at trajectory `at`."""
    torch.set_num_threads(1)
    split.record(out, at)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--on", type=click.Choice(["choose", "tell"]), default="choose")
@click.option("--commit", default="", help="Hash that the trajectories of `tell` are drawn by.")
@click.option("--trajectories", default=256, show_default=True)
@click.option("--arm", "arms", multiple=True, type=click.Choice(list(ARMS)))
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,), show_default=True)
@click.option(
    "--until", default=500.0, show_default=True, help="Seconds after which nothing begins."
)
@click.option("--workers", default=1, show_default=True, help="Processes that round.")
@click.option("--learners", default=1, show_default=True, help="Processes that learn, beside them.")
@click.option("--results", type=click.Path(path_type=Path), help="Folder of results; else OUT.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    out: Path, on: str, commit: str, trajectories: int, arms: tuple[str, ...],
    seeds: tuple[int, ...], until: float, workers: int, learners: int, results: Path | None,
    device: str,
) -> None:  # fmt: skip
    """Record, make and measure; print one line per arm and seed, then a Markdown table."""
    until += time.time()
    split = Split(f"tell-{commit}" if on == "tell" else "choose", trajectories)
    work, results = Work(out.resolve(), device, split, until), results or out
    results.mkdir(parents=True, exist_ok=True)
    file, chosen = results / f"{split.name}.jsonl", read(results / "choose.jsonl")
    told = on == "tell" and not arms
    first = ["w4a4", "nvfp4", *best(chosen)] if told else list(arms or ARMS)
    learning = [own for name in first if (own := ARMS[name].learn)]
    copies = max([own.copies for own in (*learning, *(ARMS[name] for name in first))])
    fits = [own for seed in seeds for own in fits_of(seed, copies)]
    fits += [CHOOSE] if learning and split != CHOOSE else []
    context = get_context("spawn")
    with (
        ProcessPoolExecutor(workers, context) as many,
        ProcessPoolExecutor(learners, context) as few,
    ):
        shares = [(work.out, each, at) for each in (split, *fits) for at in each.shares()]
        shares = [(own, each, at) for own, each, at in shares if not each.file(own, at).exists()]
        for future in [pool.submit(record, *own) for own, pool in zip(shares, cycle((many, few)))]:
            future.result()
        print(f"recorded, {until - time.time():.0f} s left; first: {', '.join(first)}", flush=True)
        pools = {name: few if ARMS[name].learn else many for name in first}
        found = all_run(work, [
            (pools[name], name, seed) for seed in seeds for name in first
            if told or pools[name] is many or seed == seeds[0]
        ], file)  # fmt: skip
        later = [*best(read(file)), *sorted(found, key=found.__getitem__)]
        later = [own for own in dict.fromkeys(later) if pools.get(own) is few]
        all_run(work, [
            (few, name, seed)
            for part in (later[:4], later[4:]) for seed in seeds[1:] for name in part
        ], file)  # fmt: skip
        if told:
            rest = {(own["arm"], own["seed"]): None for own in chosen}
            all_run(work, [(pool, *own) for own, pool in zip(rest, cycle((many, few)))], file)
    lines = table(read(file))
    (results / f"{split.name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
