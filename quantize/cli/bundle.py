"""`quantize bundle`: one file of a run to send to others."""

from pathlib import Path

import click

from quantize.cli.options import RUN_FOLDER


@click.command()
@RUN_FOLDER
@click.option("--out", type=click.Path(path_type=Path), help="The file; else RUN's name and .zip.")
def bundle(run: Path, out: Path | None) -> None:
    """Pack what a run found into one file: versions, times, memory, checks, scores and verdict.

    It holds no weights, no questions, no answers, no paths of this machine, and no text of errors.
    """
    from quantize.reports.bundle import write_bundle
    from quantize.runs.folder import existing_run

    folder = existing_run(run)
    file = out or Path(f"{folder.path.resolve().name}.zip")
    names = write_bundle(folder, file)
    click.echo(f"{file}: {', '.join(names)}")
