"""Replays a reference's recorded trajectories, teacher-forced, through other models.

At every step all models read the reference's canvas, after the reference's committed tokens. Each
model encodes these tokens itself. The models take each step together. Their logits are compared a
few whole canvases at a time, and only the next step's conditioning is kept. The reference may also
run by itself before the other models (`remember`). Models that do not fit a GPU together then need
not be streamed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantize.host.processes import ALONE, Processes
from quantize.host.progress import Meter, metered
from quantize.runtime.engine.interface import BatchEngine, joined
from quantize.runtime.model.choices import Choices
from quantize.runtime.record.trajectory import Trajectory
from quantize.runtime.sampler.sampler import Sampler
from quantize.stages.fidelity.reference_cache import Noted, Remembered
from quantize.stages.fidelity.routing import RoutingDistance, routing_distances


@dataclass(frozen=True)
class StepDistance:
    """A model's distance from BF16 at one step of a trajectory; [L] is one value per position."""

    trajectory: int  # index into the replayed trajectories
    canvas: int  # index of the canvas, from 0
    step: int  # denoising step, from 1
    is_last: bool  # whether the canvas was committed after this step
    kl: Tensor  # [L] KL(BF16 || quantized) in nats
    agrees: Tensor  # [L] whether both models have the same argmax
    entropy: Tensor  # [L] BF16's entropy in nats
    jaccard: float  # Jaccard index of the two models' accepted positions
    routing: RoutingDistance  # how otherwise the routers chose


@dataclass(frozen=True)
class Compared:
    """A model to compare; with `own_conditioning` it reads its own earlier logits, else BF16's.

    `decoded`, if not None, gets what its routers chose at every step. With `lends_head` it is BF16, and
    the reference's logits are made by its head too.
    """

    engine: BatchEngine
    own_conditioning: bool = False
    decoded: list[Choices] | None = None
    lends_head: bool = False


def replay(
    reference: BatchEngine | Remembered, compared: Sequence[Compared],
    trajectories: Sequence[Trajectory], sampler: Sampler, *, batch_size: int = 16,
    processes: Processes = ALONE,
) -> list[list[StepDistance]]:  # fmt: skip
    """Replay the BF16 `reference`'s `trajectories` through the models in `compared`.

    The reference runs once for all models. `reference` may also be what `remember` returned for the
    same trajectories and batches. `batch_size` may not exceed the engines' capacity. `processes`
    share the batches, and each process returns all distances.

    Returns:
        One list per entry of `compared`: its distances, in order of trajectory, canvas and step.
    """
    distances: list[tuple[int, StepDistance]] = []
    batches, steps = _shared(trajectories, batch_size, processes)
    with metered("replaying", steps * len(compared), "steps") as meter:
        for of_batch in batches:
            for distance in _Batch(reference, compared, of_batch).replay(sampler):
                distances.append(distance)
                meter.add()
    for theirs in processes.others(distances):
        distances += theirs
    distances.sort(key=lambda item: (item[1].trajectory, item[1].canvas, item[1].step))
    return [[d for at, d in distances if at == index] for index in range(len(compared))]


def remember(
    reference: BatchEngine | Remembered,
    trajectories: Sequence[Trajectory],
    sampler: Sampler,
    *,
    batch_size: int = 16,
    processes: Processes = ALONE,
) -> Remembered:
    """Run only the reference; return its results, which `replay` takes in the reference's place."""
    batches, steps = _shared(trajectories, batch_size, processes)
    with metered("reading BF16's steps", steps, "steps") as meter:
        noted: list[Noted] = []
        for of_batch in batches:
            batch = _Batch(reference, [], of_batch, meter)
            for _ in batch.replay(sampler):
                pass  # nothing is compared
            noted.append(batch.noted)
    return Remembered(noted)


def _shared(
    trajectories: Sequence[Trajectory], batch_size: int, processes: Processes
) -> tuple[list[dict[int, Trajectory]], int]:
    """Return this process' batches (index -> trajectory), and how many steps they have in all."""
    starts = processes.mine(range(0, len(trajectories), batch_size))
    rows = [range(start, min(start + batch_size, len(trajectories))) for start in starts]
    batches = [{row: trajectories[row] for row in batch} for batch in rows]
    return batches, sum(
        len(steps) for batch in batches for t in batch.values() for steps in t.steps
    )


