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
import math
import random
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

import click
import torch
from fused_dequant.formats import (
    FP8,
    FP8_MAX,
    GROUP,
    pack_e2m1,
    round_e2m1,
    unpack_e2m1,
)
from modules_oracle.opening import open_modules
from safetensors.torch import save_file
from torch import Tensor

from experiments.damage import Model, Reads, Rows, distances, kl_of, rows_of
from experiments.rounding import Variant, differing, recipe_of
from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.host.files import read_json, write_json
from quantize.runtime.chat import encode_chat, load_tokenizer
from quantize.runtime.sampler import Sampler, accepted
from quantize.runtime.trajectory import Prompt, Trajectory, record
from quantize.schemes.gptq import SMALLEST_SCALE, shrunk
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

Rowing = Literal["plain", "late", "sure", "unsure", "final", "frontier", "fisher", "half-fisher"]
CHOOSE = range(1000, 1384)  # of the held-out problems: those that earlier tables were made on
TELL = range(1384, 2000)
SHARE = 16  # trajectories that a process records at once
BATCH = 32  # trajectories of a step of learning
FLOOR = 0.25  # weight of rows that a weighting does not choose
FACTORS = (0.5, 0.71, 1.41, 2.0, 4.0)  # of input scales that are tried


@dataclass(frozen=True)
class Arm:
    """How a checkpoint is made.

    Attributes:
        attention: scheme of attention.
        rows: weights of rows in the Hessians of GPTQ; None for rounding to nearest.
        mix: share of Hessians of inputs behind quantized layers.
        prompts: to calibrate on.
        learn: what learns: block scales under which codes are rounded again (`scales`), scales of fixed
            codes (`kept`), or scales and what is rounded (`both`); None for nothing.
        by: whether each layer learns BF16's output, or all of them the logits.
        follow: of a layer that learns, share of inputs behind the learned layers.
        copies: noise seeds a prompt that are learned from.
        rate: of learning, relative to the arms' own.
        inputs: whether input scales are searched at the end.
    """

    attention: str = "NVFP4A16"
    rows: Rowing | None = "plain"
    mix: float = 0.0
    prompts: int = 256
    learn: Literal["scales", "kept", "both"] | None = None
    by: Literal["layer", "end"] = "end"
    follow: float = 1.0
    copies: int = 1
    rate: float = 1.0
    inputs: bool = False


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
    """A set of trajectories: `fit-SEED-COPY`, `choose`, or `tell-HASH`."""

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
        """Return where each process' share begins."""
        return range(0, self.count, SHARE)

    def file(self, out: Path, start: int) -> Path:
        """Return where a share lies."""
        return out / "trajectories" / f"{self.name}-{self.count}-{start:05}.pt"

    def record(self, out: Path, start: int) -> None:
        """Let BF16 denoise a share in float32 on the CPU, so that every machine records alike."""
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
        """Return what was recorded."""
        found = [each for start in self.shares() for each in torch.load(self.file(out, start))]
        return [Trajectory(Prompt(ids, False), 0, False, *rest) for ids, *rest in found]


@cache
def _reference() -> Any:
    return open_modules(CHECKPOINT, capacity=SHARE)


@cache
def _bf16(device: str) -> Model:
    return Model(CHECKPOINT, device)


@cache
def _rows(splits: tuple[Split, ...], out: Path, device: str) -> Rows:
    found = [each for split in splits for each in split.trajectories(out)]
    return rows_of(_bf16(device), found, Sampler.from_checkpoint(CHECKPOINT))


# Hessians.


