"""Simulated activation quantization: score W4A4 and W8A8 accuracy on any machine.

Every quantized Linear first rounds its input to the values the serving kernel would multiply:
  FP8_DYNAMIC, INT8_DYNAMIC   one scale a token
  NVFP4                       e2m1, one e4m3 scale for 16 values, under a calibrated global scale
NVFP4A16 has BF16 activations and is left alone. In the mode `fp8` both have one scale a token, and
weights that are rounded too (`activations.as_multiplied`). The products run in the model's dtype.

A layer's experts share one input, but each has a global scale of its own on disk. `per_expert` uses
those; `per_layer` the one of the largest range (the smallest scale) for all experts of the layer,
which is what vLLM's Blackwell mixture-of-experts path does.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.checkpoints.layout import bf16_layout, check_mode
from quantize.checkpoints.load import load, read_input_schemes, read_weight
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import linear_modules
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import Scheme
from tests.support.activations import as_multiplied, round_activations

Rounding = Callable[[torch.Tensor], torch.Tensor]
TREES = ("model.decoder.", "model.encoder.language_model.")


def simulate_activations(
    model: DiffusionGemmaForBlockDiffusion,
    inputs: Mapping[str, tuple[Scheme, float | None]],
    mode: ActivationMode,
) -> int:
    """Make every quantized Linear round its input; return how many Linears now do.

    Args:
        model: the dequantized model; both of its trees, encoder and decoder, are changed.
        inputs: on-disk module name -> (scheme as `mode` multiplies it, input global scale for NVFP4).
        mode: any but `none`.

    Raises:
        ValueError: no module was matched.
    """
    roundings = {name: rounding(*entry) for name, entry in inputs.items()}
    experts: dict[str, dict[str, tuple[Scheme, float | None]]] = {}
    count = 0
    for name, round_input in roundings.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+\.\w+)", name)
        if match:
            experts.setdefault(match[1], {})[match[2]] = inputs[name]
        elif round_input is not None:
            count += len(_in_both_trees(model, name, partial(_round_linear, round_input)))
    for name, scales in experts.items():
        gate = [scales[f"{e}.gate_proj"] for e in range(len(scales) // 3)]
        down = [scales[f"{e}.down_proj"] for e in range(len(scales) // 3)]
        if mode == "per_layer":
            gate, down = _widest(gate), _widest(down)
        rounded = _Experts([rounding(*g) for g in gate], [rounding(*d) for d in down])
        count += len(_in_both_trees(model, name, partial(_replace_experts, rounded))) * len(scales)
    if not count:
        raise ValueError("no quantized Linear of this model has its activations quantized")
    return count


def load_rounding(
    folder: Path, mode: ActivationMode, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> DiffusionGemmaForBlockDiffusion:
    """Load a checkpoint as transformers' model that rounds its inputs as `mode` does."""
    checkpoint = Checkpoint.open(folder)
    check_mode(checkpoint, mode)
    model = load(folder, dtype=dtype, device=device)
    inputs = {
        module: (as_multiplied(scheme, mode), scale)
        for module, (scheme, scale) in read_input_schemes(checkpoint).items()
    }
    schemes = {module: scheme for module, (scheme, _) in inputs.items()}
    if mode == "fp8":  # weights are rounded too
        for name, spec in bf16_layout(checkpoint.config).items():
            if any(module in schemes for module in linear_modules(name, spec.shape)):
                parameter = model.get_parameter(name)
                parameter.data = read_weight(checkpoint, name, spec.shape, schemes).to(parameter)
    if mode != "none" and any(map(round_activations, schemes.values())):
        simulate_activations(model, inputs, mode)
    return model


def rounding(scheme: Scheme, input_global_scale: float | None) -> Rounding | None:
    """Return the function that rounds activations [..., K] of a scheme, None for BF16 ones."""
    round_input = round_activations(scheme)
    return None if round_input is None else lambda x: round_input(x, input_global_scale)


def _widest(
    entries: list[tuple[Scheme, float | None]],
) -> list[tuple[Scheme, float | None]]:
    """Give every expert the scale of the largest range, which is the smallest (448 * 6 / amax)."""
    scales = [scale for _, scale in entries if scale is not None]
    widest = min(scales) if scales else None
    return [(scheme, widest) for scheme, _ in entries]


def _in_both_trees(
    model: nn.Module, name: str, change: Callable[[nn.Module], None]
) -> list[nn.Module]:
    """Apply `change` to the decoder's module and to its twin in the encoder; return both."""
    suffix = name.removeprefix(TREES[0])
    modules = [model.get_submodule(tree + suffix) for tree in TREES]
    for module in modules:
        change(module)
    return modules


def _round_linear(round_input: Rounding, module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: (round_input(args[0]), *args[1:]))


def _replace_experts(experts: "_Experts", module: nn.Module) -> None:
    module.forward = partial(experts.forward, module)


class _Experts:
    """A layer's experts' forward with rounded inputs, expert by expert on the tokens routed to it."""

    def __init__(self, gate_up: list[Rounding | None], down: list[Rounding | None]) -> None:
        self.gate_up = gate_up
        self.down = down

    def forward(
        self, module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return sum over routed experts of weight * down(gelu(gate(x)) * up(x)).

        Shapes: x [tokens, H], index and weights [tokens, top_k], result [tokens, H].
        """
        result = torch.zeros_like(x)
        for expert in index.unique().tolist():
            token, slot = torch.where(index == expert)
            inner = linear(_apply(self.gate_up[expert], x[token]), module.gate_up_proj[expert])
            gate, up = inner.chunk(2, dim=-1)  # [routed tokens, I] each
            hidden = _apply(self.down[expert], module.act_fn(gate) * up)
            out = linear(hidden, module.down_proj[expert]) * weights[token, slot, None]
            result.index_add_(0, token, out.to(result.dtype))
        return result


def _apply(round_input: Rounding | None, x: torch.Tensor) -> torch.Tensor:
    return x if round_input is None else round_input(x)
