"""`quantize judge` compares a quantized checkpoint built elsewhere with its BF16 model."""

from pathlib import Path
from typing import Any

import click

from quantize.cli.options import GPU_MEMORY, scoring_options


@click.command()
@click.argument("checkpoint")
@click.option(
    "--against", metavar="BF16",
    help="Folder or Hub id of the BF16 model; without it the checkpoint is one of the bundled model.",
)  # fmt: skip
@click.option(
    "--recipe", "recipe", default="nvfp4", show_default=True,
    help="Name or YAML file of the recipe whose tasks and gate judge.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True,
    help="Folder that holds the runs; in one folder they share BF16's samples.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=2), help="Score only the first N problems a task.")
@click.option(
    "--fine-tuned", is_flag=True,
    help="Weights differ from BF16's on purpose: they are not compared, and the report says so.",
)  # fmt: skip
@scoring_options
@GPU_MEMORY
@click.option("--resume", is_flag=True, help="Continue this judgement, or show it.")
def judge(checkpoint: str, against: str | None, recipe: str, out: Path, **options: Any) -> int:
    """Judge a checkpoint that others built: inspect, compare weights, replay, evaluate, report, gate.

    CHECKPOINT is a folder or a Hub id (NVIDIA's, RedHatAI's, a fine-tuned model's). `quantize compare`
    pairs its folder with a run of ours. Exit codes are those of `quantize run`.
    """
    from quantize.pipeline.judge import judge as judge_checkpoint

    return judge_checkpoint(checkpoint, against, recipe, out, **options)