class Sums:
    """Weighted sums of x x^T of every input, counts of rows and the largest |x|, by (layer, name).

    Padding of the encoder has weight 0.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[int, str], Tensor] = {}
        self.counts: dict[tuple[int, str], Tensor] = {}
        self.weights: dict[tuple[int, str], Tensor] = {}
        self.amax: dict[tuple[int, str], float] = {}

    def see(self, model: Model, weights: Sequence[Tensor]) -> Reads:
        """Return who watches a pass whose rows have weights [T], one tensor a layer."""

        def watch(layer: int, name: str, x: Tensor, chosen: Tensor | None) -> Tensor:
            own = weights[layer].flatten()[:, None]
            self._add((layer, name), x.detach(), own if chosen is None else chosen * own)
            return model.reads(layer, name, x, chosen)

        return watch

    def _add(self, key: tuple[int, str], x: Tensor, weights: Tensor) -> None:
        """Add [T, K] of weights [T, E], or [T, E, K] that have each expert's own."""
        own = weights.shape[1] > 1 and x.dim() == 3
        rows = x.transpose(0, 1) if own else x.flatten(0, -2)[None]  # [E, T, K] or [1, T, K]
        found = (rows * weights.T[..., None]).mT @ rows
        counts = (weights > 0).sum(0)
        if key in self.sums:
            self.sums[key] += found
            self.counts[key] += counts
            self.weights[key] += weights.sum(0)
        else:
            self.sums[key], self.counts[key], self.weights[key] = found, counts, weights.sum(0)
        seen = rows.abs().amax(-1) * (weights.T > 0)
        self.amax[key] = max(self.amax.get(key, 0.0), seen.max().item())

    def hessians(self, other: "Sums | None" = None, mix: float = 0.0) -> "Hessians":
        """Return the mean Hessians, mixed with another's."""
        found = {k: self._scaled(k).cpu() for k in self.sums}
        if other is not None:
            found = {
                k: (1 - mix) * v + mix * other._scaled(k).cpu()
                for k, v in found.items()
                if k in other.sums
            }
        return Hessians(found, {k: self.counts[k].cpu() for k in found})

    def _scaled(self, key: tuple[int, str]) -> Tensor:
        """Return sums whose weights have the mean 1 over the layer's rows."""
        return self.sums[key] * (self.counts[key].sum() / self.weights[key].sum())


@dataclass(frozen=True)
class Hessians:
    """What `round_unit` asks of Hessians."""

    _sums: dict[tuple[int, str], Tensor]
    _counts: dict[tuple[int, str], Tensor]

    def mean(self, name: str, at: slice) -> Tensor:
        """Return the shrunk mean [E', in, in] of an input."""
        return shrunk(self._sums[key_of(name)], self._counts[key_of(name)], at)

    def tokens(self, name: str) -> Tensor:
        """Return how many rows each expert saw."""
        return self._counts[key_of(name)]


def key_of(name: str) -> tuple[int, str]:
    """Return (layer, name in the layer) of a module or a tensor on disk."""
    layer, own = name.removeprefix("model.decoder.layers.").split(".", 1)
    return int(layer), own


def weights_of(kind: Rowing, model: Model, rows: Rows) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of the encoder's rows [N, S] and the decoder's [R, C], one a layer."""
    real = (
        torch.arange(rows.tokens.shape[1], device=rows.of.device) < rows.lengths[:, None]
    ).float()
    if "fisher" in kind:
        power = 0.5 if kind == "half-fisher" else 1.0
        encoder, decoder = fisher(model, rows)
        return [real * each**power for each in encoder], [each**power for each in decoder]
    entropy = rows.entropy()
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    ones = torch.ones_like(entropy)
    found = {
        "plain": lambda: ones,
        "late": lambda: ones * rows.progress[:, None],
        "sure": lambda: (-entropy).exp(),
        "unsure": lambda: 0.05 + entropy,
        "final": lambda: _either(rows.target.argmax(-1) == rows.committed),
        "frontier": lambda: _either(accepted(entropy, sampler.entropy_bound)),
    }[kind]()
    return [real] * len(model.layers), [found] * len(model.layers)


def _either(chosen: Tensor) -> Tensor:
    return torch.where(chosen, 1.0, FLOOR)


def fisher(model: Model, rows: Rows) -> tuple[list[Tensor], list[Tensor]]:
    """Return |gradient|^2 of what leaves each layer, of BF16's loss on tokens drawn from itself."""
    encoder, decoder, cache = list[Tensor](), list[Tensor](), list[Any]()
    with torch.enable_grad():
        x = model.embed(rows.tokens).requires_grad_()
        for index in range(len(model.layers)):
            x, own = model.encode_layer(index, x)
            x.retain_grad()
            encoder.append(x)
            cache.append(own)
        y = model.entered(rows).requires_grad_()
        for index, own in enumerate(cache):
            y = model.decode_layer(index, y, rows, own)
            y.retain_grad()
            decoder.append(y)
        log_p = (model.logits(y) / rows.temperature[:, None, None]).log_softmax(-1)
        drawn = torch.multinomial(rows.target.exp().flatten(0, 1), 1).view_as(rows.canvas)
        (-log_p.gather(-1, drawn[..., None]).sum()).backward()
    real = torch.arange(rows.tokens.shape[1], device=x.device) < rows.lengths[:, None]
    none = real.float() * 1e-12  # what leaves the last layer's encoder is not read
    return (
        [none if e.grad is None else e.grad.square().sum(-1) + none for e in encoder],
        [d.grad.square().sum(-1) + 1e-12 for d in decoder if d.grad is not None],
    )


