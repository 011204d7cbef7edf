"""Shows what enters every quantizable Linear of the text stack, in encoder and decoder alike.

Both towers share their weights, and a server has one backbone: inputs are named after the decoder's
modules as they are on disk, whichever tower they came through. A layer's experts run as one grouped
product, so their inputs come as rows with the expert of each:

  model.decoder.layers.N.experts.gate_up_proj   rows [tokens, H], experts [tokens, top_k]
  model.decoder.layers.N.experts.down_proj      rows [tokens * top_k, I], experts [tokens * top_k, 1]
  model.decoder.layers.N.{self_attn,mlp}.*_proj rows [..., K], no experts

The rows of `down_proj` are what transformers' grouped experts get from `_apply_gate`, in the order of
a sort by expert (transformers/integrations/moe.py, 5.15 to 5.17). Grouped products keep the calls few:
with one Linear an expert, 30 layers of 128 experts would take 11,520 calls a forward pass.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.errors import InputError
from quantize.runtime.model.watching import Observer

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
