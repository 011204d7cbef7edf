"""Hessians of an input as BF16 has it beside the same input as the quantized model reads it.

A Linear reads x in BF16, and x' in the quantized model: rounded, or behind quantized layers as well.
With weights w of the rows, S = sum w x' x'^T and C = sum w x x'^T. Of all matrices W' the least
sum w |W x - W' x'|^2 has W' = W C S^-1, and what rounding adds to it is tr (W' - Q) S (W' - Q)^T. So
GPTQ rounds W' on S.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.damage import Model, Rows
from experiments.learning import (
    Hessians,
    Rowing,
    Student,
    dequantized,
    key_of,
    weights_of,
)
from quantize.schemes.gptq import DAMPING, shrunk
from quantize.stages.round_weights.round_weights import Done, Unit, round_unit

Key = tuple[int, str]
# (encoder 0 or decoder 1, layer, name) -> input and routing [T, E], None for a dense Linear
Seen = dict[tuple[int, int, str], tuple[Tensor, Tensor | None]]
CHUNK = 32  # trajectories at once
OUTPUTS = {  # inputs by the Linear whose output is normalised before it is added
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.down_proj": ("mlp.gate_proj", "mlp.down_proj"),
    "experts.down_proj": ("experts.gate_up_proj", "experts.down_proj"),
}


@dataclass(frozen=True)
class Weighing:
    """Which rows count how much, and what weights are aimed at.

    Attributes:
        rows: weights of positions.
        gates: whether an expert's row counts by its squared routing weight, not as one.
        relative: whether a row counts by the inverse square of the block's output, which is normalised.
        aim: share of BF16's x in the input that W is to meet, x' being the rest; None for x' = x.
        follow: whether x' lies behind quantized layers, or is x rounded.
    """

    rows: Rowing = "plain"
    gates: bool = False
    relative: bool = False
    aim: float | None = None
    follow: bool = False


class Pairs:
    """S, C, counts and weights of every input by (layer, name)."""

    def __init__(self) -> None:
        self.own: dict[Key, Tensor] = {}
        self.crossed: dict[Key, Tensor] = {}
        self.counts: dict[Key, Tensor] = {}
        self.weights: dict[Key, Tensor] = {}

    def add(self, key: Key, x: Tensor, seen: Tensor, weights: Tensor) -> None:
        """Add x and x' [..., K] of weights [T, E], or [T, E, K] that have each expert's own."""
        experts = weights.shape[1] > 1 and x.dim() == 3
        both = (x.transpose(0, 1), seen.transpose(0, 1)) if experts else (
            x.flatten(0, -2)[None], seen.flatten(0, -2)[None])  # fmt: skip
        plain, rounded = both  # [E, T, K] or [1, T, K]
        weighted = (rounded * weights.T[..., None]).mT
        found = {
            "own": weighted @ rounded,
            "crossed": (weighted @ plain).mT,
            "counts": (weights > 0).sum(0),
            "weights": weights.sum(0),
        }
        for name, value in found.items():
            sums = getattr(self, name)
            sums[key] = sums[key] + value if key in sums else value

    def hessians(self) -> Hessians:
        """Return the mean S, whose weights have the mean 1 over the layer's rows."""
        sums = {key: (own * self._scale(key)).cpu() for key, own in self.own.items()}
        return Hessians(sums, {key: own.cpu() for key, own in self.counts.items()})

    def aimed(self, name: str, weight: Tensor, share: float) -> Tensor:
        """Return W' [..., out, in] BF16 that meets W (share x + (1 - share) x'), damped as GPTQ is."""
        key = key_of(name)
        scale, counts = self._scale(key), self.counts[key]
        own = shrunk(self.own[key] * scale, counts).double()
        crossed = shrunk(self.crossed[key] * scale, counts).double()
        wanted = share * crossed + (1 - share) * own
        damping = DAMPING * own.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = damping[:, None, None] * torch.eye(own.shape[-1], device=own.device).double()
        moved = weight.to(own) @ (wanted + eye)
        return torch.linalg.solve(own + eye, moved, left=False).view_as(weight).bfloat16().cpu()

    def _scale(self, key: Key) -> Tensor:
        return self.counts[key].sum() / self.weights[key].sum()


