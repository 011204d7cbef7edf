"""Tells which kernels run a recipe on a GPU, and computes the least time of a forward there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from quantize.checkpoints.targets import QUANTIZABLE, Target

if TYPE_CHECKING:
    from quantize.runtime.fused.gpus import Gpu

CONTEXT = 1024  # positions before the canvas of the estimate


def gpu_of(name: str | None) -> "Gpu | None":
    """Return the named GPU, else the one of this machine, None without one.

    Raises:
        InputError: no GPU has this name.
    """
    import torch

    from quantize.runtime.fused.gpus import at_hand, named

    if name is not None:
        return named(name)
    return at_hand(torch.device("cuda")) if torch.cuda.is_available() else None


def kernel_schemes(targets: Sequence[Target]) -> dict[str, str]:
    """Return the kernels' names of the schemes of experts, attention and MLPs."""
    schemes: dict[str, str] = dict.fromkeys(QUANTIZABLE, "bf16")
    for target in targets:
        if target.scheme is not None and target.module_class in schemes:
            schemes[target.module_class] = target.scheme.kernel
    return schemes


def gpu_table(targets: Sequence[Target], config: dict[str, Any], gpu: "Gpu") -> Table:
    """Return a table of the kernels that run each part of a recipe, with an estimate of their time."""
    from quantize.runtime.fused.cost import floor
    from quantize.runtime.fused.gpus import verdict

    schemes = kernel_schemes(targets)
    verdicts = {kind: verdict(scheme, gpu) for kind, scheme in schemes.items()}
    memory = f", {gpu.memory / 1e9:.0f} GB" if gpu.memory else ""
    table = Table(title=f"{gpu.name} ({gpu.target}{memory})", title_justify="left")
    for column in ("part", "scheme", "kernels", ""):
        table.add_column(column)
    for kind, found in verdicts.items():
        table.add_row(kind, found.scheme, found.kernels or "cannot run", found.note)
    if all(found.kernels for found in verdicts.values()):
        parts = floor(config, schemes, gpu, 1, CONTEXT)
        if parts is not None:
            each = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in parts.items())
            table.caption = (
                f"estimate by arithmetic, not measured: one canvas behind {CONTEXT:,} positions takes "
                f"at least {sum(parts.values()) * 1e3:.1f} ms a forward ({each}), from the memory "
                f"bandwidth and FLOP/s that the GPU's maker states"
            )
    return table
