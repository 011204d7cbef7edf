"""Arguments and options that several commands share; `with_options` gives a command those it takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.decorators import FC

from quantize.recipe.controls import bounds_of
from quantize.schemes.modes import ACTIVATION_MODES

REAL_MODEL = "google/diffusiongemma-26B-A4B-it"
STEPS = click.IntRange(*bounds_of("max_denoising_steps"))
SHARED: dict[str, Callable[[Any], Any]] = {
    "run": click.argument("run", type=click.Path(path_type=Path)),
    "checkpoint": click.argument("checkpoint"),
    "out": click.option(
        "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
        help="Folder that holds the runs; in one folder they share BF16's samples.",
    ),
    "revision": click.option("--revision", help="Revision of a Hub model: branch, tag or commit."),
    "model": click.option(
        "--model", callback=lambda _, __, model: None if model == "bundled" else model,
        help="Checkpoint folder or Hub id (ORG/NAME@REVISION); else the bundled model.",
    ),
    "recipe": click.option("--recipe", default="nvfp4", show_default=True, help="Name or YAML file."),
    "limit": click.option(
        "--limit", type=click.IntRange(min=2), help="Score only the first N problems a task."
    ),
    "task": click.option(
        "--task", "tasks", multiple=True, metavar="NAME",
        help="Score this task alone (`quantize tasks` lists them); may be given several times.",
    ),
    "resume": click.option(
        "--resume", is_flag=True, help="Continue what was begun, or show it when it is complete."
    ),
    "gpu": click.option(
        "--gpu", metavar="NAME",
        help="Plan for a100, a6000, rtx3090, l40s, rtx4090, rtx4080, h100, h100pcie, h200, gh200, "
        "b200, b300, gb300, dgxstation, rtxpro6000, rtx5090, rtx5080 or spark, or sm_NN with "
        "--gpu-memory; else for the GPU that is here.",
    ),
    "gpu-memory": click.option(
        "--gpu-memory", type=click.FloatRange(min=0, min_open=True), metavar="GB",
        callback=lambda _, __, gb: None if gb is None else gb * 1e9,
        help="GPU memory to use, at most; weights that do not fit are streamed. Else all that is free.",
    ),
    "scratch": click.option(
        "--scratch", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
        help="Where calibrate keeps for round what enters the first layer: up to 1.44 MB a canvas and "
        "step of a 26B model, removed when round is done. Else the run's folder.",
    ),
    "activations": click.option(
        "--activations", type=click.Choice(ACTIVATION_MODES),
        help="How a quantized model's activations are rounded; else as its kernels do, on a CPU not.",
    ),
    "modes": click.option(
        "--activations", "modes", multiple=True, type=click.Choice(ACTIVATION_MODES),
        help="Measure this way of rounding activations too; may be given several times.",
    ),
    "hourly-price": click.option(
        "--hourly-price", type=click.FloatRange(min=0),
        help="Price of an hour of the machine, with which the cost is stated.",
    ),
    "full": click.option(
        "--full", is_flag=True,
        help="Compare all of it with BF16 again, whatever convert held in memory.",
    ),
    "gguf": click.option(
        "--gguf", type=click.Path(path_type=Path),
        help="Score the exported file too, in llama.cpp, with the same prompts and noise.",
    ),
    "llama-cpp": click.option(
        "--llama-cpp", type=click.Path(path_type=Path), metavar="PROGRAM",
        help="llama.cpp's llama-diffusion-gemma-server, which --gguf needs.",
    ),
    "steps": click.option(
        "--steps", multiple=True, type=STEPS, metavar="T",
        help="Judge the candidate with at most T steps of a canvas too; may be given several times.",
    ),
    "data-dir": click.option(
        "--data-dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Folder with TASK.jsonl files, in place of data sets on the Hub.",
    ),
}  # fmt: skip


def with_options(*options: str | Callable[[Any], Any]) -> Callable[[FC], FC]:
    """Return the decorator that adds arguments and options, shared ones by name, in this order."""

    def add(command: FC) -> FC:
        for option in reversed(options):
            command = (SHARED[option] if isinstance(option, str) else option)(command)
        return command

    return add


# Fields of `quantize.pipeline.stages.Machine` that hold for whole runs and for stages that open models.
SHARED["machine"] = with_options("gpu-memory")
# Keywords of `quantize.pipeline.stages.evaluate_more`.
SHARED["scoring"] = with_options(
    "data-dir",
    click.option(
        "--noise-floor", is_flag=True,
        help="Score BF16 once more with another seed: the difference that noise alone makes.",
    ),
    click.option(
        "--operating-points", is_flag=True,
        help="Judge the recipe's operating points too, and name the fastest that passes.",
    ),
    click.option(
        "--batch-size", type=click.IntRange(min=1),
        help="Problems answered at once, in place of the recipe's number.",
    ),
    click.option(
        "--all", "go_on", is_flag=True,
        help="Ask every sample that the recipe plans, although the verdict is certain before.",
    ),
    click.option(
        "--server", "servers", multiple=True,
        help="URL of an OpenAI-compatible server with the quantized model; repeat it for more of "
        "them, which share the requests.",
    ),
    click.option(
        "--base-server", "base_servers", multiple=True, help="URL of a server with the BF16 model."
    ),
    click.option(
        "--server-revision", help="Revision that --server serves, where it reports no fingerprint."
    ),
    click.option("--base-server-revision", help="Revision that --base-server serves."),
    click.option(
        "--in-flight", type=click.IntRange(min=1), default=8, show_default=True,
        help="Number of requests to each server at once.",
    ),
)  # fmt: skip


def served_name(checkpoint: str, folder: Path) -> str:
    """Name a model after its Hub id or folder; every run's folder is called checkpoint."""
    if not Path(checkpoint).is_dir():
        return checkpoint
    path = folder.resolve()
    return path.parent.name if path.name == "checkpoint" else path.name