@torch.no_grad()
def observed(model: Model, rows: Rows, kind: Rowing, only: int | None = None) -> Sums:
    """Show what enters the Linears of a model, of all layers or one."""
    sums, bf16 = Sums(), _bf16(str(model.device))
    for part in rows.chunks(32):
        see = [sums.see(model, own) for own in weights_of(kind, bf16, part)]
        if only is not None:
            see = [partial(_one_layer, only, each, model) for each in see]
        model(part, model.encode(part, see[0]), see[1])
    return sums


def _one_layer(
    only: int, see: Reads, model: Model, layer: int, name: str, x: Tensor, chosen: Tensor | None
) -> Tensor:
    return (see if layer == only else model.reads)(layer, name, x, chosen)


# A model whose units are rounded.


class Student:
    """The bundled model with units that are rounded, and inputs rounded as its plan says."""

    def __init__(
        self, units: Sequence[Unit], scales: dict[tuple[int, str], float], device: str
    ) -> None:
        self.model = Model(CHECKPOINT, device)
        self.units = units
        for unit in units:
            key = key_of(unit.reads)
            self.model.round(key, unit.scheme, scales[key] if unit.scheme.calibrated else None)

    def install(self, unit: Unit, weight: Tensor) -> None:
        """Give a unit the weight [E, out, in], cut into its tensors."""
        own = self.model.layers[unit.layer]
        names = [key_of(target.name)[1] for target in unit.targets]
        heights = [own[name].shape[-2] for name in names]
        for name, part in zip(names, weight.split(heights, 1), strict=True):
            own[name] = part.view_as(own[name])


def weight_of(unit: Unit) -> Tensor:
    """Return a unit's BF16 weight [E, out, in]."""
    source = Checkpoint.open(CHECKPOINT)
    read = [source.read(target.name) for target in unit.targets]
    return torch.cat([own if own.dim() == 3 else own[None] for own in read], 1)


def dequantized(done: Done) -> Tensor:
    """Return what a rounded unit stands for, [E, out, in] float32."""
    return done.unit.scheme.dequantize(done.tensors).float()


