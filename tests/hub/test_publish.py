"""Publishing to a Hub on the loopback: what lands there, in which order, and after which faults."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from quantize import cli
from quantize.checkpoints.reader import Checkpoint, hub_commit, resolve
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.recipe.reading import read_recipe
from quantize.reports.scores import read_scoring, write_scoring
from quantize.runs.folder import RunDir
from quantize.runs.manifest import new_manifest
from quantize.stages.report.report import judge_run
from tests.support.fake_hub import TOKEN, FakeHub, Fault
from tests.support.finished_run import (
    BASE,
    COMMIT,
    base_files,
    bless,
    finished_run,
    write_checkpoint,
)

REPO = "org/model"
WEIGHTS, CARD = "Weights of nvfp4-0123abc", "Model card of nvfp4-0123abc"
RESULTS = [f".eval_results/{task}.yaml" for task in ("aime25", "gpqa_diamond", "gsm8k")]
# The client hands httpx its files the old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], RunDir]:
    """Copies of finished runs, one made for each verdict; its copies share the BF16 model."""
    made: dict[str, RunDir] = {}

    def copy(outcome: str, folder: Path) -> RunDir:
        if outcome not in made:
            place = tmp_path_factory.mktemp("finished")
            made[outcome] = finished_run(place, outcome=outcome, judged=True)
            (place / "bf16" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
            bless(made[outcome])
        whole = made[outcome].path
        return RunDir(shutil.copytree(whole, folder / whole.name, dirs_exist_ok=True))

    return copy


@pytest.fixture
def run(finished: Callable[[str, Path], RunDir], tmp_path: Path) -> RunDir:
    return finished("PASS", tmp_path)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited for the Hub; nothing really waits."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The last line, when it is an error and no traceback."""
        last = self.err.strip().splitlines()[-1]
        assert last.startswith("error: "), self.err
        assert "Traceback" not in self.err
        return last


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDir) -> Any:
    """Run `quantize push` on the run, in this process."""

    def call(*options: str, yes: bool = True) -> Done:
        arguments = ["quantize", "push", str(run.path), "--repo", REPO, *options]
        monkeypatch.setattr(sys, "argv", [*arguments, "--yes"] if yes else arguments)
        capsys.readouterr()
        code = cli._exit_code()
        text = capsys.readouterr()
        return Done(code, text.out, text.err)

    return call


def local_files(run: RunDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.checkpoint.iterdir()}


def remote_files(hub: FakeHub, ref: str = "main") -> dict[str, bytes | None]:
    files = hub.files(REPO, ref)
    return {path: blob.content for path, blob in files.items() if path != ".gitattributes"}


def assert_released(hub: FakeHub, run: RunDir, ref: str = "main") -> None:
    remote = remote_files(hub, ref)
    assert sorted(set(remote) - set(local_files(run))) == sorted(["README.md", *RESULTS])
    assert {name: remote[name] for name in local_files(run)} == local_files(run)


def assert_no_half_release(hub: FakeHub) -> None:
    """No card, no scores, no tag, not public: whatever else is there."""
    repo = hub.repos.get(REPO)
    if repo is not None:
        heads = [set(repo.commits[oid]) for oid in repo.refs.values()]
        assert not any({"README.md", *RESULTS} & paths for paths in heads)
        assert not repo.tags
        assert repo.private


def test_a_signed_release_has_evidence_and_is_pushed_once(
    push: Any, hub: FakeHub, run: RunDir, tmp_path: Path
) -> None:
    pytest.importorskip("model_signing", reason="pip install '.[sign]'")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*forms, serialization.NoEncryption()))
    signed = ("--to", "main", "--sign", str(tmp_path / "key.pem"))
    assert push(*signed).code == 0
    with_it = {"model.sig", "evidence/report.json", "evidence/verification.json"}
    assert with_it <= set(remote_files(hub))
    commits = len(hub.repos[REPO].commits)
    assert push(*signed).code == 0
    assert len(hub.repos[REPO].commits) == commits
    assert push("--to", "main").code == 0  # without: no signature stays that says otherwise
    assert not with_it & set(remote_files(hub))


