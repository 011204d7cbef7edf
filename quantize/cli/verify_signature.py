"""`quantize verify-signature`: whether a folder is what somebody signed."""

from pathlib import Path

import click


@click.command("verify-signature")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), help="The signer's public key, PEM.")
@click.option("--identity", help="With Sigstore: the account that signed.")
@click.option("--issuer", help="With Sigstore: where that account was logged in, a URL.")
def verify_signature(
    folder: Path, key: Path | None, identity: str | None, issuer: str | None
) -> None:
    """Check the signature of a published checkpoint: a folder that `hf download` made.

    Every file but model.sig, .git* and .cache must be what was signed. Exit code 1 if there is no
    signature, it is another's, or a file was changed, added or taken away.
    """
    from quantize.hub.signing import Signer, verify

    if (key is None) == (identity is None) or (identity is None) != (issuer is None):
        raise click.UsageError("give --key, or --identity and --issuer")
    files = verify(folder, Signer(key, identity, issuer))
    click.echo(f"{folder}: {files} files are what was signed by {key or identity}")
