"""`quantize evaluate` scores a run's models, and others that are asked for."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from quantize.cli.options import GPU_MEMORY, MODES, RUN_FOLDER, scoring_options
from quantize.pipeline.stages import STAGES


@click.command()
@RUN_FOLDER
@MODES
@scoring_options
@click.option(
    "--gguf", type=click.Path(path_type=Path),
    help="Score the exported file too, in llama.cpp, with the same prompts and noise.",
)  # fmt: skip
@click.option(
    "--llama-cpp", type=click.Path(path_type=Path), metavar="PROGRAM",
    help="llama.cpp's llama-diffusion-gemma-server, which --gguf needs.",
)  # fmt: skip
@click.option(
    "--steps", multiple=True, type=click.IntRange(1, 1000), metavar="T",
    help="Judge the candidate with at most T steps of a canvas too; may be given several times.",
)  # fmt: skip
@GPU_MEMORY
def evaluate(run: Path, modes: tuple[str, ...], gpu_memory: float | None, **options: Any) -> None:
    """Score BF16 and quantized with the same prompts and seeds, where they are not scored yet.

    \b
    On several GPUs, with the scores of one:
      torchrun --nproc-per-node 8 -m quantize evaluate RUN
    """
    from quantize.pipeline.run import opened, run_alone
    from quantize.pipeline.stages import evaluate_more

    (stage,) = (stage for stage in STAGES if stage.name == "evaluate")
    with opened(run, gpu_memory) as found:
        run_alone(found, stage, partial(evaluate_more, modes=modes, **options))
