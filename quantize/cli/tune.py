"""`quantize tune`: find the fastest launch configurations of this GPU."""

import click


@click.command()
@click.option(
    "--only", default="", metavar="REGEX",
    help="Tune only products whose key matches, such as linear/fp8/4096x2816 M=256.",
)  # fmt: skip
def tune(only: str) -> None:
    """Measure the kernels' launch configurations on this GPU and keep the fastest.

    Every product of the 26B model is timed with every candidate, at 64 to 8,192 tokens (up to 64
    canvases together); those at 64, 256 and 1,024 take about two minutes on an H200. The table goes
    into the user's cache folder, and generate, bench, serve and every stage launch by it from then on.
    Says how much each product gained.
    """
    from rich.console import Console

    from quantize.bench.tune import gains_table, tune_gpu

    Console().print(gains_table(tune_gpu(only)))
