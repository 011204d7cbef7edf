"""`quantize bench`: how fast a checkpoint denoises on this GPU."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantize.cli.options import ACTIVATIONS, GPU_MEMORY, REAL_MODEL

if TYPE_CHECKING:
    from quantize.schemes.modes import ActivationMode


@click.command()
@click.argument("checkpoint", required=False)
@click.option(
    "--random-weights", metavar="MIX",
    help="Random weights of the exact 26B shape instead: bf16, fp8, int8, nvfp4 or nvfp4_fp8.",
)  # fmt: skip
@click.option(
    "--steps", multiple=True, default=("16",), show_default=True, metavar="N|adaptive",
    help="Denoising steps of a canvas: fixed, or as the checkpoint stops. Repeatable.",
)  # fmt: skip
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1, 64), default=(1,),
    show_default=True, help="Canvases denoised together. Repeatable.",
)  # fmt: skip
@click.option(
    "--context",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Tokens before each canvas.",
)
@click.option(
    "--canvases", type=click.IntRange(1), default=5, show_default=True,
    help="Canvases measured for each row; the median counts.",
)  # fmt: skip
@click.option(
    "--experts-hit", type=click.IntRange(8, 128),
    help="With random weights: number of experts that tokens are routed to.",
)  # fmt: skip
@click.option(
    "--autoregressive", is_flag=True,
    help="Measure the same weights one token a forward too, as a model without canvases writes.",
)  # fmt: skip
@click.option(
    "--hourly-price",
    type=float,
    help="Price of an hour of the machine, which adds the cost of a million tokens.",
)
@click.option(
    "--stops", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="JSON list of steps that canvases take in adaptive rows, in turns, in place of their own.",
)  # fmt: skip
@ACTIVATIONS
@GPU_MEMORY
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(
    checkpoint: str | None,
    random_weights: str | None,
    steps: tuple[str, ...],
    batches: tuple[int, ...],
    context: int,
    canvases: int,
    experts_hit: int | None,
    autoregressive: bool,
    hourly_price: float | None,
    stops: Path | None,
    activations: "ActivationMode | None",
    gpu_memory: float | None,
    as_json: bool,
) -> None:
    """Measure how fast a checkpoint denoises on this GPU, and how far from the floor.

    CHECKPOINT is a folder or a Hub id; leave it out with --random-weights. Shows ms per forward and
    per canvas, tokens/s, tokens a joule, the clock and how often the power limit held it down (where
    the driver tells), time to the first canvas, memory, and where a step's time goes.

    
      quantize bench outputs/nvfp4-3f2a91c/checkpoint --steps 10 --steps adaptive --batch 1 --batch 4
      quantize bench --random-weights nvfp4 --batch 1 --batch 4 --autoregressive --hourly-price 3
    """
    from rich.console import Console

    from quantize.bench.adaptive import read_stops
    from quantize.bench.speed import bench as measure
    from quantize.bench.speed import tables, to_json
    from quantize.checkpoints.reader import known_config, resolve
    from quantize.runtime import Placement

    if (checkpoint is None) == (random_weights is None):
        raise click.UsageError("name a CHECKPOINT, or a mix of --random-weights")
    result = measure(
        None if checkpoint is None else resolve(checkpoint),
        random=random_weights,
        config=known_config(REAL_MODEL),
        steps=steps,
        batches=sorted(set(batches)),
        context=context,
        canvases=canvases,
        place=Placement("cuda", gpu_memory, activations),
        experts_hit=experts_hit,
        autoregressive=autoregressive,
        hourly_price=hourly_price,
        stops=None if stops is None else read_stops(stops),
    )
    if as_json:
        click.echo(to_json(result))
        return
    for table in tables(result):
        Console().print(table)
