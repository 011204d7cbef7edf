"""What enters every quantizable Linear of the text stack while a model runs, encoder and decoder alike.

Both towers share their weights, and a server has one backbone: inputs are named after the decoder's
modules as they are on disk, whichever tower they came through. A layer's experts run as one grouped
product, so their inputs come as rows with the expert of each:

  model.decoder.layers.N.experts.gate_up_proj   rows [tokens, H], experts [tokens, top_k]
  model.decoder.layers.N.experts.down_proj      rows [tokens * top_k, I], experts [tokens * top_k, 1]
  model.decoder.layers.N.{self_attn,mlp}.*_proj rows [..., K], no experts

The rows of `down_proj` are what transformers' grouped experts get from `_apply_gate`, in the order of
a sort by expert (transformers/integrations/moe.py, 5.15 to 5.17). One product a layer in place of one
Linear an expert: 30 layers of 128 experts are 11,520 calls a forward pass otherwise.
"""

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.errors import InputError
from quantize.processes import Processes

# (name, rows, experts of the rows or None)
Observer = Callable[[str, Tensor, Tensor | None], None]

GROUPED = "grouped_mm"


@contextmanager
def watch_inputs(model: DiffusionGemmaForBlockDiffusion, *observers: Observer) -> Generator[None]:
    """Show every input to `observers` while the block runs. The runtime computes no padding.

    Raises:
        InputError: the model's experts do not run as grouped products.
    """
    text: Any = model.config.get_text_config()
    implementation = text._experts_implementation
    if implementation != GROUPED:
        raise InputError(
            f"experts implementation {implementation!r}: their inputs are read from {GROUPED!r}; "
            f"load the model with experts_implementation={GROUPED!r}"
        )

    def see(name: str, rows: Tensor, experts: Tensor | None = None) -> None:
        if rows.numel():
            for observer in observers:
                observer(name, rows, experts)

    parent: Any = model.model
    with ExitStack() as stack:
        for tower in (parent.decoder, parent.encoder.language_model):
            for index, layer in enumerate(tower.layers):
                stack.enter_context(_watch_layer(layer, f"model.decoder.layers.{index}", see))
        yield


@contextmanager
def _watch_layer(layer: nn.Module, prefix: str, see: Callable[..., None]) -> Generator[None]:
    with ExitStack() as stack:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and name.startswith(("self_attn.", "mlp.")):
                hook = partial(_see_first, partial(see, f"{prefix}.{name}"))
                stack.enter_context(module.register_forward_pre_hook(hook))
        stack.enter_context(_watch_experts(layer.get_submodule("experts"), prefix, see))
        yield


def _see_first(see: Callable[[Tensor], None], _: nn.Module, args: tuple[Tensor, ...]) -> None:
    see(args[0])


@contextmanager
def _watch_experts(experts: Any, prefix: str, see: Callable[..., None]) -> Generator[None]:
    apply_gate = experts._apply_gate
    routed: Tensor | None = None

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal routed
        routed = args[1]
        see(f"{prefix}.experts.gate_up_proj", args[0], routed)

    def gated(projected: Tensor) -> Tensor:
        assert routed is not None  # the experts' own forward comes between
        hidden = apply_gate(projected)
        see(f"{prefix}.experts.down_proj", hidden, routed.flatten().sort().values[:, None])
        return hidden

    with experts.register_forward_pre_hook(before):
        experts._apply_gate = gated
        try:
            yield
        finally:
            del experts._apply_gate


class Ranges:
    """The largest |x| that entered each Linear, exact in any order of tokens and batches."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._amax: dict[str, Tensor] = {}

    def see(self, name: str, rows: Tensor, experts: Tensor | None) -> None:
        """Observe one input."""
        largest = rows.abs().flatten(0, -2).amax(-1)
        if experts is None:
            found = largest.amax(0, keepdim=True)
        else:
            each = largest.repeat_interleave(experts.shape[1])
            found = largest.new_zeros(self._experts)
            found = found.scatter_reduce(0, experts.flatten(), each, "amax")
        self._keep(name, found)

    def _keep(self, name: str, found: Tensor) -> None:
        before = self._amax.get(name)
        self._amax[name] = (
            found if before is None else torch.maximum(before, found.to(before.device))
        )

    def pool(self, processes: Processes) -> None:
        """Add what the other processes have seen: maxima of maxima, so nothing is rounded."""
        for amax in processes.others({name: found.cpu() for name, found in self._amax.items()}):
            for name, found in amax.items():
                self._keep(name, found)

    def amax(self, module: str) -> float:
        """Return the largest |x| of a module by its on-disk name; 0 when nothing entered it."""
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", module)
        if match is None:
            return self._value(module, 0)
        return self._value(
            f"{match[1]}.{'down' if match[3] == 'down' else 'gate_up'}_proj", int(match[2])
        )

    def _value(self, name: str, index: int) -> float:
        return self._amax[name][index].item() if name in self._amax else 0.0
