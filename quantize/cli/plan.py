"""`quantize plan`: what a recipe would do."""

import click

from quantize.cli.options import GPU_MEMORY, REAL_MODEL, model_options


@click.command()
@model_options
@GPU_MEMORY
@click.option(
    "--gpu", metavar="NAME",
    help="Plan for a100, a6000, rtx3090, l40s, rtx4090, rtx4080, h100, h200, gh200, b200, b300, gb300, "
    "dgxstation, rtxpro6000, rtx5090, rtx5080 or spark, or sm_NN with --gpu-memory; else for the GPU "
    "that is here.",
)  # fmt: skip
@click.option(
    "--serve", is_flag=True,
    help="Show instead how each format would be served: slots, memory, speed at best. Without --model, "
    "of the 26B model.",
)  # fmt: skip
@click.option(
    "--context", type=click.IntRange(min=1), metavar="N",
    help="With --serve: positions of a prompt and its answer.  [default: 8192]",
)  # fmt: skip
@click.option(
    "--clients", type=click.IntRange(1, 64), default=4, show_default=True,
    help="With --serve: requests at once.",
)  # fmt: skip
def plan(
    recipe: str,
    model: str | None,
    revision: str | None,
    gpu_memory: float | None,
    gpu: str | None,
    serve: bool,
    context: int | None,
    clients: int,
) -> None:
    """Show what a recipe would do, and what each stage takes on a GPU; no weights are read.

    --model may also be a config.json: the plan then comes from the config alone. It exits with 3
    when a stage does not fit --gpu-memory. Without --gpu, and without a GPU here, times are an H200's.
    """
    if serve:
        from quantize.stages.plan.serving import show_serving

        show_serving(model or REAL_MODEL, revision, gpu, gpu_memory, context, clients)
        return
    from quantize.stages.plan.show import show_plan

    show_plan(recipe, model, revision, gpu_memory, gpu)
