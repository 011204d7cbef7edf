"""Chooses an option for each group: least damage within a budget of bytes, or the reverse.

An option has two costs, bytes and damage. x is 1 for a chosen option and else 0, and sums to 1 over
each group. The solver HiGHS minimizes the sum of one cost, with the other's sum within a bound.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array

from quantize.errors import InputError

Choice = tuple[int, float]  # bytes and damage of an option


class Knapsack:
    """Chooses exactly one option from each of `groups`; an option is a pair (bytes, damage)."""

    def __init__(self, groups: Sequence[Sequence[Choice]]) -> None:
        sizes = [len(options) for options in groups]
        self._first = np.cumsum([0, *sizes[:-1]])
        self._bytes, self._damage = np.array(
            [o for options in groups for o in options], dtype=float
        ).T
        rows = np.repeat(np.arange(len(sizes)), sizes), np.arange(sum(sizes))
        self._one = LinearConstraint(csr_array((np.ones(sum(sizes)), rows)), 1, 1)
        self.least = int(np.minimum.reduceat(self._bytes, self._first).sum())
        self._most = int(np.maximum.reduceat(self._bytes, self._first).sum())

    def best(self, nbytes: int) -> list[int]:
        """Minimize damage within `nbytes` bytes; return the index of each group's chosen option.

        Raises:
            InputError: not even the smallest options fit.
        """
        picked = self._least(self._damage, self._bytes, nbytes)
        if picked is None:
            raise InputError(
                f"no choice is so small: the searched parts take at least {self.least:,} bytes, and "
                f"{max(nbytes, 0):,} are left for them beside what is not searched"
            )
        return self._options(picked)

    def cheapest(self, damage: float) -> list[int]:
        """Find the fewest bytes with at most `damage`; return the index of each group's chosen option.

        Raises:
            InputError: every combination of options does more damage.
        """
        picked = self._least(self._bytes, self._damage, damage)
        if picked is None:
            least = np.minimum.reduceat(self._damage, self._first).sum()
            raise InputError(f"no choice does so little damage: the least is {least:.4g}")
        return self._options(picked)

    def frontier(self, points: int) -> list[Choice]:
        """Return pairs (bytes, least damage with at most these bytes) for the possible `budgets`."""
        choices = [(n, self._least(self._damage, self._bytes, n)) for n in self.budgets(points)]
        return [(budget, float(x @ self._damage)) for budget, x in choices if x is not None]

    def budgets(self, points: int) -> list[int]:
        """Return up to `points` evenly spaced budgets in bytes, from smallest to largest choice."""
        return [int(n) for n in dict.fromkeys(np.linspace(self.least, self._most, points).round())]

    def _least(self, cost: np.ndarray, bounded: np.ndarray, limit: float) -> np.ndarray | None:
        # HiGHS keeps a limit to 1e-6 and ends that near to the optimum: numbers below 1 are scaled up.
        scale, unit = (max(1.0, 1e6 / (abs(values).max() or 1)) for values in (cost, bounded))
        within = LinearConstraint(bounded[None] * unit, ub=limit * unit)
        solution = milp(
            cost * scale, integrality=1, bounds=(0, 1), constraints=[self._one, within],
            options={"mip_rel_gap": 0},
        )  # fmt: skip
        if solution.x is None:
            return None
        x = solution.x.round()
        over = float(bounded @ x) - limit  # where an x was a little off 0 or 1
        return x if over <= 1e-12 * limit else self._least(cost, bounded, limit - over)

    def _options(self, x: np.ndarray) -> list[int]:
        return (np.flatnonzero(x) - self._first).tolist()