# 1. What lands there


def test_a_new_repository_is_private_and_gets_a_pull_request(
    hub: FakeHub, run: RunDir, push: Any
) -> None:
    done = push()
    assert done.code == 0, done.err
    repo = hub.repos[REPO]
    assert repo.private
    assert hub.events == ["create", f"commit {WEIGHTS}", f"commit {CARD}", "request open"]
    assert list(remote_files(hub)) == []  # main is as it was
    assert_released(hub, run, "refs/pr/1")
    assert f"{hub.url}/{REPO}/discussions/1" in done.err
    first = next(
        c for c, m in zip(repo.commits.values(), repo.messages, strict=True) if m == WEIGHTS
    )
    assert "README.md" not in first
    assert not any(path.startswith(".eval_results") for path in first)


def test_main_then_tag_then_public_in_this_order(hub: FakeHub, run: RunDir, push: Any) -> None:
    assert push("--to", "main", "--tag", "v1", "--public").code == 0
    order = ["create", f"commit {WEIGHTS}", f"commit {CARD}", "tag v1", "settings"]
    assert hub.events == order
    assert_released(hub, run, "v1" if "v1" in hub.repos[REPO].refs else "main")
    assert hub.repos[REPO].tags["v1"] == hub.repos[REPO].refs["main"]
    assert hub.repos[REPO].private is False


def test_a_branch(hub: FakeHub, run: RunDir, push: Any) -> None:
    assert push("--to", "nightly").code == 0
    assert_released(hub, run, "nightly")
    assert list(remote_files(hub)) == []


def test_pushing_again_changes_nothing_and_a_tag_needs_no_commit(
    hub: FakeHub, run: RunDir, push: Any
) -> None:
    assert push("--to", "main").code == 0
    before, sent = list(hub.repos[REPO].commits), len(hub.paths(r"^PUT /store"))
    assert push("--to", "main").code == 0
    assert push().code == 0  # nor is a pull request needed
    assert push("--to", "main", "--tag", "v1").code == 0
    assert push("--to", "main", "--tag", "v1").code == 0
    assert list(hub.repos[REPO].commits) == before
    assert len(hub.paths(r"^PUT /store")) == sent
    assert not hub.repos[REPO].requests
    assert hub.repos[REPO].tags == {"v1": before[-1]}


