"""`quantize run`, `rehearse` and `status`: make a whole run, try it at small limits, show its state."""

from pathlib import Path
from typing import Any

import click

from quantize.cli.options import remember_command, with_options
from quantize.pipeline.stages import STAGES
from quantize.runs.folder import RunDir, continued_by


@click.command()
@with_options("recipe", "model", "revision", "out", "task", "limit")
@click.option(
    "--until", type=click.Choice([stage.name for stage in STAGES]), default="report",
    help="Stop after this stage.",
)  # fmt: skip
@with_options("scoring", "machine", "scratch", "resume")
def run(recipe: str, model: str | None, out: Path, until: str, **options: Any) -> int:
    """Do everything: plan, calibrate, round, convert, verify, replay, evaluate, report, gate."""
    from quantize.pipeline.run import advance, started

    with started(recipe, model, out, **options) as started_run:
        remember_command(started_run.folder)
        return advance(started_run, until)


@click.command()
@with_options("recipe", "model", "revision", "out", "data-dir", "machine", "gpus")
def rehearse(recipe: str, model: str | None, out: Path, **options: Any) -> int:
    """Try every stage on your own copy of the model before the run that takes hours.

    Weights, data sets, disk and GPU memory are checked for the whole run. Then every stage runs at
    small limits: 32 prompts, all weights, 4 questions per task. A finding would end a run, but does
    not end the rehearsal. Prints all findings, and the most time and disk that a run may take,
    with --gpus on several GPUs (by arithmetic: it rehearses on one).
    The verdict of so few answers says nothing. The exit code is that of the first finding, else 0.

    rehearsal.json in the run folder holds these results, versions and hardware, but no questions or
    answers: send it when you ask for help. The same command continues an interrupted rehearsal.
    """
    from quantize.pipeline.rehearse import rehearse as rehearse_run

    return rehearse_run(recipe, model, out, began=remember_command, **options)


@click.command()
@with_options("run")
def status(run: Path) -> None:
    """Show what a run, search or judgement is doing: stage, task, interim look, rate, time left."""
    from quantize.errors import InputError
    from quantize.host.files import read_json
    from quantize.host.locks import holder
    from quantize.pipeline.run import failed_check
    from quantize.pipeline.staleness import why_stale

    folder = RunDir(run)
    if not folder.lock.is_file():
        raise InputError(
            f"{run}: no run there; name a folder that `quantize run` made: outputs/..."
        )
    failed = failed_check(folder)
    process, done = holder(folder.lock), [s.name for s in STAGES if (run / s.result).exists()]
    click.echo(f"{run}: {f'process {process} is' if process else 'no process is'} at work")
    click.echo(f"results there: {', '.join(done) or 'none'}")
    if folder.report_json.exists():
        verdict = read_json(folder.report_json, "verdict.outcome", "verdict.reason")["verdict"]
        stale = None if failed else why_stale(folder, STAGES[-1])
        since = f" (stale, {stale})" if stale else ""
        click.echo(f"last reported{since}: {verdict['outcome']}, {verdict['reason']}")
    if not process and not failed and (commands := _going_on(folder)):
        click.echo(f"go on with {commands}")
    if process and folder.progress_json.exists():
        progress = read_json(folder.progress_json, "under_way", "said")
        for line in [
            *progress["under_way"],
            *(f"last said: {sentence}" for sentence in progress["said"]),
        ]:
            click.echo(line)


def _going_on(folder: RunDir) -> str | None:
    """Return the command that does what a run still lacks; None if it lacks nothing, or is none.

    What `quantize run` and `judge` began, they continue; else the stages' own commands do.
    """
    from quantize.host.files import read_json
    from quantize.pipeline.staleness import why_stale
    from quantize.recipe.reading import read_recipe

    if not folder.manifest_json.exists():
        return None
    began = continued_by(folder, "")
    if name := read_json(folder.manifest_json).get("judged"):
        began = began or f"quantize judge {name} ... --resume"
        return None if folder.report_json.exists() else f"`{began}`"
    if why_stale(folder, STAGES[0]):
        return f"`{began or STAGES[0].command(folder)}`"
    recipe = read_recipe(folder.recipe_yaml)
    needed = [stage for stage in STAGES if stage.is_needed(recipe)]
    first = next((i for i, stage in enumerate(needed) if why_stale(folder, stage)), len(needed))
    whole = began and first < len(needed) - 1  # a report alone has a command of its own
    commands = [began] if whole else [stage.command(folder) for stage in needed[first:]]
    return " && ".join(f"`{command}`" for command in commands) if needed[first:] else None
