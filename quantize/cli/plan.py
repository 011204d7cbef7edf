"""`quantize plan`: what a recipe would do."""

import click

from quantize.cli.options import GPU_MEMORY, model_options


@click.command()
@model_options
@GPU_MEMORY
@click.option(
    "--gpu", metavar="NAME",
    help="Show which kernels run the recipe on a100, rtx3090, rtx4090, h100, h200, b200, rtx5090 or "
    "spark, in how much memory, and how fast at least; else on the GPU that is here.",
)  # fmt: skip
def plan(
    recipe: str,
    model: str | None,
    revision: str | None,
    gpu_memory: float | None,
    gpu: str | None,
) -> None:
    """Show what a recipe would do: modules, schemes, bytes, GPU memory; no weights are read.

    --model may also be a config.json: the plan then comes from the config alone. It exits with 3
    when a stage does not fit --gpu-memory; without it and --gpu it shows GPUs of 24 to 141 GB.
    """
    from quantize.pipeline.run import show_plan

    show_plan(recipe, model, revision, gpu_memory, gpu)
