"""`quantize plan`, and for every other stage in STAGES a command that runs the stage again."""

from pathlib import Path
from typing import Any

import click

from quantize.cli.options import REAL_MODEL, with_options
from quantize.pipeline.stages import STAGES, Stage


@click.command()
@with_options(
    "recipe", "model", "revision", "out", "task", "limit", "gpu-memory", "gpu", "gpus",
    "hourly-price",
)  # fmt: skip
@click.option(
    "--serve", is_flag=True,
    help="Show instead how each format would be served: slots, memory, speed at best. Without "
    "--model, the 26B model is shown.",
)  # fmt: skip
@click.option(
    "--context", type=click.IntRange(min=1), metavar="N",
    help="With --serve: positions of a prompt and its answer together.  [default: 8192]",
)  # fmt: skip
@click.option(
    "--clients", type=click.IntRange(1, 64), default=4, show_default=True,
    help="With --serve: requests at once.",
)  # fmt: skip
@with_options("measured")
def plan(
    recipe: str, model: str | None, out: Path, serve: bool,
    context: int | None, clients: int, **options: Any,
) -> int:  # fmt: skip
    """Show what a recipe would do, and what each stage takes on a GPU; no weights are read.

    --model may also be a config.json: the plan then needs no other file. Figures are for --gpu;
    default: this GPU, else an H200. --hourly-price adds what evaluation costs. The exit code is 3 if a
    stage does not fit --gpu-memory, and 4 if the gate cannot PASS, whatever the answers are; `quantize
    run --until plan` ends alike. Answers of BF16 that were imported into --out are looked at too: too
    few are refused.
    """
    from quantize.pipeline.run import check_imported
    from quantize.stages.plan.serving import show_serving
    from quantize.stages.plan.show import show_plan

    if serve:
        del options["tasks"], options["limit"], options["hourly_price"], options["gpus"]
        show_serving(model or REAL_MODEL, context=context, clients=clients, **options)
        return 0
    code = show_plan(recipe, model, **options)
    check_imported(recipe, model, out, options["tasks"], options["limit"])
    return code


def command_of(stage: Stage) -> click.Command:
    """Return the command that runs `stage` of a run folder again."""

    @click.command(name=stage.name, help=stage.summary)
    @with_options("run", *stage.options)
    def command(run: Path, **options: Any) -> int:
        from quantize.pipeline.run import opened, run_alone

        with opened(run, **options) as opened_run:
            return run_alone(opened_run, stage)

    return command


globals().update({stage.name: command_of(stage) for stage in STAGES[1:]})