class Learning:
    """A unit's codes and scales, with a gradient.

    Scales are the start's times exp(p), rounded to e4m3. What is rounded is the start's values plus d
    steps of their blocks; where codes are kept, they multiply the scales. Rows in 8 bits keep scales.
    """

    def __init__(self, done: Done, base: Tensor, kind: str, device: str) -> None:
        self.unit, self.start, self.kind = done.unit, done.tensors, kind
        tensors = {k: v.to(device) for k, v in done.tensors.items()}
        self.base = base.to(device)
        self.rows = "weight_packed" not in tensors
        if self.rows:
            self.scale = tensors["weight_scale"].float()  # [E, out, 1]
            self.step = self.base.abs().clamp(min=1e-4) / 16
        else:
            self.shared = tensors["weight_global_scale"].unsqueeze(-1)  # [E, 1, 1]
            self.scale = tensors["weight_scale"].float()  # [E, out, in / 16]
            self.codes = unpack_e2m1(tensors["weight_packed"]).unflatten(-1, (-1, GROUP))
            self.step = (self.scale / self.shared)[..., None]
            self.base = self.base.unflatten(-1, (-1, GROUP))
        self.p = torch.zeros_like(self.scale, requires_grad=not self.rows)
        self.d = torch.zeros_like(self.base, requires_grad=kind == "both")

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Return what an optimizer moves, and how fast."""
        found = [(self.p, 2e-3), (self.d, 1e-2)]
        return [{"params": [x], "lr": rate * lr} for x, lr in found if x.requires_grad]

    def values(self) -> tuple[Tensor, Tensor]:
        """Return code values and their steps, whose product is the weight."""
        wanted = self.base + self.d * self.step
        if self.rows:
            codes = _through(
                wanted / self.scale, lambda x: x.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()
            )
            return codes, self.scale
        scale = (self.scale * self.p.exp()).clamp(SMALLEST_SCALE, FP8_MAX)
        step = (_through(scale, lambda x: x.to(FP8).float()) / self.shared)[..., None]
        if self.kind == "kept":
            return self.codes, step
        return _through((wanted / step).clamp(-E2M1_MAX, E2M1_MAX), round_e2m1), step

    def weight(self) -> Tensor:
        """Return the rounded weight [E, out, in]."""
        codes, step = self.values()
        return (codes * step).reshape(len(codes), codes.shape[1], -1)

    @torch.no_grad()
    def done(self) -> Done:
        """Return the unit as it lies on disk."""
        codes, _ = self.values()
        if self.rows:
            return Done(self.unit, self.start | {"weight": codes.to(FP8).cpu()}, {})
        scale = (self.scale * self.p.exp()).clamp(SMALLEST_SCALE, FP8_MAX).to(FP8)
        found = {"weight_packed": pack_e2m1(codes.flatten(-2)).cpu(), "weight_scale": scale.cpu()}
        return Done(self.unit, self.start | found, {})


def _through(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    return x + (rounded(x.detach().clone()) - x.detach())


def learn(
    student: Student,
    learned: Sequence[Learning],
    count: int,
    steps: int,
    rate: float,
    loss: Callable[[Tensor], Tensor],
) -> list[float]:
    """Lower a loss of some of `count` trajectories; return its course."""
    device = student.model.device
    optimizer = torch.optim.Adam(
        [group for own in learned for group in own.groups(rate)], betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    generator, course = torch.Generator().manual_seed(0), list[float]()
    for step in range(steps):
        chosen = torch.randperm(count, generator=generator)[:BATCH].sort().values.to(device)
        for own in learned:
            student.install(own.unit, own.weight())
        found = loss(chosen)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 10) == 0:
            course.append(round(found.item(), 6))
    with torch.no_grad():
        for own in learned:
            student.install(own.unit, own.weight())
    return course


def learn_end(
    student: Student, learned: Sequence[Learning], rows: Rows, steps: int, rate: float
) -> list[float]:
    """Learn BF16's logits, in all layers at once."""
    return learn(
        student, learned, len(rows.tokens), steps, rate,
        lambda chosen: kl_of(student.model, rows.select(chosen)).mean(),
    )  # fmt: skip


def learn_layers(
    student: Student, learned: Sequence[Learning], rows: Rows, steps: int, arm: Arm
) -> list[float]:
    """Learn what leaves BF16's layers, one layer after the other."""
    bf16, model, course = _bf16(str(student.model.device)), student.model, list[float]()
    with torch.no_grad():
        theirs = bf16.embed(rows.tokens), bf16.entered(rows)
    ours = theirs
    for index in range(len(model.layers)):
        before = tuple(torch.lerp(a, b, arm.follow) for a, b in zip(theirs, ours, strict=True))
        theirs = through(bf16, index, theirs, rows)

        def loss(
            chosen: Tensor, index: int = index, before: Any = before, after: Any = theirs
        ) -> Tensor:
            part, (kept, _) = rows.select(chosen), rows.members(chosen)
            at = slice(part.tokens.shape[1])
            encoded, own = model.encode_layer(index, before[0][chosen, at])
            decoded = model.decode_layer(index, before[1][kept], part, own)
            real = torch.arange(part.tokens.shape[1], device=chosen.device) < part.lengths[:, None]
            left = encoded[real], after[0][chosen, at][real]
            return _unlike(*left) + _unlike(decoded, after[1][kept])

        own = [each for each in learned if each.unit.layer == index]
        course += learn(student, own, len(rows.tokens), steps, arm.rate, loss)[::9]
        ours = through(model, index, ours, rows)
    return course


