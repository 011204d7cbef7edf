"""`quantize plan`: what a recipe would do."""

import click

from quantize.cli.options import GPU_MEMORY, model_options


@click.command()
@model_options
@GPU_MEMORY
def plan(recipe: str, model: str | None, revision: str | None, gpu_memory: float | None) -> None:
    """Show what a recipe would do: modules, schemes, bytes, GPU memory. Reads no weights.

    --model may also be a config.json: the plan then comes from the config alone. Exits 3 when a
    stage does not fit --gpu-memory; without it, GPUs of 24 to 141 GB are shown.
    """
    from quantize.pipeline import show_plan

    show_plan(recipe, model, revision, gpu_memory)
