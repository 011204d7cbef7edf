"""Measures how far the quantized model is from BF16 on the same denoising steps.

It replays recorded BF16 trajectories, teacher-forced: at every step both models get BF16's canvas,
BF16's committed tokens and BF16's self-conditioning logits. Each model encodes the committed tokens
itself. So a step's distance has no sampling noise and no errors of earlier steps.

    KL       sum_v p log(p / q), nats per canvas position. p is BF16's distribution, q the quantized
             model's; both are from the temperature-divided logits that the sampler draws from
    top-1    share of positions with equal argmax
    Jaccard  |A and B| / |A or B|; A, B are the positions that the entropy bound accepts, per model
    commit   share of equal argmax at the last step of a canvas: tokens that would be committed
    routing  share of the top-k experts that both routers choose, by layer; see `routing`

`linear_checks` also compares every quantized Linear by itself, on the inputs that BF16 gives it,
and compares every router's tensors bit for bit. Routing has a limit only if a recipe states one
(`gate.min_routing_overlap`), since no limit would tell sound models from damaged ones. In the bundled
model's worst layer, routing's share is 0.90 for sound NVFP4 (0.93 with BF16 activations), 0.92 with two
experts swapped, and 0.90 with two rows of a router swapped.

The activation mode that the gate judges is replayed once more, conditioned on the quantized model's
own logits: errors then add up over the steps of a canvas, as they do while serving. Two more replays
find what other choices of experts cost in that mode: the model with BF16's choices, and BF16 with the
model's. So BF16 is opened a second time, at the end.

BF16 runs first, by itself, and its results stay on the host (`reference_cache`), so the models need
not fit a GPU together. Modes that share weights are replayed side by side, other modes one by one.

Intervals are percentile bootstraps with a fixed seed. They resample trajectories, since positions
and steps of one sample are not independent. A run with faults ends before anything is scored.
Faults are a mean KL above a mode's `gate.max_kl_nats`, an overlap below its `gate.min_routing_overlap`,
and all that `linear_checks` finds.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoints.layout import check_mode
from quantize.checkpoints.reader import Checkpoint
from quantize.host.files import write_json
from quantize.host.processes import joined
from quantize.host.units import digits
from quantize.runtime import Placement, open, sized
from quantize.runtime.engine.interface import Engine
from quantize.runtime.gpu.memory import EMBEDDING
from quantize.runtime.gpu.placement import CPU, free_unused
from quantize.runtime.gpu.trust import has_own_weights
from quantize.runtime.model.choices import RoutingLog
from quantize.runtime.record.trajectory import longest
from quantize.schemes.modes import ActivationMode
from quantize.stages.fidelity.held_out import held_out_trajectories
from quantize.stages.fidelity.linear_checks import check_linears
from quantize.stages.fidelity.replay import Compared, StepDistance, remember, replay
from quantize.stages.fidelity.routing import routing_at_step, routing_figures
from quantize.stages.memory_needs import HELD_OUT, REPLAYED

# Bounds on BF16's entropy of a position in nats: certain, nearly so, undecided, noise.
ENTROPY_BINS = (0.0, 0.01, 0.1, 1.0, float("inf"))
RESAMPLES = 2000


def fidelity(
    source: Path,
    checkpoint: Path,
    calibration: Path,
    out: Path,
    *,
    activations: ActivationMode,
    limits: Mapping[ActivationMode, float],
    overlaps: Mapping[ActivationMode, float] | None = None,
    more: Sequence[ActivationMode] = (),
    count: int = HELD_OUT,
    shared: Path | None = None,
    place: Placement = CPU,
    fine_tuned: bool = False,
) -> None:
    """Replay held-out trajectories through BF16 and the quantized model; write fidelity.json.

    The folder `calibration` has recorded trajectories; without it, they come from the folder
    `shared`, or are recorded (`held_out`). At most `count` of them are replayed. The
    replayed activation modes are `none`, the gated mode `activations`, and those of `limits`,
    `overlaps` and `more`. `limits` is mode -> largest mean KL allowed, in nats. `overlaps` is mode ->
    smallest mean share of BF16's experts allowed in any layer. A batch has REPLAYED trajectories, or
    fewer if memory is short. `out` is the path of fidelity.json. Weights of a `fine_tuned` model differ
    from BF16's on purpose, so they are no fault.

    Raises:
        InputError: the checkpoint cannot run in a mode. ResourceError: a model does not fit.
    """
    overlaps = overlaps or {}
    named: tuple[ActivationMode, ...] = ("none", activations, *limits, *overlaps, *more)
    modes = list(dict.fromkeys(named))
    for mode in modes:
        check_mode(Checkpoint.open(checkpoint), mode)
    linears, linear_faults = None, []
    with joined() as processes:
        trajectories, sampler = held_out_trajectories(
            source, calibration, place, processes, count=count, shared=shared
        )
        place = replace(place, capacity=REPLAYED, max_context=longest(trajectories), compares=True)
        baseline, places = _placed(source, checkpoint, modes, place)
        engine = open(source, baseline)
        batch = min(REPLAYED, engine.capacity)
        if processes.rank == 0:
            linears, linear_faults = check_linears(
                engine, source, checkpoint, trajectories[:batch], fine_tuned
            )
        ours, theirs = RoutingLog(), RoutingLog()
        how: dict[str, Any] = {"batch_size": batch, "processes": processes}
        with engine.routing(noted=ours):
            reference = remember(engine, trajectories, sampler, **how)
        ours.decoded = reference.decoded
        engine.close()
        del engine  # or its weights would stay on the GPU
        free_unused(place.device)
        replayed: dict[ActivationMode, list[StepDistance]] = {}
        conditioned: list[StepDistance] = []
        given = {}  # name -> the replay with the other model's choices
        for group, candidate in places.items():
            engines = _opened(checkpoint, group, candidate)
            compared = [Compared(engine) for engine in engines.values()]
            if gated := engines.get(activations):
                compared[group.index(activations)] = Compared(gated, decoded=theirs.decoded)
                compared.append(Compared(gated, own_conditioning=True))
            with gated.routing(noted=theirs) if gated else nullcontext():
                distances = replay(reference, compared, trajectories, sampler, **how)
            replayed |= zip(group, distances, strict=False)
            if gated:
                conditioned = distances[-1]
                with gated.routing(given=ours):
                    given["with_bf16_choices"] = replay(
                        reference, [Compared(gated)], trajectories, sampler, **how
                    )[0]
            del engines, compared, gated  # or its weights would stay on the GPU
            free_unused(place.device)
        reference.forget_heads()  # or the vocabulary would be on the GPU twice
        engine = open(source, baseline)
        with engine.routing(given=theirs):
            given["bf16_with_its_choices"] = replay(
                reference, [Compared(engine, lends_head=True)], trajectories, sampler, **how
            )[0]
        engine.close()
    if processes.rank > 0:
        return
    window: int = Checkpoint.open(source).config["text_config"]["sliding_window"]
    kinds = [trajectory.prompt.kind(window) for trajectory in trajectories]
    results = {mode: summarize(replayed[mode], kinds) for mode in modes}
    content = {
        "trajectories": len(trajectories),
        "max_kl_nats": dict(limits),
        "min_routing_overlap": dict(overlaps),
        "faults": [*find_faults(results, limits, overlaps), *linear_faults],
        "linears": linears,
        "activations": results,
        "own_conditioning": {"activations": activations} | summarize(conditioned, kinds),
        "routing_cost": {"activations": activations} | attributed(replayed[activations], given),
    }
    write_json(out, content)


def find_faults(
    results: Mapping[ActivationMode, Mapping[str, Any]],
    limits: Mapping[ActivationMode, float],
    overlaps: Mapping[ActivationMode, float],
) -> list[str]:
    """Return one sentence for each activation mode with a mean KL or an overlap beyond its limit."""
    far = [
        f"KL from BF16 is {kl:.4g} nats (activations {mode}), above max_kl_nats {limit:g}"
        for mode, limit in limits.items()
        if mode in results and not (kl := results[mode]["kl_nats"]["mean"]) <= limit
    ]
    return far + [
        f"routers of layer {shares.index(least)} choose {least:.4g} of BF16's experts (activations "
        f"{mode}), below min_routing_overlap {limit:g}"
        for mode, limit in overlaps.items()
        for shares in [results[mode]["routing_overlap"]]
        if not (least := min(shares)) >= limit
    ]


def attributed(
    as_it_is: Sequence[StepDistance], given: Mapping[str, Sequence[StepDistance]]
) -> dict[str, Any]:
    """Return fidelity.json's entry on what the choices of experts cost (`routing`), in nats of KL.

    `given` has the replays of the model `with_bf16_choices` and of `bf16_with_its_choices`.
    `choices_add` is by how much the first is below `as_it_is`, paired by trajectory.
    """
    plain, held = (by_trajectory(d, _kl) for d in (as_it_is, given["with_bf16_choices"]))
    differences = [kl - held[at] for at, kl in plain.items()]
    low, high = bootstrap_interval(differences)
    mean = digits(sum(differences) / len(differences))
    kls = {name: _with_interval(distances, _kl) for name, distances in given.items()}
    return {"as_it_is": _with_interval(as_it_is, _kl), **kls} | {
        "choices_add": {"mean": mean, "interval": [digits(low), digits(high)]}
    }


Group = tuple[ActivationMode, ...]  # modes that are replayed side by side


def _placed(
    source: Path, checkpoint: Path, modes: Sequence[ActivationMode], place: Placement
) -> tuple[Placement, dict[Group, Placement]]:
    """Place all models, which a GPU holds one after another, always with BF16's vocabulary."""
    placement = sized(source, place)  # checking its Linears takes less memory than comparing logits
    beside = Checkpoint.open(source).tensors[EMBEDDING].nbytes
    asked = replace(place, capacity=placement.capacity, beside=beside)
    device = torch.device(place.device)
    own_weights: list[ActivationMode] = [mode for mode in modes if has_own_weights(mode, device)]
    groups: list[Group] = [(mode,) for mode in own_weights]
    groups.insert(0, tuple(mode for mode in modes if mode not in own_weights))
    placements = {
        group: sized(checkpoint, replace(asked, caches=len(group), activations=group[0]))
        for group in groups
    }
    least = min(placement.capacity for placement in placements.values())
    placements = {group: replace(placed, capacity=least) for group, placed in placements.items()}
    return replace(placement, capacity=least), placements


