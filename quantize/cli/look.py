"""`quantize recipes`, `tasks`, `inspect`, `measure` and `doctor`: what ships, and what is there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from quantize.cli.options import with_options
from quantize.schemes.modes import ACTIVATION_MODES

ROW = "{:22}{:>10}{:>16}{:>16}{:>16}  {}"


@click.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the recipes that ship with quantize, or print one: `quantize recipes nvfp4`."""
    from quantize.recipe.reading import load_recipe, shipped_recipes

    shipped = shipped_recipes()
    if name is not None:
        load_recipe(name)  # an unknown name is an error that lists the known ones
        click.echo(shipped[name], nl=False)
        return
    for known, text in shipped.items():
        click.echo(f"{known:14} {text.splitlines()[0].lstrip('# ')}")


@click.command()
@click.option("--recipe", help="A recipe whose own tasks are listed too: a name or a YAML file.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), metavar="TOKENS/S",
    help="Tokens per second from which hours are computed.  [default: 1562, the 26B model "
    "in BF16 on an H200, 16 slots, 26 steps per canvas]",
)  # fmt: skip
def tasks(recipe: str | None, rate: float | None) -> None:
    """List the tasks that a recipe can be scored on, and what each of them costs.

    The cost is the most tokens that one model can need for all answers, and the hours that they take
    at --rate; most answers end before their limit. Each question is answered once, or as often as
    --recipe says. A question mark means that the size of the data set is not known beforehand.
    """
    from quantize.recipe.reading import load_recipe
    from quantize.recovery.catalog import known_tasks, shipped
    from quantize.stages.plan.estimate import EVALUATED_TOKENS_A_SECOND

    loaded = load_recipe(recipe) if recipe else None
    listed: dict[str, tuple[Mapping[str, Any], str]] = {}
    repeats: dict[str, int] = {}
    for part in filter(None, (loaded.bundled.evaluation, loaded.evaluation) if loaded else ()):
        repeats |= part.repeats
        for name, own_task in part.own_tasks.items():
            data = own_task.data or own_task.lm_eval or f"that of {own_task.of}"
            listed[name] = own_task.definition(), data
    listed |= {name: (shipped(name), _data(shipped(name))) for name in known_tasks()}
    heads = ("questions", "tokens/answer", "tokens at most", "hours at most")
    click.echo(ROW.format("task", *heads, "data"))
    for name, (task, data) in listed.items():
        costs = _costs(task, repeats.get(name, 1), rate or EVALUATED_TOKENS_A_SECOND)
        click.echo(ROW.format(name, *costs, data))


def _costs(task: Mapping[str, Any], repeats: int, rate: float) -> list[str]:
    count, length = task["metadata"].get("questions"), task["generation_kwargs"]["max_gen_toks"]
    if not count:
        return ["?", f"{length:,}", "?", "?"]
    tokens = count * length * repeats
    return [f"{count:,}", f"{length:,}", f"{tokens:,}", f"{tokens / rate / 3600:,.2f}"]


def _data(task: Mapping[str, Any]) -> str:
    if "custom_dataset" in task:
        return "made here, from a seed"
    if task["dataset_path"] == "json":
        return "ships with the bundled model"
    gated = ", gated: needs HF_TOKEN" if task["metadata"].get("private") else ""
    return f"Hub: {task['dataset_path']}{gated}"


@click.command()
@with_options("checkpoint")
def inspect(checkpoint: str) -> int:
    """Show what is in a checkpoint, quantized or not, and what is wrong.

    Reads all weights' headers and, of values, scales of whole matrices and tied copies. CHECKPOINT is a
    folder or a Hub id; `bundled` is the model that ships. The exit code is 1 if something is wrong.
    """
    from quantize.checkpoints.inspect import inspect as inspect_checkpoint
    from quantize.checkpoints.inspect import inspection_table
    from quantize.checkpoints.reader import resolve
    from quantize.host.progress import say, screen
    from quantize.runtime.weights.beside import INSPECTED

    inspection = inspect_checkpoint(resolve(checkpoint), INSPECTED)
    screen().print(inspection_table(inspection))
    for problem in inspection.problems:
        say(f"problem: {problem}")
    return 1 if inspection.problems else 0


@click.command()
@with_options("out")
def doctor(out: Path) -> int:
    """Check this machine: packages, compiler, GPUs and driver, memory, disk, caches.

    A line with an arrow says what to do. Exit code 3: something that commands need is missing.
    Nothing is downloaded, written or sent; the output is meant to be pasted into a bug report.
    """
    from quantize import __version__
    from quantize.host.doctor import NEEDED, findings

    checks = list(findings(out, __version__))
    for finding in checks:
        click.echo(f"{finding.what}: {finding.seen}")
        if finding.advice:
            click.echo(f"  -> {finding.advice}")
    return 3 if any(finding.advice and finding.level == NEEDED for finding in checks) else 0


@click.command()
@click.argument("model")
@click.option(
    "--checkpoint", metavar="FOLDER", help="A quantized checkpoint, whose routing is compared too."
)
@click.option(
    "--activations", type=click.Choice(ACTIVATION_MODES), default="per_layer", show_default=True,
    help="How the checkpoint's activations are rounded.",
)  # fmt: skip
@click.option(
    "--prompts", type=click.IntRange(1, 26), default=25, show_default=True,
    help="Prompts of each of the four kinds.",
)  # fmt: skip
@click.option(
    "--canvases", type=click.IntRange(1, 1024), default=4, show_default=True,
    help="Most canvases of an answer.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Folder of the two files; by default outputs/measured-FINGERPRINTS.",
)  # fmt: skip
@with_options("gpu-memory")
def measure(model: str, **options: Any) -> None:
    """Measure what a BF16 model does while it denoises: routing, ranges, entropy, steps.

    MODEL is a folder or a Hub id; `bundled` is the model that ships. It answers the prompts of four
    kinds that ship: structured, code, chat and prose. Writes measured.json and measured.html, which
    hold no prompt and no answer: by denoising step experts hit, load and entropy, by Linear the range
    of inputs, by kind of prompt steps and ends, and on a GPU ms per forward. Interrupted? The same
    command goes on behind the parts that are finished: prompts, speed, routing.
    """
    from quantize.host.progress import say
    from quantize.pipeline.measure import measure as measured

    folder = measured(model, **options)
    say(f"{folder}: measured.json and measured.html; `quantize bundle {folder}` packs the figures")
