"""Shows how each format of a model would be served on a GPU: `quantize plan --serve`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target
from quantize.errors import ResourceError
from quantize.host.progress import screen
from quantize.host.units import size
from quantize.runtime.gpu.gpus import Gpu
from quantize.runtime.gpu.memory import (
    BEGUN_BYTES,
    CONTEXT_BYTES,
    DEFAULT_CONTEXT,
    Need,
    Stack,
    plan,
)
from quantize.stages.memory_needs import bf16_stack, quantized_stack
from quantize.stages.plan.estimate import least_of
from quantize.stages.plan.gpu_support import (
    AS_ASSUMED,
    CanvasWork,
    Products,
    gpu_of,
    is_measured,
    planned_gpu,
    runs,
    tokens_a_second,
)
from quantize.stages.plan.measured import measured_denoising
from quantize.stages.plan.plan import described, narrow_table, plans_of

CLIENTS = 4  # requests at once
W4A8 = ("nvfp4", "nvfp4_fp8")  # recipes that are also shown with `--activations fp8`
UNMEASURED = "*"  # after a speed of which no like was ever measured
NUMBERS = ("slots", "GPU", "streamed", "tokens/s")


def show_serving(
    model: str | None,
    revision: str | None,
    gpu: str | None,
    gpu_memory: float | None,
    context: int | None,
    clients: int,
    measured: Path | None = None,
) -> None:
    """Print how each format of a model would serve `clients` at once: what fits, and how fast.

    Each client has `context` positions (None: the default). `measured` is measured.json of the model
    (None: every expert is hit, and a canvas takes STEPS). Raise InputError for an unknown GPU.
    """
    chosen = planned_gpu(gpu_of(gpu, gpu_memory), gpu_memory)
    config, tensors = described(model, revision)
    limit = config["text_config"]["max_position_embeddings"]
    length = min(context or DEFAULT_CONTEXT, limit)
    plans = plans_of(tensors)
    denoising = measured_denoising(measured, config)
    screen().print(serving_table(config, tensors, plans, chosen, length, clients, denoising))


def serving_table(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    plans: Mapping[str, Sequence[Target]],
    gpu: Gpu,
    context: int,
    clients: int,
    denoising: CanvasWork = AS_ASSUMED,
) -> Table:
    """Return a table, 80 characters wide: one row for BF16, and one or two for each of `plans`."""
    never = "" if gpu.ran else " (never run on one)"
    table = narrow_table(
        f"serving on {gpu.name}, {gpu.memory / 1e9:.0f} GB{never}:\n{clients} clients, {context:,} "
        f"positions each",
        ("format", "weights", *NUMBERS), NUMBERS,
    )  # fmt: skip
    for name, targets, stack, products in _formats(tensors, plans, gpu):
        need = Need(name, stack, clients, context)
        table.add_row(name, *_cells(need, config, targets, gpu, products, denoising))
    where = (
        "measured on an H200 and an H100" if gpu.ran else "extrapolated from an H200 and an H100"
    )
    table.caption = (
        f"tokens/s: all slots busy, {denoising.steps:g} steps a canvas, prompts not counted; {where}; "
        f"{UNMEASURED}: this format was timed nowhere"
    )
    return table


def _formats(
    tensors: Mapping[str, TensorInfo], plans: Mapping[str, Sequence[Target]], gpu: Gpu
) -> Iterator[tuple[str, Sequence[Target], Stack, Products]]:
    """Yield name, targets, what is held in memory, and what is multiplied, for each row."""
    yield "BF16", next(iter(plans.values())), bf16_stack(tensors), "bf16"
    for name, targets in plans.items():
        yield name, targets, quantized_stack(name, targets, gpu.capability), "stored"
        if name in W4A8 and runs(targets, gpu, "w4a8"):
            stack = quantized_stack(name, targets, gpu.capability, "fp8")
            yield f"{name}, W4A8", targets, stack, "w4a8"


def serving_line(
    config: Mapping[str, Any],
    targets: Sequence[Target],
    gpu: Gpu,
    denoising: CanvasWork = AS_ASSUMED,
) -> str:
    """Return one line on how `quantize serve`, at its defaults, would place a recipe's checkpoint."""
    context = min(DEFAULT_CONTEXT, config["text_config"]["max_position_embeddings"])
    need = Need("", quantized_stack("", targets, gpu.capability), CLIENTS, context)
    cells = _cells(need, config, targets, gpu, "stored", denoising)
    if len(cells) == 1:
        return f"serve: {cells[0]}"
    weights, slots, total, streamed, tokens = cells
    what = f"{weights} ({streamed} a pass)" if streamed else weights
    return (
        f"serve: {slots} slots of {context:,} positions, weights {what}, {total}; about {tokens} "
        f"tokens/s"
    )


def _cells(
    need: Need, config: Mapping[str, Any], targets: Sequence[Target], gpu: Gpu, products: Products,
    denoising: CanvasWork,
) -> list[str]:  # fmt: skip
    if products != "bf16" and not runs(targets, gpu):
        return ["no kernels for it"]
    try:
        placed = plan(need, config, gpu.memory)
    except ResourceError as error:
        return [f"needs {least_of(error)}"]
    streamed = size(placed.streamed) if placed.streamed else ""
    held = placed.total - CONTEXT_BYTES + BEGUN_BYTES  # a server compiles less than a whole run
    cells = ["streamed" if streamed else "resident", str(placed.need.batch), size(held), streamed]
    if gpu.rates is None:
        return [*cells, "?"]
    low, high = tokens_a_second(
        config, targets, gpu, placed.need.batch, placed.need.context, products, placed.streamed,
        denoising,
    )  # fmt: skip
    ends = f"{low:,.0f}" if round(low) == round(high) else f"{low:,.0f} to {high:,.0f}"
    return [*cells, ends + ("" if is_measured(targets, products) else UNMEASURED)]
