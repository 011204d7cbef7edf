"""Simulated activation quantization: score W4A4 and W8A8 accuracy on any machine.

Every quantized Linear first rounds its input to the values the serving kernel would multiply:
  FP8_DYNAMIC, INT8_DYNAMIC   one scale a token
  NVFP4                       e2m1, one e4m3 scale for 16 values, under a calibrated global scale
NVFP4A16 has BF16 activations and is left alone. In the mode `fp8` both have one scale a token, and
weights that are rounded too (`Scheme.as_multiplied`). The products themselves run in the model's dtype.

A layer's experts share one input, but each has a global scale of its own on disk. `per_expert` uses
those; `per_layer` the one of the largest range (the smallest scale) for all experts of the layer,
which is what vLLM's Blackwell mixture-of-experts path does.
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import Scheme

Rounding = Callable[[torch.Tensor], torch.Tensor]
TREES = ("model.decoder.", "model.encoder.language_model.")


def simulate_activations(
    model: DiffusionGemmaForBlockDiffusion,
    inputs: Mapping[str, tuple[Scheme, float | None]],
    mode: ActivationMode,
    undo: ExitStack | None = None,
) -> int:
    """Make every quantized Linear round its input; return how many Linears now do.

    Args:
        model: the dequantized model; both of its trees, encoder and decoder, are changed.
        inputs: on-disk module name -> (scheme as `mode` multiplies it, input global scale for NVFP4).
        mode: any but `none`.
        undo: gets a callback for every change, which takes it back.

    Raises:
        ValueError: no module was matched.
    """
    undo = undo or ExitStack()
    roundings = {name: rounding(*entry) for name, entry in inputs.items()}
    experts: dict[str, dict[str, tuple[Scheme, float | None]]] = {}
    count = 0
    for name, round_input in roundings.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+\.\w+)", name)
        if match:
            experts.setdefault(match[1], {})[match[2]] = inputs[name]
        elif round_input is not None:
            count += len(_in_both_trees(model, name, partial(_round_linear, round_input, undo)))
    for name, scales in experts.items():
        gate = [scales[f"{e}.gate_proj"] for e in range(len(scales) // 3)]
        down = [scales[f"{e}.down_proj"] for e in range(len(scales) // 3)]
        if mode == "per_layer":
            gate, down = _widest(gate), _widest(down)
        rounded = _Experts([rounding(*g) for g in gate], [rounding(*d) for d in down])
        count += len(_in_both_trees(model, name, partial(_replace_experts, rounded, undo))) * len(
            scales
        )
    if not count:
        raise ValueError("no quantized Linear of this model has its activations quantized")
    return count


@contextmanager
def simulated(
    model: DiffusionGemmaForBlockDiffusion,
    inputs: Mapping[str, tuple[Scheme, float | None]],
    mode: ActivationMode,
) -> Generator[None]:
    """Make quantized Linears round their inputs while the block runs; no input need be rounded."""
    with ExitStack() as undo:
        if mode != "none" and any(scheme.round_activations for scheme, _ in inputs.values()):
            simulate_activations(model, inputs, mode, undo)
        yield


def rounding(scheme: Scheme, input_global_scale: float | None) -> Rounding | None:
    """Return the function that rounds activations [..., K] of a scheme, None for BF16 ones."""
    round_input = scheme.round_activations
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


def _round_linear(round_input: Rounding, undo: ExitStack, module: nn.Module) -> None:
    hook = module.register_forward_pre_hook(lambda _, args: (round_input(args[0]), *args[1:]))
    undo.callback(hook.remove)


def _replace_experts(experts: "_Experts", undo: ExitStack, module: nn.Module) -> None:
    module.forward = partial(experts.forward, module)
    undo.callback(delattr, module, "forward")


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
