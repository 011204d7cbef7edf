"""Prepares the rows that enter products for an activation mode, and shows them to observers.

By default, kernels quantize rows to 8 bits for 8-bit weights, and take bf16 rows for NVFP4 weights.
Other activation modes differ:

    per_expert, per_layer   Rows for NVFP4 weights are rounded here, with calibrated global scales: one
                            per expert, or one per layer, that of the experts' widest range. On FP4
                            units, per_layer packs weights so that the kernels round rows instead
    none                    FP8 and INT8 weights are dequantized to bf16, layer by layer, in every pass
    fp8                     NVFP4 weights are packed so that kernels quantize rows; nothing is done here

Linears that share an input get the scale of the widest range among them, as in servers.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fused_dequant import Weight, simulated
from fused_dequant.formats import EIGHT_BIT
from torch import Tensor

from quantize.checkpoints.layout import stated_schemes
from quantize.checkpoints.load import read_input_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.runtime.model.watching import Observer
from quantize.runtime.weights.load import TextWeights
from quantize.runtime.weights.packing import Scales
from quantize.schemes.modes import ActivationMode

# Kinds of products, and the Linears that read their input.
DENSE = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
EXPERTS = {"experts_gate_up": ("gate_proj", "up_proj"), "experts_down": ("down_proj",)}


class ProductInputs:
    """Rounds the inputs of products by their layer's `scales`, and shows them to observers.

    If `scales` is None, nothing is rounded here. If `bf16`, kernels quantize no inputs either, since
    8-bit weights are dequantized. `config` is transformers' configuration of the text stack.
    """

    def __init__(self, config: Any, scales: Sequence[Scales] | None, *, bf16: bool) -> None:
        self.scales = scales or [{}] * config.num_hidden_layers
        self.bf16 = bf16
        self._kinds: list[str] = config.layer_types
        self._observers: tuple[Observer, ...] = ()
        self.replayable = False  # whether a CUDA graph may hold the work of observers (`shown_to`)
        self.real: Tensor | None = None  # int64, rows that are no padding; None for all

    @property
    def shown(self) -> bool:
        """Whether an observer watches; then inputs are computed even if no output depends on them."""
        return bool(self._observers)

    @contextmanager
    def shown_to(self, observers: Sequence[Observer]) -> Generator[None]:
        """Show rows, before they are rounded, to `observers` inside a `with` block.

        A CUDA graph may hold the work of observers only if all are methods of objects with
        `launches_alone` set: such objects only launch GPU work, on tensors that stay in place.
        """
        self._observers = tuple(observers)
        owners = [getattr(see, "__self__", None) for see in observers]
        self.replayable = all(getattr(owner, "launches_alone", False) for owner in owners)
        try:
            yield
        finally:
            self._observers, self.replayable = (), False

    def dense(
        self, index: int, kind: str, x: Tensor, rows: Sequence[Weight]
    ) -> tuple[Tensor, tuple[Weight, ...]]:
        """Return the operands of layer `index`'s product `kind`: x bf16 [M, K], rounded, and weights.

        `kind` is a key of DENSE. If it has no scale, x is not rounded. Observers see x before it is
        rounded. Raise InputError if there are observers and `rows` is quantized.
        """
        if self._observers and any(weight.scheme != "bf16" for weight in rows):
            raise InputError("inputs are watched in a BF16 model: calibrate with that")
        for linear in DENSE[kind]:
            if linear.endswith("v_proj") and self._kinds[index] == "full_attention":
                continue  # its values are the keys
            self._show(f"{index}.{linear}", x, None)
        scale = self.scales[index].get(kind)
        if scale is None:
            return x, tuple(simulated.plain(weight) for weight in rows)
        # Before x: see `scaled`.
        weights = tuple(simulated.scaled(weight, scale) for weight in rows)
        return simulated.round_nvfp4(x, scale), weights

    def experts(
        self, index: int, x: Tensor, ids: Tensor, routing: Tensor, gate_up: Weight, down: Weight
    ) -> Tensor:
        """Return `routed_experts`' output [M, topk, H] for rows x bf16 [M, H] and experts `ids`."""
        chosen = ids.long() if self._observers else ids  # once: observers know it by its memory
        self._show(f"{index}.experts.gate_up_proj", x, chosen)
        layer_scales = self.scales[index]
        scales = tuple(layer_scales[kind] for kind in EXPERTS if kind in layer_scales)
        return simulated.experts(
            x, ids, routing, simulated.plain(gate_up), simulated.plain(down),
            (scales[0], scales[1]) if len(scales) == 2 else None,
            lambda hidden: self._show(
                f"{index}.experts.down_proj", hidden.view(*ids.shape, -1), chosen
            ),
        )  # fmt: skip

    def _show(self, name: str, x: Tensor, ids: Tensor | None) -> None:
        if self._observers and self.real is not None:
            x, ids = x[self.real], None if ids is None else ids[self.real]
        if x.dim() == 3 and ids is not None:  # a row for each choice
            x, ids = x.flatten(0, 1), ids.reshape(-1, 1)
        for see in self._observers:
            see(f"model.decoder.layers.{name}", x, ids)


def inputs_of(
    checkpoint: Checkpoint, weights: TextWeights, mode: ActivationMode
) -> ProductInputs | None:
    """Return the object that rounds a checkpoint's inputs for `mode`; None if only kernels round."""
    schemes = stated_schemes(checkpoint.config)
    text = weights.config.text_config
    if schemes is None or mode == "fp8" or weights.in_fp4:
        return None
    if mode == "none":
        eight = any(scheme.kernel in EIGHT_BIT for scheme in schemes.used)
        return ProductInputs(text, None, bf16=True) if eight else None
    scales = read_scales(checkpoint, weights.config, mode, weights.device)
    return ProductInputs(text, scales, bf16=False) if any(scales) else None


def read_scales(
    checkpoint: Checkpoint, config: Any, mode: ActivationMode, device: torch.device
) -> list[dict[str, Tensor]]:
    """Return every layer's `Scales` of NVFP4 inputs; InputError if only some experts have scales."""
    text = config.text_config
    schemes = read_input_schemes(checkpoint)
    by_module = {name: scale for name, (_, scale) in schemes.items() if scale is not None}
    layers: list[dict[str, Tensor]] = []
    for index in range(text.num_hidden_layers):
        prefix = f"model.decoder.layers.{index}."
        scales: dict[str, list[float]] = {}
        for kind, linears in DENSE.items():
            dense = [by_module[prefix + name] for name in linears if prefix + name in by_module]
            if dense:
                scales[kind] = [min(dense)]
        for kind, linears in EXPERTS.items():
            by_expert = [
                [
                    by_module[key]
                    for name in linears
                    if (key := f"{prefix}experts.{e}.{name}") in by_module
                ]
                for e in range(text.num_experts)
            ]
            if all(by_expert):
                widest = [min(scales_of_one) for scales_of_one in by_expert]
                scales[kind] = [min(widest)] if mode == "per_layer" else widest
            elif any(by_expert):
                raise InputError(f"{checkpoint.folder}: {prefix}experts: some lack input scales")
        layers.append({k: torch.tensor(v, device=device) for k, v in scales.items()})
    return layers
