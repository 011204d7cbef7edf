"""What `learned` compares: weighted Hessians, and scales and codes that learn through the rounding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from fused_dequant.formats import (
    FP8,
    FP8_MAX,
    GROUP,
    pack_e2m1,
    round_e2m1,
    unpack_e2m1,
)
from torch import Tensor

from experiments.damage import Chosen, Model, Reads, Rows, Stream, kl_of, read_rows
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.runtime.sampler.sampler import Sampler, accepted
from quantize.schemes.gptq import SMALLEST_SCALE, shrunk
from quantize.schemes.rounding import E2M1_MAX
from quantize.stages.round_weights.round_weights import (
    Done,
    Unit,
)

Rowing = Literal["plain", "late", "sure", "unsure", "final", "frontier", "fisher", "half-fisher"]
BATCH = 32  # trajectories of a step of learning
FLOOR = 0.25  # weight of rows that a weighting does not choose


@dataclass(frozen=True)
class Arm:
    """How a checkpoint is made.

    Attributes:
        attention: quantization scheme of the attention Linears.
        rows: how GPTQ's Hessians weight rows (`weights_of`); None rounds to nearest, without GPTQ.
        mix: share of each Hessian that is measured behind quantized layers; the rest is BF16's.
        prompts: number of prompts to calibrate on and to learn from.
        learn: what is trained: block scales, with codes rounded again under them (`scales`), scales of
            fixed codes (`kept`), or scales and the values that are rounded (`both`); None for nothing.
        by: `layer` trains each layer to match BF16's output, `end` all together to match its logits.
        follow: in training by layer, share of the inputs from the trained layers; the rest is BF16's.
        copies: number of recordings of each prompt, each under its own noise seed, to learn from.
        rate: factor on the learning rates of `Learning.groups`.
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


@cache
def bf16_model(device: str) -> Model:
    """Return the BF16 model of the bundled checkpoint."""
    return Model(CHECKPOINT, device)


class Sums:
    """For each input, by (layer, name): weighted sums of x x^T, counts of rows, and the largest |x|.

    Rows of weight 0, such as padding of the encoder, count in none of them.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[int, str], Tensor] = {}
        self.counts: dict[tuple[int, str], Tensor] = {}
        self.weights: dict[tuple[int, str], Tensor] = {}
        self.amax: dict[tuple[int, str], float] = {}

    def see(self, model: Model, weights: Sequence[Tensor]) -> Reads:
        """Return a callback that adds a pass' inputs; `weights` has its rows' weights, by layer."""

        def watch(layer: int, name: str, x: Tensor, chosen: Chosen | None) -> Tensor:
            own = read_rows(name, x.detach(), weights[layer].flatten(), chosen)
            self.add((layer, name), *own)
            return model.reads(layer, name, x, chosen)

        return watch

    def add(self, key: tuple[int, str], x: Tensor, weights: Tensor, counts: list[int]) -> None:
        """Add rows x [P, K] with `weights` [P]; rows are ordered by expert, `counts[e]` of expert e."""
        found = {
            "sums": products(x, x, weights, counts),
            "counts": torch.stack([own.count_nonzero() for own in weights.split(counts)]),
            "weights": torch.stack([own.sum() for own in weights.split(counts)]),
        }
        for name, value in found.items():
            sums = getattr(self, name)
            sums[key] = sums[key] + value if key in sums else value
        seen = (x.abs().amax(-1) * (weights > 0)).max().item()
        self.amax[key] = max(self.amax.get(key, 0.0), seen)

    def hessians(self, other: "Sums | None" = None, mix: float = 0.0) -> "Hessians":
        """Return these sums as Hessians; with `other`, mixed as (1 - mix) * own + mix * other's."""
        found = {k: self._scaled(k).cpu() for k in self.sums}
        if other is not None:
            found = {
                k: (1 - mix) * v + mix * other._scaled(k).cpu()  # noqa: SLF001
                for k, v in found.items()
                if k in other.sums
            }
        return Hessians(found, {k: self.counts[k].cpu() for k in found})

    def _scaled(self, key: tuple[int, str]) -> Tensor:
        """Return sums whose weights have the mean 1 over the layer's rows."""
        return self.sums[key] * (self.counts[key].sum() / self.weights[key].sum())


