"""Chooses one option a group so that their damage is least within a budget of bytes: exact, in bins.

The least bytes of every group are taken off; what is left of the budget is cut into `BINS` bins, and an
option's bytes are rounded up to bins, so a choice never exceeds the budget. With d[b] the least damage
of the groups so far within b bins,

    d'[b] = min over options of d[b - bins(option)] + damage(option)

is the least with one group more. One table answers every budget.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantize.errors import InputError

BINS = 1 << 15
Choice = tuple[int, float]  # bytes and damage of an option


class Knapsack:
    """All best choices, by budget.

    Args:
        groups: the options of each group, at least one; exactly one of each is chosen.
    """

    def __init__(self, groups: Sequence[Sequence[Choice]]) -> None:
        least = [min(nbytes for nbytes, _ in options) for options in groups]
        most = sum(max(nbytes for nbytes, _ in options) for options in groups)
        self.least = sum(least)
        self._unit = max(1, -(-(most - self.least) // BINS))
        self._bins = [
            [-(-(nbytes - low) // self._unit) for nbytes, _ in options]
            for options, low in zip(groups, least, strict=True)
        ]
        length = sum(max(bins) for bins in self._bins) + 1
        self._damage = torch.zeros(length, dtype=torch.float64)
        self._picked: list[Tensor] = []
        for options, bins in zip(groups, self._bins, strict=True):
            tried = torch.stack(
                [self._shifted(at) + damage for at, (_, damage) in zip(bins, options, strict=True)]
            )
            self._damage, picked = tried.min(0)
            self._picked.append(picked)

    def _shifted(self, bins: int) -> Tensor:
        """Return d[b - bins], infinite where that is no budget."""
        moved = torch.full_like(self._damage, float("inf"))
        moved[bins:] = self._damage[: len(self._damage) - bins]
        return moved

    def best(self, nbytes: int) -> list[int]:
        """Return the option of each group that together do the least damage within `nbytes`.

        Raises:
            InputError: not even the smallest options fit.
        """
        if nbytes < self.least:
            raise InputError(
                f"no choice is so small: the searched parts take at least {self.least:,} bytes, and "
                f"{max(nbytes, 0):,} are left for them beside what is not searched"
            )
        return self._trace(min((nbytes - self.least) // self._unit, len(self._damage) - 1))

    def cheapest(self, damage: float | None) -> list[int]:
        """Return the options of the fewest bytes whose damage is at most `damage`.

        Raises:
            InputError: no choice does so little.
        """
        limit = float("inf") if damage is None else damage
        within = (self._damage <= limit).nonzero()
        if not len(within):
            raise InputError(
                f"no choice does so little damage: the least is {self._damage[-1].item():.4g}"
            )
        return self._trace(int(within[0]))

    def frontier(self, points: int) -> list[Choice]:
        """Return bytes and least damage at evenly spaced budgets."""
        at = torch.linspace(0, len(self._damage) - 1, points).long().unique().tolist()
        return [(self.least + bins * self._unit, self._damage[bins].item()) for bins in at]

    def _trace(self, budget: int) -> list[int]:
        found: list[int] = []
        for picked, bins in zip(reversed(self._picked), reversed(self._bins), strict=True):
            option = int(picked[budget])
            found.append(option)
            budget -= bins[option]
        return found[::-1]
