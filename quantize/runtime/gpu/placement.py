"""Places a model on a device: which device, how much of its memory, and which layers stay there.

A caller makes a `Placement`; `sized` adds what fits the device; `open` loads the model accordingly.
"""

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from fused_dequant.weights import target_of

from quantize.checkpoints.layout import parameters
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import DROPPED
from quantize.errors import ResourceError
from quantize.host.processes import best_device
from quantize.host.progress import say
from quantize.host.resources import free_memory
from quantize.runtime.gpu.memory import (
    BEGUN_BYTES,
    CONTEXT_BYTES,
    DEFAULT_CONTEXT,
    HOST_BYTES,
    Need,
    Stack,
    packed_sizes,
    plan,
)
from quantize.runtime.gpu.transfer import in_memory
from quantize.schemes.modes import ActivationMode


@dataclass(frozen=True)
class Placement:
    """Where a model runs, what it is opened for, and how it fits there.

    `sized` sets `capacity`, `resident`, `lanes` and `on_host`. Fields without comment are as in `Need`.
    """

    device: str = "cpu"  # "cpu", "cuda" or "cuda:1"
    # bytes of the GPU that may be used, including this process' CUDA context; None for all free
    # bytes. On a CPU, None means that nothing is planned.
    gpu_memory: float | None = None
    # how a quantized model's activations are rounded; None for the kernels' default
    activations: ActivationMode | None = None
    # positions that a sample may take; None for the engine's default
    max_context: int | None = None
    batches: int = 1
    fixed_batch: bool = False
    caches: int = 1
    compares: bool = False
    beside: float = 0.0
    capacity: int = 4  # samples per pass; fewer if they do not fit, unless `fixed_batch`
    # layers that stay, others are streamed in every pass; None: `sized` decides, without it all stay
    resident: int | None = None
    lanes: int = 1
    on_host: bool = False

    @classmethod
    def here(cls, gpu_memory: float | None = None) -> "Placement":
        """Return a placement on the GPU of this process, or on the CPU if there is no GPU."""
        return cls(best_device(), gpu_memory)

    @property
    def in_fp8(self) -> bool:
        """Whether weights are packed for FP8 products."""
        return self.activations == "fp8"


CPU = Placement()
LEFT_BYTES = 8e9  # of host memory that stay free for everything else
DECODED_BYTES = 4  # of a dequantized weight, which a CPU keeps: `fused_dequant.weights.kept`


def sized(checkpoint: Path, place: Placement) -> Placement:
    """Return `place` changed so that a checkpoint fits the device; no weights are read.

    On a GPU, raise ResourceError if less than `gpu_memory` is free, or if one slot (or the fixed batch)
    does not fit even with all layers streamed. On a CPU, raise it if memory cannot hold the weights.
    """
    free_unused(place.device)
    opened = Checkpoint.open(checkpoint)
    sizes = packed_sizes(opened, place.activations, target_of(torch.device(place.device)))
    if (budget := budget_of(place)) is None:
        needed = sum(size for name, size in sizes.items() if not DROPPED.fullmatch(name))
        needed += DECODED_BYTES * parameters(opened.config)
        if needed > (free := free_memory()):
            raise ResourceError(
                f"{checkpoint}: {needed / 1e9:.1f} GB of weights, and cpu has {free / 1e9:.1f} GB "
                f"free; use a machine with more memory"
            )
        return place
    context = place.max_context or DEFAULT_CONTEXT
    stack = Stack.of(checkpoint.name, sizes, quantized=opened.is_quantized)
    need = Need(
        str(checkpoint), stack, place.capacity, context, place.compares, place.caches, place.beside,
        place.batches, _host_room(opened), place.fixed_batch,
    )  # fmt: skip
    planned = plan(need, opened.config, budget)
    lanes, on_host = planned.need.lanes, planned.need.on_host
    if planned.streamed or planned.need.batch < place.capacity:
        say(
            f"{checkpoint}: {planned.resident} layers stay in {budget / 1e9:.1f} GB of GPU memory, "
            f"{(planned.streamed + planned.moved) / 1e9:.1f} GB are streamed a pass, "
            f"{planned.need.batch * lanes} canvases at once"
        )
    return replace(
        place, capacity=planned.need.batch, resident=planned.resident, lanes=lanes, on_host=on_host
    )


def budget_of(place: Placement) -> float | None:
    """Return how many bytes of a GPU may be used: `gpu_memory`, or all free bytes if that is None.

    On a CPU, return `gpu_memory` unchanged. On a GPU, if `gpu_memory` is set, limit torch's
    allocator to it minus CONTEXT_BYTES. Raise ResourceError if less than `gpu_memory` is free.
    """
    device, asked = place.device, place.gpu_memory
    if device == "cpu":
        return asked
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)  # which this process can use again
    if asked is None:
        return free + BEGUN_BYTES  # this process' own context, which has been taken already
    if asked > free + BEGUN_BYTES:
        raise ResourceError(
            f"--gpu-memory {asked / 1e9:g}: {device} has {total / 1e9:.1f} GB, of which "
            f"{free / 1e9:.1f} GB are free; end what else runs there, or ask for less"
        )
    share = max(0.0, asked - CONTEXT_BYTES) / total
    # The allocator does not take "cuda" without an index.
    index = torch.device(device).index if ":" in device else torch.cuda.current_device()
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)
    return asked


def free_unused(device: str) -> None:
    """Release host and device memory that nothing uses, such as the previous stage's model."""
    gc.unfreeze()  # what was there before the stage
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _host_room(checkpoint: Checkpoint) -> float:
    """Return the bytes of host memory that keys and values may take."""
    files = {info.file for info in checkpoint.tensors.values()}
    # A file on a disk is streamed fast only while the system keeps all of it in memory.
    cached = sum(file.stat().st_size for file in files if not in_memory(file))
    return min(HOST_BYTES, free_memory() - cached - LEFT_BYTES)
