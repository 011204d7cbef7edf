"""`quantize search`: which layers should have which scheme, within so many bytes."""

from pathlib import Path

import click

from quantize.cli.options import GPU_MEMORY


@click.command()
@click.argument("recipe")
@click.option(
    "--bytes", "nbytes", type=click.FloatRange(min=0), help="The most bytes of a checkpoint."
)
@click.option("--kl", type=click.FloatRange(min=0), help="Or the largest predicted KL, in nats.")
@click.option(
    "--scheme", "schemes", multiple=True, default=("NVFP4", "NVFP4A16", "FP8_DYNAMIC"),
    show_default=True, help="A scheme that a part may have beside BF16; repeat it.",
)  # fmt: skip
@click.option("--model", help="Checkpoint folder or Hub id; else the bundled model.")
@click.option("--revision", help="Revision of a Hub model: branch, tag or commit.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
    help="Folder that holds runs and searches.",
)  # fmt: skip
@GPU_MEMORY
@click.option("--gpu", metavar="NAME", help="GPU whose milliseconds are estimated, as in `plan`.")
def search(
    recipe: str,
    nbytes: float | None,
    kl: float | None,
    schemes: tuple[str, ...],
    model: str | None,
    revision: str | None,
    out: Path,
    gpu: str | None,
    gpu_memory: float | None,
) -> None:
    """Search a scheme for every layer's attention, MLP and experts; write the recipe of the best.

    Each part is quantized alone and its KL from BF16 measured; within the bytes (or under the KL) the
    best choice is computed, then measured whole. RECIPE gives everything that is not searched. A second
    search in the same folder measures nothing twice.
    """
    from quantize.pipeline.search import search as search_schemes

    search_schemes(
        recipe, None if model == "bundled" else model, out, nbytes=nbytes, kl=kl, schemes=schemes,
        revision=revision, gpu=gpu, gpu_memory=gpu_memory,
    )  # fmt: skip
