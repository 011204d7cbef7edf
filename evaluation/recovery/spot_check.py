"""What a spot check of an imported baseline says: BF16 gave a random sample of its answers again.

A digest proves that a pack is as it was exported, not that BF16 gave its answers. Answers made under
equal conditions (GPU, packages, launch table) are equal in every byte, so one that differs is a
forgery or a fault. If a share f of a pack was forged, a sample of n answers finds it in
1 - (1 - f)^n of checks. On another GPU sums round otherwise: honest answers differ too, but are as
often right. Then an exact sign test compares how often only the pack, and only BF16 here, solves a
question.
"""

import math
from dataclasses import dataclass

from scipy.stats import binomtest, norm

CHANCE = 0.01  # of accusing an honest pack of another machine
POWER = 0.8  # chance to find the loss that the sentence names


@dataclass(frozen=True)
class SpotCheck:
    """What a spot check found; `pack` is the pack's sha256, `seed` drew the answers."""

    pack: str
    seed: int
    conditions_equal: bool  # whether honest answers must be equal in every byte
    answers: int
    differing: int  # answers of another text
    only_pack_right: int
    only_here_right: int

    @property
    def fault(self) -> str | None:
        """What speaks against the pack, in a sentence; None if nothing does."""
        if self.conditions_equal and self.differing:
            return (
                f"{self.differing} of {self.answers} answers are not those that BF16 gives here, under "
                f"the conditions under which the pack says that it was made"
            )
        discordant = self.only_pack_right + self.only_here_right
        if discordant and binomtest(self.only_pack_right, discordant).pvalue < CHANCE:
            return (
                f"of {self.answers} questions BF16 solves {self.only_here_right} only here and "
                f"{self.only_pack_right} only in the pack: chance explains this in less than "
                f"{CHANCE:.0%} of packs"
            )
        return None

    def __str__(self) -> str:
        """Return what was compared, and what such a check would have found."""
        n = self.answers
        if self.conditions_equal:
            share = 1 - 0.05 ** (1 / n)
            return (
                f"{n - self.differing} of {n} answers are equal in every byte; had {share:.1%} of the "
                f"pack been forged, 95 % of checks would have found it"
            )
        discordant = max(1, self.only_pack_right + self.only_here_right)
        needed = norm.isf(CHANCE / 2) + norm.ppf(POWER)
        share = needed * math.sqrt(discordant) / n
        return (
            f"{n} answers, made on another machine: {self.only_pack_right} right only in the pack, "
            f"{self.only_here_right} only here; a pack that is {share:.0%} of questions "
            f"better or worse would have been found in {POWER:.0%} of checks"
        )
