"""Fidelity: how far the quantized model is from BF16 on the same denoising steps.

Teacher-forced replay of recorded BF16 trajectories. At every step both models read the canvas BF16
read, behind the tokens BF16 committed, with the self-conditioning logits BF16 computed; each encodes
the prefix itself. So a step's distance is that step's alone: no sampling noise, nothing accumulated.

    KL      sum_v p log(p / q), nats per canvas position; p BF16, q quantized, both of the
            temperature-divided logits the sampler draws from
    top-1   share of positions with equal argmax
    Jaccard |A and B| / |A or B| of the positions the entropy bound accepts
    commit  share of equal argmax at the last step of a canvas: tokens that would be committed
    routing share of the top-k experts that both routers choose, by layer

A second replay, of the gated mode alone, lets the quantized model condition itself on its own logits:
errors then add up over the steps of a canvas, as they do while serving.

Intervals: percentile bootstrap over trajectories (positions and steps of one sample are not
independent), fixed seed. The gate: a mean KL above the recipe's `gate.max_kl_nats` of its mode is a
fault, and ends a run before anything is scored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.checkpoints.load import load
from quantize.progress import track
from quantize.recipe import ActivationMode, Calibration
from quantize.run_dir import write_json
from quantize.runtime.modules.passes import Prefix, decode_canvas, encode_prompts, encode_tokens
from quantize.runtime.sampler import Sampler, accept, token_entropy
from quantize.runtime.trajectory import Trajectory, load_trajectories, record_all
from quantize.stages.prompts import BUNDLED, load_prompts

# BF16 entropy of a position in nats: certain, nearly so, undecided, noise.
ENTROPY_BINS = (0.0, 0.01, 0.1, 1.0, float("inf"))
RESAMPLES = 2000
# Without a calibration (FP8 needs none) these are recorded first: word problems fit any model.
FRESH = Calibration(datasets=[BUNDLED], prompts=16, canvases=2, thinking=0.5)


@dataclass(frozen=True)
class StepDistance:
    """Distance at one step of one trajectory; tensors are [L], one value a position.

    Attributes:
        trajectory: index into the replayed trajectories.
        canvas: index of the canvas, from 0.
        step: denoising step, from 1.
        is_last: whether the canvas was committed after this step.
        kl: KL(BF16 || quantized) in nats.
        agrees: whether the argmax is the same.
        entropy: BF16's, in nats.
        jaccard: of the accepted positions.
        routing: [layers] share of equal experts among a position's top k, mean over positions.
    """

    trajectory: int
    canvas: int
    step: int
    is_last: bool
    kl: Tensor
    agrees: Tensor
    entropy: Tensor
    jaccard: float
    routing: Tensor


def fidelity(
    source: Path,
    checkpoint: Path,
    calibration: Path,
    out: Path,
    *,
    activations: ActivationMode,
    limits: Mapping[ActivationMode, float],
    device: str = "cpu",
) -> None:
    """Replay held-out trajectories through BF16 and the quantized model; write fidelity.json.

    Weights alone are replayed first: wiring faults stand out there most.

    Args:
        source: folder of the BF16 checkpoint.
        checkpoint: folder of the quantized one.
        calibration: folder with recorded trajectories; where there is none, fresh ones are made.
        out: the file to write.
        activations: how activations are rounded while serving.
        limits: largest mean KL in nats by activation mode; a mode without one is not judged.
        device: where the models run.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    reference = load(source, dtype=dtype, device=device)
    trajectories, sampler = held_out_trajectories(reference, source, calibration)
    modes: list[ActivationMode] = list(dict.fromkeys(("none", activations)))
    models = [load(checkpoint, activations=mode, dtype=dtype, device=device) for mode in modes]
    replayed = replay(reference, models, trajectories, sampler)
    results = {mode: summarize(each) for mode, each in zip(modes, replayed, strict=True)}
    (own,) = replay(reference, models[-1:], trajectories, sampler, own_conditioning=True)
    content = {
        "trajectories": len(trajectories),
        "max_kl_nats": dict(limits),
        "faults": find_faults(results, limits),
        "activations": results,
        "own_conditioning": {"activations": activations} | summarize(own),
    }
    write_json(out, content)


def find_faults(
    results: Mapping[str, Mapping[str, Any]], limits: Mapping[ActivationMode, float]
) -> list[str]:
    """Return one sentence for every mode whose mean KL exceeds its limit."""
    return [
        f"KL from BF16 is {kl:.4g} nats (activations {mode}), above max_kl_nats {limit:g}"
        for mode, limit in limits.items()
        if mode in results and not (kl := results[mode]["kl_nats"]["mean"]) <= limit
    ]


