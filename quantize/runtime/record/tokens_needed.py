"""Counts, by step, how many tokens hold 0.999 of a row's probability; `see` is an `engine.OnLogits`.

`sparse_soft_embedding` reads the embeddings of only these tokens; the counts tell how much that saves.
"""

import torch
from fused_dequant.reference import tokens_needed
from torch import Tensor

from quantize.host.processes import Processes


class TokensNeeded:
    """Counts, for every 8th row of logits, how many tokens hold 0.999 of the row's probability."""

    EVERY, ROWS = 8, 64  # every 8th row, and 64 of these rows at a time: 67 MB in float32
    STEPS, MOST = ("first step", "second step", "later steps"), (1, 2, 4, 8, 16, 32, 64, 128)

    def __init__(self) -> None:
        kinds = len(self.STEPS) * (len(self.MOST) + 1)
        self._counts = [torch.zeros(kinds, dtype=torch.int64)]

    def see(self, logits: Tensor, inverse_temperature: Tensor, step: Tensor) -> None:
        """Count rows of logits [m, V]; each has its 1 / T [m] and its denoising step [m], from 1."""
        of, most = len(self.MOST) + 1, torch.tensor(self.MOST, device=logits.device)
        shown = (
            values[:: self.EVERY].split(self.ROWS) for values in (logits, inverse_temperature, step)
        )
        for rows, sharpness, at in zip(*shown, strict=True):
            kind = torch.bucketize(tokens_needed(rows, sharpness), most)
            kind += of * (at.clamp(max=len(self.STEPS)) - 1)
            kinds = torch.arange(len(self._counts[0]), device=logits.device)
            self._counts.append((kind[:, None] == kinds).sum(0))

    def counted(self, processes: Processes) -> dict[str, dict[str, int]]:
        """Return step ("first step") -> tokens ("at most 8") -> number of rows of all processes."""
        summed = torch.stack([counts.cpu() for counts in self._counts]).sum(0)
        rows = (summed + sum(processes.others(summed))).view(len(self.STEPS), -1).tolist()
        names = [*(f"at most {most}" for most in self.MOST), "more"]
        return {
            at: dict(zip(names, of, strict=True)) for at, of in zip(self.STEPS, rows, strict=True)
        }
