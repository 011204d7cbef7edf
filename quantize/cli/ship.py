"""`quantize adopt`, `card`, `bundle`, `push`, `verify-signature`: make and check a release."""

import sys
from pathlib import Path
from typing import Any

import click

from quantize.cli.options import with_options


@click.command()
@with_options("run")
@click.option(
    "--repo", metavar="ORG/NAME", help="Name in the card's commands; by default the run's name."
)
def card(run: Path, repo: str | None) -> None:
    """Write the model card, README.md, into a run's checkpoint; no token is needed.

    The scores of a task whose questions are a data set on the Hub (AIME, GPQA, GSM8K, SVAMP) are also
    written for machines, as .eval_results/TASK.yaml. The Hub's form has no place for other tasks:
    their scores for machines are in report.json alone.

    The Hub is not asked. `push` makes the card again after it has compared the base model's checksums
    with the Hub's.
    """
    from quantize.host.progress import say
    from quantize.pipeline.run import reported
    from quantize.reports.card import write_card

    with reported(run) as (folder, recipe):
        paths, without = write_card(folder, recipe, repo or folder.path.resolve().name)
        for path in paths:
            say(f"card: {path}")
        if without:
            say(
                f"no .eval_results of {', '.join(without)}: not judged, or no data set on the Hub, "
                f"which that form names; {folder.report_json} has all scores"
            )


@click.command()
@with_options("run")
@click.argument("point", required=False)
@click.option("--own", "restores", is_flag=True, help="Restore the model's own settings instead.")
def adopt(run: Path, point: str | None, restores: bool) -> int:
    """Write sampler settings into the checkpoint: those of an operating point that passed.

    Without POINT, the fastest point that passes is taken. The settings go into the checkpoint's
    generation_config.json, so that servers serve what was judged. Then verify and report run again.
    """
    from quantize.pipeline.adopt import adopt as adopt_point

    if restores and point:
        raise click.UsageError("name a point, or --own, not both")
    return adopt_point(run, point, restores=restores)


@click.command()
@with_options("run")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write; by default NAME.zip here, NAME being the run's folder.",
)
def bundle(run: Path, out: Path | None) -> None:
    """Pack what a run found into one file: versions, times, memory, checks, scores and verdict.

    RUN may also be the folder that `quantize measure` wrote.

    It holds no weights, no questions, no answers, no paths of this machine, and no text of errors.
    """
    from quantize.reports.bundle import write_bundle
    from quantize.runs.folder import RunDir, existing_run

    folder = RunDir(run) if (run / "measured.json").is_file() else existing_run(run)
    file = out or Path(f"{folder.path.resolve().name}.zip")
    click.echo(f"{file}: {', '.join(write_bundle(folder, file))}")


@click.command()
@with_options("run")
@click.option("--repo", required=True, metavar="ORG/NAME", help="Repository; a new one is private.")
@click.option(
    "--to", default="pr", show_default=True, metavar="pr|main|BRANCH",
    help="Target: a pull request, main, or a branch.",
)  # fmt: skip
@click.option("--tag", help="Tag the release, after all is verified (not with a pull request).")
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
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded; upload nothing.")
@click.option("--yes", is_flag=True, help="Do not ask (for CI).")
def push(run: Path, allow: str | None, dry_run: bool, yes: bool, **request: Any) -> int:
    """Upload a run to the Hugging Face Hub if it passed its gate, with a model card of the run.

    --dry-run shows what would be uploaded. Without a token or a network, it also says what it did
    not check. The token is HF_TOKEN or that of `hf auth login`. Interrupted? Run the command again.
    """
    from quantize.hub.publish import push as push_release
    from quantize.hub.release import ReleaseRequest
    from quantize.pipeline.run import reported

    def confirm() -> bool:
        if not (yes or sys.stdin.isatty()):
            raise click.UsageError("nobody to ask here: add --yes, or --dry-run to look only")
        return yes or click.confirm("Upload this?", err=True)

    asked = ReleaseRequest(**request, allow_inconclusive=allow == "inconclusive")
    with reported(run) as (folder, _):
        return push_release(folder, asked, dry_run=dry_run, confirm=confirm)


@click.command("verify-signature")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), help="The signer's public key, PEM.")
@click.option("--identity", help="With Sigstore: the account that signed.")
@click.option("--issuer", help="With Sigstore: URL of the service where that account logged in.")
def verify_signature(
    folder: Path, key: Path | None, identity: str | None, issuer: str | None
) -> None:
    """Check the signature of a published checkpoint: a folder that `hf download` made.

    Every file but model.sig, .git* and .cache must be as it was signed. The exit code is 1 if there
    is no signature, if another signer made it, or if a file was changed, added or removed.
    """
    from quantize.hub.signing import verify

    if (key is None) == (identity is None) or (identity is None) != (issuer is None):
        raise click.UsageError("give --key, or --identity and --issuer")
    files = verify(folder, key, identity, issuer)
    click.echo(f"{folder}: {files} files are what was signed by {key or identity}")
