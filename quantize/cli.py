"""The command line: parse, call one function each, map errors to exit codes.

Heavy imports (torch, transformers) stay inside the commands: `quantize --help` answers at once.
"""

import errno
import os
import sys
from pathlib import Path

import click

from quantize import __version__
from quantize.errors import QuantizeError

RUN_FOLDER = click.argument("run", type=click.Path(path_type=Path))
STAGE_NAMES = ("plan", "calibrate", "convert", "verify", "fidelity", "evaluate", "report")
EXIT_CODES = """\b
Exit codes:
  0  done, and the gate passed
  1  the gate or the verification failed
  2  usage or bad input
  3  environment: missing GPU, memory, disk, token or dataset
  4  inconclusive, or not comparable
"""


class _InOrder(click.Group):
    """Lists commands in the order of the pipeline, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="quantize")
def cli() -> None:
    """Quantize DiffusionGemma to FP8 or NVFP4, and prove that it still thinks.

    \b
    Start here (the bundled model, a few minutes on a CPU):
      quantize run --recipe nvfp4
    The real model (BF16 weights on disk or on the Hub):
      quantize plan --recipe nvfp4 --model google/diffusiongemma-26B-A4B-it
      quantize run  --recipe nvfp4 --model google/diffusiongemma-26B-A4B-it

    A run lies in outputs/RECIPE-HASH/. Each stage is done when its file is there; a run that was
    interrupted goes on with --resume.
    """


def _model_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--revision", help="Revision of a Hub model: branch, tag or commit."),
        click.option(
            "--model", help="Checkpoint folder or Hub id; without it, the small bundled model."
        ),
        click.option(
            "--recipe", "recipe", default="nvfp4", show_default=True, help="Name or YAML file."
        ),
    ):
        command = option(command)
    return command


@cli.command()
@_model_options
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
    help="Folder that holds the runs.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=2), help="Score only the first N problems a task.")
@click.option("--until", type=click.Choice(STAGE_NAMES), default="report", help="Stop after it.")
@click.option("--resume", is_flag=True, help="Continue this run, or show it when it is complete.")
def run(
    recipe: str,
    model: str | None,
    revision: str | None,
    out: Path,
    limit: int | None,
    until: str,
    resume: bool,
) -> int:
    """Do everything: plan, calibrate, convert, verify, replay, evaluate, report, gate."""
    from quantize.pipeline import advance, start

    found = start(recipe, model, out, resume=resume, revision=revision, limit=limit)
    return advance(found, until)


@cli.command()
@_model_options
def plan(recipe: str, model: str | None, revision: str | None) -> None:
    """Show what a recipe would do: modules, schemes, bytes. Reads no weights.

    --model may also be a config.json: the plan then comes from the config alone.
    """
    from quantize.pipeline import show_plan

    show_plan(recipe, model, revision)


@cli.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the recipes that ship with quantize, or print one: `quantize recipes nvfp4`."""
    from quantize.recipe import load_recipe, shipped_recipes

    shipped = shipped_recipes()
    if name is not None:
        load_recipe(name)  # an unknown name is an error that lists the known ones
        click.echo(shipped[name], nl=False)
        return
    for known, text in shipped.items():
        purpose = text.splitlines()[0].lstrip("# ")
        click.echo(f"{known:14} {purpose}")


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False))
def inspect(checkpoint: Path) -> int:
    """Show what is in a checkpoint, quantized or not, and what is wrong. Reads headers only.

    Exits 1 when something is wrong.
    """
    from rich.console import Console

    from quantize.inspect import inspect as inspect_checkpoint
    from quantize.inspect import inspection_table
    from quantize.progress import say

    found = inspect_checkpoint(checkpoint)
    Console().print(inspection_table(found))
    for problem in found.problems:
        say(f"problem: {problem}")
    return 1 if found.problems else 0


def _add_stage(name: str, summary: str) -> None:
    @cli.command(name=name, help=summary)
    @RUN_FOLDER
    def stage(run: Path) -> int:
        from quantize.pipeline import open_run, run_stage

        return run_stage(open_run(run), name, again=True)


_add_stage("calibrate", "Calibrate a run again: denoise on prompts, record input scales.")
_add_stage("convert", "Write the quantized checkpoint of a run again.")
_add_stage("verify", "Check the quantized checkpoint of a run statically.")
_add_stage("fidelity", "Replay recorded trajectories: distance of the quantized model from BF16.")


@cli.command()
@RUN_FOLDER
@click.option(
    "--activations", "modes", multiple=True,
    type=click.Choice(["none", "per_expert", "per_layer"]),
    help="Score this way of rounding activations too; may be given several times.",
)  # fmt: skip
@click.option(
    "--data-dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with TASK.jsonl files, in place of data sets on the Hub.",
)  # fmt: skip
def evaluate(run: Path, modes: tuple[str, ...], data_dir: Path | None) -> None:
    """Score BF16 and quantized with the same prompts and seeds: what is not scored yet."""
    from quantize.pipeline import evaluate_more, open_run

    evaluate_more(open_run(run), modes, data_dir)


_add_stage("report", "Write the report of a run, and its verdict.")


def main() -> None:
    """Run the command line and exit with the code that the outcome calls for."""
    sys.exit(_exit_code())


# The libraries' own bars and chatter would cut into ours; each can be turned on again from outside.
QUIET = {
    "TQDM_DISABLE": "1",
    "LLM_COMPRESSOR_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}


def _exit_code() -> int:
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        return cli.main(standalone_mode=False) or 0
    except QuantizeError as error:
        return _complain(str(error), error.exit_code)
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted; --resume continues this run", 130)
    except MemoryError as error:
        return _complain(f"out of memory ({error}); free some, or use a larger machine", 3)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            place = error.filename or "the output folder"
            return _complain(f"{place}: the disk is full; free some space, then --resume", 3)
        raise


def _complain(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code
