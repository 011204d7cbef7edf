"""The one door to a model: a checkpoint on a device becomes an `Engine`.

modules   transformers' modules: the reference on every device, and the default on a CPU
fused     the kernels, over weights that stay quantized: the default on a GPU

An engine is imported when it is opened: who only plans memory waits neither for transformers nor for
triton.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from quantize.checkpoints.layout import check_mode
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.host.progress import say, track
from quantize.runtime.engine import Engine
from quantize.runtime.memory import Need, Stack, budget_of, in_lockstep, packed_sizes, plan
from quantize.schemes.modes import ActivationMode

if TYPE_CHECKING:
    from quantize.runtime.fused.weights import TextWeights

Kind = Literal["modules", "fused"]


@dataclass(frozen=True)
class RandomModel:
    """Random weights in place of a checkpoint, to measure speed and memory.

    Attributes:
        config: config.json of a BF16 model.
        schemes: kernel scheme of "experts", "attention" and "mlp".
        experts_hit: number of experts, from the first on, that tokens are routed to; None for all.
    """

    config: dict[str, Any]
    schemes: Mapping[str, str]
    experts_hit: int | None = None


def open(
    checkpoint: Path | RandomModel,
    *,
    device: str,
    activations: ActivationMode | None = None,
    capacity: int = 4,
    max_context: int | None = None,
    batch_invariant: bool = False,
    dtype: torch.dtype | None = None,
    resident: int | None = None,
    gpu_memory: float | None = None,
    kind: Kind | None = None,
    beside: Engine | None = None,
    prefix_bytes: int = 0,
    batches: int | None = None,
) -> Engine:
    """Load a checkpoint and return the engine that runs it.

    Args:
        checkpoint: folder of a BF16 or quantized checkpoint, or random weights (fused engine only).
        device: "cpu", "cuda" or "cuda:1".
        activations: how a quantized model's activations are rounded. None leaves it to the engine:
            BF16 in modules; in the kernels 8 bits beside FP8 and INT8 weights, BF16 beside NVFP4.
            Random weights know no other mode than `fp8`.
        capacity: number of slots, that is, of samples denoised together.
        max_context: positions that a sample may take; None for the engine's own limit.
        batch_invariant: whether a sample's tokens must not depend on its batch (fused engine only).
        dtype: the modules compute in it; None for float32 on a CPU and BF16 on a GPU. The kernels
            compute in BF16.
        resident: how many layers stay on the device, while the others are streamed from the files in
            every pass (fused engine only); None for as many as fit.
        gpu_memory: bytes of the GPU that may be used, the process' own context included; None for what
            is free. Where even streamed layers leave too little, the engine has fewer slots.
        kind: which engine; None for the device's default.
        beside: an engine of the same checkpoint, whose weights are shared where they can be: the mode
            `fp8` has weights of its own.
        prefix_bytes: memory of the device, beside what is planned, for beginnings of prompts that are
            kept encoded.
        batches: how many batches of `capacity` prompts `Engine.each` will be given: where weights are
            streamed, as many denoise in lockstep as save the most. The batch is never made smaller.

    Raises:
        InputError: the checkpoint cannot be loaded, the engine does not have a setting, or the mode
            means nothing to the weights.
        ResourceError: the model does not fit, or the device lacks what the kernels need.
    """
    if (kind or default_kind(device, dtype)) == "modules":
        checkpoint = _for_modules(checkpoint, batch_invariant)
        return _modules(
            checkpoint, device, activations or "none", capacity, max_context, dtype, prefix_bytes
        )
    from quantize.runtime.fused.engine import FusedEngine
    from quantize.runtime.fused.inputs import inputs_of

    in_fp8 = activations == "fp8"
    shared, lanes = _weights_of(beside, in_fp8), 1
    if isinstance(checkpoint, Path):
        if in_fp8:  # no other mode is refused, and thousands of headers would be read once more
            check_mode(Checkpoint.open(checkpoint), activations)
    elif activations not in (None, "fp8"):
        raise InputError(f"random weights have no activation mode {activations}, only fp8")
    if resident is None and isinstance(checkpoint, Path) and shared is None:
        place = placed(
            checkpoint, device, capacity=capacity, max_context=max_context, gpu_memory=gpu_memory,
            activations=activations, batches=batches,
        )  # fmt: skip
        capacity, resident, lanes = place.capacity, place.resident, place.lanes
    weights = shared or _made(checkpoint, device, resident, in_fp8)
    inputs = None
    if activations is not None and isinstance(checkpoint, Path):
        inputs = inputs_of(Checkpoint.open(checkpoint), weights, activations)
    return FusedEngine(
        weights, capacity=capacity, max_context=max_context, batch_invariant=batch_invariant,
        inputs=inputs, prefix_bytes=prefix_bytes, lanes=lanes,
    )  # fmt: skip


def _weights_of(beside: Engine | None, in_fp8: bool) -> "TextWeights | None":
    """Return the kernels' weights of another engine, if they are packed alike."""
    from quantize.runtime.fused.engine import FusedEngine

    found = beside.model.weights if isinstance(beside, FusedEngine) else None
    return found if found is not None and found.in_fp8 == in_fp8 else None


