"""What a run's manifest says of its origin, and which files a model's digests are of."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.checkpoints.reader import GENERATION, Checkpoint
from quantize.runs import manifest
from quantize.runs.manifest import (
    checksums,
    code_digest,
    fingerprint,
    new_manifest,
    package_versions,
    tokenizer_digest,
    tool,
)


@pytest.fixture
def model(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A model with every kind of file."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json", GENERATION):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("the card")
    (folder / ".eval_results").mkdir()
    (folder / ".eval_results" / "scores.yaml").write_text("[]")
    return folder


def test_a_new_manifest(model: Path) -> None:
    source = Checkpoint.open(model)
    made = new_manifest(source, "digest", "nvfp4", "org/model")
    about = {"model": "org/model", "bundled": False, "commit": None, "folder": str(model.resolve())}
    assert made["source"] == about | {"fingerprint": "digest", "bytes": source.nbytes}
    assert (made["recipe"], made["stages"], made["tool"]) == ("nvfp4", {}, tool())
    assert made["began"]
    assert made["versions"] == {"python": manifest.platform.python_version()} | package_versions()
    assert {"torch", "transformers", "safetensors"} < made["versions"].keys()
    assert set(made["hardware"]) == {"cpu", "cores", "memory_bytes", "gpus"}
    assert made["hardware"]["cpu"]
    assert made["hardware"]["cores"] > 0
    bundled = new_manifest(source, "digest", "nvfp4", None)["source"]
    assert (bundled["model"], bundled["bundled"]) == ("bundled", True)


@pytest.mark.parametrize(
    ("state", "commit", "modified"),
    [(("abc", ""), "abc", False), (("abc", " M x"), "abc", True), ((None, ""), None, None)],
)
def test_a_checkout_names_its_commit(
    state: tuple[str | None, str], commit: str | None, modified: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A release is made of this code, and says so only if git does."""
    answers = dict(
        zip((("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")), state, strict=True)
    )
    monkeypatch.setattr(manifest, "_git", lambda folder, *words: answers[words])
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert tool() == {"version": manifest.__version__, "commit": commit, "modified": modified}


@pytest.mark.parametrize(
    ("text", "commit"), [(None, None), ('{"vcs_info": {"commit_id": "abc"}}', "abc"), ("{}", None)]
)
def test_an_installation_names_the_commit_that_pip_noted(
    text: str | None, commit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: False)
    installed = SimpleNamespace(read_text={"direct_url.json": text}.get)
    monkeypatch.setattr(manifest, "distribution", lambda _: installed)
    assert tool() == {"version": manifest.__version__, "commit": commit, "modified": None}


def test_git_is_asked_about_the_folder(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    here = manifest._git(tmp_path, "rev-parse", "--show-toplevel")
    assert here == str(tmp_path.resolve())
    (tmp_path / "new").write_text("x")
    assert manifest._git(tmp_path, "status", "--porcelain") == "?? new"
    assert manifest._git(tmp_path, "no-such-command") is None


def test_git_that_fails_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest._git(tmp_path / "nowhere", "rev-parse", "HEAD") is None
    monkeypatch.setenv("PATH", "")
    assert manifest._git(tmp_path, "status") is None


def test_a_fingerprint_covers_what_can_change_an_answer_and_no_card(model: Path) -> None:
    source = Checkpoint.open(model)
    before = fingerprint(source)
    for name in (
        "config.json", GENERATION, "tokenizer.json", "chat_template.jinja",
        "preprocessor_config.json", *(path.name for path in source.shards),
    ):  # fmt: skip
        content = (model / name).read_bytes()
        (model / name).write_bytes(content + b" ")
        assert fingerprint(source) != before, name
        (model / name).write_bytes(content)
    (model / "README.md").write_text("another")
    assert fingerprint(source) == before
    (model / "tokenizer.json").unlink()
    assert fingerprint(source) != before


def test_settings_of_another_folder_stand_for_those_of_a_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    source, other = Checkpoint.open(model), tmp_path / "other"
    other.mkdir()
    (other / GENERATION).write_text('{"max_denoising_steps": 3}')
    before = fingerprint(source)
    assert fingerprint(source, settings_of=model) == before
    theirs = fingerprint(source, settings_of=other)
    (model / GENERATION).write_text('{"max_denoising_steps": 3}')
    assert fingerprint(source) == theirs != before
    (other / GENERATION).unlink()
    without = fingerprint(source, settings_of=other)
    (model / GENERATION).unlink()
    assert fingerprint(source) == without
    (other / GENERATION).write_text("{}")
    assert fingerprint(source, settings_of=other) == without  # it has none to stand for


def test_a_tokenizers_digest_is_of_its_files_alone(model: Path) -> None:
    before = tokenizer_digest(model)
    (model / GENERATION).write_text('{"x": 1}')
    assert tokenizer_digest(model) == before
    (model / "chat_template.jinja").write_text("x")
    assert tokenizer_digest(model) != before


def test_checksums_are_of_every_file_but_the_card(model: Path) -> None:
    source = Checkpoint.open(model)
    (model / "deep").mkdir()
    (model / "deep" / "file").write_text("x")
    found = checksums(source)
    there = {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()}
    assert found.keys() == there - {"README.md", ".eval_results/scores.yaml"}
    assert found["deep/file"] == manifest.sha256_of(model / "deep" / "file")
    known = checksums(source, {"config.json": "known", "gone": "kept"})
    assert known == found | {"config.json": "known", "gone": "kept"}


def test_the_codes_digest_changes_with_a_package_and_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A witness of other code is not trusted."""
    before = code_digest()
    assert code_digest() == before
    monkeypatch.setattr(manifest, "package_versions", lambda: {"torch": "1"})
    other = code_digest()
    assert other != before
    roots: Any = {}
    for package in ("quantize", "fused_dequant"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("x = 1")
        roots[package] = tmp_path / package
    monkeypatch.setattr(manifest.importlib.resources, "files", roots.__getitem__)
    seen = [code_digest()]
    for package in roots:
        (tmp_path / package / "a.py").write_text("x = 2")
        seen.append(code_digest())
    (tmp_path / "quantize" / "a.py").rename(tmp_path / "quantize" / "b.py")
    seen.append(code_digest())
    assert len({before, other, *seen}) == 6


def test_a_processor_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "flags: x\nmodel name\t: A CPU: fast\nmodel name\t: another\n"
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: lines)
    assert manifest._cpu_name() == "A CPU: fast"
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(manifest.platform, "processor", lambda: "from the platform")
    assert manifest._cpu_name() == "from the platform"


def test_versions_of_packages_that_are_not_there_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest, "PACKAGES", ("torch", "no-such-package-at-all"))
    assert list(package_versions()) == ["torch"]
    assert json.dumps(package_versions())
