"""Publishes a run on the Hub if its gate passed or was overruled, and never half of the run.

  1. gate      the checkpoint is whole and is the one that was verified and scored; the verdict is PASS,
               or was overruled by an option that the model card names.
  2. look      account, repository and its files are shown before anything is written.
  3. weights   go into one commit: in a draft pull request, or on a branch or main, on top of the
               commit seen in 2. The new commit also removes a model card of other weights.
  4. check     the Hub's checksum of each file of weights must equal the local checksum.
  5. release   README.md and .eval_results go into a second commit and are checked. A pull request
               then leaves its draft state, the tag is set, and --public makes a repository public.

After an interruption the same command continues: it reads from the Hub what is left to do. After a
finished push, nothing is left. The run's publication.json records what was pushed.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

from huggingface_hub.hf_api import RepoFile
from rich.table import Column, Table

from quantize.errors import InputError, ResourceError
from quantize.host.files import write_json
from quantize.host.progress import say, screen
from quantize.hub.release import (
    BILL,
    EVIDENCE,
    MAIN,
    PULL_REQUEST,
    Release,
    ReleaseRequest,
    find_base,
    prepare,
)
from quantize.hub.repository import File, Hub, Repository
from quantize.hub.signing import SIGNATURE, SIGSTORE
from quantize.recipe.sections import Recipe
from quantize.reports.card import stated_base
from quantize.runs.folder import README, RESULTS, RunDir

PUBLICATION = "publication.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
RELEASE = (README, f"{RESULTS}/*.yaml", SIGNATURE, BILL, f"{EVIDENCE}/*.json")


@dataclass(frozen=True)
class Changes:
    """What turns a commit on the Hub into the release: files to upload and paths to delete."""

    weights: list[File]
    card: list[File]
    deleted: list[str]

    def __bool__(self) -> bool:
        return bool(self.weights or self.card or self.deleted)


@dataclass(frozen=True)
class PushPlan:
    """What a push to `revision` of `there` changes; `account` is None if the Hub was not asked."""

    account: str | None
    there: Repository
    revision: str
    changes: Changes


def push(
    run: RunDir, request: ReleaseRequest, *, dry_run: bool, confirm: Callable[[], bool]
) -> int:
    """Check a run, show the changes, and publish them if `confirm()` returns True; return exit code 0.

    If `confirm()` returns False, raise InputError; raise also as `prepare` does. `dry_run` uploads
    nothing, and shows what can be known, even without a token or a network.
    """
    if dry_run:
        return _show(run, request)
    release = prepare(run, request)
    hub = Hub(request.repo)
    plan = _look(hub, release, request)
    screen().print(_preview(plan, release, request))
    if not confirm():
        raise InputError("push: not confirmed; nothing was uploaded")
    say(f"push: done, {_publish(hub, run, release, request, plan)}")
    return 0


def _show(run: RunDir, request: ReleaseRequest) -> int:
    unchecked: dict[str, ResourceError] = {}

    def base(source: dict[str, Any], recipe: Recipe) -> str | None:
        try:
            return find_base(source, recipe)
        except ResourceError as error:
            unchecked["whether the BF16 files are those of a revision on the Hub"] = error
            return stated_base(source, recipe)

    sign = None if request.sign == SIGSTORE else request.sign  # Sigstore needs a network
    release = prepare(run, replace(request, sign=sign), base)
    what = f"account, what {request.repo} holds{', whether the tag is free' if request.tag else ''}"
    plan = PushPlan(None, Repository(), request.to, Changes(release.weights, release.card, []))
    try:
        if unchecked:  # the Hub is not asked twice
            unchecked[what] = next(iter(unchecked.values()))
        else:
            plan = _look(Hub(request.repo), release, request)
    except ResourceError as error:
        unchecked[what] = error
    screen().print(_preview(plan, release, request))
    for thing, error in unchecked.items():
        say(f"push: not checked: {thing} ({error})")
    say("push: dry run; nothing was uploaded")
    return 0


def _look(hub: Hub, release: Release, request: ReleaseRequest) -> PushPlan:
    """Compare a release with what is on the Hub; InputError if the tag stands for other files."""
    account, there = hub.account(), hub.look()
    # A pull request is compared with main: when main holds everything, none is needed.
    revision = MAIN if request.to == PULL_REQUEST else request.to
    start = revision if revision in there.branches else MAIN
    changes = _find_changes(release, hub.files(start) if start in there.branches else {})
    if request.tag in there.tags:
        commit = None if changes else there.branches.get(revision)
        hub.check_tag(request.tag, there.tags[request.tag], commit)
    return PushPlan(account, there, revision, changes)


def _find_changes(release: Release, remote: dict[str, RepoFile]) -> Changes:
    """Compare a release with the files at one commit, by checksums.

    Weights that the release lacks are deleted, since loaders may take them. If weights change, the
    old card is deleted too; the new card follows in a commit of its own.
    """
    weights = [file for file in release.weights if not file.is_at(remote.get(file.path))]
    card = [file for file in release.card if not file.is_at(remote.get(file.path))]
    ours = {file.path for file in (*release.weights, *release.card)}
    deleted = [path for path in remote if path not in ours and _is_one_of(path, WEIGHTS + RELEASE)]
    if weights:
        deleted += [path for path in remote if path in ours and _is_one_of(path, RELEASE)]
        card = release.card
    return Changes(weights, card, sorted(deleted))


def _is_one_of(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _preview(plan: PushPlan, release: Release, request: ReleaseRequest) -> Table:
    seen = "exists" if plan.there.exists else "new" if plan.account else "not looked at"
    if plan.account:
        seen += ", private" if plan.there.private else ", PUBLIC"
    seen += "; public at the very end" if request.public else ""
    target = "a pull request to main" if request.to == PULL_REQUEST else f"branch {request.to}"
    tag = f", tag {request.tag}" if request.tag else ""
    verdict = "gate passed"
    if release.override:
        verdict = f"{release.override.outcome}, overruled with {release.override.option}"
    table = Table(
        *("file", Column("bytes", justify="right"), "what happens"),
        title=f"{release.name} -> {request.repo} ({seen}), {target}{tag}",
        caption=f"as {plan.account or 'nobody yet'}; {verdict}",
    )
    new = {file.path for file in (*plan.changes.weights, *plan.changes.card)}
    for file in (*release.weights, *release.card):
        fate = "upload" if file.path in new else "there already"
        table.add_row(file.path, f"{file.size:,}", fate)
    for path in plan.changes.deleted:
        if path not in new:
            table.add_row(path, "", "remove: not of this release")
    return table


def _publish(
    hub: Hub, run: RunDir, release: Release, request: ReleaseRequest, plan: PushPlan
) -> str:
    """Carry out the plan and return the address of the result; after an error the same call goes on.

    GateError: the Hub holds other bytes than we sent. ResourceError: there is no access or no network,
    or somebody else committed meanwhile.
    """
    if request.to == PULL_REQUEST and not plan.changes:
        say(f"push: {request.repo} holds this release already; no pull request is needed")
        revision, commit = MAIN, hub.head(MAIN)
    else:
        revision, commit = _committed(hub, release, request, plan)
    if request.tag and request.tag not in plan.there.tags:
        hub.tag(request.tag, commit)
    if request.public and plan.there.private:
        hub.ask("make it public", hub.api.update_repo_settings, private=False)
    record = {
        "request": asdict(request),
        "account": plan.account,
        "revision": revision,
        "commit": commit,
        "override": asdict(release.override) if release.override else None,
        "files": {file.path: file.sha256 for file in (*release.weights, *release.card)},
    }
    write_json(run.path / PUBLICATION, record)
    address = f"{hub.api.endpoint}/{request.repo}"
    if revision.startswith("refs/pr/"):
        return f"{address}/discussions/{revision.rsplit('/', 1)[1]}"
    return f"{address}/tree/{request.tag or revision}"


def _committed(
    hub: Hub, release: Release, request: ReleaseRequest, plan: PushPlan
) -> tuple[str, str]:
    """Upload a release to the revision of its request; return that revision and its commit."""
    if not plan.there.exists:
        hub.ask("create the repository", hub.api.create_repo, private=True, exist_ok=True)
    revision, number = plan.revision, None
    if request.to == PULL_REQUEST:
        title = f"Quantized checkpoint {release.name}"  # a resumed push finds the request by it
        about = f"{len(release.weights)} files and a model card from run `{release.name}`."
        if release.override:
            about += f" The gate was overruled: `{release.override.option}`."
        number = hub.pull_request(title, about, plan.account or hub.account())
        revision = f"refs/pr/{number}"
    elif revision != MAIN and revision not in plan.there.branches:
        doing = f"create branch {revision}"  # from main
        hub.ask(doing, hub.api.create_branch, branch=revision, exist_ok=True)
    # On main or a branch the parent is the commit that the preview was made from.
    parent = plan.there.branches.get(revision) or hub.head(revision)
    commit = _upload(hub, release, revision, parent)
    if number is not None:
        stands = hub.ask("read it", hub.api.get_discussion_details, number).status
        if stands == "draft":
            hub.ask("open it", hub.api.change_discussion_status, number, new_status="open")
    return revision, commit


def _upload(hub: Hub, release: Release, revision: str, parent: str) -> str:
    """Commit and check weights, then the card; skip what the Hub has; return the last commit."""
    changes = _find_changes(release, hub.files(parent))
    if changes.weights or changes.deleted:
        size = sum(file.size for file in changes.weights)
        say(f"push: {len(changes.weights)} files, {size:,} bytes, to {revision}")
        message = f"Weights of {release.name}"
        parent = hub.commit(revision, parent, changes.weights, changes.deleted, message)
    hub.verify(parent, release.weights)
    say(f"push: checksums of {len(release.weights)} files agree at {parent[:12]}")
    if card := _find_changes(release, hub.files(parent)).card:
        parent = hub.commit(revision, parent, card, [], f"Model card of {release.name}")
    hub.verify(parent, [*release.weights, *release.card])
    return parent
