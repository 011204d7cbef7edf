"""`quantize card` writes the model card of a run beside its checkpoint."""

from pathlib import Path

import click

from quantize.cli.options import RUN_FOLDER


@click.command()
@RUN_FOLDER
@click.option(
    "--repo", metavar="ORG/NAME", help="Name in the card's commands; else the run's name."
)
def card(run: Path, repo: str | None) -> None:
    """Write README.md and machine-readable scores into a run's checkpoint; no token is needed.

    The Hub is not asked: `push` writes the card once more, when it has compared the base model's
    checksums.
    """
    from quantize.host.progress import say
    from quantize.pipeline.run import card as write_card

    for path in write_card(run, repo):
        say(f"card: {path}")