def products(x: Tensor, y: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Return each expert's sum of w x y^T, [E, K, L], for x [P, K], y [P, L] and `weights` w [P]."""
    both = zip((x * weights[:, None]).split(counts), y.split(counts), strict=True)
    return torch.stack([own.T @ each for own, each in both])


@dataclass(frozen=True)
class Hessians:
    """Hessians of weighted rows, with the two methods that `round_unit` calls."""

    _sums: dict[tuple[int, str], Tensor]
    _counts: dict[tuple[int, str], Tensor]

    def mean(self, name: str, at: slice) -> Tensor:
        """Return an input's mean Hessians [E', in, in] of the experts `at`, by `gptq.shrunk`."""
        return shrunk(self._sums[key_of(name)], self._counts[key_of(name)], at)

    def tokens(self, name: str) -> Tensor:
        """Return how many rows each expert saw."""
        return self._counts[key_of(name)]


def key_of(name: str) -> tuple[int, str]:
    """Return (layer, name in the layer) of a module or a tensor on disk."""
    layer, own = name.removeprefix("model.decoder.layers.").split(".", 1)
    return int(layer), own


def weights_of(kind: Rowing, model: Model, rows: Rows) -> tuple[list[Tensor], list[Tensor]]:
    """Return row weights of `kind`, a tensor a layer, for encoder [N, S] and decoder [R, C]."""
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
    """Return |gradient|^2 of each layer's output rows; the loss is BF16's on tokens it drew itself."""
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
def observed(model: Model, rows: Rows | Stream, kind: Rowing, only: int | None = None) -> Sums:
    """Return sums over a model's Linear inputs, weighted by `kind`, of all layers or only one."""
    sums, bf16 = Sums(), bf16_model(str(model.device))
    for part in rows.chunks(32):
        see = [sums.see(model, own) for own in weights_of(kind, bf16, part)]
        if only is not None:
            see = [partial(_one_layer, only, each, model) for each in see]
        model(part, model.encode(part, see[0]), see[1])
    return sums


def _one_layer(
    only: int, see: Reads, model: Model, layer: int, name: str, x: Tensor, chosen: Chosen | None
) -> Tensor:
    return (see if layer == only else model.reads)(layer, name, x, chosen)


class Student:
    """The bundled model with inputs of its units rounded by their schemes; `install` sets weights."""

    def __init__(
        self, units: Sequence[Unit], scales: dict[tuple[int, str], float], device: str
    ) -> None:
        self.model = Model(CHECKPOINT, device)
        self.units, self.scales = units, scales
        for unit in units:
            key = key_of(unit.reads)
            self.model.round(key, unit.scheme, scales[key] if unit.scheme.calibrated else None)

    def install(self, unit: Unit, weight: Tensor) -> None:
        """Replace a unit's weight by [E, out, in], which is cut along `out` into the unit's tensors."""
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
    """Return a rounded unit's dequantized weight, float32 [E, out, in]."""
    return done.unit.scheme.dequantize(done.tensors).float()


class Learning:
    """A rounded unit whose scales and codes are trained, with a straight-through gradient.

    Block scales are the start's times exp(p), rounded to e4m3; FP8 rows keep their scales. Codes are
    rounded from base + d * step, where only `both` trains d; `kept` leaves them as at the start.
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
        """Return the optimizer's parameter groups; `rate` multiplies their learning rates."""
        found = [(self.p, 2e-3), (self.d, 1e-2)]
        return [{"params": [x], "lr": rate * lr} for x, lr in found if x.requires_grad]

    def values(self) -> tuple[Tensor, Tensor]:
        """Return code values and step sizes; their product is the dequantized weight."""
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
    """Train `learned` to lower `loss` of random trajectories out of `count`; return some losses."""
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
    """Train all layers together to lower KL(BF16 || student); return some losses."""
    return learn(
        student, learned, len(rows.tokens), steps, rate,
        lambda chosen: kl_of(student.model, rows.select(chosen)).mean(),
    )  # fmt: skip


def learn_layers(
    student: Student, learned: Sequence[Learning], rows: Rows, steps: int, arm: Arm
) -> list[float]:
    """Train one layer after the other to match BF16's outputs; return some losses of each."""
    bf16, model, course = bf16_model(str(student.model.device)), student.model, list[float]()
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
    """Take x, the encoder's tokens and the decoder's canvases, through a layer; return both."""
    encoded, decoded = torch.zeros_like(x[0]), torch.empty_like(x[1])
    for each in torch.arange(len(rows.tokens), device=rows.of.device).split(64):
        part, (kept, _) = rows.select(each), rows.members(each)
        at = slice(part.tokens.shape[1])
        encoded[each, at], own = model.encode_layer(index, x[0][each, at])
        decoded[kept] = model.decode_layer(index, x[1][kept], part, own)
    return encoded, decoded
