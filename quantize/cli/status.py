"""`quantize status`: what the process at work in a run is doing, for another terminal."""

from pathlib import Path

import click

from quantize.cli.options import RUN_FOLDER


@click.command()
@RUN_FOLDER
def status(run: Path) -> None:
    """Say what is at work in a run, a search or a judgement: stage, task, look, rate, time left."""
    from quantize.errors import InputError
    from quantize.host.files import read_json
    from quantize.host.locks import holder
    from quantize.pipeline.stages import STAGES
    from quantize.runs.folder import RunDir

    folder = RunDir(run)
    if not folder.lock.is_file():
        raise InputError(
            f"{run}: no run there; name a folder that `quantize run` made: outputs/..."
        )
    process, done = holder(folder.lock), [s.name for s in STAGES if (run / s.result).exists()]
    click.echo(
        f"{run}: " + (f"process {process} is at work" if process else "no process is at work")
    )
    click.echo(f"results there: {', '.join(done) or 'none'}")
    if process and folder.progress_json.exists():
        found = read_json(folder.progress_json, "under_way", "said")
        for line in found["under_way"]:
            click.echo(line)
        for line in found["said"]:
            click.echo(f"last said: {line}")