def test_large_files_in_parts(hub: FakeHub, run: RunDir, push: Any) -> None:
    hub.part_bytes = 60_000
    assert push("--to", "main").code == 0
    large = [len(content) for content in local_files(run).values() if len(content) > 100_000]
    parts = [-(-size // hub.part_bytes) for size in large]
    assert len(parts) == 4  # three shards and the tokenizer
    assert min(parts) > 1
    assert len(hub.paths("^PUT /store/part")) == sum(parts)
    assert_released(hub, run)


def test_by_xet(
    hub: FakeHub, run: RunDir, push: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.xet_folder = tmp_path / "xet"
    hub.xet_folder.mkdir()
    assert push().code == 0
    assert hub.paths("xet-write-token")
    assert not hub.paths("^PUT /store")
    stored = sum(path.stat().st_size for path in hub.xet_folder.rglob("*") if path.is_file())
    assert stored > 500_000  # random shards do not shrink
    sizes = {path: blob.size for path, blob in hub.files(REPO, "refs/pr/1").items()}
    assert all(sizes[name] == len(content) for name, content in local_files(run).items())
    assert "README.md" in sizes


def test_a_download_is_byte_equal_and_knows_its_commit(
    hub: FakeHub, run: RunDir, push: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push("--to", "main", "--tag", "v1").code == 0
    folder = resolve(f"{REPO}@v1")
    assert hub_commit(folder) == hub.repos[REPO].tags["v1"]
    for name, content in local_files(run).items():
        assert (folder / name).read_bytes() == content
    manifest = new_manifest(Checkpoint.open(folder), "digest", "nvfp4", f"{REPO}@v1")
    assert manifest["source"]["commit"] == hub.repos[REPO].tags["v1"]
    hub.put(REPO, "main", "config.json", b"{}")
    assert hub_commit(resolve(f"{REPO}@v1")) == hub.repos[REPO].tags["v1"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert resolve(f"{REPO}@v1") == folder  # from the cache, without a request
    assert len(hub.requests) == asked
    with pytest.raises(InputError, match="ORG/NAME@revision"):
        resolve(f"{REPO}@")
    with pytest.raises(InputError, match="give one"):
        resolve(f"{REPO}@v1", "v2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match="no such model or revision 'v2'"):
        resolve(f"{REPO}@v2")


def test_other_weights_take_the_old_card_and_left_over_shards_away_first(
    hub: FakeHub, run: RunDir, push: Any
) -> None:
    repo = hub.create(REPO)
    hub.put(REPO, "main", "README.md", b"about other weights")
    hub.put(REPO, "main", "model-00009-of-00009.safetensors", b"old")
    hub.put(REPO, "main", "notes.txt", b"not ours")
    assert push("--to", "main").code == 0
    weights = list(repo.commits.values())[-2]
    assert "README.md" not in weights
    remote = remote_files(hub)
    assert "model-00009-of-00009.safetensors" not in remote
    assert remote.pop("notes.txt") == b"not ours"


def test_the_preview_says_what_where_who_and_a_dry_run_writes_nothing(
    hub: FakeHub, run: RunDir, push: Any
) -> None:
    files = sorted(path for path in run.path.rglob("*"))
    done = push("--dry-run", yes=False)
    assert done.code == 0
    for word in (REPO, "new, private", "pull request", "alice", "README.md", "LICENSE", "upload"):
        assert word in " ".join(done.out.split()), word
    assert f"checksums: {len(local_files(run))} files done in" in done.err
    assert not hub.repos
    assert not hub.paths("^(POST|PUT)")
    assert sorted(path for path in run.path.rglob("*")) == files


def test_without_a_terminal_nothing_is_uploaded_unasked(hub: FakeHub, push: Any) -> None:
    done = push(yes=False)
    assert done.code == 2
    assert "--yes" in done.err
    assert not hub.repos


def test_who_says_no_is_heard(hub: FakeHub, push: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked: list[str] = []
    monkeypatch.setattr("click.confirm", lambda text, **_: bool(asked.append(text)))
    done = push(yes=False)
    assert done.code == 2
    assert asked == ["Upload this?"]
    assert not hub.repos


# The gate


@pytest.mark.parametrize(
    ("outcome", "options", "code"),
    [
        ("FAIL", (), 1),
        ("FAIL", ("--allow", "inconclusive"), 1),
        ("INCONCLUSIVE", (), 4),
        ("NOT COMPARABLE", ("--allow", "inconclusive"), 4),
        ("INCONCLUSIVE", ("--allow", "inconclusive"), 0),
        ("NOT COMPARABLE", ("--no-gate",), 0),
        ("FAIL", ("--no-gate",), 0),
    ],
)
def test_only_a_pass_or_an_explicit_option_is_published(
    outcome: str,
    options: tuple[str, ...],
    code: int,
    hub: FakeHub,
    tmp_path: Path,
    push: Any,
    finished: Callable[[str, Path], RunDir],
) -> None:
    run = finished(outcome, tmp_path)
    done = push("--to", "main", *options)
    assert done.code == code, done.err
    if code:
        assert outcome in done.error
        overrules = "--allow inconclusive" if outcome == "INCONCLUSIVE" else "--no-gate"
        assert f"; {overrules} overrules it" in done.error
        assert not hub.requests
        return
    card = (remote_files(hub)["README.md"] or b"").decode()
    assert "Published without a passed gate" in card
    assert f"`{' '.join(options)}`" in card
    override = read_json(run.path / "publication.json")["override"]
    assert override["option"] == " ".join(options)
    assert override["outcome"] == outcome


def test_a_run_that_failed_before_all_tasks_were_asked_can_be_overruled(
    hub: FakeHub, tmp_path: Path, push: Any, finished: Callable[[str, Path], RunDir]
) -> None:
    run = finished("FAIL", tmp_path)
    first, *others = read_recipe(run.recipe_yaml).evaluation.tasks
    for file in run.evaluation.glob("*/*"):
        if file.name.split(".")[0] in others:
            file.unlink()
    looks = {first: {"taken": 2, "of": 5}}
    done = {"tasks": [first], "not_asked": others, "looks": looks}
    change(run.evaluation / "done.json", lambda found: found.update(done))
    rejudge(run)
    assert "the verdict is FAIL" in push("--to", "main").error
    assert push("--to", "main", "--no-gate").code == 0
    card = (remote_files(hub)["README.md"] or b"").decode()
    assert f"{first}: the verdict was certain after look 2 of 5; the rest was not asked." in card
    assert all(f"{task}: not asked; the run's verdict was certain" in card for task in others)


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change a JSON file of a run."""
    value = read_json(path)
    edit(value)
    write_json(path, value)


def test_an_unverified_or_another_checkpoint_is_refused(
    hub: FakeHub, run: RunDir, push: Any
) -> None:
    verification = read_json(run.verification_json)
    write_json(run.verification_json, {**verification, "passed": False})
    bless(run)
    assert "'verdict' is not what" in push("--no-gate").error
    write_json(run.verification_json, verification)
    scoring = read_scoring(run.evaluation / "quantized", "gsm8k")
    scoring.made_with["model"].update(weights="another")
    write_scoring(run.evaluation / "quantized", scoring)
    bless(run)
    assert "is not read: scored on other weights (another)" in push("--no-gate").error
    scoring.made_with["model"].pop("weights")
    write_scoring(run.evaluation / "quantized", scoring)
    bless(run)
    assert "its scores do not name the weights that they are of" in push("--no-gate").error
    scoring.made_with["model"]["weights"] = verification["artifact"]
    write_scoring(run.evaluation / "quantized", scoring)
    rejudge(run)
    write_checkpoint(run.checkpoint, 3, seed=1)
    bless(run)
    done = push("--no-gate")
    assert done.code == 2
    assert "quantize verify" in done.error
    (run.checkpoint / "model-00002-of-00003.safetensors").unlink()
    assert push("--no-gate").code == 2
    run.report_json.unlink()
    assert "is stale" in push("--no-gate").error
    assert not hub.requests


def test_a_link_in_the_checkpoint_is_refused(hub: FakeHub, run: RunDir, push: Any) -> None:
    (run.checkpoint / "notes.txt").symlink_to("/etc/hostname")
    assert push().code == 2
    bless(run)
    assert "notes.txt: a link, and only files are published; put a copy in" in push().error
    assert not hub.requests


def rejudge(run: RunDir) -> None:
    """Write the report of what the run's files say now."""
    judged, _ = judge_run(run, read_recipe(run.recipe_yaml))
    write_json(run.report_json, read_json(run.report_json) | judged)
    bless(run)


def test_a_fidelity_fault_is_refused(hub: FakeHub, run: RunDir, push: Any) -> None:
    change(run.fidelity_json, lambda found: found.update(faults=["KL is over the limit"]))
    rejudge(run)
    done = push()
    assert done.code == 1
    assert "KL is over the limit" in done.error
    assert not hub.requests


@pytest.mark.parametrize("other", [None, "config.json", "model.safetensors", "more.safetensors"])
def test_the_base_model_is_named_when_the_hub_lists_its_files(
    other: str | None, hub: FakeHub, run: RunDir, push: Any
) -> None:
    """Whatever the manifest says: checksums of config and weights decide."""
    hub.create(BASE)
    for name, content in base_files().items():
        hub.put(BASE, "main", name, content)
    if other:
        hub.put(BASE, "main", other, b"another")
    repo = hub.repos[BASE]
    repo.commits[COMMIT] = repo.commits[repo.refs["main"]]
    done = push("--to", "main")
    assert done.code == 0, done.err
    card = (remote_files(hub)["README.md"] or b"").decode()
    assert ("base_model:" in card) == (other is None)
    assert ("no base model is named" in done.err) == (other is not None)


def test_a_base_model_in_a_folder_is_compared_with_main_of_the_recipes_id(
    hub: FakeHub, run: RunDir, push: Any
) -> None:
    hub.create(BASE)
    for name, content in base_files().items():
        hub.put(BASE, "main", name, content)
    change(
        run.manifest_json, lambda m: m["source"].update(model=m["source"]["folder"], commit=None)
    )
    rejudge(run)
    done = push("--to", "main")
    assert done.code == 0, done.err
    assert f"base_model: {BASE}" in (remote_files(hub)["README.md"] or b"").decode()


def test_bad_requests_are_usage(hub: FakeHub, push: Any) -> None:
    assert "pull request is no release" in push("--tag", "v1").error
    assert push("--to", "refs/pr/3").code == 2
    assert push("--repo", "no-organisation").code == 2
    assert not hub.requests


# 2. Faults


@pytest.mark.parametrize(
    ("status", "request_"),
    [(503, "whoami"), (429, "GET .*/models/org/model$"), (500, "repos/create"),
     (429, "POST .*/commit/"), (502, "GET .*/tree/"), (504, "/tag/"), (408, "PUT .*/settings"),
     # these the library asks again
     (503, "preupload"), (429, "objects/batch"), (503, "PUT /store"), (429, "api/verify")],
)  # fmt: skip
def test_a_busy_hub_is_asked_again_after_the_time_it_names(
    status: int, request_: str, hub: FakeHub, run: RunDir, push: Any, waits: list[float]
) -> None:
    hub.faults.append(Fault(request_, status=status, headers={"Retry-After": "7"}))
    done = push("--to", "main", "--tag", "v1", "--public")
    assert done.code == 0, done.err
    assert hub.faults[0].times == 0
    assert [round(seconds) for seconds in waits if seconds >= 7] in ([7], [8])
    assert_released(hub, run)
    assert hub.events.count(f"commit {WEIGHTS}") == 1


@pytest.mark.parametrize(("asked", "slept"), [("600", 600), ("\u00b2", 1), ("7, 7", 1), ("0", 1)])
def test_a_time_that_can_be_waited_or_that_is_no_number(
    asked: str, slept: int, hub: FakeHub, push: Any, waits: list[float]
) -> None:
    hub.faults.append(Fault("whoami", status=503, headers={"Retry-After": asked}))
    assert push("--to", "main").code == 0
    assert [round(seconds) for seconds in waits] == [slept]


@pytest.mark.parametrize("asked", ["601", "86400", "9" * 400])
def test_a_busy_hub_is_not_waited_for_without_end(
    asked: str, hub: FakeHub, push: Any, waits: list[float]
) -> None:
    hub.faults.append(Fault("whoami", status=429, headers={"Retry-After": asked}, times=9))
    done = push("--to", "main")
    assert done.code == 3
    assert "the Hub asks to wait" in done.error
    assert "at most 600 s are waited; try again then" in done.error
    assert not waits


def test_a_hub_that_stays_busy_ends_the_push_and_the_same_command_goes_on(
    hub: FakeHub, run: RunDir, push: Any, waits: list[float]
) -> None:
    hub.faults.append(Fault("PUT /store", status=503, skip=2, times=1000))
    done = push("--to", "main", "--tag", "v1")
    assert done.code == 3
    assert "503" in done.error
    assert "push again" in done.error
    assert "SignedByTheStore" not in done.err
    assert_no_half_release(hub)
    assert len(hub.large) == 2
    hub.faults.clear()
    sent = len(hub.paths("^PUT /store"))
    assert push("--to", "main", "--tag", "v1").code == 0
    assert len(hub.paths("^PUT /store")) - sent == 2  # of three shards and a tokenizer
    assert_released(hub, run)


@pytest.mark.parametrize("parts", [None, 60_000])
def test_a_connection_reset_within_a_file(
    parts: int | None, hub: FakeHub, run: RunDir, push: Any, waits: list[float]
) -> None:
    hub.part_bytes = parts
    hub.faults.append(Fault("PUT /store", reset=True, skip=1, times=2))
    assert push("--to", "main").code == 0
    assert hub.faults[0].times == 0
    assert_released(hub, run)


@pytest.mark.parametrize("commit", [0, 1])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(
    commit: int, hub: FakeHub, run: RunDir, push: Any, waits: list[float]
) -> None:
    hub.faults.append(Fault("POST .*/commit/", lost=True, skip=commit))
    assert push("--to", "main").code == 0
    assert hub.faults[0].times == 0
    assert hub.events == ["create", f"commit {WEIGHTS}", f"commit {CARD}"]
    assert_released(hub, run)


@pytest.mark.parametrize("commit", [0, 1])
def test_somebody_elses_commit_in_between_is_refused_then_kept(
    commit: int, hub: FakeHub, run: RunDir, push: Any
) -> None:
    hub.create(REPO)
    intrude = Fault(
        "POST .*/commit/", before=lambda: hub.put(REPO, "main", "theirs.txt", b"x") and None,
        skip=commit,
    )  # fmt: skip
    hub.faults.append(intrude)
    done = push("--to", "main", "--tag", "v1")
    assert done.code == 3
    assert "somebody else committed" in done.error
    assert_no_half_release(hub)
    assert remote_files(hub)["theirs.txt"] == b"x"
    assert push("--to", "main", "--tag", "v1").code == 0
    assert hub.files(REPO).pop("theirs.txt").content == b"x"
    assert_released(hub, run)


@pytest.mark.parametrize("moment", ["GET .*/tree/main", "preupload"])
def test_a_change_after_the_look_is_refused(
    moment: str, hub: FakeHub, run: RunDir, push: Any
) -> None:
    """The parent is the commit that the preview was made from, not whatever is there later."""
    hub.create(REPO)
    hub.faults.append(Fault(moment, before=lambda: hub.put(REPO, "main", "a.txt", b"x") and None))
    done = push("--to", "main")
    assert done.code == 3
    assert "somebody else committed" in done.error
    assert_no_half_release(hub)


@pytest.mark.parametrize(
    ("set_up", "code", "words"),
    [
        ({"token": "another"}, 3, ("401", "HF_TOKEN")),
        ({"may_write": False}, 3, ("403", "this token may not")),
    ],
)
def test_a_token_without_access(
    set_up: dict[str, Any], code: int, words: tuple[str, ...], hub: FakeHub, push: Any
) -> None:
    for name, value in set_up.items():
        setattr(hub, name, value)
    done = push()
    assert done.code == code
    for word in words:
        assert word in done.error
    assert not hub.repos


@pytest.mark.parametrize("status", [401, 403])
def test_xet_refuses_the_token(
    status: int, hub: FakeHub, push: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """hf_xet raises errors of its own kinds; they too end in one line."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.xet_folder = tmp_path
    hub.faults.append(Fault("xet-write-token", status=status, times=99))
    done = push("--to", "main")
    assert done.code == 3
    assert str(status) in done.error
    assert_no_half_release(hub)


def test_a_token_that_loses_its_rights_half_way(hub: FakeHub, run: RunDir, push: Any) -> None:
    hub.faults.append(Fault("POST .*/commit/", status=403, skip=1))
    assert push("--to", "main", "--tag", "v1").code == 3
    assert_no_half_release(hub)
    assert push("--to", "main", "--tag", "v1").code == 0
    assert_released(hub, run)


def test_no_token(hub: FakeHub, push: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    done = push()
    assert done.code == 3
    assert "no token; set HF_TOKEN or run `hf auth login`" in done.error
    assert not hub.requests


def test_an_unknown_organisation(hub: FakeHub, push: Any) -> None:
    done = push("--repo", "nobody/model")
    assert done.code == 2
    assert "404" in done.error
    assert not hub.repos


def test_offline(hub: FakeHub, push: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = push()
    assert done.code == 3
    assert "HF_HUB_OFFLINE is set; unset it" in done.error
    assert not hub.requests


@pytest.mark.parametrize("path", ["model-00002-of-00003.safetensors", "config.json", "README.md"])
def test_wrong_bytes_on_the_hub_stop_the_release(
    path: str, hub: FakeHub, run: RunDir, push: Any
) -> None:
    hub.garbled.add(path)
    done = push("--to", "main", "--tag", "v1", "--public")
    assert done.code == 1
    assert path in done.error
    assert "checksum" in done.error
    assert not hub.repos[REPO].tags
    assert hub.repos[REPO].private
    if path != "README.md":
        assert_no_half_release(hub)
    hub.garbled.clear()
    assert push("--to", "main", "--tag", "v1").code == 0
    assert_released(hub, run)


def test_a_tag_on_an_older_commit_with_the_same_files(hub: FakeHub, run: RunDir, push: Any) -> None:
    """A tag stands for one commit: that its files are equal does not make it the release's."""
    assert push("--to", "main", "--tag", "v1").code == 0
    hub.put(REPO, "main", "notes.txt", b"theirs")
    done = push("--to", "main", "--tag", "v1")
    assert done.code == 2
    assert "stands for another commit" in done.error


def test_a_tag_that_stands_for_something_else(hub: FakeHub, push: Any) -> None:
    repo = hub.create(REPO)
    repo.tags["v1"] = repo.refs["main"]
    done = push("--to", "main", "--tag", "v1")
    assert done.code == 2
    assert "v1" in done.error
    assert len(repo.commits) == 1


def test_a_tag_that_somebody_sets_meanwhile(
    hub: FakeHub, run: RunDir, push: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our look and our tag: it stays on their commit, and is not reported as ours."""
    create = HfApi.create_tag

    def later(self: HfApi, *words: Any, **named: Any) -> None:
        repo = hub.repos[REPO]
        repo.tags["v1"] = next(iter(repo.commits))
        create(self, *words, **named)

    monkeypatch.setattr(HfApi, "create_tag", later)
    done = push("--to", "main", "--tag", "v1")
    assert done.code == 2
    assert "tag v1 exists and stands for another commit" in done.error
    assert not (run.path / "publication.json").exists()


def test_sigkill_within_a_shard_then_the_same_command(
    hub: FakeHub, run: RunDir, push: Any, tmp_path: Path
) -> None:
    hub.faults.append(Fault("PUT /store", hang=True, skip=1))
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "quantize", "push", str(run.path), "--repo", REPO, "--yes"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert hub.hanging.wait(60), "the second file was never begun"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert_no_half_release(hub)
    assert len(hub.large) == 1
    sent = len(hub.paths("^PUT /store"))
    assert push().code == 0
    assert len(hub.repos[REPO].requests) == 1  # the same pull request
    assert len(hub.paths("^PUT /store")) - sent == 3  # the first shard is not sent again
    assert_released(hub, run, "refs/pr/1")


# 4. The token


@pytest.mark.parametrize("xet", [False, True])
def test_the_token_appears_nowhere_but_in_the_authorization_header(
    xet: bool,
    hub: FakeHub,
    run: RunDir,
    push: Any,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if xet:
        pytest.importorskip("hf_xet")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        hub.xet_folder = tmp_path / "xet"
        hub.xet_folder.mkdir()
    echo = f'{{"error": "bad token {TOKEN}"}}'
    seen = ""
    for fault in (
        Fault("POST .*/commit/", status=400, text=echo, headers={"X-Error-Message": TOKEN}),
        Fault("POST .*/commit/", status=500, text=echo, times=99),
        Fault("GET .*/tree/", status=418, text=echo, headers={"X-Error-Message": TOKEN}),
    ):
        hub.faults[:] = [fault]
        done = push()
        assert done.code in (2, 3)
        assert done.error
        seen += done.out + done.err
    hub.faults.clear()
    done = push()
    assert done.code == 0, done.err
    seen += done.out + done.err
    assert TOKEN not in seen
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    for commit in hub.repos[REPO].commits.values():
        assert all(TOKEN.encode() not in (blob.content or b"") for blob in commit.values())
    authorized = 0
    for request in hub.requests:
        headers = {name.lower(): value for name, value in request.headers.items()}
        authorized += headers.pop("authorization", None) == f"Bearer {TOKEN}"
        everything = f"{request.path} {headers} {request.body!r}"
        assert TOKEN not in everything, request.path
    assert authorized > 10
