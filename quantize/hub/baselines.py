"""Packs of BF16's answers on the Hub: `quantize baseline push` and `quantize baseline pull`.

A pack is a file of a dataset repository, named by the pack's sha256, so that no push replaces another
pack. Its signature, if it has one, lies beside it. A pull that names a commit gets the same bytes
for ever. Report and card say from which repository and commit a pack came.
"""

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, hf_hub_download

from quantize.errors import InputError
from quantize.hub.calls import patiently
from quantize.hub.signing import SIGNATURE, sign_files, verify

T = TypeVar("T")
PACK = re.compile(r"([0-9a-f]{64})\.jsonl\.gz")
CARD = """---
license: other
tags: [diffusiongemma-quantize, baseline]
---
BF16's answers to tasks. `quantize baseline pull {repo}` takes one of these packs; an evaluation then
asks only the quantized model. There are no questions here; of private tasks only extracted answers.
"""


def push_pack(
    path: Path, digest: str, repo: str, *, signed: bool = False, key: Path | None = None
) -> str:
    """Add the pack at `path`, whose sha256 is `digest`, to a dataset; return ORG/NAME@COMMIT.

    The dataset `repo` is private if it is new. If `signed`, a signature by the private `key`, or by
    Sigstore if that is None, goes with the pack.

    Raises:
        InputError: there is no such organisation. ResourceError: no access, no network.
    """
    name, ask, api = f"{digest}.jsonl.gz", partial(_ask, repo), HfApi()
    files: dict[str, bytes | Path] = {name: path}
    if signed:
        files[f"{name}.sig"] = sign_files({name: path}, key)
    ask("create it", api.create_repo, private=True, exist_ok=True)
    there = ask("list its files", api.list_repo_files)
    if "README.md" not in there:
        files["README.md"] = CARD.format(repo=repo).encode()
    for file, content in files.items():
        if file not in there:
            ask(f"upload {file}", api.upload_file, path_or_fileobj=content, path_in_repo=file)
    return f"{repo}@{ask('read it', api.repo_info).sha}"


def pull_pack(
    named: str, digest: str, *, key: Path | None, identity: str | None, issuer: str | None
) -> tuple[Path, str, str]:
    """Download the pack of `named`, ORG/NAME[@REVISION], whose sha256 begins with `digest`.

    Return its file, the sha256 that it should have, and ORG/NAME@COMMIT. It must be signed by the owner
    of the public `key` (PEM), or by the account `identity` at `issuer`, if either is given.

    Raises:
        InputError: no pack or several are meant. GateError: somebody else signed it, or nobody.
        ResourceError: no access, no network.
    """
    repo, _, revision = named.partition("@")
    ask, api = partial(_ask, repo), HfApi()
    commit = ask("read it", api.repo_info, revision=revision or None).sha
    files = ask("list its files", api.list_repo_files, revision=commit)
    packs = [match[1] for file in files if (match := PACK.fullmatch(file))]
    meant = [pack for pack in packs if pack.startswith(digest)]
    if len(meant) != 1:
        has = ", ".join(pack[:12] for pack in packs) or "none"
        which = f"{len(meant)} packs begin with {digest!r}" if digest else f"{len(meant)} packs"
        raise InputError(f"{named}: {which}; name one by --sha256; it has {has}")
    name = f"{meant[0]}.jsonl.gz"
    fetch = partial(ask, "download", hf_hub_download, revision=commit)
    path = Path(fetch(filename=name))
    if key or identity or issuer:
        with tempfile.TemporaryDirectory(prefix="quantize-baseline-") as scratch:
            folder = Path(scratch)  # a signature covers the pack under its name
            (folder / name).symlink_to(path.resolve())
            if f"{name}.sig" in files:
                signature = Path(fetch(filename=f"{name}.sig")).read_bytes()
                (folder / SIGNATURE).write_bytes(signature)
            verify(folder, key, identity, issuer)
    return path, meant[0], f"{repo}@{commit}"


def _ask(repo: str, doing: str, call: Callable[..., T], **arguments: Any) -> T:
    return patiently(
        f"{repo}: cannot {doing}", partial(call, repo_id=repo, repo_type="dataset", **arguments)
    )
