"""Counts the tokens that reach every expert, and those that hold a row's mass, during denoising."""

import torch
from fused_dequant.reference import tokens_needed
from torch import Tensor

from quantize.host.processes import Processes


class Coverage:
    """Counts the tokens routed to every expert: an observer for an engine's `watching`."""

    launches_alone = True

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._counts: dict[str, Tensor] = {}

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Tokens of each expert, by layer (`model.decoder.layers.N.experts`)."""
        return {name: counts.tolist() for name, counts in self._counts.items()}

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Count the tokens of one input."""
        layer, _, projection = name.rpartition(".")
        if experts is not None and projection == "gate_up_proj":
            each = torch.arange(self._experts, device=experts.device)
            # bincount would wait for the device, and many sums into few cells for each other
            self._add(layer, (experts[..., None] == each).sum((0, 1)))

    def _add(self, layer: str, found: Tensor) -> None:
        before = self._counts.setdefault(layer, torch.zeros_like(found))
        before += found.to(before.device)

    def pool(self, processes: Processes) -> None:
        """Add the counts of the other processes."""
        for counts in processes.others({name: found.cpu() for name, found in self._counts.items()}):
            for layer, found in counts.items():
                self._add(layer, found)


class TokensNeeded:
    """Counts how many tokens hold 0.999 of a row's mass: what `sparse_soft_embedding` would read.

    `see` is an engine's `on_logits`, and looks at one row of EVERY.
    """

    EVERY, ROWS = 8, 64  # of the rows seen, those looked at together: 67 MB in float32
    STEPS, MOST = ("first step", "second step", "later steps"), (1, 2, 4, 8, 16, 32, 64, 128)

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    def see(self, logits: Tensor, inverse_temperature: Tensor, step: Tensor) -> None:
        """Count the rows of one draw."""
        of, most = len(self.MOST) + 1, torch.tensor(self.MOST, device=logits.device)
        shown = (
            each[:: self.EVERY].split(self.ROWS) for each in (logits, inverse_temperature, step)
        )
        for own, sharpness, at in zip(*shown, strict=True):
            kind = torch.bucketize(tokens_needed(own, sharpness), most)
            kind += of * (at.clamp(max=len(self.STEPS)) - 1)
            each = torch.arange(of * len(self.STEPS), device=logits.device)
            self._found.append((kind[:, None] == each).sum(0))

    def counted(self, processes: Processes) -> dict[str, dict[str, int]]:
        """Return how many rows of all processes needed at most so many tokens, by step."""
        own = torch.stack(self._found).sum(0).cpu()
        rows = (own + sum(processes.others(own))).view(len(self.STEPS), -1).tolist()
        names = [*(f"at most {most}" for most in self.MOST), "more"]
        return {
            at: dict(zip(names, of, strict=True)) for at, of in zip(self.STEPS, rows, strict=True)
        }
