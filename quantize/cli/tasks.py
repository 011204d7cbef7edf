"""`quantize tasks`: what a recipe may be scored on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from quantize.recipe.sections import Evaluation, Recipe

ROW = "{:22}{:>10}{:>16}{:>16}{:>16}  {}"


@click.command()
@click.option("--recipe", help="A recipe whose own tasks are listed too: a name or a YAML file.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), metavar="TOKENS/S",
    help="Tokens a second of the model that answers, for the hours.  [default: 1562, the 26B model "
    "in BF16 on an H200, 16 slots, 26 steps a canvas]",
)  # fmt: skip
def tasks(recipe: str | None, rate: float | None) -> None:
    """List the tasks that a recipe can be scored on, and what each of them costs.

    The cost is the most tokens that each model needs for one answer to every question, or for as many
    as the `repeats` of --recipe say, and the hours that these take. Most answers end earlier. A
    question mark stands where a data set's size is not known beforehand.
    """
    from recovery.catalog import known_tasks, shipped

    from quantize.recipe.sections import load_recipe
    from quantize.stages.plan.estimate import EVALUATED_TOKENS_A_SECOND

    parts = _evaluations(load_recipe(recipe)) if recipe else []
    own = {name: task for part in parts for name, task in part.own_tasks.items()}
    repeats = {name: count for part in parts for name, count in part.repeats.items()}
    rate = rate or EVALUATED_TOKENS_A_SECOND
    heads = ("questions", "tokens/answer", "tokens at most", "hours at most")
    click.echo(ROW.format("task", *heads, "data"))
    for name, task in own.items():
        place = str(task.data or task.lm_eval)
        click.echo(_row(name, task.definition(), rate, place, repeats.get(name, 1)))
    for name in known_tasks():
        task = shipped(name)
        click.echo(_row(name, task, rate, _data(task), repeats.get(name, 1)))


def _evaluations(recipe: "Recipe") -> list["Evaluation"]:
    """Return a recipe's sections about scoring, that of the bundled model first."""
    return [part for part in (recipe.bundled.evaluation, recipe.evaluation) if part]


def _row(name: str, task: Mapping[str, Any], rate: float, data: str, repeats: int) -> str:
    count, length = task["metadata"].get("questions"), task["generation_kwargs"]["max_gen_toks"]
    if not count:
        return ROW.format(name, "?", f"{length:,}", "?", "?", data)
    tokens = count * length * repeats
    hours = f"{tokens / rate / 3600:,.2f}"
    return ROW.format(name, f"{count:,}", f"{length:,}", f"{tokens:,}", hours, data)


def _data(task: Mapping[str, Any]) -> str:
    """Return where the questions of a task that ships come from."""
    if task["dataset_path"] == "json":
        return "ships with the bundled model"
    gated = ", gated: needs HF_TOKEN" if task["metadata"].get("private") else ""
    return f"Hub: {task['dataset_path']}{gated}"
