"""`quantize baseline`: BF16's answers as a file, for machines where BF16 is slow to ask."""

from pathlib import Path

import click

from quantize.cli.options import RUN_FOLDER

PACK = click.argument("pack", type=click.Path(path_type=Path, dir_okay=False))


@click.group()
def baseline() -> None:
    """Take BF16's answers from one machine to another.

    They do not depend on the recipe, and on a small GPU they cost most of an evaluation. Where a pack
    was imported, `run` and `evaluate` ask the quantized model alone; report and card name its origin.
    """


@baseline.command("export")
@RUN_FOLDER
@PACK
def export_(run: Path, pack: Path) -> None:
    """Write BF16's answers of a run to PACK, with what they were made with, and no question."""
    from quantize.runs.folder import existing_run
    from quantize.stages.evaluate.baseline_pack import export_pack

    click.echo(f"{pack}: {export_pack(existing_run(run), pack)}")


@baseline.command("import")
@PACK
@click.option(
    "--out", default="outputs", show_default=True, type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the runs that may use it.",
)  # fmt: skip
def import_(pack: Path, out: Path) -> None:
    """Let the runs in a folder take BF16's answers from PACK.

    Each run checks that sampler, data, seed, weights, tokenizer and versions are its own, and names
    what is not.
    """
    from quantize.stages.evaluate.baseline_pack import import_pack

    found = import_pack(pack, out)
    click.echo(f"{found.path}: {found}")
