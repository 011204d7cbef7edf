"""Counts the tokens that hold 0.999 of a row's mass, for an engine's `on_logits`, by denoising step.

They are what `sparse_soft_embedding` would read of a row, and decide what it saves.
"""

import torch
from fused_dequant.reference import tokens_needed
from torch import Tensor

from quantize.host.processes import Processes


class TokensNeeded:
    """Rows by how many tokens they need; `see` looks at one row of EVERY."""

    EVERY, ROWS = 8, 64  # of the rows seen, those looked at together: 67 MB in float32
    STEPS, MOST = ("first step", "second step", "later steps"), (1, 2, 4, 8, 16, 32, 64, 128)

    def __init__(self) -> None:
        kinds = len(self.STEPS) * (len(self.MOST) + 1)
        self._found = [torch.zeros(kinds, dtype=torch.int64)]

    def see(self, logits: Tensor, inverse_temperature: Tensor, step: Tensor) -> None:
        """Count the rows of one draw."""
        of, most = len(self.MOST) + 1, torch.tensor(self.MOST, device=logits.device)
        shown = (
            each[:: self.EVERY].split(self.ROWS) for each in (logits, inverse_temperature, step)
        )
        for own, sharpness, at in zip(*shown, strict=True):
            kind = torch.bucketize(tokens_needed(own, sharpness), most)
            kind += of * (at.clamp(max=len(self.STEPS)) - 1)
            each = torch.arange(len(self._found[0]), device=logits.device)
            self._found.append((kind[:, None] == each).sum(0))

    def counted(self, processes: Processes) -> dict[str, dict[str, int]]:
        """Return how many rows of all processes needed at most so many tokens, by step."""
        own = torch.stack([found.cpu() for found in self._found]).sum(0)
        rows = (own + sum(processes.others(own))).view(len(self.STEPS), -1).tolist()
        names = [*(f"at most {most}" for most in self.MOST), "more"]
        return {
            at: dict(zip(names, of, strict=True)) for at, of in zip(self.STEPS, rows, strict=True)
        }