def inputs_of(model: Model, rows: Rows, only: int | None = None) -> Seen:
    """Return what enters the Linears of a model as it reads it, of all layers or one."""
    found: Seen = {}

    def watching(phase: int) -> Any:
        def reads(layer: int, name: str, x: Tensor, routing: Tensor | None) -> Tensor:
            seen = model.reads(layer, name, x, routing)
            if only in (None, layer):
                found[phase, layer, name] = seen, routing
            return seen

        return reads

    model(rows, model.encode(rows, watching(0)), watching(1))
    return found


def relative_weights(model: Model, seen: Seen) -> dict[tuple[int, int, str], Tensor]:
    """Return the inverse mean square [T, 1] of the output that each input leads to."""
    found = dict[tuple[int, int, str], Tensor]()
    for (phase, layer, name), (x, routing) in seen.items():
        if name not in OUTPUTS:
            continue
        w = model.layers[layer]
        if routing is None:
            y = F.linear(x.flatten(0, -2), w[f"{name}.weight"])
        else:
            h = (x * routing[..., None]).flatten(1)
            y = F.linear(h, w[name].transpose(0, 1).flatten(1))
        inverse = 1 / y.square().mean(-1, keepdim=True).clamp(min=1e-12)
        found |= {(phase, layer, each): inverse for each in OUTPUTS[name]}
    return found


@torch.no_grad()
def paired(
    how: Weighing, bf16: Model, student: Student, rows: Rows, only: int | None = None
) -> Pairs:
    """Show trajectories to BF16 and the student, of all layers or one."""
    model, sums = student.model, Pairs()
    for part in rows.chunks(CHUNK):
        theirs = inputs_of(bf16, part, only)
        ours = inputs_of(model, part, only) if how.follow else theirs
        weights = weights_of(how.rows, bf16, part)
        relative = relative_weights(bf16, theirs) if how.relative else {}
        for key, (x, _) in theirs.items():
            phase, layer, name = key
            seen, routing = ours[key]
            if how.aim is not None and not how.follow:
                seen = model.reads(layer, name, seen, None)
            own = weights[phase][layer].flatten()[:, None] * relative.get(key, 1.0)
            if routing is not None:
                own = own * (routing.square() if how.gates else (routing > 0))
            sums.add((layer, name), x, seen, own)
    return sums


def rounded_by(how: Weighing, bf16: Model, student: Student, rows: Rows) -> list[Done]:
    """Round a model's weights by GPTQ, layer after layer, and install them in the student."""
    done = list[Done]()
    sums = None if how.follow else paired(how, bf16, student, rows)
    hessians: Any = None if sums is None else sums.hessians()
    for layer in sorted({unit.layer for unit in student.units}):
        found = sums or paired(how, bf16, student, rows, layer)
        hessians = hessians if sums else found.hessians()
        for unit in (own for own in student.units if own.layer == layer):
            weights = weights_in(bf16, unit)
            if how.aim is not None:
                weights = [found.aimed(unit.reads, own, how.aim) for own in weights]
            done.append(round_unit(unit, weights, hessians))  # pyrefly: ignore[bad-argument-type]
            install(student, done[-1:])
    return done


def weights_in(model: Model, unit: Unit) -> list[Tensor]:
    """Return the BF16 weights that a model has for a unit's targets."""
    names = [key_of(target.name)[1] for target in unit.targets]
    return [model.layers[unit.layer][name].bfloat16().cpu() for name in names]


def install(student: Student, done: Sequence[Done]) -> None:
    """Give the student rounded units."""
    for own in done:
        student.install(own.unit, dequantized(own).to(student.model.device))


def forget(student: Student, names: Sequence[str]) -> None:
    """Leave inputs of these names in BF16, in every layer."""
    roundings: Mapping[Key, Any] = student.model.roundings
    student.model.roundings = {k: v for k, v in roundings.items() if k[1] not in names}
