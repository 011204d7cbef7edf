"""Opens a model: loads a checkpoint on a device and returns an `Engine`.

Only `open` imports the engine, so that planning memory imports neither transformers nor triton.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantize.checkpoints.layout import check_mode, model_config
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.progress import track
from quantize.runtime.engine.interface import Engine
from quantize.runtime.gpu.placement import Placement, budget_of, sized

if TYPE_CHECKING:
    from quantize.runtime.engine.fused_engine import FusedEngine
    from quantize.runtime.weights.load import TextWeights
    from quantize.runtime.weights.packing import Scales


@dataclass(frozen=True)
class RandomModel:
    """Random weights in place of a checkpoint, to measure speed and memory."""

    config: dict[str, Any]  # config.json of a BF16 model
    schemes: Mapping[str, str]  # "experts", "attention", "mlp" -> scheme, see `random_weights`


def open(
    checkpoint: Path | str | RandomModel,
    place: Placement | None = None,
    *,
    batch_invariant: bool = False,
    beside: Engine | None = None,
    prefix_bytes: int = 0,
    **room: Any,
) -> "FusedEngine":
    """Load a checkpoint's folder, or random weights, and return the engine that runs them.

    If `place` is None, `room` gives the fields of a `Placement`. If `place.resident` is None, `sized`
    fits a checkpoint to the device, with `prefix_bytes` left free. `beside` is an engine of the same
    checkpoint. Both share its weights if their activation modes pack weights in the same way: `fp8` has
    its own way, so has `per_layer` on FP4 units, and all others share one way. Other arguments are as
    in `FusedEngine`. Raise InputError if the checkpoint cannot be loaded, or does not support the mode.
    Raise ResourceError if the model does not fit, or the device lacks what the kernels need.
    """
    place = place or Placement(**room)
    checkpoint = Path(checkpoint) if isinstance(checkpoint, str) else checkpoint
    from quantize.runtime.engine.fused_engine import FusedEngine
    from quantize.runtime.gpu.trust import schemes_of, trust
    from quantize.runtime.model.inputs import inputs_of

    activations, model = place.activations, checkpoint
    schemes = model.schemes.values() if isinstance(model, RandomModel) else schemes_of(model)
    in_fp4 = trust(schemes, activations, torch.device(place.device))
    shared = beside.model.weights if isinstance(beside, FusedEngine) else None
    if shared and (shared.in_fp8, shared.in_fp4) != (place.in_fp8, in_fp4):
        shared = None
    if isinstance(checkpoint, RandomModel):
        if activations not in (None, "fp8") and not in_fp4:
            units = "only fp8 and, on FP4 units, per_layer"
            raise InputError(f"random weights have no activation mode {activations}, {units}")
        budget_of(place)
    else:
        if place.in_fp8:  # no other mode is refused, so the headers are not read once more
            check_mode(Checkpoint.open(checkpoint), "fp8")
        if place.resident is None and shared is None:
            place = sized(checkpoint, replace(place, beside=place.beside + prefix_bytes))
    weights = shared or _made(checkpoint, place, in_fp4)
    inputs = None
    if activations is not None and isinstance(checkpoint, Path):
        inputs = inputs_of(Checkpoint.open(checkpoint), weights, activations)
    return FusedEngine(
        weights, capacity=place.capacity, max_context=place.max_context, lanes=place.lanes,
        on_host=place.on_host, batch_invariant=batch_invariant, inputs=inputs,
        prefix_bytes=prefix_bytes,
    )  # fmt: skip


def _made(checkpoint: Path | RandomModel, place: Placement, in_fp4: bool) -> "TextWeights":
    from quantize.runtime.model.inputs import read_scales
    from quantize.runtime.weights.load import load_packed
    from quantize.runtime.weights.random_weights import random_weights

    if isinstance(checkpoint, RandomModel):
        return random_weights(
            checkpoint.config, dict(checkpoint.schemes), place.device, in_fp8=place.in_fp8,
            in_fp4=in_fp4,
        )  # fmt: skip
    scales: Sequence[Scales] = ()
    if in_fp4:
        opened = Checkpoint.open(checkpoint)
        config, device = model_config(opened.config), torch.device(place.device)
        scales = read_scales(opened, config, "per_layer", device)
    return load_packed(
        checkpoint, place.device, resident=place.resident, in_fp8=place.in_fp8, scales=scales,
        on_layer=lambda layers: track(layers, "loading", unit="layers"),
    )  # fmt: skip
