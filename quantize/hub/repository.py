"""One model repository on the Hub: makes each commit once, and compares checksums with local files.

It builds on `huggingface_hub.HfApi`, which uploads (by Xet, or by LFS in parts) and retries uploads.
What HfApi leaves to its caller is here and in `hub.calls`:

  lost answers   A commit names its parent, so the Hub accepts it only once. If an answer was lost, the
                 branch's head is read: a head with our files means that the commit was accepted.
  checksums      The Hub lists the sha256 of each large file, and the git blob id of each small file.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, httpx, logging
from huggingface_hub.utils.sha import git_hash

from quantize.errors import GateError, InputError
from quantize.host.progress import track
from quantize.hub.calls import STALE_PARENT, explained, is_transient, patiently, status_of
from quantize.runs.digests import sha256_of

T = TypeVar("T")


@dataclass(frozen=True)
class File:
    """A file to publish: path in the repository, bytes or local path, size in bytes, sha256."""

    path: str
    content: Path | bytes
    size: int
    sha256: str

    @classmethod
    def of(cls, path: str, content: Path | bytes) -> "File":
        """Return the File for `path`; `content` is read once, for its size and sha256."""
        if isinstance(content, bytes):
            return cls(path, content, len(content), hashlib.sha256(content).hexdigest())
        return cls(path, content, content.stat().st_size, sha256_of(content))

    def is_at(self, remote: RepoFile | None) -> bool:
        """Return whether the Hub's entry `remote` has exactly these bytes; False if it is None."""
        if remote is None or remote.size != self.size:
            return False
        if remote.lfs is not None:
            return remote.lfs.sha256 == self.sha256
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return remote.blob_id == git_hash(data)


@dataclass(frozen=True)
class Repository:
    """The state of a repository on the Hub; `tags` and `branches` map names to commits."""

    exists: bool = False  # False also if the token may not see the repository
    private: bool = True  # True for a repository that does not exist: it is created so
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    branches: Mapping[str, str] = field(default_factory=dict[str, str])


class Hub:
    """Access to one repository, with the token of the environment or of `hf auth login`."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.api = HfApi()
        disable_progress_bars()  # we draw one bar over all files
        logging.set_verbosity_error()  # its warnings print the addresses of uploads, which are signed

    def account(self) -> str:
        """Return the name of the account that the token belongs to."""
        identity = self.ask("tell whose token this is", lambda _: self.api.whoami())
        return str(identity["name"])

    def look(self) -> Repository:
        """Return the state of the repository, or a `Repository()` if there is none."""
        if (info := self.ask("look", self._info)) is None:
            return Repository()
        refs = self.ask("refs", self.api.list_repo_refs)
        tags = {ref.name: ref.target_commit for ref in refs.tags}
        branches = {ref.name: ref.target_commit for ref in refs.branches}
        return Repository(True, bool(info.private), tags, branches)

    def _info(self, repo: str) -> ModelInfo | None:
        try:
            return self.api.model_info(repo)
        except RepositoryNotFoundError as error:
            if status_of(error) == 404:
                return None
            raise

    def head(self, revision: str) -> str:
        """Return the commit that a branch or pull request points to."""
        return str(self.ask(f"read {revision}", self.api.model_info, revision=revision).sha)

    def files(self, revision: str) -> dict[str, RepoFile]:
        """Return path -> entry (with checksums) of every file that the Hub lists at a revision."""
        tree = partial(self.api.list_repo_tree, revision=revision, recursive=True)
        listed_files = self.ask(f"list the files of {revision}", lambda repo: list(tree(repo)))
        return {entry.path: entry for entry in listed_files if isinstance(entry, RepoFile)}

    def pull_request(self, title: str, description: str, account: str) -> int:
        """Return the number of `account`'s open or draft pull request `title`, or of a new one."""
        listed = partial(self.api.get_repo_discussions, discussion_type="pull_request")
        doing = "list pull requests"
        for request in self.ask(doing, lambda repo: list(listed(repo, author=account))):
            if request.title == title and request.status in ("draft", "open"):
                return request.num
        create, doing = self.api.create_pull_request, "open a pull request"
        return self.ask(doing, create, title, description=description).num

    def tag(self, name: str, commit: str) -> None:
        """Tag a commit; InputError if somebody has meanwhile given the tag to another commit."""
        create = self.api.create_tag
        self.ask(f"tag {name}", create, tag=name, revision=commit, exist_ok=True)
        refs = self.ask("refs", self.api.list_repo_refs)
        self.check_tag(name, {ref.name: ref.target_commit for ref in refs.tags}[name], commit)

    def check_tag(self, name: str, standing: str, commit: str | None) -> None:
        """Raise InputError unless `standing`, the commit of the Hub's tag `name`, is `commit`."""
        if standing != commit:
            raise InputError(
                f"{self.repo}: tag {name} exists and stands for another commit ({standing[:12]}); "
                f"choose another name"
            )

    def commit(
        self,
        revision: str,
        parent: str,
        files: Sequence[File],
        deleted: Sequence[str],
        message: str,
    ) -> str:
        """Commit `files` and the removal of `deleted` paths on top of `parent`; return the new commit.

        Bytes that the Hub has stored are not sent again. ResourceError: `revision` no longer points to
        `parent`, or the Hub cannot be reached.
        """
        additions: list[CommitOperationAdd] = []
        # Files go one by one: a shard is large, and the bar counts files.
        for file in track(files, "upload", unit="files"):
            addition = CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=file.content)
            addition.upload_info.sha256 = bytes.fromhex(file.sha256)  # saves reading it once more
            additions.append(addition)
            send_ahead = partial(self.api.preupload_lfs_files, self.repo, [addition])
            with explained(f"{self.repo}: cannot upload {file.path}"):
                send_ahead(revision=revision, free_memory=False)
        operations = [*additions, *(CommitOperationDelete(path) for path in deleted)]

        def send(repo: str) -> str:
            try:
                return self.api.create_commit(
                    repo, operations, revision=revision, parent_commit=parent,
                    commit_message=message,
                ).oid  # fmt: skip
            except (HfHubHTTPError, httpx.TransportError) as error:
                if is_transient(error) or status_of(error) == STALE_PARENT:
                    taken = self.head(revision)
                    if taken != parent and not self.differing(taken, files, deleted):
                        return taken  # it was our commit, and only the answer was lost
                raise

        return self.ask(f"commit to {revision}", send)

    def differing(
        self, revision: str, files: Sequence[File], deleted: Sequence[str] = ()
    ) -> list[str]:
        """Return faults at `revision`: `files` missing or unequal, `deleted` paths still there."""
        remote = self.files(revision)
        wrong = [
            f"{file.path} ({'missing' if file.path not in remote else 'another checksum'})"
            for file in files
            if not file.is_at(remote.get(file.path))
        ]
        return wrong + [f"{path} (still there)" for path in deleted if path in remote]

    def verify(self, revision: str, files: Sequence[File]) -> None:
        """Raise GateError if a file is missing on the Hub, or has other bytes than here."""
        if wrong := self.differing(revision, files):
            raise GateError(
                f"{self.repo} at {revision}: checksum verification failed for {', '.join(wrong[:3])}"
                f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}; no model card, tag or "
                f"release was written; push again"
            )

    def ask(self, doing: str, call: Callable[..., T], *words: Any, **named: Any) -> T:
        """Return `call(repo, ...)`, retried while the Hub is busy; errors say "cannot `doing`"."""
        return patiently(f"{self.repo}: cannot {doing}", partial(call, self.repo, *words, **named))
