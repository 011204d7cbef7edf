"""`quantize inspect`: what is in a checkpoint."""

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint")
@click.option(
    "--repair", "out", type=click.Path(path_type=Path),
    help="Write a corrected copy to this folder, where there is one right correction.",
)  # fmt: skip
def inspect(checkpoint: str, out: Path | None) -> int:
    """Show what is in a checkpoint, quantized or not, and what is wrong.

    It reads headers, and the scales of whole matrices. CHECKPOINT is a folder or a Hub id; `bundled` is
    the model that ships. It exits with 1 when something is wrong and not repaired.
    """
    from rich.console import Console

    from quantize.checkpoints.inspect import inspect as inspect_checkpoint
    from quantize.checkpoints.inspect import inspection_table
    from quantize.checkpoints.reader import resolve
    from quantize.checkpoints.repair import repair
    from quantize.host.progress import say

    folder = resolve(checkpoint)
    found = inspect_checkpoint(folder)
    Console().print(inspection_table(found))
    for problem in found.problems:
        say(f"problem: {problem}")
    if out is None:
        return 1 if found.problems else 0
    for correction in repair(folder, out):
        say(f"repaired: {correction}")
    return 0