def held_out_trajectories(
    reference: DiffusionGemmaForBlockDiffusion, source: Path, calibration: Path
) -> tuple[list[Trajectory], Sampler]:
    """Load the recorded trajectories that calibration did not observe, or record fresh ones."""
    if calibration.is_dir():
        trajectories, sampler = load_trajectories(calibration)
        return [item for item in trajectories if item.held_out], sampler
    sampler = Sampler.from_checkpoint(source)
    prompts = load_prompts(source, FRESH, FRESH.prompts)
    return record_all(reference, prompts, FRESH, sampler, title="recording BF16"), sampler


def replay(
    reference: DiffusionGemmaForBlockDiffusion,
    models: Sequence[DiffusionGemmaForBlockDiffusion],
    trajectories: Sequence[Trajectory],
    sampler: Sampler,
    *,
    batch_size: int = 16,
    own_conditioning: bool = False,
) -> list[list[StepDistance]]:
    """Replay `trajectories` of `reference` through `models`, teacher-forced; one result a model.

    Args:
        reference: the BF16 model that made the trajectories; it runs once for all models.
        models: the models to compare.
        trajectories: what to replay.
        sampler: the settings they were recorded with.
        batch_size: trajectories at once.
        own_conditioning: whether a model reads its own logits of the step before, not BF16's.
    """
    distances: list[list[StepDistance]] = [[] for _ in models]
    title = "replaying, own self-conditioning" if own_conditioning else "replaying"
    for start in track(range(0, len(trajectories), batch_size), title):
        rows = list(range(start, min(start + batch_size, len(trajectories))))
        replayed = _replay_batch(
            (reference, *models), trajectories, rows, sampler, own_conditioning
        )
        for index, distance in replayed:
            distances[index].append(distance)
    return distances


def _replay_batch(
    models: Sequence[DiffusionGemmaForBlockDiffusion],
    trajectories: Sequence[Trajectory],
    rows: list[int],
    sampler: Sampler,
    own_conditioning: bool,
) -> Iterator[tuple[int, StepDistance]]:
    """Yield (index of the compared model, distance); `models[0]` is the reference."""
    prompts = [trajectories[row].prompt.ids for row in rows]
    prefixes = [encode_prompts(each, prompts) for each in models]
    canvas = 0
    while rows:
        yield from _replay_canvas(
            models, prefixes, trajectories, rows, canvas, sampler, own_conditioning
        )
        canvas += 1
        keep = [i for i, row in enumerate(rows) if len(trajectories[row].steps) > canvas]
        rows = [rows[i] for i in keep]
        if rows:
            device = models[0].device
            committed = torch.stack([trajectories[row].committed[canvas - 1] for row in rows])
            index = torch.tensor(keep, device=device)
            prefixes = [
                encode_tokens(each, prefix.select(index), committed.to(device))
                for each, prefix in zip(models, prefixes, strict=True)
            ]


def _replay_canvas(
    models: Sequence[DiffusionGemmaForBlockDiffusion],
    prefixes: list[Prefix],
    trajectories: Sequence[Trajectory],
    rows: list[int],
    canvas: int,
    sampler: Sampler,
    own_conditioning: bool,
) -> Iterator[tuple[int, StepDistance]]:
    conditioning: list[Tensor | None] = [None] * len(models)
    steps = {row: trajectories[row].steps[canvas] for row in rows}
    for step in range(1, max(len(ids) for ids in steps.values()) + 1):
        keep = [i for i, row in enumerate(rows) if len(steps[row]) >= step]
        if len(keep) < len(rows):
            index = torch.tensor(keep, device=models[0].device)
            rows = [rows[i] for i in keep]
            prefixes = [prefix.select(index) for prefix in prefixes]
            conditioning = [None if each is None else each[index] for each in conditioning]
        read = torch.stack([steps[row][step - 1] for row in rows]).to(models[0].device)
        temperature = sampler.temperature(step).to(read.device)
        ours, our_experts = _decode(models[0], prefixes[0], read, conditioning[0], temperature)
        for i in range(1, len(models)):
            theirs, experts = _decode(models[i], prefixes[i], read, conditioning[i], temperature)
            measured = (*_distance(ours, theirs, sampler), _overlap(our_experts, experts))
            for at, row in enumerate(rows):
                kl, agrees, entropy, jaccard, routing = (each[at].cpu() for each in measured)
                last = step == len(steps[row])
                yield (
                    i - 1,
                    StepDistance(
                        row, canvas, step, last, kl, agrees, entropy, jaccard.item(), routing
                    ),
                )
            conditioning[i] = theirs if own_conditioning else ours
        conditioning[0] = ours


