"""`quantize run`: every stage of a run in order."""

from pathlib import Path
from typing import Any

import click

from quantize.cli.options import GPU_MEMORY, SCRATCH, model_options, scoring_options
from quantize.pipeline.stages import STAGES


@click.command()
@model_options
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
    help="Folder that holds the runs.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=2), help="Score only the first N problems a task.")
@click.option(
    "--until",
    type=click.Choice([stage.name for stage in STAGES]),
    default="report",
    help="Stop after this stage.",
)
@scoring_options
@GPU_MEMORY
@SCRATCH
@click.option("--resume", is_flag=True, help="Continue this run, or show it when it is complete.")
def run(
    recipe: str,
    model: str | None,
    revision: str | None,
    out: Path,
    limit: int | None,
    until: str,
    resume: bool,
    gpu_memory: float | None,
    scratch: Path | None,
    **scoring: Any,
) -> int:
    """Do everything: plan, calibrate, convert, verify, replay, evaluate, report, gate."""
    from quantize.pipeline.run import advance, started

    with started(
        recipe,
        model,
        out,
        resume=resume,
        revision=revision,
        limit=limit,
        gpu_memory=gpu_memory,
        scratch=scratch,
        **scoring,
    ) as found:
        return advance(found, until)
