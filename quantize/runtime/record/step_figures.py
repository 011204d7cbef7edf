"""What a model's routers and distributions do at each denoising step, summed over canvases.

load        tokens that reached each expert, by step and layer
hit         experts that any token of a canvas reached, by step and layer
entropy     of the distribution that a token is drawn from, in nats, mean over positions
mass        tokens that hold MASS of that distribution, the most probable first; at POSITIONS
positions of a canvas, evenly spaced, since a sort of every vocabulary takes too long
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantize.host.units import digits
from quantize.runtime.engine.generate import StepRecord
from quantize.runtime.sampler.sampler import Sampler

MASS, POSITIONS = 0.999, 32


@dataclass
class StepSums:
    """Sums over the canvases that took part in one denoising step."""

    load: Tensor  # int64 [layers, experts]
    hit: Tensor  # int64 [layers], summed over canvases
    canvases: int = 0
    entropy: float = 0.0  # summed over canvases
    mass: list[Tensor] = field(default_factory=list[Tensor])  # int64 [b * positions] each


class StepFigures:
    """Sums figures of denoising steps; `see` is an `OnStep`, for a sampler and a number of experts."""

    def __init__(self, experts: int, sampler: Sampler) -> None:
        self._experts, self._sampler = experts, sampler
        self.steps: dict[int, StepSums] = {}

    def see(self, record: StepRecord) -> None:
        """Add one step of the canvases in `record`."""
        chosen = record.decoded.choices.experts.long()  # [B, layers, n, k]
        B, layers = chosen.shape[:2]
        cells = torch.arange(B * layers, device=chosen.device).view(B, layers, 1, 1)
        counts = torch.bincount(
            (cells * self._experts + chosen).flatten(), minlength=B * layers * self._experts
        ).view(B, layers, -1)
        load, hit = counts.sum(0).cpu(), (counts > 0).sum((0, 2)).cpu()
        at = self.steps.setdefault(
            record.step, StepSums(torch.zeros_like(load), torch.zeros_like(hit))
        )
        at.load += load
        at.hit += hit
        at.canvases += B
        at.entropy += record.entropy.double().mean(1).sum().item()
        temperature = self._sampler.temperature(record.step).to(chosen.device)
        stride = max(1, record.entropy.shape[1] // POSITIONS)
        for piece in record.decoded.pieces():
            logits = record.decoded.logits(piece)[:, ::stride]
            at.mass.append(_tokens_of_mass(logits / temperature))

    def add(self, other: "StepFigures") -> None:
        """Add what another object saw."""
        for step, theirs in other.steps.items():
            if (ours := self.steps.get(step)) is None:
                self.steps[step] = theirs
                continue
            ours.load += theirs.load
            ours.hit += theirs.hit
            ours.canvases += theirs.canvases
            ours.entropy += theirs.entropy
            ours.mass += theirs.mass

    def by_step(self) -> list[dict[str, Any]]:
        """Return the figures of each step, in order: means over its canvases, or quantiles."""
        return [
            {
                "step": step,
                "canvases": at.canvases,
                "entropy_nats": digits(at.entropy / at.canvases),
                "tokens_of_mass": _quantiles(torch.cat(at.mass)),
                "experts_hit": [digits(n / at.canvases) for n in at.hit.tolist()],
                "largest_share_of_load": [
                    digits(x) for x in (at.load.max(1).values / at.load.sum(1)).tolist()
                ],
            }
            for step, at in sorted(self.steps.items())
        ]


def _tokens_of_mass(logits: Tensor) -> Tensor:
    held = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    return ((held < MASS).sum(-1) + 1).flatten().cpu()


def _quantiles(values: Tensor) -> dict[str, float]:
    ordered = values.sort().values
    at = {
        name: ordered[(len(ordered) - 1) * of // 10].item()
        for name, of in (("median", 5), ("p90", 9))
    }
    return {"mean": digits(values.double().mean().item()), **at}
