"""What flows through a model while it denoises: tokens per expert, and activations by step.

Both watch the decoder's modules. They see the encoder too when it shares them (see calibrate), and
real tokens only, since the runtime computes no padding.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.recipe import Calibration
from quantize.runtime.sampler import StepRecord

# One of each group of Linears that read the same input: (suffix of its name, name of the input).
INPUTS = (
    ("self_attn.q_proj", "attention.qkv"),
    ("self_attn.o_proj", "attention.o"),
    ("mlp.gate_proj", "mlp.gate_up"),
    ("mlp.down_proj", "mlp.down"),
    ("gate_proj", "experts.gate_up"),
    ("down_proj", "experts.down"),
)


class Coverage:
    """Counts the tokens routed to every expert.

    `tokens` maps `model.decoder.layers.N.experts` to one count an expert.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self._routers: dict[str, nn.Module] = {
            f"model.decoder.layers.{index}.experts": layer.get_submodule("router")
            for index, layer in enumerate(model.model.decoder.layers)
        }
        experts: int = model.config.get_text_config().num_experts
        self._counts = {name: torch.zeros(experts, dtype=torch.long) for name in self._routers}

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Tokens per expert by layer."""
        return {name: counts.tolist() for name, counts in self._counts.items()}

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count while the block runs."""
        hooks = [
            router.register_forward_hook(self._hook(name)) for name, router in self._routers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def count(_: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen = output[2].flatten().cpu()
            self._counts[name] += chosen.bincount(minlength=len(self._counts[name]))

        return count

    def summary(self, settings: Calibration, fallbacks: list[str]) -> dict[str, Any]:
        """Return what coverage.json holds."""
        return {
            "min_tokens_per_expert": settings.min_tokens_per_expert,
            "fallbacks": fallbacks,
            "tokens_per_expert": self.tokens,
        }


@dataclass
class _Magnitude:
    """Running |x| of one kind of input."""

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
    """What happened at one denoising step, over all canvases; step 0 is the encoder."""

    inputs: dict[str, _Magnitude] = field(default_factory=dict)
    rows: int = 0
    accepted: float = 0.0
    entropy: float = 0.0
    finished: int = 0


class StepStatistics:
    """Magnitude of activations, acceptance and entropy by denoising step."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self._encoder = model.model.encoder
        self._watched: list[tuple[nn.Module, str]] = []
        for name, module in model.model.decoder.named_modules():
            kind = next((kind for suffix, kind in INPUTS if name.endswith(suffix)), None)
            if name.startswith("layers.") and kind is not None:
                self._watched.append((module, kind))
        self._pending: list[tuple[str, Tensor, Tensor, int]] = []
        self._steps: dict[int, _Step] = {}

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Collect while the block runs; pass `on_step` to the generation inside it."""
        hooks = [
            module.register_forward_pre_hook(self._hook(kind)) for module, kind in self._watched
        ]
        hooks.append(self._encoder.register_forward_hook(lambda *_: self._flush(0)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, kind: str) -> Any:
        def measure(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0].numel():
                x = args[0].abs()
                self._pending.append((kind, x.amax(), x.sum(dtype=torch.float64), x.numel()))

        return measure

    def _flush(self, step: int) -> _Step:
        """Book everything measured since the last call under `step`."""
        entry = self._steps.setdefault(step, _Step())
        for kind, amax, total, count in self._pending:
            entry.inputs.setdefault(kind, _Magnitude()).add(amax.item(), total.item(), count)
        self._pending.clear()
        return entry

    def on_step(self, record: StepRecord) -> None:
        """Book one denoising step."""
        entry = self._flush(record.step)
        entry.rows += len(record.rows)
        entry.accepted += record.accepted.float().mean(-1).sum().item()
        entry.entropy += record.mean_entropy.sum().item()
        entry.finished += int(record.finished.sum())

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
