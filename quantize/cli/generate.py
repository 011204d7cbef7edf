"""`quantize generate`: one answer, its canvas denoising."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantize.cli.options import ACTIVATIONS, GPU_MEMORY

if TYPE_CHECKING:
    from quantize.schemes.modes import ActivationMode


@click.command()
@click.argument("checkpoint")
@click.argument("prompt")
@click.option(
    "--image", "pictures", multiple=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A picture shown before the prompt; repeatable.",
)  # fmt: skip
@click.option(
    "--image-tokens", "soft_tokens", type=int, default=280, show_default=True,
    help="Most tokens a picture takes: 70, 140, 280, 560 or 1120.",
)  # fmt: skip
@click.option("--thinking", is_flag=True, help="Let the model think before it answers.")
@click.option(
    "--steps", type=click.IntRange(1, 1000), metavar="T", help="Most denoising steps of a canvas."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the sampling noise.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    help="Most tokens of the answer, rounded up to whole canvases.",
)
@ACTIVATIONS
@GPU_MEMORY
@click.option(
    "--plain",
    is_flag=True,
    help="Write finished canvases and draw none, as it also does where stderr is a pipe.",
)
def generate(
    checkpoint: str,
    prompt: str,
    pictures: tuple[Path, ...],
    soft_tokens: int,
    thinking: bool,
    steps: int | None,
    seed: int,
    max_new_tokens: int | None,
    activations: "ActivationMode | None",
    gpu_memory: float | None,
    plain: bool,
) -> None:
    """Answer one prompt and show the canvas denoise: quantize generate CHECKPOINT "prompt".

    CHECKPOINT is a folder or a Hub id, BF16 or quantized; `bundled` is the model that ships. The
    answer goes to stdout, thoughts to stderr; with --plain each canvas as it is finished.
    """
    from quantize.checkpoints.reader import resolve
    from quantize.cli.canvas_view import watch
    from quantize.host.processes import best_device
    from quantize.runtime import Placement

    watch(
        resolve(checkpoint),
        prompt,
        thinking=thinking,
        steps=steps,
        seed=seed,
        max_new_tokens=max_new_tokens,
        where=Placement(best_device(), gpu_memory, activations),
        plain=plain or not sys.stderr.isatty(),
        pictures=pictures,
        soft_tokens=soft_tokens,
        write=partial(click.echo, nl=False),
    )
