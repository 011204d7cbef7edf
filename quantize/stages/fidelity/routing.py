"""How far a model's routers choose otherwise than BF16's, and what their choices cost.

    overlap   share of a token's k experts that both models' routers chose, by layer; experts count by
              their index, so experts that only changed places count as others
    p10       a tenth of the tokens have at most this overlap
    moved     share of a token's routing weight that is on other experts, or in other proportion:
              sum over experts of |w_ref - w| / 2; each model's w of a token add up to 1
    hit       experts that any token of a canvas reaches in a layer, at a step and in all its steps

What choices cost is measured by injecting them (`RoutingLog`): experts and weights, in encoder and
decoder. `attributed` splits the KL of the model as it is:

    as it is   = with BF16's choices + what choosing otherwise adds
    BF16 with the model's choices    is what they cost where nothing is rounded
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantize.host.units import digits
from quantize.runtime.model.choices import Choices


@dataclass(frozen=True)
class RoutingDistance:
    """How two models' routers differ at one step of one canvas; E is the highest expert hit, plus 1."""

    equal: Tensor  # int64 [layers, k + 1], number of tokens of which 0 .. k experts are the same
    moved: Tensor  # [layers] share of the routing weight that moved, mean over tokens
    hit: Tensor  # bool [2, layers, E], experts that BF16's tokens and the model's tokens reach

    @property
    def overlap(self) -> Tensor:
        """Share of equal experts, mean over tokens: [layers]."""
        return _overlap(self.equal)


def routing_distances(ours: Choices, theirs: Choices) -> list[RoutingDistance]:
    """Return each sequence's distance between BF16's choices and a model's, for the same tokens."""
    total, k = 1 + max(int(c.experts.max()) for c in (ours, theirs)), ours.experts.shape[-1]
    distances: list[RoutingDistance] = []
    for row in range(len(ours.experts)):  # one at a time: [layers, n, E] may be large
        weights, chosen = zip(*(_dense(c, row, total) for c in (ours, theirs)), strict=True)
        equal = F.one_hot((chosen[0] & chosen[1]).sum(-1), k + 1).sum(1)
        moved = (weights[0] - weights[1]).abs().sum(-1).mean(-1) / 2
        hit = torch.stack([mask.any(1) for mask in chosen])
        distances.append(RoutingDistance(equal.cpu(), moved.cpu(), hit.cpu()))
    return distances


def _dense(choices: Choices, row: int, total: int) -> tuple[Tensor, Tensor]:
    """Return a sequence's weights, of sum 1, and whether each expert was chosen: [layers, n, total]."""
    experts, weights = choices.experts[row].long(), choices.weights[row].float()
    blank = weights.new_zeros(*experts.shape[:-1], total)
    share = weights / weights.sum(-1, keepdim=True)
    return blank.scatter(-1, experts, share), blank.bool().scatter(-1, experts, True)


def routing_figures(distances: Sequence[tuple[tuple[int, int], RoutingDistance]]) -> dict[str, Any]:
    """Return fidelity.json's figures of routing; each distance comes with its canvas' key."""
    equal = torch.stack([d.equal for _, d in distances]).sum(0)
    moved = torch.stack([d.moved for _, d in distances]).mean(0)
    canvases: dict[tuple[int, int], list[Tensor]] = {}
    for canvas, distance in distances:
        canvases.setdefault(canvas, []).append(distance.hit)
    hit = {"step": _hit([d.hit] for _, d in distances), "canvas": _hit(canvases.values())}
    return {
        "p10": [_p10(counts) for counts in equal],
        "moved": [digits(share) for share in moved.tolist()],
        "experts_hit": {
            name: {of: digits(counts[at].item()) for of, counts in hit.items()}
            for at, name in enumerate(("bf16", "quantized"))
        },
    }


def routing_at_step(distances: Sequence[RoutingDistance]) -> dict[str, Any]:
    """Return fidelity.json's figures of routing at one step, over all layers."""
    equal = torch.stack([d.equal for d in distances]).sum((0, 1))
    bf16, quantized = _hit([d.hit] for d in distances).tolist()
    return {
        "routing_overlap": digits(_overlap(equal).item()),
        "routing_p10": _p10(equal),
        "routing_moved": digits(torch.stack([d.moved for d in distances]).mean().item()),
        "experts_hit": {"bf16": digits(bf16), "quantized": digits(quantized)},
    }


def _overlap(equal: Tensor) -> Tensor:
    k = equal.shape[-1] - 1
    shares = torch.arange(k + 1, dtype=torch.float64) / k
    return (equal * shares).sum(-1) / equal.sum(-1)


def _p10(equal: Tensor) -> float:
    """Return the overlap that a tenth of the tokens do not exceed, from counts [k + 1]."""
    reached = equal.cumsum(0) * 10 >= equal.sum()
    return digits(int(reached.int().argmax()) / (len(equal) - 1))


def _hit(groups: Iterable[Sequence[Tensor]]) -> Tensor:
    """Return how many experts of a layer each group's masks hit together, mean over groups: [2]."""
    counts: list[Tensor] = []
    for masks in groups:
        width = max(mask.shape[-1] for mask in masks)
        padded = torch.stack([F.pad(mask, (0, width - mask.shape[-1])) for mask in masks])
        counts.append(padded.any(0).sum(-1).double().mean(-1))
    return torch.stack(counts).mean(0)
