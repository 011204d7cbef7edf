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

from experiments.damage import Chosen, Model, Rows, Stream, read_rows
from experiments.learning import (
    Rowing,
    Student,
    Sums,
    dequantized,
    key_of,
    products,
    weights_of,
)
from quantize.schemes.gptq import DAMPING, shrunk
from quantize.stages.round_weights.round_weights import Done, Unit, round_unit

Key = tuple[int, str]
# (encoder 0 or decoder 1, layer, name) -> input and who chose experts, None for a dense Linear
Seen = dict[tuple[int, int, str], tuple[Tensor, Chosen | None]]
CHUNK = 16  # trajectories at once
OUTPUTS = {  # inputs by the Linear whose output is normalised before it is added
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.down_proj": ("mlp.gate_proj", "mlp.down_proj"),
    "experts.down_proj": ("experts.gate_up_proj", "experts.down_proj"),
}


@dataclass(frozen=True)
class Weighing:
    """How much each row counts in the sums, and which weights W' GPTQ rounds.

    Attributes:
        rows: the rule that weights positions (`learning.weights_of`).
        gates: True to weight an expert's row by its squared routing weight, False by 1.
        relative: True to divide its weight by the mean square of the block's output before the norm.
        aim: share s for which W' x' approximates W (s x + (1 - s) x'); None rounds W itself.
        follow: True for x' behind quantized layers, False for x rounded (unrounded if `aim` is None).
    """

    rows: Rowing = "plain"
    gates: bool = False
    relative: bool = False
    aim: float | None = None
    follow: bool = False


class Pairs:
    """Sums by (layer, name of an input): `own` has S of x', and `crossed` has C if there is an aim."""

    def __init__(self) -> None:
        self.own, self.crossed = Sums(), dict[Key, Tensor]()

    def cross(self, key: Key, x: Tensor, seen: Tensor, weights: Tensor, counts: list[int]) -> None:
        """Add rows x and x' (`seen`) [P, K] with `weights` [P], `counts` rows for each expert."""
        self.own.add(key, seen, weights, counts)
        found = products(x, seen, weights, counts)
        self.crossed[key] = self.crossed[key] + found if key in self.crossed else found

    def aimed(self, name: str, weight: Tensor, share: float) -> Tensor:
        """Return damped BF16 W' [..., out, in]: W' x' is nearest W (share x + (1 - share) x')."""
        key = key_of(name)
        counts = self.own.counts[key]
        scale = counts.sum() / self.own.weights[key].sum()
        own = shrunk(self.own.sums[key] * scale, counts).double()
        crossed = shrunk(self.crossed[key] * scale, counts).double()
        wanted = share * crossed + (1 - share) * own
        damping = DAMPING * own.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = damping[:, None, None] * torch.eye(own.shape[-1], device=own.device).double()
        moved = weight.to(own) @ (wanted + eye)
        return torch.linalg.solve(own + eye, moved, left=False).view_as(weight).bfloat16().cpu()


def inputs_of(model: Model, rows: Rows, only: int | None = None) -> Seen:
    """Run `model` on `rows`; return its Linears' inputs as rounded, of all layers or layer `only`."""
    found: Seen = {}

    def watching(phase: int) -> Any:
        def reads(layer: int, name: str, x: Tensor, chosen: Chosen | None) -> Tensor:
            seen = model.reads(layer, name, x, chosen)
            if only in (None, layer):
                found[phase, layer, name] = seen, chosen
            return seen

        return reads

    model(rows, model.encode(rows, watching(0)), watching(1))
    return found


def relative_weights(model: Model, seen: Seen) -> dict[tuple[int, int, str], Tensor]:
    """Return, for each input in OUTPUTS, 1 / mean square [T] of its block's output before the norm."""
    found = dict[tuple[int, int, str], Tensor]()
    for (phase, layer, name), (x, chosen) in seen.items():
        if name not in OUTPUTS:
            continue
        w = model.layers[layer]
        if chosen is None:
            y = F.linear(x.flatten(0, -2), w[f"{name}.weight"])
        else:
            y = chosen.down(x, w[name])
        inverse = 1 / y.square().mean(-1).clamp(min=1e-12)
        found |= {(phase, layer, each): inverse for each in OUTPUTS[name]}
    return found


@torch.no_grad()
def paired(
    how: Weighing, bf16: Model, model: Model, rows: Rows | Stream, only: int | None = None
) -> Pairs:
    """Return sums over `rows` of BF16's inputs x and `model`'s x', of all layers or layer `only`."""
    sums = Pairs()
    for part in rows.chunks(CHUNK):
        theirs = inputs_of(bf16, part, only)
        ours = inputs_of(model, part, only) if how.follow else theirs
        weights = weights_of(how.rows, bf16, part)
        relative = relative_weights(bf16, theirs) if how.relative else {}
        for key, (x, _) in theirs.items():
            phase, layer, name = key
            seen, chosen = ours[key]
            if how.follow and chosen is not None and name == "experts.down_proj":
                before, _ = theirs[phase, layer, "experts.gate_up_proj"]
                x = bf16.inner(layer, before, chosen)  # of the experts that the student chose
            if how.aim is not None and not how.follow:
                seen = model.reads(layer, name, seen, None)
            own = weights[phase][layer].flatten() * relative.get(key, 1.0)
            seen, own, counts = read_rows(name, seen, own, chosen)
            if chosen is not None and how.gates:
                own = own * chosen.gates.square()
            if how.aim is None:
                sums.own.add((layer, name), seen, own, counts)
            else:
                x, _, _ = read_rows(name, x, weights[phase][layer].flatten(), chosen)
                sums.cross((layer, name), x, seen, own, counts)
    return sums


def rounded_by(
    how: Weighing, bf16: Model, student: Student, rows: Rows | Stream, sums: Pairs | None = None
) -> list[Done]:
    """Round the weights of `bf16` with GPTQ, layer by layer; install them in the student; return them.

    `sums` is what `paired` returned; None calls it here, with `how.follow` before each layer.
    """
    done, model = list[Done](), student.model
    if sums is None and not how.follow:
        sums = paired(how, bf16, model, rows)
    hessians: Any = None if sums is None else sums.own.hessians()
    for layer in sorted({unit.layer for unit in student.units}):
        found = sums or paired(how, bf16, model, rows, layer)
        hessians = hessians if sums else found.own.hessians()
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
    """Replace the student's weights of the units `done` by the rounded ones, dequantized."""
    for own in done:
        student.install(own.unit, dequantized(own).to(student.model.device))


def forget(student: Student, names: Sequence[str]) -> None:
    """Stop the student from rounding the inputs called `NAME` in every layer, `N.NAME` in layer N."""
    roundings: Mapping[Key, Any] = student.model.roundings
    kept = {k: v for k, v in roundings.items() if not {k[1], f"{k[0]}.{k[1]}"} & {*names}}
    student.model.roundings = kept
