"""`quantize tasks`: what a recipe may be scored on."""

from collections.abc import Mapping
from typing import Any

import click

ROW = "{:22}{:>10}{:>16}{:>16}  {}"


@click.command()
@click.option("--recipe", help="A recipe whose own tasks are listed too: a name or a YAML file.")
def tasks(recipe: str | None) -> None:
    """List the tasks that a recipe can be scored on, and what each of them costs.

    The cost is the most tokens that each model needs for one answer to every question; a recipe's
    `repeats` multiply it. A question mark stands where a data set's size is not known beforehand.
    """
    from recovery.catalog import known_tasks, shipped

    from quantize.recipe import load_recipe

    own = load_recipe(recipe).evaluation.own_tasks if recipe else {}
    click.echo(ROW.format("task", "questions", "tokens/answer", "tokens at most", "data"))
    for name, task in own.items():
        click.echo(_row(name, task.definition(), str(task.data or task.lm_eval)))
    for name in known_tasks():
        task = shipped(name)
        click.echo(_row(name, task, _data(task)))


def _row(name: str, task: Mapping[str, Any], data: str) -> str:
    count, length = task["metadata"].get("questions"), task["generation_kwargs"]["max_gen_toks"]
    sizes = (
        (f"{count:,}", f"{length:,}", f"{count * length:,}") if count else ("?", f"{length:,}", "?")
    )
    return ROW.format(name, *sizes, data)


def _data(task: Mapping[str, Any]) -> str:
    """Return where the questions of a task that ships come from."""
    if task["dataset_path"] == "json":
        return "ships with the bundled model"
    gated = ", gated: needs HF_TOKEN" if task["metadata"].get("private") else ""
    return f"Hub: {task['dataset_path']}{gated}"
