"""Tells which kernels run a recipe on a GPU, and computes the least time of a forward pass."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from quantize.checkpoints.targets import QUANTIZABLE, Target
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import Scheme

if TYPE_CHECKING:
    from quantize.runtime.gpu.gpus import Gpu
    from quantize.runtime.gpu.rates import Rates

CONTEXT = 1024  # positions before the canvas in an estimate


def gpu_of(name: str | None, memory: float | None = None) -> "Gpu | None":
    """Return the GPU `name`, or without a name this machine's, or None; InputError as `gpus.named`."""
    import torch

    from quantize.runtime.gpu.gpus import at_hand, named

    if name is not None:
        return named(name, memory)
    return at_hand(torch.device("cuda")) if torch.cuda.is_available() else None


def kernel_schemes(targets: Sequence[Target], *, units: bool = False) -> dict[str, str]:
    """Return class -> weight format in the kernels; if `units`, FP4 units' for calibrated NVFP4."""
    schemes: dict[str, str] = dict.fromkeys(QUANTIZABLE, "bf16")
    for target in targets:
        if target.scheme is not None and target.module_class in schemes:
            schemes[target.module_class] = _kernel(target.scheme, units)
    return schemes


def _kernel(scheme: Scheme, units: bool) -> str:
    from quantize.runtime.gpu.gpus import on_units

    return on_units(scheme.kernel) if units and scheme.calibrated else scheme.kernel


def floor(
    config: Mapping[str, Any],
    targets: Sequence[Target],
    rates: "Rates",
    batch: int,
    context: int,
    *,
    bf16: bool = False,
    units: bool = False,
) -> dict[str, float]:
    """Return the least seconds of a denoising step that uses every expert, by part of the model.

    The seconds follow from the GPU's stated `rates`. Each of `batch` canvases follows `context`
    positions. If `bf16`, all weights are BF16; if `units`, FP4 units run calibrated NVFP4.
    """
    text, L = config["text_config"], config["canvas_length"]
    V, H, experts = text["vocab_size"], text["hidden_size"], text["num_experts"]
    rows, parts = batch * L, {"experts": 0.0, "dense": 0.0, "attention": 0.0}

    def product(target: Target, tokens: float) -> float:
        scheme: Scheme | None = None if bf16 else target.scheme
        nbytes = target.bytes_after if scheme else target.bytes_before
        flop = tokens * target.bytes_before  # two for each BF16 weight
        return rates.seconds(nbytes, flop, _kernel(scheme, units) if scheme else "bf16")

    for target in targets:
        if target.module_class == "experts":
            parts["experts"] += product(target, rows * text["top_k_experts"] / experts)
        elif target.module_class in QUANTIZABLE:
            parts["dense"] += product(target, rows)
    for kind in text["layer_types"]:
        sliding = kind == "sliding_attention"
        seen = (min(context, text["sliding_window"] - 1) if sliding else context) + L
        dim = text["head_dim" if sliding else "global_head_dim"]
        heads = text["num_key_value_heads" if sliding else "num_global_key_value_heads"]
        cells = 4 * batch * seen * heads * dim
        flop = 4 * rows * seen * text["num_attention_heads"] * dim
        parts["attention"] += rates.seconds(cells, flop, "bf16")
    # lm_head, then the soft embedding
    vocabulary = 2 * rates.seconds(2 * V * H, 2 * rows * V * H, "bf16")
    return parts | {"vocabulary": vocabulary}


def runs(targets: Sequence[Target], gpu: "Gpu") -> bool:
    """Return whether a GPU has kernels for every scheme of a plan."""
    from quantize.runtime.gpu.gpus import verdict

    return all(verdict(scheme, gpu).kernels for scheme in kernel_schemes(targets).values())


def gpu_table(
    targets: Sequence[Target], config: dict[str, Any], gpu: "Gpu", mode: ActivationMode
) -> Table:
    """Return a table of the kernels that run each part of a recipe; a caption estimates their time."""
    from quantize.runtime.gpu.gpus import verdict

    units = gpu.fp4 and mode == "per_layer"
    memory = f", {gpu.memory / 1e9:.0f} GB" if gpu.memory else ""
    title = f"{gpu.name} ({gpu.target}{memory})"
    table = Table("part", "scheme", "kernels", "", title=title, title_justify="left")
    for kind, scheme in kernel_schemes(targets, units=units).items():
        found = verdict(scheme, gpu)
        table.add_row(kind, found.scheme, found.kernels or "cannot run", found.note)
    if gpu.rates is not None and runs(targets, gpu):
        parts = floor(config, targets, gpu.rates, 1, CONTEXT, units=units)
        each = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in parts.items())
        table.caption = (
            f"estimate by arithmetic, not measured: one canvas behind {CONTEXT:,} positions takes at "
            f"least {sum(parts.values()) * 1e3:.1f} ms a forward ({each}), from the memory bandwidth "
            f"and FLOP/s that the GPU's maker states"
        )
        without = sum(floor(config, targets, gpu.rates, 1, CONTEXT).values())
        if units and without != sum(parts.values()):
            table.caption += f"; {without * 1e3:.1f} without FP4 units"
    return table
