"""Counts the tokens that hold 0.999 of a row's mass, for an engine's `on_logits`, by denoising step.

`sparse_soft_embedding` would read only these tokens, so their number decides what it saves.
"""

import torch
from fused_dequant.reference import tokens_needed
from torch import Tensor

from quantize.host.processes import Processes


class TokensNeeded:
    """Counts rows of logits by how many tokens they need; `see` looks at one row in EVERY (8)."""

    EVERY, ROWS = 8, 64  # of the rows seen, those looked at together: 67 MB in float32
    STEPS, MOST = ("first step", "second step", "later steps"), (1, 2, 4, 8, 16, 32, 64, 128)

    def __init__(self) -> None:
        kinds = len(self.STEPS) * (len(self.MOST) + 1)
        self._found = [torch.zeros(kinds, dtype=torch.int64)]

    def see(self, logits: Tensor, inverse_temperature: Tensor, step: Tensor) -> None:
        """Count rows of one draw: logits [m, V], 1 / T [m] and step numbers [m], which begin at 1."""
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
        """Return how many rows of all processes needed so many tokens, by step and range of tokens."""
        own = torch.stack([found.cpu() for found in self._found]).sum(0)
        rows = (own + sum(processes.others(own))).view(len(self.STEPS), -1).tolist()
        names = [*(f"at most {most}" for most in self.MOST), "more"]
        return {
            at: dict(zip(names, of, strict=True)) for at, of in zip(self.STEPS, rows, strict=True)
        }
