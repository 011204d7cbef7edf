"""`quantize inspect`: what is in a checkpoint."""

import click


@click.command()
@click.argument("checkpoint")
def inspect(checkpoint: str) -> int:
    """Show what is in a checkpoint, quantized or not, and what is wrong.

    It reads headers, and the scales of whole matrices. CHECKPOINT is a folder or a Hub id; `bundled` is
    the model that ships. It exits with 1 when something is wrong.
    """
    from rich.console import Console

    from quantize.checkpoints.inspect import inspect as inspect_checkpoint
    from quantize.checkpoints.inspect import inspection_table
    from quantize.checkpoints.reader import resolve
    from quantize.host.progress import say

    found = inspect_checkpoint(resolve(checkpoint))
    Console().print(inspection_table(found))
    for problem in found.problems:
        say(f"problem: {problem}")
    return 1 if found.problems else 0
