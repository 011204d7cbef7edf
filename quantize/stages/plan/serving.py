"""Shows how each format of a model would be served on a GPU: `quantize plan --serve`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target
from quantize.errors import ResourceError
from quantize.host.units import size
from quantize.runtime.gpu.memory import BEGUN_BYTES, CONTEXT_BYTES, DEFAULT_CONTEXT, Need, plan
from quantize.stages.memory_needs import bf16_stack, quantized_stack
from quantize.stages.plan.estimate import GpuMachine, least_of
from quantize.stages.plan.gpu_support import floor, gpu_of, runs
from quantize.stages.plan.plan import described, narrow_table, plans_of

STEPS = 16  # denoising steps of a canvas; encoding it takes one more forward pass
CLIENTS = 4  # requests at once
FP8_AHEAD = (  # measured: docs/runtime.md
    "; from 16 clients on fp8_dynamic is faster: an H100 wrote 3,721 tokens/s with it at 16 (nvfp4 "
    "2,847; with --activations fp8 3,708), and 3,785 at 32 (2,920; 3,764)"
)
NUMBERS = ("slots", "GPU", "streamed", "ms", "tokens/s")


def show_serving(
    model: str | None,
    revision: str | None,
    gpu: str | None,
    gpu_memory: float | None,
    context: int | None,
    clients: int,
) -> None:
    """Print how each format of a model would serve `clients` at once: what fits, and how fast at most.

    Each client has `context` positions (None: the default). Raise InputError for an unknown GPU.
    """
    machine = GpuMachine.of(gpu_of(gpu, gpu_memory), gpu_memory)
    config, tensors = described(model, revision)
    limit = config["text_config"]["max_position_embeddings"]
    length = min(context or DEFAULT_CONTEXT, limit)
    plans = plans_of(tensors)
    Console().print(serving_table(config, tensors, plans, machine, length, clients))


def serving_table(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    plans: Mapping[str, Sequence[Target]],
    machine: GpuMachine,
    context: int,
    clients: int,
) -> Table:
    """Return a table, 80 characters wide: one row for BF16, and one for each recipe of `plans`."""
    table = narrow_table(
        f"serving on {machine.gpu.name}, {machine.budget / 1e9:.0f} GB: {clients} clients, "
        f"{context:,} positions each",
        ("format", "weights", *NUMBERS), NUMBERS,
    )  # fmt: skip
    caption = f"by arithmetic: ms of a forward at least, tokens/s at most ({STEPS} steps a canvas)"
    for name, targets in {"BF16": next(iter(plans.values())), **plans}.items():
        quantized = quantized_stack(name, targets, machine.gpu.capability)
        stack = bf16_stack(tensors) if name == "BF16" else quantized
        cells = _cells(Need(name, stack, clients, context), config, targets, machine)
        table.add_row(name, *cells)
        ahead = name == "fp8_dynamic" and not machine.gpu.fp4  # W4A4 on FP4 units takes less
        if ahead and cells[0] == "resident" and int(cells[1]) >= 16:
            caption += FP8_AHEAD
    table.caption = caption
    return table


def serving_line(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    targets: Sequence[Target],
    machine: GpuMachine,
) -> str:
    """Return one line on how `quantize serve`, at its defaults, would place a recipe's checkpoint."""
    context = min(DEFAULT_CONTEXT, config["text_config"]["max_position_embeddings"])
    stack = quantized_stack("", targets, machine.gpu.capability)
    cells = _cells(Need("", stack, CLIENTS, context), config, targets, machine)
    if len(cells) == 1:
        return f"serve: {cells[0]}"
    weights, slots, total, streamed, _, tokens = cells
    what = f"{weights} ({streamed} a pass)" if streamed else weights
    return (
        f"serve: {slots} slots of {context:,} positions, weights {what}, {total}; at most {tokens} "
        f"tokens/s"
    )


def _cells(
    need: Need, config: Mapping[str, Any], targets: Sequence[Target], machine: GpuMachine
) -> list[str]:
    if need.stage != "BF16" and not runs(targets, machine.gpu):
        return ["no kernels for it"]
    try:
        found = plan(need, config, machine.budget)
    except ResourceError as error:
        return [f"needs {least_of(error)}"]
    streamed = size(found.streamed) if found.streamed else ""
    held = found.total - CONTEXT_BYTES + BEGUN_BYTES  # a server compiles less than a whole run
    cells = ["streamed" if streamed else "resident", str(found.need.batch), size(held), streamed]
    if (rates := machine.gpu.rates) is None:
        return [*cells, "?", "?"]
    is_bf16, context = need.stage == "BF16", found.need.context
    least = floor(config, targets, rates, found.need.batch, context, bf16=is_bf16)
    streaming = found.streamed / machine.link_rate if found.streamed else 0.0
    seconds = max(sum(least.values()), streaming)
    tokens = found.need.batch * config["canvas_length"] / ((STEPS + 1) * seconds)
    return [*cells, f"{1e3 * seconds:.1f}", f"{tokens:,.0f}"]