class _Batch:
    """Some trajectories and each engine's passes over them; with a meter it notes the reference."""

    def __init__(
        self,
        reference: BatchEngine | Remembered,
        compared: Sequence[Compared],
        trajectories: dict[int, Trajectory],
        meter: Meter | None = None,
    ) -> None:
        self._names = list(trajectories)
        self._trajectories = list(trajectories.values())
        prompts = [item.prompt.ids for item in self._trajectories]
        images = [item.prompt.images for item in self._trajectories]
        engines = {
            id(engine): engine for engine in (reference, *(item.engine for item in compared))
        }
        self._passes = {key: engine.passes(prompts, images) for key, engine in engines.items()}
        self._runs = [self._passes[id(item.engine)] for item in compared]
        self._compared = compared
        passes = self._reference = self._passes[id(reference)]
        self._meter = meter
        self.noted = Noted(passes.device, passes.canvas_length, passes.vocabulary)

    def replay(self, sampler: Sampler) -> Iterator[tuple[int, StepDistance]]:
        """Yield (index of the compared model, distance), step by step."""
        rows, canvas = list(range(len(self._trajectories))), 0
        while rows:
            yield from self._canvas(rows, canvas, sampler)
            canvas += 1
            rows = [row for row in rows if len(self._trajectories[row].steps) > canvas]
            if rows:
                committed = [self._trajectories[row].committed[canvas - 1] for row in rows]
                for passes in self._passes.values():
                    passes.encode(rows, torch.stack(committed).to(passes.device))

    def _canvas(
        self, rows: list[int], canvas: int, sampler: Sampler
    ) -> Iterator[tuple[int, StepDistance]]:
        recorded = {row: self._trajectories[row].steps[canvas] for row in rows}
        given: list[Tensor | None] = [None] * (1 + len(self._runs))  # reference's first
        for step in range(1, max(len(ids) for ids in recorded.values()) + 1):
            keep = [i for i, row in enumerate(rows) if len(recorded[row]) >= step]
            if len(keep) < len(rows):
                rows = [rows[i] for i in keep]
                given = [None if rows is None else rows[keep] for rows in given]
            read = torch.stack([recorded[row][step - 1] for row in rows])
            given, measured = self._step(rows, read, given, sampler.temperature(step), sampler)
            for index, (columns, routing) in enumerate(measured):
                for at, row in enumerate(rows):
                    kl, agrees, entropy, jaccard = (column[at] for column in columns)
                    last = step == len(recorded[row])
                    yield index, StepDistance(
                        self._names[row], canvas, step, last, kl, agrees, entropy, jaccard.item(),
                        routing[at],
                    )  # fmt: skip

    def _step(
        self,
        rows: list[int],
        canvas: Tensor,
        given: list[Tensor | None],
        temperature: Tensor,
        sampler: Sampler,
    ) -> tuple[list[Tensor | None], list[tuple[list[Tensor], list[RoutingDistance]]]]:
        """Run one step of all models; return the next step's conditioning, and the distances."""
        runs = [self._reference, *self._runs]
        decoded = [
            passes.decode(rows, canvas.to(passes.device), conditioning)
            for passes, conditioning in zip(runs, given, strict=True)
        ]
        for item, result in zip(self._compared, decoded[1:], strict=True):
            if item.decoded is not None:
                item.decoded.append(result.choices.on_host)
            if item.lends_head:
                decoded[0] = replace(decoded[0], head=result.head)
        if self._meter is not None:
            self.noted.noted.append(decoded[0].to("cpu"))
            self._meter.add(len(rows))
        T = temperature.to(self._reference.device)
        following: list[list[Tensor]] = [[] for _ in runs]
        by_run: list[list[tuple[Tensor, ...]]] = [[] for _ in self._runs]
        for piece in decoded[0].pieces():
            ours = decoded[0].logits(piece)
            following[0].append(self._reference.condition(ours, T))
            if not self._runs:
                continue
            certain = _Certainty.of(ours / T, sampler)
            for i, passes in enumerate(self._runs):
                theirs = decoded[i + 1].logits(piece)
                by_run[i].append(_distance(certain, theirs / T, sampler))
                following[i + 1].append(
                    passes.condition(theirs if self._compared[i].own_conditioning else ours, T)
                )
        measured = [
            (
                [joined(column).cpu() for column in zip(*of_run, strict=True)],
                routing_distances(decoded[0].choices, result.choices),
            )
            for of_run, result in zip(by_run, decoded[1:], strict=True)
        ]
        return [joined(rows) for rows in following], measured


@dataclass(frozen=True)
class _Certainty:
    """What temperature-divided logits [B, L, V] say; BF16's are compared with every model's."""

    log_p: Tensor  # float32 [B, L, V]
    entropy: Tensor  # [B, L] in nats
    argmax: Tensor  # [B, L]
    accepted: Tensor  # [B, L]

    @classmethod
    def of(cls, scaled: Tensor, sampler: Sampler) -> "_Certainty":
        argmax, log_p = scaled.argmax(-1), scaled.log_softmax(-1)
        entropy = -log_p.exp().mul_(log_p).sum(-1)  # as `token_entropy`
        return cls(log_p, entropy, argmax, sampler.accepted(entropy))


def _distance(ours: _Certainty, scaled: Tensor, sampler: Sampler) -> tuple[Tensor, ...]:
    """Return KL, agreement and BF16's entropy [B, L], and Jaccard [B], of scaled logits [B, L, V]."""
    theirs = _Certainty.of(scaled, sampler)
    kl = (ours.log_p - theirs.log_p).mul_(ours.log_p.exp()).sum(-1)
    both, either = ours.accepted & theirs.accepted, ours.accepted | theirs.accepted
    agrees = ours.argmax == theirs.argmax
    return kl, agrees, ours.entropy, both.sum(-1) / either.sum(-1)
