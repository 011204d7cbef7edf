"""What a denoising step could take over from the step before it, and the KL that this would cost.

    PYTHONPATH=evaluation python -m experiments.reuse [--seed N] [--rule NAME ...] [--quantized FOLDER]

It prints, by step of BF16's own trajectories on held-out problems, what did not move since the step
before. Then it replays them, teacher-forced, under every `ReuseRule`, and through quantized checkpoints
(docs/reuse.md). `denoising_steps` denoises freely under a rule. --checkpoint may name any model in
BF16, the released one too.

No rule is fast here: every row is computed, and what a rule reuses is then put back. Without attention
the rows of a pass do not depend on each other. So a row whose input to a layer is put back has its old
keys and values there too. One thread computes.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import click
import fused_dequant
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.held_out import kl_by_trajectory, recorded
from quantize.bundled import CHECKPOINT
from quantize.runtime import open
from quantize.runtime.engine.batch import FusedPasses
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import BatchEngine, Decoded
from quantize.runtime.model.choices import Choice
from quantize.runtime.model.passes import Pass
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.prompt.images import Images
from quantize.runtime.record.trajectory import Trajectory
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import TextWeights, load_packed
from quantize.runtime.weights.packing import BF16
from quantize.stages.fidelity.replay import Compared, StepDistance, replay

BATCH, CONTEXT = 16, 1024
# What a step of B canvases of L tokens read and computed: `canvas`, `argmax`, `stable` and `frozen`
# int64 [B, L]; `h`, the residual before the first and after each layer, and `x`, the next product's
# input made from it, both bf16 [B, layers + 1, L, H]; `experts` int32 [B, layers, L, k].
Step = dict[str, Tensor]
See = Callable[[int, Step, Step], object]  # number of the step, the step before it, the step
Seen = dict[int, list[tuple[int, dict[str, float]]]]  # step -> (number of canvases, their `moves`)


@dataclass(frozen=True)
class ReuseRule:
    """What a step takes over from earlier steps of its canvas; by default nothing.

    A row is settled when its argmax stayed for `stable` steps and its entropy is below `entropy`, in
    nats; with `read`, only if it read this argmax. It is then frozen for `frozen` steps: its keys,
    values and outputs stay as they were.
    """

    stable: int = 1
    frozen: int = 0
    entropy: float = math.inf
    read: bool = False
    experts: int = 0  # most distinct experts of a canvas in a layer, by vote; 0 for any number
    layers: tuple[int, ...] = ()  # at even steps they add what they added the step before

    def repeats(self, layer: int, step: int) -> bool:
        """Whether a layer is not computed at a step (from 1)."""
        return layer in self.layers and step % 2 == 0

    def __str__(self) -> str:
        if self.frozen:
            kind = "read" if self.read else "rows"
            return f"{kind}:{self.stable}:{self.frozen}:{self.entropy:g}"
        if self.experts:
            return f"experts:{self.experts}"
        return "layers:" + ",".join(map(str, self.layers)) if self.layers else "exact"


def rules_of(text: Any) -> list[ReuseRule]:
    """Return the rules that are measured, for a model's text config."""
    layers, experts = text.num_hidden_layers, text.num_experts
    times = ((1, 1), (1, 2), (1, 48))
    return [
        ReuseRule(),
        *(ReuseRule(*t, e) for e in (0.01, 0.001) for t in ((1, 1), (1, 48))),
        *(ReuseRule(*t, e, read=True) for e in (0.01, 0.001, 0.0001) for t in times),
        ReuseRule(1, 1, read=True),
        ReuseRule(2, 48, 0.001, read=True),
        *(ReuseRule(experts=experts * sixteenths // 16) for sixteenths in (15, 14, 12, 10)),
        *(ReuseRule(layers=(layer,)) for layer in range(layers)),
    ]


def rule_named(name: str, weights: TextWeights) -> ReuseRule:
    """Return the measured rule of a name; raise click.BadParameter if there is none."""
    rules = {str(rule): rule for rule in rules_of(weights.config.text_config)}
    if name not in rules:
        raise click.BadParameter(f"{name}: no such rule; write one of {', '.join(rules)}")
    return rules[name]


def moves(before: Step, after: Step) -> dict[str, float]:
    """Return what did not move from one step to the next: shares, and distinct experts a layer."""
    cosine = F.cosine_similarity(before["h"].float(), after["h"].float(), dim=-1)[:, 1:]
    same = (before["experts"][..., None] == after["experts"][..., None, :]).any(-1)
    hit = F.one_hot(after["experts"].long().flatten(2)).any(2).sum(-1)
    shares = {name: before[name] == after[name] for name in ("canvas", "argmax")}
    shares |= {"cosine > .99": cosine > 0.99, "> .999": cosine > 0.999}
    by_layer = {f"> .99 after layer {i + 1}": cosine[:, i] > 0.99 for i in (0, cosine.shape[1] - 1)}
    shares |= by_layer | {"experts": same, "distinct experts": hit}
    return {name: share.double().mean().item() for name, share in shares.items()}


def voted(x: Tensor, router: Tensor, scale: Tensor, topk: int, *, length: int, most: int) -> Choice:
    """Choose as `choose_experts` does, but among the `most` experts that a canvas' tokens vote for.

    x is bf16 [B * length, H]. A token's votes are its weights of the experts that it would choose.
    """
    chances = torch.softmax((x @ router.T).float(), -1)
    best, chosen = chances.topk(topk)
    votes = torch.zeros_like(chances).scatter_(1, chosen, best / best.sum(-1, keepdim=True))
    winners = votes.unflatten(0, (-1, length)).sum(1).topk(most).indices
    lost = torch.ones(len(winners), len(router), dtype=torch.bool, device=x.device)
    lost = lost.scatter_(1, winners, False).repeat_interleave(length, 0)
    experts = chances.masked_fill(lost, -1).topk(topk).indices.sort(-1).values
    kept = chances.gather(1, experts)
    return experts.int(), kept / kept.sum(-1, keepdim=True) * scale.float()[experts]


class Reusing(FusedEngine):
    """An engine whose decoder follows a rule; it takes one batch at a time.

    Attributes:
        computed, steps: rows times layers that were computed, in canvases; and steps of canvases.
    """

    def __init__(
        self, weights: TextWeights, sampler: Sampler, rule: ReuseRule, see: See = lambda *_: None
    ) -> None:
        super().__init__(weights, capacity=BATCH, max_context=CONTEXT)
        self.computed, self.steps = 0.0, 0
        self._rule, self._sampler, self._see, self._step = rule, sampler, see, 0
        self._before: Step = {}  # of the rows that take part now
        self._last: Step = {}  # of all rows
        self._reached: list[tuple[Tensor, Tensor]] = []  # h and x between layers, at this step
        setattr(self.model, "through", self._through)  # noqa: B010 - of this model alone

    @property
    def share(self) -> float:
        """The share of rows times layers that was computed."""
        return self.computed / self.steps

    def passes(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> FusedPasses:
        """Encode prompts as `FusedEngine.passes` does, and return passes that follow the rule."""
        passes = super().passes(prompts, images)
        setattr(passes, "decode", partial(self._decode, passes.decode))  # noqa: B010 - of these alone
        return passes

    def _decode(
        self, decode: Callable[..., Decoded], rows: list[int], canvas: Tensor, signal: Tensor | None
    ) -> Decoded:
        self._step = 1 if signal is None else self._step + 1
        self._before, self._reached = {}, []
        if signal is not None:
            self._before = {name: of_all[rows] for name, of_all in self._last.items()}
        decoded = decode(rows, canvas, signal)
        for name, tensor in self._decided(canvas, decoded).items():
            of_all = self._last.setdefault(name, tensor.new_zeros(BATCH, *tensor.shape[1:]))
            of_all[rows] = tensor
        return decoded

    def _decided(self, canvas: Tensor, decoded: Decoded) -> Step:
        """Return the step, with the rows that are frozen at the next one."""
        T = self._sampler.temperature(self._step).to(canvas.device)
        log_p = (decoded.logits(slice(None)) / T).log_softmax(-1)
        entropy, argmax = -(log_p.exp() * log_p).sum(-1), log_p.argmax(-1)
        after = {"canvas": canvas, "argmax": argmax, "experts": decoded.choices.experts}
        for name, rows in zip("hx", zip(*self._reached, strict=True), strict=True):
            after[name] = torch.stack(rows, 1).unflatten(0, canvas.shape).transpose(1, 2)
        if self._before:
            self._see(self._step, self._before, after)
        return after | self.settled(canvas, argmax, entropy)

    def settled(self, canvas: Tensor, argmax: Tensor, entropy: Tensor) -> Step:
        """Count this step's work; return `stable`, and `frozen`: for how many steps rows are frozen."""
        rule, zero = self._rule, torch.zeros_like(canvas)
        stable, frozen = (self._before.get(name, zero) for name in ("stable", "frozen"))
        if self._before:
            stayed = self._before["argmax"] == argmax
            stable = torch.where(frozen > 0, stable, (stable + 1) * stayed)
        rows = (stable >= rule.stable) & (entropy < rule.entropy) & (frozen == 0)
        rows &= (canvas == argmax) | (not rule.read)
        layers = range(self.model.weights.config.text_config.num_hidden_layers)
        repeated = mean(rule.repeats(layer, self._step) for layer in layers)
        self.computed += (1 - repeated) * (frozen == 0).double().mean(1).sum().item()
        self.steps += len(canvas)
        frozen = torch.where(rows, rule.frozen, (frozen - 1).clamp(min=0))
        return {"stable": stable, "frozen": frozen}

    def _through(self, index: int, layer: Any, entering: Pass) -> None:
        """Take a pass through a layer as `FusedModel.through` does, then put back what is reused."""
        if entering.decoded and index == 0:
            self._put_back(entering)
        if entering.decoded and self._rule.repeats(index, self._step):
            self._repeat(index, entering)
        else:
            choose = fused_dequant.choose_experts
            if entering.decoded and self._rule.experts:
                choose = partial(voted, length=entering.rows.rows_each, most=self._rule.experts)
            with mock.patch.object(fused_dequant, "choose_experts", choose):
                FusedModel.through(copy(self.model), index, layer, entering)
        if entering.decoded:
            self._put_back(entering)

    def _put_back(self, entering: Pass) -> None:
        x, scale = entering.x
        if scale is not None or len(x) != entering.decoded:
            raise RuntimeError("reuse is measured on a BF16 model, and on passes that only decode")
        if self._before and self._before["frozen"].any():
            at, frozen = len(self._reached), (self._before["frozen"] > 0).flatten()[:, None]
            h_before, x_before = (self._before[name][:, at].flatten(0, 1) for name in "hx")
            entering.h = torch.where(frozen, h_before, entering.h)
            entering.x = torch.where(frozen, x_before, x), None
        self._reached.append((entering.h.clone(), entering.x[0].clone()))

    def _repeat(self, index: int, entering: Pass) -> None:
        """Add what a layer added at the step before; its keys and values stay in the cache."""
        weights, before = self.model.weights, self._before["h"].float()
        last = index + 1 == len(weights.entrances)
        norm = weights.norm if last else weights.entrances[index + 1][0]
        added = (before[:, index + 1] - before[:, index]).flatten(0, 1)
        h, rows = (entering.h + added).bfloat16(), torch.arange(len(added), device=added.device)
        entering.h, entering.x = fused_dequant.begin(
            rows, h, 1.0, None, norm, 0, BF16[0], self.model.eps
        )
        if entering.routed is not None:  # what the layer would choose is not known
            experts = self._before["experts"][:, index].flatten(0, 1)
            entering.routed.append((experts, torch.ones_like(experts, dtype=torch.float32)))


def row_of(distances: Sequence[StepDistance], sampler: Sampler) -> str:
    """Return cells of the table: KL x 1000 from the exact logits, and flips of the argmax."""
    kl, agrees, entropy = (
        torch.stack([getattr(d, name) for d in distances]) for name in ("kl", "agrees", "entropy")
    )
    waiting = kl[~sampler.accepted(entropy)] * 1000
    return (
        f"{1000 * mean(kl_by_trajectory(distances)):.2f} | {1000 * kl.flatten().quantile(0.99):.0f} | "
        f"{waiting.mean():.1f} | {waiting.quantile(0.99):.0f} | "
        f"{100 * (1 - agrees.double().mean()):.2f} |"
    )


def print_moves(trajectories: Sequence[Trajectory], seen: Seen, sampler: Sampler) -> None:
    """Print what trajectories are like, and what moved: a row for each step."""
    ends = [(sampler.end_of(ids), len(ids)) for t in trajectories for ids in t.committed.tolist()]
    steps = mean(len(steps) for trajectory in trajectories for steps in trajectory.steps)
    fill = mean(0 if end is None else 1 - (end + 1) / length for end, length in ends)
    print(f"{len(ends)} canvases of {steps:.2f} steps; {fill:.1%} is fill after an EOS\n")
    for step, batches in sorted(seen.items()):
        total = sum(canvases for canvases, _ in batches)
        means = {k: sum(n * figures[k] for n, figures in batches) / total for k in batches[0][1]}
        if step == min(seen):
            print(f"| step | canvases | {' | '.join(means)} |\n|---:|---:|{'---:|' * len(means)}")
        print(f"| {step} | {total} | " + " | ".join(f"{x:.3f}" for x in means.values()) + " |")


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), default=CHECKPOINT)
@click.option("--rule", "names", multiple=True, help="For example read:1:2:0.01; by default all.")
@click.option("--quantized", multiple=True, type=click.Path(path_type=Path, exists=True))
@click.option("--trajectories", default=64, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--entropy-bound", type=float, help="In place of the model's: less, more steps.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    checkpoint: Path, names: tuple[str, ...], quantized: tuple[Path, ...], trajectories: int,
    seed: int, entropy_bound: float | None, device: str,
) -> None:  # fmt: skip
    """Record and replay trajectories; print what moved, and a row for each rule and checkpoint."""
    torch.set_num_threads(1)
    weights, sampler = load_packed(checkpoint, device), Sampler.from_checkpoint(checkpoint)
    if entropy_bound is not None:
        sampler = replace(sampler, entropy_bound=entropy_bound)
    rules = [rule_named(name, weights) for name in names]
    rules, seen = rules or rules_of(weights.config.text_config), Seen()

    def see(step: int, before: Step, after: Step) -> None:
        seen.setdefault(step, []).append((len(after["canvas"]), moves(before, after)))

    reference = Reusing(weights, sampler, ReuseRule(), see)
    made = recorded(reference, trajectories, seed, checkpoint, batch=BATCH, sampler=sampler)
    print_moves(made, seen, sampler)
    engines: dict[str, BatchEngine] = {str(r): Reusing(weights, sampler, r) for r in rules}
    how: dict[str, Any] = {"device": device, "activations": "per_layer", "capacity": BATCH}
    engines |= {folder.parent.name: open(folder, **how) for folder in quantized}
    print("\n| rule | computed | KL x 1000 | p99 | not accepted yet | p99 | flips, % |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    compared = [Compared(engine) for engine in engines.values()]
    exact = Reusing(weights, sampler, ReuseRule())
    measured = replay(exact, compared, made, sampler, batch_size=BATCH)
    for (name, engine), distances in zip(engines.items(), measured, strict=True):
        share = engine.share if isinstance(engine, Reusing) else 1
        print(f"| {name} | {share:.3f} | {row_of(distances, sampler)}")


if __name__ == "__main__":
    main()