def _opened(checkpoint: Path, group: Group, place: Placement) -> dict[ActivationMode, Engine]:
    """Open the quantized model in each mode of a group; the engines share its weights."""
    engines: dict[ActivationMode, Engine] = {}
    beside: Engine | None = None
    for mode in group:
        engines[mode] = beside = open(checkpoint, replace(place, activations=mode), beside=beside)
    return engines


def summarize(
    distances: Sequence[StepDistance], kinds: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return fidelity.json's entry on one replay; `kinds` has each trajectory's kind of prompt."""
    kl = torch.cat([d.kl for d in distances])
    agrees = torch.cat([d.agrees for d in distances]).double()
    entropy = torch.cat([d.entropy for d in distances])
    return {
        "kl_nats": _with_interval(distances, _kl)
        | {"p99": digits(_quantile(kl, 0.99)), "max": digits(kl.max().item())}
        | {"two_largest": digits(two_largest(list(by_trajectory(distances, _kl).values())))},
        "top1_agreement": _with_interval(distances, _agreement),
        "acceptance_jaccard": _with_interval(distances, lambda d: d.jaccard),
        "commit_agreement": _with_interval([d for d in distances if d.is_last], _agreement),
        "routing_overlap": [
            digits(share)
            for share in torch.stack([d.routing.overlap for d in distances]).mean(0).tolist()
        ],
        "routing": routing_figures([((d.trajectory, d.canvas), d.routing) for d in distances]),
        "by_step": [
            {
                "step": step,
                "canvases": len(here),
                "kl_nats": digits(sum(map(_kl, here)) / len(here)),
                "top1_agreement": digits(sum(map(_agreement, here)) / len(here)),
                **routing_at_step([d.routing for d in here]),
            }
            for step in sorted({d.step for d in distances})
            for here in [[d for d in distances if d.step == step]]
        ],
        "by_entropy": [
            {
                "nats_from": low,
                "positions": int(inside.sum()),
                "kl_nats": digits(kl[inside].mean().item()),
                "top1_agreement": digits(agrees[inside].mean().item()),
            }
            for low, high in pairwise(ENTROPY_BINS)
            for inside in [(entropy >= low) & (entropy < high)]
            if inside.any()
        ],
        "by_kind": [
            {
                "kind": kind,
                "trajectories": len({d.trajectory for d in here}),
                "kl_nats": _with_interval(here, _kl),
            }
            for kind in sorted(set(kinds or ()))
            for here in [[d for d in distances if kinds and kinds[d.trajectory] == kind]]
        ],
    }


def _kl(distance: StepDistance) -> float:
    return distance.kl.mean().item()


def _agreement(distance: StepDistance) -> float:
    return distance.agrees.double().mean().item()


def by_trajectory(
    distances: Sequence[StepDistance], value: Callable[[StepDistance], float]
) -> dict[int, float]:
    """Return trajectory's index -> mean of `value` over its steps."""
    values: dict[int, list[float]] = {}
    for distance in distances:
        values.setdefault(distance.trajectory, []).append(value(distance))
    return {index: sum(v) / len(v) for index, v in sorted(values.items())}


def two_largest(values: Sequence[float]) -> float:
    """Return the share of the sum of `values`, 0 or above, that the two largest make."""
    return sum(sorted(values)[-2:]) / (sum(values) or 1)


def bootstrap_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return (low, high), the percentile bootstrap interval of the mean; its seed is fixed."""
    data = torch.tensor(list(values), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(data), (RESAMPLES, len(data)), generator=generator)
    means = data[picks].mean(-1)
    tail = (1 - confidence) / 2
    return _quantile(means, tail), _quantile(means, 1 - tail)


def _with_interval(
    distances: Sequence[StepDistance], value: Callable[[StepDistance], float]
) -> dict[str, Any]:
    means = list(by_trajectory(distances, value).values())
    low, high = bootstrap_interval(means)
    return {"mean": digits(sum(means) / len(means)), "interval": [digits(low), digits(high)]}


def _quantile(values: Tensor, q: float) -> float:
    """Return a quantile, also of more than 2^24 values, which torch.quantile refuses."""
    ordered = values.flatten().sort().values
    return ordered[round(q * (len(ordered) - 1))].item()
