"""`quantize fidelity` replays recorded trajectories through a run's quantized model."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantize.cli.options import GPU_MEMORY, MODES, RUN_FOLDER
from quantize.pipeline.stages import STAGES

if TYPE_CHECKING:
    from quantize.schemes.modes import ActivationMode


@click.command()
@RUN_FOLDER
@MODES
@GPU_MEMORY
def fidelity(run: Path, modes: "tuple[ActivationMode, ...]", gpu_memory: float | None) -> int:
    """Replay recorded trajectories: distance of the quantized model from BF16."""
    from quantize.pipeline.run import opened, run_alone
    from quantize.pipeline.stages import fidelity_more

    (stage,) = (stage for stage in STAGES if stage.name == "fidelity")
    with opened(run, gpu_memory) as found:
        return run_alone(found, stage, partial(fidelity_more, modes=modes))
