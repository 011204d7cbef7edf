"""Counts what flows through a model while it denoises: tokens per expert, activations by step.

Both are observers for an engine's `watching`: they see encoder and decoder, and real tokens only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from quantize.host.processes import Processes
from quantize.recipe.sections import Calibration
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

    def summary(self, settings: Calibration, fallbacks: list[str]) -> dict[str, Any]:
        """Return what coverage.json holds."""
        return {
            "min_tokens_per_expert": settings.min_tokens_per_expert,
            "fallbacks": fallbacks,
            "tokens_per_expert": self.tokens,
        }


@dataclass
class _Magnitude:
    """Running sums of |x| of one kind of input."""

    amax: float = 0.0
    total: float = 0.0
    count: int = 0

    def add(self, amax: float, total: float, count: int) -> None:
        self.amax = max(self.amax, amax)
        self.total += total
        self.count += count

    def summary(self) -> dict[str, float]:
        return {"amax": _digits(self.amax), "mean_abs": _digits(self.total / self.count)}


@dataclass
class _Step:
    """Statistics of one denoising step over all canvases; step 0 is the encoder."""

    inputs: dict[str, _Magnitude] = field(default_factory=dict)
    rows: int = 0
    accepted: float = 0.0
    entropy: float = 0.0
    finished: int = 0

    def add(self, other: "_Step") -> None:
        for kind, seen in other.inputs.items():
            self.inputs.setdefault(kind, _Magnitude()).add(seen.amax, seen.total, seen.count)
        self.rows += other.rows
        self.accepted += other.accepted
        self.entropy += other.entropy
        self.finished += other.finished


class StepStatistics:
    """Magnitude of activations, acceptance and entropy by denoising step."""

    launches_alone = True

    def __init__(self) -> None:
        self._pending: Tensor | None = None  # of each kind: largest |x|, sum, count; float64 [6, 3]
        self._steps: dict[int, _Step] = {}

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
        self._flush(0)

    def _flush(self, step: int) -> _Step:
        """Add everything measured since the last call to `step`."""
        entry = self._steps.setdefault(step, _Step())
        if self._pending is None:
            return entry
        for kind, (amax, total, count) in zip(KINDS, self._pending.tolist(), strict=True):
            if count:
                entry.inputs.setdefault(kind, _Magnitude()).add(amax, total, int(count))
        self._pending.zero_()
        return entry

    def on_step(self, record: StepRecord) -> None:
        """Add one denoising step."""
        entry = self._flush(record.step)
        entry.rows += len(record.rows)
        entry.accepted += record.accepted.float().mean(-1).sum().item()
        entry.entropy += record.mean_entropy.sum().item()
        entry.finished += int(record.finished.sum())

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

    def _add(self, steps: Mapping[int, _Step]) -> None:
        for number, step in steps.items():
            self._steps.setdefault(number, _Step()).add(step)

    def summary(self) -> Mapping[str, Any]:
        """Return what statistics.json holds."""
        steps = sorted(self._steps.items())
        return {
            "encoder": {k: m.summary() for k, m in sorted(self._steps[0].inputs.items())},
            "denoising_steps": [
                {
                    "step": number,
                    "canvases": step.rows,
                    "accepted_share": _digits(step.accepted / step.rows),
                    "mean_entropy_nats": _digits(step.entropy / step.rows),
                    "finished_share": _digits(step.finished / step.rows),
                    "inputs": {k: m.summary() for k, m in sorted(step.inputs.items())},
                }
                for number, step in steps
                if number > 0
            ],
        }


def _digits(value: float) -> float:
    """Keep 6 significant digits: no float32 sum has more."""
    return float(f"{value:.6g}")
