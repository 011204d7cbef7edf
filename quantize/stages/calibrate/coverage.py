"""Counts the tokens that reach each expert while a model denoises."""

import torch
from torch import Tensor

from quantize.host.processes import Processes


class Coverage:
    """Counts the tokens routed to each expert: an observer for an engine's `watching`."""

    launches_alone = True

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._counts: dict[str, Tensor] = {}

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Layer (`model.decoder.layers.N.experts`) -> how many tokens reached each of its experts."""
        return {name: counts.tolist() for name, counts in self._counts.items()}

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Count how often each expert occurs in `experts` [N, k], if `name` is a gate_up_proj."""
        layer, _, projection = name.rpartition(".")
        if experts is not None and projection == "gate_up_proj":
            expert_ids = torch.arange(self._experts, device=experts.device)
            # bincount would wait for the device; atomic sums into few cells would wait for each other
            self._add(layer, (experts[..., None] == expert_ids).sum((0, 1)))

    def _add(self, layer: str, tokens: Tensor) -> None:
        before = self._counts.setdefault(layer, torch.zeros_like(tokens))
        before += tokens.to(before.device)

    def pool(self, processes: Processes) -> None:
        """Add the counts of the other processes; all processes must call this."""
        for counts in processes.others(
            {name: tokens.cpu() for name, tokens in self._counts.items()}
        ):
            for layer, tokens in counts.items():
                self._add(layer, tokens)