def _decode(
    model: DiffusionGemmaForBlockDiffusion,
    prefix: Prefix,
    canvas: Tensor,
    conditioning: Tensor | None,
    temperature: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return temperature-divided logits [B, L, V] and the chosen experts [B, layers, L, k]."""
    chosen: list[Tensor] = []

    def note(_: nn.Module, __: object, output: tuple[Tensor, ...]) -> None:
        chosen.append(output[-1].view(*canvas.shape, -1))

    layers = cast(Sequence[nn.Module], model.model.decoder.layers)
    hooks = [layer.get_submodule("router").register_forward_hook(note) for layer in layers]
    logits = decode_canvas(model, prefix, canvas, conditioning) / temperature
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(chosen, dim=1)


def _overlap(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the share of equal experts by layer, [B, layers], of choices [B, layers, L, k]."""
    return (ours[..., None] == theirs[..., None, :]).any(-1).float().mean((-1, -2))


def _distance(ours: Tensor, theirs: Tensor, sampler: Sampler) -> tuple[Tensor, ...]:
    """Compare temperature-divided logits [B, L, V]: KL, agreement, entropy [B, L], Jaccard [B]."""
    log_p, log_q = ours.log_softmax(-1), theirs.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    entropy = token_entropy(ours)
    mine = accept(entropy, sampler.entropy_bound)
    other = accept(token_entropy(theirs), sampler.entropy_bound)
    jaccard = (mine & other).sum(-1) / (mine | other).sum(-1)
    return kl, ours.argmax(-1) == theirs.argmax(-1), entropy, jaccard


def summarize(distances: Sequence[StepDistance]) -> dict[str, Any]:
    """Return what fidelity.json holds for one replay: means with intervals, by step, by entropy."""
    kl = torch.cat([d.kl for d in distances])
    agrees = torch.cat([d.agrees for d in distances]).double()
    entropy = torch.cat([d.entropy for d in distances])
    last = [d for d in distances if d.is_last]
    return {
        "kl_nats": _with_interval(distances, lambda d: d.kl.mean().item())
        | {"p99": _digits(_quantile(kl, 0.99)), "max": _digits(kl.max().item())},
        "top1_agreement": _with_interval(distances, lambda d: d.agrees.double().mean().item()),
        "acceptance_jaccard": _with_interval(distances, lambda d: d.jaccard),
        "commit_agreement": _with_interval(last, lambda d: d.agrees.double().mean().item()),
        "routing_overlap": [
            _digits(share) for share in torch.stack([d.routing for d in distances]).mean(0).tolist()
        ],
        "by_step": [
            {
                "step": step,
                "canvases": len(here),
                "kl_nats": _digits(sum(d.kl.mean().item() for d in here) / len(here)),
                "top1_agreement": _digits(
                    sum(d.agrees.double().mean().item() for d in here) / len(here)
                ),
            }
            for step in sorted({d.step for d in distances})
            for here in [[d for d in distances if d.step == step]]
        ],
        "by_entropy": [
            {
                "nats_from": low,
                "positions": int(inside.sum()),
                "kl_nats": _digits(kl[inside].mean().item()),
                "top1_agreement": _digits(agrees[inside].mean().item()),
            }
            for low, high in pairwise(ENTROPY_BINS)
            for inside in [(entropy >= low) & (entropy < high)]
            if inside.any()
        ],
    }


def by_trajectory(
    distances: Sequence[StepDistance], value: Callable[[StepDistance], float]
) -> dict[int, float]:
    """Return the mean of `value` over each trajectory's steps."""
    values: dict[int, list[float]] = {}
    for distance in distances:
        values.setdefault(distance.trajectory, []).append(value(distance))
    return {index: sum(v) / len(v) for index, v in sorted(values.items())}


def bootstrap_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean; the same values give the same interval."""
    data = torch.tensor(list(values), dtype=torch.float64)
    picks = torch.randint(len(data), (RESAMPLES, len(data)), generator=_generator())
    means = data[picks].mean(-1)
    tail = (1 - confidence) / 2
    return _quantile(means, tail), _quantile(means, 1 - tail)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _with_interval(
    distances: Sequence[StepDistance], value: Callable[[StepDistance], float]
) -> dict[str, Any]:
    means = list(by_trajectory(distances, value).values())
    low, high = bootstrap_interval(means)
    return {"mean": _digits(sum(means) / len(means)), "interval": [_digits(low), _digits(high)]}


def _quantile(values: Tensor, q: float) -> float:
    """Return a quantile; torch.quantile refuses more than 2^24 values."""
    ordered = values.flatten().sort().values
    return ordered[round(q * (len(ordered) - 1))].item()


def _digits(value: float) -> float:
    """Keep 6 significant digits: no float32 sum has more."""
    return float(f"{value:.6g}")
