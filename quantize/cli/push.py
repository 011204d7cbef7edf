"""`quantize push`: a run goes to the Hub."""

import sys
from pathlib import Path

import click

from quantize.cli.options import RUN_FOLDER


@click.command()
@RUN_FOLDER
@click.option("--repo", required=True, metavar="ORG/NAME", help="Repository; a new one is private.")
@click.option(
    "--to", default="pr", show_default=True, metavar="pr|main|BRANCH",
    help="Target: a pull request, main, or a branch.",
)  # fmt: skip
@click.option("--tag", help="Tag the release, as the last step (not with a pull request).")
@click.option("--public", is_flag=True, help="Make the repository public, once all is verified.")
@click.option(
    "--allow", type=click.Choice(["inconclusive"]),
    help="Publish although the gate could not decide; the model card says so.",
)  # fmt: skip
@click.option(
    "--no-gate", is_flag=True, help="Publish whatever the verdict; the model card says so."
)
@click.option(
    "--sign", metavar="KEY.pem|sigstore",
    help="Sign all files: with a private key (elliptic curve, PEM), or by Sigstore.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask (for CI).")
def push(
    run: Path,
    repo: str,
    to: str,
    tag: str | None,
    public: bool,
    allow: str | None,
    no_gate: bool,
    sign: str | None,
    dry_run: bool,
    yes: bool,
) -> int:
    """Publish a run whose gate passed to the Hugging Face Hub, with a model card made from it.

    --dry-run shows what would be uploaded and, without a token or a network, what it could not check.
    The token comes from HF_TOKEN or from `hf auth login`. Interrupted? The same command goes on.
    """
    from quantize.hub.release import Request
    from quantize.pipeline.run import push as push_run

    def confirm() -> bool:
        if not (yes or sys.stdin.isatty()):
            raise click.UsageError("nobody to ask here: add --yes, or --dry-run to look only")
        return yes or click.confirm("Upload this?", err=True)

    request = Request(repo, to, tag, public, allow == "inconclusive", no_gate, sign)
    return push_run(run, request, dry_run=dry_run, confirm=confirm)
