"""Arguments and options that several commands share."""

from pathlib import Path

import click

from quantize.schemes.modes import ACTIVATION_MODES

RUN_FOLDER = click.argument("run", type=click.Path(path_type=Path))
GPU_MEMORY = click.option(
    "--gpu-memory", type=click.FloatRange(min=0, min_open=True), metavar="GB",
    callback=lambda _, __, gb: None if gb is None else gb * 1e9,
    help="GPU memory to use, at most; weights that do not fit are streamed. Else all that is free.",
)  # fmt: skip
SCRATCH = click.option(
    "--scratch", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Where calibrate keeps for round what enters the first layer: up to 1.44 MB a canvas and step "
    "of a 26B model, removed when round is done. Else the run's folder.",
)  # fmt: skip
ACTIVATIONS = click.option(
    "--activations", type=click.Choice(ACTIVATION_MODES),
    help="How a quantized model's activations are rounded; else as its kernels do, on a CPU not.",
)  # fmt: skip
MODES = click.option(
    "--activations", "modes", multiple=True, type=click.Choice(ACTIVATION_MODES),
    help="Measure this way of rounding activations too; may be given several times.",
)  # fmt: skip
REAL_MODEL = "google/diffusiongemma-26B-A4B-it"


def model_options(command: click.decorators.FC) -> click.decorators.FC:
    """Add the options that name a recipe and a model."""
    for option in (
        click.option("--revision", help="Revision of a Hub model: branch, tag or commit."),
        click.option(
            "--model", callback=lambda _, __, model: None if model == "bundled" else model,
            help="Checkpoint folder or Hub id (ORG/NAME@REVISION); else the bundled model.",
        ),
        click.option(
            "--recipe", "recipe", default="nvfp4", show_default=True, help="Name or YAML file."
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def scoring_options(command: click.decorators.FC) -> click.decorators.FC:
    """Add the options of `quantize.pipeline.stages.evaluate_more` that `run` and `evaluate` share."""
    for option in (
        click.option(
            "--in-flight", type=click.IntRange(min=1), default=8, show_default=True,
            help="Number of requests to each server at once.",
        ),
        click.option("--base-server-revision", help="Revision that --base-server serves."),
        click.option(
            "--server-revision",
            help="Revision that --server serves, where it reports no fingerprint.",
        ),
        click.option(
            "--base-server", "base_servers", multiple=True, help="URL of a server with the BF16 model."
        ),
        click.option(
            "--server", "servers", multiple=True,
            help="URL of an OpenAI-compatible server with the quantized model; repeat it for more of "
            "them, which share the requests.",
        ),
        click.option(
            "--all", "go_on", is_flag=True,
            help="Ask every sample that the recipe plans, although the verdict is certain before.",
        ),
        click.option(
            "--batch-size", type=click.IntRange(min=1),
            help="Problems answered at once, in place of the recipe's number.",
        ),
        click.option(
            "--operating-points", is_flag=True,
            help="Judge the recipe's operating points too, and name the fastest that passes.",
        ),
        click.option(
            "--noise-floor", is_flag=True,
            help="Score BF16 once more with another seed: the difference that noise alone makes.",
        ),
        click.option(
            "--data-dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Folder with TASK.jsonl files, in place of data sets on the Hub.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def served_name(checkpoint: str, folder: Path) -> str:
    """Name a model after its Hub id or folder; every run's folder is called checkpoint."""
    if not Path(checkpoint).is_dir():
        return checkpoint
    path = folder.resolve()
    return path.parent.name if path.name == "checkpoint" else path.name