def _made(
    checkpoint: Path | RandomModel, device: str, resident: int | None, in_fp8: bool
) -> "TextWeights":
    """Make or load the weights of the kernels."""
    from quantize.runtime.fused.random_weights import random_weights
    from quantize.runtime.fused.weights import load_packed

    if isinstance(checkpoint, RandomModel):
        return random_weights(
            checkpoint.config, dict(checkpoint.schemes), device, in_fp8=in_fp8,
            experts_hit=checkpoint.experts_hit,
        )  # fmt: skip
    return load_packed(
        checkpoint, device, resident=resident, in_fp8=in_fp8,
        on_layer=lambda layers: track(layers, "loading", unit="layers"),
    )  # fmt: skip


def default_kind(device: str, dtype: torch.dtype | None = None) -> Kind:
    """Return the engine of a device: the kernels on a GPU, unless float32 is asked for."""
    return "modules" if device == "cpu" or dtype == torch.float32 else "fused"


@dataclass(frozen=True)
class Place:
    """How a checkpoint fits a device.

    Attributes:
        capacity: slots.
        resident: layers that stay there, as `open` takes it; None for all.
        lanes: batches in lockstep.
    """

    capacity: int
    resident: int | None
    lanes: int = 1


def placed(
    checkpoint: Path,
    device: str,
    *,
    capacity: int,
    max_context: int | None = None,
    gpu_memory: float | None = None,
    caches: int = 1,
    compares: bool = False,
    beside: float = 0.0,
    activations: ActivationMode | None = None,
    batches: int | None = None,
) -> Place:
    """Plan how a checkpoint fits a GPU, without reading any weights.

    Args:
        checkpoint: its folder.
        device: as in `open`; on a CPU everything fits unless `gpu_memory` is given.
        capacity: the most slots.
        max_context: as in `open`.
        gpu_memory: as in `open`.
        caches: number of engines that share it.
        compares: whether its logits are compared with another model's.
        beside: bytes that the caller holds beside the model.
        activations: as in `open`; the mode `fp8` packs weights in its own way.
        batches: as in `open`.

    Raises:
        ResourceError: not even one slot over streamed layers fits, or with `batches` not `capacity`.
    """
    free_unused(device)
    budget = budget_of(device, gpu_memory)
    if budget is None:
        return Place(capacity, None)
    from fused_dequant.weights import is_hopper

    from quantize.runtime.fused.engine import DEFAULT_CONTEXT

    opened, in_fp8 = Checkpoint.open(checkpoint), activations == "fp8"
    four_bit_experts = in_fp8 and is_hopper(torch.device(device))
    sizes = packed_sizes(opened, in_fp8=in_fp8, four_bit_experts=four_bit_experts)
    stack = Stack.of(checkpoint.name, sizes, quantized=opened.is_quantized)
    context = max_context or DEFAULT_CONTEXT
    need = Need(str(checkpoint), stack, capacity, context, compares, caches, beside)
    need = replace(need, fixed_batch=batches is not None)
    found, lanes = plan(need, opened.config, budget), 1
    if batches is not None and found.streamed:
        found, lanes = in_lockstep(need, opened.config, budget, batches)
    if found.streamed or found.batch < capacity:
        say(
            f"{checkpoint}: {found.resident} layers stay in {budget / 1e9:.1f} GB of GPU memory, "
            f"{found.streamed / 1e9:.1f} GB are streamed a pass, {found.batch * lanes} canvases at once"
        )
    return Place(found.batch, found.resident, lanes)


def free_unused(device: str) -> None:
    """Give back the memory that nobody holds any more, such as the model of the stage before."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _for_modules(checkpoint: Path | RandomModel, batch_invariant: bool) -> Path:
    """Return the folder, or refuse settings that only the kernels have."""
    if batch_invariant:
        raise InputError(
            "batch-invariant is a property of the kernels: it needs a GPU, or kind='fused'"
        )
    if isinstance(checkpoint, RandomModel):
        raise InputError("random weights are made for the kernels: they need a GPU")
    return checkpoint


def _modules(
    checkpoint: Path,
    device: str,
    activations: ActivationMode,
    capacity: int,
    max_context: int | None,
    dtype: torch.dtype | None,
    prefix_bytes: int,
) -> Engine:
    from quantize.checkpoints.load import load
    from quantize.runtime.modules.engine import ModelEngine

    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    model = load(checkpoint, activations=activations, dtype=dtype, device=device)
    return ModelEngine(model, capacity, max_context, prefix_bytes)
