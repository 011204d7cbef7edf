"""Signs a release and checks signatures, with OpenSSF's model signing (the package `model-signing`).

One signature, `model.sig`, covers the sha256 of every file of the folder, so a check finds files
that were changed, removed or added. Only the signature, git's own files (`.gitattributes`, `.git`)
and what downloads leave in `.cache` are left out. Links are followed: the Hub's cache is made of
links. Sigstore signs for an account and needs a network; a key pair (PEM, elliptic curve) does not.
"""

import base64
import hashlib
import importlib
import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantize.errors import GateError, InputError, ResourceError
from quantize.host.files import parse_json

SIGNATURE = "model.sig"
SIGSTORE = "sigstore"
CURVES = ("secp256r1", "secp384r1", "secp521r1")
CACHES = (".cache",)  # what a download leaves in its folder


def sign(folder: Path, key: Path | None, out: Path | None = None) -> Path:
    """Sign all files of a folder, links followed, and return the path of the signature.

    `key` is a private key's file, PEM without a password; if it is None, Sigstore signs. The
    signature goes to `out`, by default into the folder. InputError: `key` cannot sign.
    ResourceError: the package is missing, or Sigstore cannot be reached.
    """
    config = extra("model_signing.signing").Config().set_hashing_config(_hashing())
    written = out or folder / SIGNATURE
    if key is not None:
        fingerprint(key)  # says in one line what is wrong with a key
        config.use_elliptic_key_signer(private_key=key).sign(folder, written)
    else:
        with _sigstore():  # as the account that CI is logged in as; else a browser asks
            config.use_sigstore_signer(use_ambient_credentials=True).sign(folder, written)
    return written


def sign_files(files: Mapping[str, Path | bytes], key: Path | None) -> bytes:
    """Return the signature of `files` (name -> path or bytes) by `key`, or by Sigstore if None."""
    with tempfile.TemporaryDirectory(prefix="quantize-sign-") as scratch:
        folder = Path(scratch, "release")
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                (folder / name).symlink_to(content.resolve())
        return sign(folder, key, Path(scratch, SIGNATURE)).read_bytes()


def verify(
    folder: Path, key: Path | None = None, identity: str | None = None, issuer: str | None = None
) -> int:
    """Check a folder's signature, and return how many files the signature covers.

    The expected signer owns the public `key` or, if it is None, the account `identity` at `issuer`.
    GateError: there is no signature, another signer made it, or a file is not as it was signed.
    InputError: `key` is unusable. ResourceError: the package is missing, or Sigstore fails.
    """
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise GateError(f"{signature}: missing; this folder is not signed")
    try:
        payload = parse_json(signature.read_bytes())["dsseEnvelope"]["payload"]
        signed = len(parse_json(base64.b64decode(payload))["predicate"]["resources"])
    except (ValueError, KeyError, TypeError) as error:
        raise GateError(f"{signature}: cannot be read as a signature ({_line(error)})") from None
    config = extra("model_signing.verifying").Config().set_hashing_config(_hashing())
    who = str(key or f"{identity} at {issuer}")
    if key is None:
        with _sigstore():  # asks for the roots of trust
            config = config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    elif key.is_file():
        try:
            config = config.use_elliptic_key_verifier(public_key=key)
        except (ValueError, TypeError) as error:
            raise InputError(f"{key}: no public key that can verify ({_line(error)})") from error
    else:
        raise InputError(f"{key}: no such public key")
    try:
        config.verify(folder, signature)
    except Exception as error:  # the package raises errors of many libraries
        text = _line(error)
        if text.startswith("Signature mismatch:"):
            raise GateError(f"{folder}: not what was signed: {_differences(text)}") from None
        raise GateError(f"{signature}: not a signature of {who} ({text})") from None
    return signed


def fingerprint(key: Path) -> str:
    """Return the sha256, in hex, of a private key's public half (DER); InputError: unusable key."""
    if not key.is_file():
        raise InputError(f"{key}: no such private key")
    serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    try:
        private_key = serialization.load_pem_private_key(key.read_bytes(), None)
        curve = private_key.curve.name  # an AttributeError for keys of other kinds
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{key}: no private key of an elliptic curve ({_line(error)})") from None
    if curve not in CURVES:
        raise InputError(f"{key}: a key on {curve}; make one on {CURVES[0]}")
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(private_key.public_key().public_bytes(encoding, form)).hexdigest()


@contextmanager
def _sigstore() -> Generator[None]:
    try:
        yield
    except Exception as error:  # its client raises errors of many libraries
        raise ResourceError(f"Sigstore: {_line(error)}") from None


DIFFERENCES = {  # kind -> the package's words for files that are not as they were signed
    "changed": r"Hash mismatch for '(.+?)':",
    "added": r"Extra files found in model '.*?': (.+?)[\"'](?:, [\"']|\])",
    "gone": r"Missing files in model '.*?': (.+?)[\"'](?:, [\"']|\])",
}


def _differences(text: str) -> str:
    """Return which files differ, without the digests."""
    text = text.replace("\\'", "'")
    differing = {what: ", ".join(re.findall(said, text)) for what, said in DIFFERENCES.items()}
    return "; ".join(f"{what} {names}" for what, names in differing.items() if names) or text[:300]


def _hashing() -> Any:
    """Return how files are hashed: links are followed, the signature and caches are left out."""
    config = extra("model_signing.hashing").Config().set_allow_symlinks(True)
    return config.set_ignored_paths(paths=[SIGNATURE, *CACHES], ignore_git_paths=True)


def extra(module: str) -> Any:
    """Return `module`, which the extra `sign` installs; ResourceError: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"signatures need {error.name}: pip install 'diffusiongemma-quantize[sign]'"
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
