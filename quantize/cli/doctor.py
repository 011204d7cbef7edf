"""`quantize doctor`: what is installed, what is missing, and what to do about it."""

from pathlib import Path

import click


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("outputs"), show_default=True)
def doctor(out: Path) -> int:
    """Look at this machine: packages, compiler, GPUs and driver, memory, disk, caches.

    Each line with an arrow says what to do. Exit code 3 if something is missing that commands need.
    Nothing is downloaded, written or sent; the output is meant to be pasted into a bug report.
    """
    from quantize.host.doctor import NEEDED, findings

    found = list(findings(out))
    for finding in found:
        click.echo(f"{finding.what}: {finding.found}")
        if finding.advice:
            click.echo(f"  -> {finding.advice}")
    return 3 if any(finding.advice and finding.level == NEEDED for finding in found) else 0
