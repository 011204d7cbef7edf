"""What the routers of a pass choose; a pass may be given choices, and then takes them as they are.

A pass takes experts and weights alike, so a model that is given its own choices computes the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

Choice = tuple[Tensor, Tensor]  # one router's experts int32 and their weights float32, both [M, k]


@dataclass(frozen=True)
class Choices:
    """The k experts that each layer's router chose for n tokens of each of B sequences.

    In a pass that only encodes, the last layer has no rows to route and is left out.
    """

    experts: Tensor  # int32 [B, layers, n, k], in any order
    weights: Tensor  # float32 [B, layers, n, k], what each expert's output is multiplied by

    @classmethod
    def of(cls, layers: Sequence[Choice], sequences: int) -> "Choices":
        """Join the choices [sequences * n, k] of one pass' layers."""
        experts, weights = (
            torch.stack([rows.unflatten(0, (sequences, -1)) for rows in of_layers], 1)
            for of_layers in zip(*layers, strict=True)
        )
        return cls(experts, weights)

    @cached_property
    def on_host(self) -> "Choices":
        """The same choices on the host: one copy, whoever asks."""
        return self.to("cpu")

    def to(self, device: torch.device | str) -> "Choices":
        """Return the choices on `device`; if they are there already, without a copy."""
        return Choices(self.experts.to(device), self.weights.to(device))

    def of_layer(self, index: int) -> Choice:
        """Return the choice of one layer, [B * n, k]."""
        return self.experts[:, index].flatten(0, 1), self.weights[:, index].flatten(0, 1)


@dataclass
class RoutingLog:
    """The choices of a model's passes, in order; the next passes of another model may be given them."""

    encoded: list[Choices] = field(default_factory=list)
    decoded: list[Choices] = field(default_factory=list)

    def next_of(self, decoded: int, sequences: int, tokens: int) -> Choices:
        """Take out the first choices of an encoder pass, or if `decoded`, of a decoder pass.

        Raises:
            RuntimeError: the log has none of this shape, so the models ran other passes.
        """
        waiting = self.decoded if decoded else self.encoded
        shape = waiting[0].experts.shape if waiting else ()
        if (shape[:1], shape[2:3]) != ((sequences,), (tokens,)):
            raise RuntimeError(
                f"{sequences} x {tokens} tokens: the log of choices has {shape} next"
            )
        return waiting.pop(0)
