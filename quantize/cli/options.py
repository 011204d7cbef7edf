"""Arguments and options that several commands share; `with_options` adds them to a command."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.decorators import FC

from quantize.host.files import write_text
from quantize.host.known_gpus import KNOWN_GPUS
from quantize.host.processes import is_first
from quantize.recipe.controls import bounds_of
from quantize.runs.folder import RunDir
from quantize.schemes.modes import ACTIVATION_MODES

REAL_MODEL = "google/diffusiongemma-26B-A4B-it"
STEPS = click.IntRange(*bounds_of("max_denoising_steps"))
SHARED: dict[str, Callable[[Any], Any]] = {
    "run": click.argument("run", type=click.Path(path_type=Path)),
    "checkpoint": click.argument("checkpoint"),
    "out": click.option(
        "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
        help="Folder of the runs; runs in one folder share BF16's samples.",
    ),
    "revision": click.option("--revision", help="Revision of a Hub model: branch, tag or commit."),
    "model": click.option(
        "--model", callback=lambda _, __, model: None if model == "bundled" else model,
        help="Checkpoint folder or Hub id (ORG/NAME@REVISION); by default the bundled model.",
    ),
    "recipe": click.option("--recipe", default="nvfp4", show_default=True, help="Name or YAML file."),
    "limit": click.option(
        "--limit", type=click.IntRange(min=2),
        help="Score only the first N problems per task, and replay fewer trajectories of BF16: one "
        "for five problems, at least 4."
    ),
    "task": click.option(
        "--task", "tasks", multiple=True, metavar="NAME",
        help="Score only this task (`quantize tasks` lists all tasks); repeatable.",
    ),
    "resume": click.option(
        "--resume", is_flag=True, help="Continue an interrupted run, or show a complete one."
    ),
    "gpu": click.option(
        "--gpu", metavar="NAME",
        help=f"GPU to estimate for: {', '.join(KNOWN_GPUS)}, or sm_NN with --gpu-memory. By default "
        "this machine's GPU.",
    ),
    "gpus": click.option(
        "--gpus", type=click.IntRange(1, 1024), default=1, show_default=True,
        help="How many such GPUs will share the stages that can be shared.",
    ),
    "gpu-memory": click.option(
        "--gpu-memory", type=click.FloatRange(min=0, min_open=True), metavar="GB",
        callback=lambda _, __, gb: None if gb is None else gb * 1e9,
        help="Most GPU memory to use; default: what is free. Weights that do not fit are streamed.",
    ),
    "scratch": click.option(
        "--scratch", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
        help="Folder for calibrate's recording, by default the run folder. The recording takes up "
        "to 1.44 MB per canvas and step of the 26B model, and is removed after the stage round.",
    ),
    "activations": click.option(
        "--activations", type=click.Choice(ACTIVATION_MODES),
        help="How activations are rounded; by default to 8 bits if weights have 8 bits, else not.",
    ),
    "modes": click.option(
        "--activations", "modes", multiple=True, type=click.Choice(ACTIVATION_MODES),
        help="Also measure with activations rounded this way; repeatable.",
    ),
    "hourly-price": click.option(
        "--hourly-price", type=click.FloatRange(min=0),
        help="Price of an hour of the machine (with --gpus, of one GPU); the output states the cost.",
    ),
    "measured": click.option(
        "--measured", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
        help="measured.json of `quantize measure MODEL`: the experts that a canvas hit, and in a plan "
        "its denoising steps, replace what is assumed.",
    ),
    "full": click.option(
        "--full", is_flag=True,
        help="Compare all values with BF16 again, including those that convert compared.",
    ),
    "gguf": click.option(
        "--gguf", type=click.Path(path_type=Path),
        help="Also score this exported file, in llama.cpp, with the same prompts and noise.",
    ),
    "llama-cpp": click.option(
        "--llama-cpp", type=click.Path(path_type=Path), metavar="PROGRAM",
        help="Path of llama.cpp's llama-diffusion-gemma-server, which --gguf needs.",
    ),
    "steps": click.option(
        "--steps", multiple=True, type=STEPS, metavar="T",
        help="Also judge the candidate with at most T steps per canvas; repeatable.",
    ),
    "data-dir": click.option(
        "--data-dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Folder with TASK.jsonl files, in place of data sets on the Hub.",
    ),
}  # fmt: skip


def with_options(*options: str | Callable[[Any], Any]) -> Callable[[FC], FC]:
    """Return a decorator that adds options to a command; a string is a key of SHARED."""

    def add(command: FC) -> FC:
        for option in reversed(options):
            command = (SHARED[option] if isinstance(option, str) else option)(command)
        return command

    return add


# Those of `quantize.pipeline.stages.MACHINE` that all stages which open models have.
SHARED["machine"] = with_options("gpu-memory")
# Keywords of `quantize.pipeline.stages.evaluate_more`.
SHARED["scoring"] = with_options(
    "data-dir",
    click.option(
        "--noise-floor", is_flag=True,
        help="Also score BF16 with another seed, to show the difference that noise alone makes.",
    ),
    click.option(
        "--operating-points", is_flag=True,
        help="Also judge the recipe's operating points, and name the fastest that passes.",
    ),
    click.option(
        "--batch-size", type=click.IntRange(min=1),
        help="Problems to answer at once, in place of the recipe's number.",
    ),
    click.option(
        "--all", "go_on", is_flag=True,
        help="Ask for every sample that the recipe plans, even when the verdict is certain.",
    ),
    click.option(
        "--server", "servers", multiple=True,
        help="URL of an OpenAI-compatible server with the quantized model; repeatable: several share "
        "the requests.",
    ),
    click.option(
        "--base-server", "base_servers", multiple=True, help="URL of a server with the BF16 model."
    ),
    click.option(
        "--server-revision", help="Revision that --server serves, if it reports no fingerprint."
    ),
    click.option("--base-server-revision", help="Revision that --base-server serves."),
    click.option(
        "--in-flight", type=click.IntRange(min=1), default=8, show_default=True,
        help="Requests in flight to each server.",
    ),
)  # fmt: skip


def continuing(words: list[str]) -> list[str]:
    """Return the words of the command line that continues what the command line `words` began."""
    resumes = words[:1] in (["run"], ["judge"]) and "--resume" not in words
    return [*words, "--resume"] if resumes else words


def remember_command(folder: RunDir) -> None:
    """Keep, in a run's folder, the command line that does what the command at work leaves undone."""
    words = continuing(sys.argv[1:])
    pairs = zip(["", *words], words, strict=False)
    whole = [word for before, word in pairs if not (before == "--until" or word[:7] == "--until")]
    if is_first():
        write_text(folder.command, shlex.join(["quantize", *whole]))


def served_name(checkpoint: str, folder: Path) -> str:
    """Return a served model's name: the Hub id, or the run's name; without a run, the folder's."""
    if not Path(checkpoint).is_dir():
        return checkpoint
    path = folder.resolve()
    return path.parent.name if path.name == "checkpoint" else path.name
