"""`quantize rehearse`: a run at small limits, to find what would end it and how long it takes."""

from pathlib import Path

import click

from quantize.cli.options import GPU_MEMORY, model_options


@click.command()
@model_options
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
    help="Folder that holds the runs.",
)  # fmt: skip
@click.option(
    "--data-dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with TASK.jsonl files, in place of data sets on the Hub.",
)  # fmt: skip
@GPU_MEMORY
def rehearse(
    recipe: str, model: str | None, revision: str | None, out: Path, data_dir: Path | None,
    gpu_memory: float | None,
) -> int:  # fmt: skip
    """Try every stage on your own copy before the run that takes hours.

    Weights, data sets, disk and GPU memory are checked as the whole run needs them. Then every stage
    runs at small limits: 32 prompts, all weights, 4 questions a task. Nothing that is found ends it. At
    the end stand the findings, and the time, memory and disk that the whole run takes at most; the
    verdict of so few answers says nothing.

    \b
    rehearsal.json in the run folder holds all of it, with versions and hardware, and neither questions
    nor answers: send it along when you ask for help. The same command goes on where it stopped.

    The exit code is 0 when nothing was found, else that of the first finding.
    """
    from quantize.pipeline.rehearse import rehearse as rehearse_run

    return rehearse_run(
        recipe, model, out, revision=revision, gpu_memory=gpu_memory, data_dir=data_dir
    )
