"""`quantize report`: the report of a run, and its verdict."""

from pathlib import Path

import click

from quantize.cli.options import RUN_FOLDER
from quantize.pipeline.stages import STAGES


@click.command()
@RUN_FOLDER
@click.option(
    "--hourly-price", type=click.FloatRange(min=0),
    help="Price of an hour of the machine, with which the report states what the evaluation cost.",
)  # fmt: skip
def report(run: Path, hourly_price: float | None) -> int:
    """Write the report of a run, and its verdict: report.json, .md, .html and junit.xml.

    In a job of GitHub Actions report.md also becomes the job's summary (docs/ci.md).
    """
    from quantize.host.files import read_json, write_json
    from quantize.pipeline.run import opened, run_alone

    (stage,) = (stage for stage in STAGES if stage.name == "report")
    with opened(run) as found:
        if hourly_price is not None:
            path = found.folder.manifest_json
            write_json(path, read_json(path) | {"hourly_price": hourly_price})
        return run_alone(found, stage)
