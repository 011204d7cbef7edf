"""The commands that run one stage of a run folder again, made from the list of stages."""

from pathlib import Path

import click

from quantize.cli.options import GPU_MEMORY, RUN_FOLDER, SCRATCH
from quantize.pipeline.stages import Stage


def command_of(stage: Stage) -> click.Command:
    """Return the command that runs one stage of a run folder again."""

    @click.command(name=stage.name, help=stage.summary)
    @RUN_FOLDER
    def command(run: Path, gpu_memory: float | None = None, scratch: Path | None = None) -> int:
        from quantize.pipeline.run import opened, run_alone

        with opened(run, gpu_memory, scratch) as found:
            return run_alone(found, stage)

    command = SCRATCH(command) if stage.uses_scratch else command
    return GPU_MEMORY(command) if stage.runs_models else command