def _unlike(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours - theirs).square().mean() / theirs.var()


@torch.no_grad()
def through(model: Model, index: int, x: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, Tensor]:
    """Take all tokens and canvases through a layer."""
    encoded, decoded = torch.zeros_like(x[0]), torch.empty_like(x[1])
    for each in torch.arange(len(rows.tokens), device=rows.of.device).split(64):
        part, (kept, _) = rows.select(each), rows.members(each)
        at = slice(part.tokens.shape[1])
        encoded[each, at], own = model.encode_layer(index, x[0][each, at])
        decoded[kept] = model.decode_layer(index, x[1][kept], part, own)
    return encoded, decoded


# Arms.


@dataclass(frozen=True)
class Work:
    """What every process is told."""

    out: Path
    device: str
    steps: int
    split: Split
    threads: int

    def begin(self) -> None:
        """Set a process up."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.matmul.allow_tf32 = False


def plan_of(arm: Arm) -> tuple[Any, list[Any]]:
    """Return an arm's recipe and plan."""
    recipe = recipe_of(Variant(attention=arm.attention, rounding="gptq"), arm.prompts)
    return recipe, plan_targets(Checkpoint.open(CHECKPOINT).tensors, recipe.quantization)


def start_file(work: Work, arm: Arm, seed: int) -> Path:
    """Return where codes and scales lie that an arm starts from."""
    name = f"{arm.attention}-{arm.rows}-{arm.mix:g}-{arm.prompts}.pt"
    return work.out / f"seed-{seed}" / "starts" / name


def start(work: Work, arm: Arm, seed: int) -> None:
    """Round to nearest, or by GPTQ; write tensors of every unit, and input scales."""
    work.begin()
    path = start_file(work, arm, seed)
    if path.exists():
        return
    _, targets = plan_of(arm)
    units = units_of(targets)
    rows = _rows((Split(f"fit-{seed}-0", arm.prompts),), work.out, work.device)
    bf16 = _bf16(work.device)
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
    """Return the share of bytes of codes that learning changed."""
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
    """Multiply each input scale by the factor of least KL, one after the other, in place."""
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
    """Write the checkpoint of rounded units by the product's own `convert`."""
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
    """Let an arm's checkpoint denoise a share of the split by itself; write its steps and tokens."""
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
    tokens = [int((own.committed != sampler.pad_token_id).sum()) for own in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"steps": steps, "tokens": tokens})


# The command.


def table(folder: Path, base: str = "w4a4", default: str = "nvfp4") -> list[str]:
    """Return what is measured in a set as Markdown, the seeds of an arm together.

    Differences are paired by trajectory, means over the seeds first.
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
        rest = [mean(averaged(own, key)) for key in ("flips", "jaccard", "commits")]
        lines.append(
            f"| {name} | {len(own)} | {1000 * mean(kl):.2f} | {seeds} | {ratio} | {less} "
            f"| {100 * rest[0]:.2f} | {rest[1]:.3f} | {100 * rest[2]:.2f} "
            f"| {inflation(folder / 'free', name)} | {max(each['error'] for each in own):.3f} |"
        )
    return lines


def averaged(own: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Return a measure of each trajectory, its mean over the seeds."""
    return [mean(each) for each in zip(*(found[key] for found in own), strict=True)]


def share(mine: Sequence[float], base: Sequence[float]) -> str:
    """Return the ratio of two means with its 95 % bootstrap interval, paired."""
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
    """Return how many more steps a token an arm takes than BF16, over all shares and seeds."""

    def rate(pattern: str) -> float:
        found = [read_json(path) for path in folder.glob(pattern)]
        return sum(sum(own["steps"]) for own in found) / max(
            1, sum(sum(own["tokens"]) for own in found)
        )

    base, mine = rate("*-bf16-[0-9]*.json"), rate(f"?-{name}-[0-9]*.json")
    return f"{mine / base - 1:+.1%}" if base and mine else ""


def in_pool(pool: ProcessPoolExecutor, calls: Sequence[tuple[Any, ...]]) -> None:
    """Run calls; one that fails is told and does not stop the others."""
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
