"""Counts what flows through a model while it denoises: tokens per expert, activations by step.

Both are observers for an engine's `watching`: they see encoder and decoder, and real tokens only.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from quantize.host.processes import Processes
from quantize.host.units import digits
from quantize.runtime.batch import StepRecord

# One Linear of each group that reads the same input: end of its name -> name of the input.
INPUTS = {
    "self_attn.q_proj": "attention.qkv",
    "self_attn.o_proj": "attention.o",
    "mlp.gate_proj": "mlp.gate_up",
    "mlp.down_proj": "mlp.down",
    "experts.gate_up_proj": "experts.gate_up",
    "experts.down_proj": "experts.down",
}
KINDS = tuple(INPUTS.values())


class Coverage:
    """Counts the tokens routed to every expert."""

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


class StepStatistics:
    """Magnitude of activations, acceptance and entropy by denoising step."""

    launches_alone = True

    def __init__(self) -> None:
        # Of each kind of input: largest |x|, sum, count; float64 [6, 3].
        self._pending: Tensor | None = None
        # Of each step, 0 being the encoder, over all canvases: the same [6, 3], and sums of canvases,
        # accepted share, entropy and finished canvases, float64 [4].
        self._steps: dict[int, tuple[Tensor, Tensor]] = {}

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Observe one input; an experts' row counts once for every expert that reads it."""
        kind = INPUTS.get(".".join(name.rsplit(".", 2)[1:]))
        if kind is None:
            return
        if self._pending is None:
            self._pending = torch.zeros(len(KINDS), 3, dtype=torch.float64, device=rows.device)
        amax, total, count = self._pending[KINDS.index(kind)]
        times = 1 if experts is None else experts.shape[1]
        torch.maximum(amax, vector_norm(rows, float("inf")).double(), out=amax)
        total += vector_norm(rows, 1, dtype=torch.float64) * times
        count += rows.numel() * times

    def on_encoded(self) -> None:
        """Add what a pass of the encoder has shown."""
        self._flush(0, [0.0] * 4)

    def _flush(self, step: int, sums: list[float]) -> None:
        """Add everything measured since the last call to `step`."""
        seen = torch.zeros(len(KINDS), 3) if self._pending is None else self._pending
        self._add({step: (seen.double().cpu(), torch.tensor(sums, dtype=torch.float64))})
        if self._pending is not None:
            self._pending.zero_()

    def on_step(self, record: StepRecord) -> None:
        """Add one denoising step."""
        accepted = record.accepted.float().mean(-1).sum().item()
        sums = [len(record.rows), accepted, record.mean_entropy.sum().item()]
        self._flush(record.step, [*sums, record.finished.sum().item()])

    @classmethod
    def joined(cls, each: "Iterable[StepStatistics]") -> "StepStatistics":
        """Return the statistics of several batches, added in their order."""
        whole = cls()
        for own in each:
            whole._add(own._steps)
        return whole

    def pool(self, processes: Processes) -> None:
        """Add the statistics of the other processes."""
        for steps in processes.others(self._steps):
            self._add(steps)

    def _add(self, steps: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        for number, (seen, sums) in steps.items():
            empty = torch.zeros_like(seen), torch.zeros_like(sums)
            inputs, own = self._steps.setdefault(number, empty)
            torch.maximum(inputs[:, 0], seen[:, 0], out=inputs[:, 0])
            inputs[:, 1:] += seen[:, 1:]
            own += sums

    def summary(self) -> Mapping[str, Any]:
        """Return what statistics.json holds."""
        found: list[dict[str, Any]] = []
        for number, (inputs, sums) in sorted(self._steps.items()):
            canvases, *totals = sums.tolist()
            entry: dict[str, Any] = {"step": number, "canvases": int(canvases)}
            names = ("accepted_share", "mean_entropy_nats", "finished_share")
            entry |= {k: digits(v / max(canvases, 1)) for k, v in zip(names, totals, strict=True)}
            entry["inputs"] = {
                kind: {"amax": digits(amax), "mean_abs": digits(total / count)}
                for kind, (amax, total, count) in sorted(zip(KINDS, inputs.tolist(), strict=True))
                if count
            }
            found.append(entry)
        return {"encoder": found[0]["inputs"], "denoising_steps": found[1:]}
