"""A run used by two processes, resumed after a change of settings, or tampered with in any single file.

Each case ends in a clear refusal, or in a redo that leaves what an untouched run holds. What was edited
so that every digest agrees (`bless`) is refused by `push`, which judges the scores once more.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantize.host.files import read_json, write_json
from quantize.host.locks import locked
from quantize.reports.scores import read_scoring, write_scoring
from quantize.runs.folder import RunDir
from tests.support.finished_run import bless
from tests.support.quick_run import TASK, Done, Quick

# Every file of a run, and the stage that makes it again when it was changed or removed.
FILES = {
    "recipe.yaml": "plan",
    "targets.csv": "plan",
    "calibration/coverage.json": "calibrate",
    "calibration/input_scales.safetensors": "calibrate",
    "checkpoint/chat_template.jinja": "convert",
    "checkpoint/config.json": "convert",
    "checkpoint/generation_config.json": "convert",
    "checkpoint/model.safetensors": "convert",
    "checkpoint/tokenizer.json": "convert",
    "checkpoint/tokenizer_config.json": "convert",
    "conversion.json": "convert",
    "verification.json": "verify",
    "fidelity.json": "fidelity",
    f"evaluation/bf16/{TASK}.conditions.json": "evaluate",
    f"evaluation/bf16/{TASK}.jsonl": "evaluate",
    f"evaluation/quantized/{TASK}.conditions.json": "evaluate",
    f"evaluation/quantized/{TASK}.jsonl": "evaluate",
    "evaluation/done.json": "evaluate",
    "report.json": "report",
    "report.md": "report",
    "report.html": "report",
    "junit.xml": "report",
    "stages.json": "report",  # where its last entry was changed
}
# What verify may trust or not: no result is made of it.
RECORDS = {"conversion.checks.json", "manifest.json"}
DIFFERS = {
    *RECORDS,
    ".command",
    "report.json",
    "report.md",
    "report.html",
    "junit.xml",
    "stages.json",
}


def push(quick: Quick) -> Done:
    """Ask for a release; who gets as far as the Hub, which is offline here, ends with 3."""
    return quick("push", quick.folder.path, "--repo", "org/model", "--no-gate", "--yes")


def contents(run: RunDir) -> dict[str, bytes]:
    """All files but for those that hold seconds, and their digests."""
    files = {p.relative_to(run.path).as_posix(): p for p in run.path.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in DIFFERS}


def test_nobody_touched_it(quick: Quick) -> None:
    """What the cases below start from; the Hub is asked, so nothing here refuses."""
    assert push(quick).code == 3
    done = quick.run("--resume")
    assert (done.code, done.redone()) == (0, [])
    found = {p.relative_to(quick.folder.path).as_posix() for p in quick.folder.path.rglob("*")}
    files = {name for name in found if (quick.folder.path / name).is_file()}
    assert files == {*FILES, *RECORDS, ".command", ".lock"}


@pytest.mark.parametrize("path", FILES)
def test_a_file_that_was_changed_or_removed(path: str, quick: Quick) -> None:
    file, before = quick.folder.path / path, contents(quick.folder)
    content = file.read_bytes()
    for damage in (content[:-9] + b"x" + content[-8:], None):
        file.unlink()
        if damage is not None:
            file.write_bytes(damage)
        refused = push(quick)
        assert refused.code == 2, refused.err
        redone = [FILES[path]]
        if path == "stages.json" and damage is None:
            redone = list(dict.fromkeys(FILES.values()))
        said = f"{redone[0]} is stale", f"not finished, without {redone[0]}; "
        assert path in refused.last or any(words in refused.last for words in said)
        done = quick.run("--resume")
        assert (done.code, done.redone()) == (0, redone)
        assert contents(quick.folder) == before
        assert push(quick).code == 3


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = read_json(path)
    change(value)
    write_json(path, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about["versions"].update(torch="1.0"),
        lambda about: about["hardware"].update(cpu="another"),
        lambda about: about["source"].update(model="google/another"),
    ],
)
def test_a_manifest_that_says_something_else_is_not_published(
    change: Callable[[Any], object], quick: Quick
) -> None:
    edit(quick.folder.manifest_json, change)
    done = push(quick)
    assert done.code == 2
    assert "is not what the run's files give" in done.last


def test_a_manifest_of_another_model(quick: Quick) -> None:
    edit(quick.folder.manifest_json, lambda about: about["source"].update(fingerprint="ab" * 32))
    before = contents(quick.folder)
    done = quick.run("--resume")
    assert done.code == 2
    assert "manifest.json: names another model" in done.last
    assert push(quick).code == 2
    assert quick("report", quick.folder.path).code == 2
    assert contents(quick.folder) == before
    quick.folder.manifest_json.unlink()
    done = quick.run("--resume")
    assert (done.code, done.redone()) == (0, [])


def changed_behind(path: Path) -> bytes:
    """Change a byte, and keep size and time as a copy may; return what the file held."""
    before, whole = path.stat(), path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return whole


@pytest.mark.parametrize("command", ["push", "card", "adopt", "compare"])
def test_no_command_reads_what_was_changed_behind_its_back(command: str, quick: Quick) -> None:
    """One file of each stage; `run` and the stages' own commands are held by test_handover."""
    run, files = (
        quick.folder,
        {maker: path for path, maker in FILES.items() if path != "stages.json"},
    )
    if command == "compare":  # which reads these two alone
        files = {maker: path for maker, path in files.items() if maker == "fidelity"}
        files["evaluate"] = f"evaluation/quantized/{TASK}.jsonl"
    words = {"compare": [run.path, run.path], "adopt": [run.path, "--own"]}.get(command, [run.path])
    for maker, path in files.items():
        whole = changed_behind(run.path / path)
        refused = push(quick) if command == "push" else quick(command, *words)
        assert refused.code == 2, (path, refused.err)
        assert f"{maker} is stale" in refused.last
        (run.path / path).write_bytes(whole)


# Edited so that every digest agrees: the scores are judged once more.

BLESSED: dict[str, tuple[Callable[[RunDir], object], int, str]] = {
    "a figure of the report": (
        lambda run: edit(run.report_json, lambda r: r["tasks"][0].update(difference_pp=9)),
        2, "'tasks' is not what",
    ),
    "the verdict": (
        lambda run: edit(run.report_json, lambda r: r["verdict"].update(reason="?")),
        2, "'verdict' is not what",
    ),
    "the digests of the scores": (
        lambda run: edit(run.report_json, lambda r: r["evidence"].clear()), 2, "'evidence' is not",
    ),
    "the distance": (
        lambda run: edit(run.report_json, lambda r: r.pop("fidelity")), 2, "'fidelity' is missing",
    ),
    "the checkpoint that the report is of": (
        lambda run: edit(run.report_json, lambda r: r.update(artifact="x")), 2, "'artifact' is not",
    ),
    "an answer": (
        lambda run: _replace(run.evaluation / "quantized" / f"{TASK}.jsonl", "1.0", "0.0"),
        2, "not what was scored",
    ),
    "an answer and the digest beside it": (lambda run: _answer(run), 2, "is not what"),
    "the margin": (
        lambda run: _replace(run.recipe_yaml, f"{TASK}: 30", f"{TASK}: 50"), 2, "is not what",
    ),
    "the verification": (
        lambda run: edit(run.verification_json, lambda v: v.update(passed=False)), 2, "'verdict' is",
    ),
    "another checkpoint that was scored": (
        lambda run: edit(
            run.evaluation / "quantized" / f"{TASK}.conditions.json",
            lambda c: c["made_with"]["model"].update(weights="another"),
        ),
        2, "not what was scored",
    ),
    "a secret in the checkpoint": (
        lambda run: (run.checkpoint / ".env").write_text("TOKEN=1"), 2, ".env: not among the files",
    ),
    "a link in the checkpoint": (
        lambda run: (run.checkpoint / "notes.txt").symlink_to("/etc/hostname"), 2, "a link",
    ),
    "a file of the checkpoint that is a link": (
        lambda run: _link(run.checkpoint / "tokenizer.json", run.path / "t.json"), 2, "a link",
    ),
    "a file of the checkpoint that is gone": (
        lambda run: (run.checkpoint / "chat_template.jinja").unlink(), 2, "was verified and is gone",
    ),
    "the tokenizer": (
        lambda run: (run.checkpoint / "tokenizer.json").write_text("{}"), 1, "tokenizer.json",
    ),
    "the settings of the sampler": (
        lambda run: (run.checkpoint / "generation_config.json").write_text("{}"),
        1, "generation_config.json",
    ),
    "the last byte of the weights": (
        lambda run: _flip(run.checkpoint / "model.safetensors"), 1, "its bytes have changed",
    ),
}  # fmt: skip


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _answer(run: RunDir) -> None:
    scoring = read_scoring(run.evaluation / "quantized", TASK)
    rows = [replace(scoring.rows[0], scores={"exact": 0.0}), *scoring.rows[1:]]
    write_scoring(run.evaluation / "quantized", replace(scoring, rows=rows))


def _link(path: Path, to: Path) -> None:
    path.rename(to)
    path.symlink_to(to)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("case", BLESSED)
def test_what_was_edited_and_entered_as_if_it_had_been_made_so(
    case: str, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 2 GB the digests sample; the sha256 of the verification sees every byte of every file."""
    run, (damage, code, words) = quick.folder, BLESSED[case]
    digest = read_json(run.verification_json)["artifact"]
    monkeypatch.setattr("quantize.hub.release.fingerprint", lambda _: digest)
    damage(run)
    bless(run)
    done = push(quick)
    assert done.code == code, done.err
    assert words in done.last


# Two processes.


@pytest.mark.parametrize("command", ["run", "convert", "report", "push"])
def test_another_process_works_in_the_run(command: str, quick: Quick) -> None:
    """The second one touches nothing, and says at once who is at work."""
    run = quick.folder
    edit(run.verification_json, lambda found: found.update(passed=False))  # there would be work
    before = contents(run)
    with locked(run.lock, "held"):
        before[".lock"] = run.lock.read_bytes()
        began = time.monotonic()
        done = {
            "run": lambda: quick.run("--resume"),
            "push": lambda: push(quick),
        }.get(command, lambda: quick(command, run.path))()
        assert time.monotonic() - began < 10
    assert done.code == 3
    assert "is at work there" in done.last
    assert contents(run) == before


# Other settings.


def other_margin(quick: Quick) -> list[object]:
    fields = yaml.safe_load(quick.recipe.read_text())
    fields["gate"]["margin_pp"][TASK] = 50
    quick.recipe.write_text(yaml.safe_dump(fields))
    return []


def other_sampler(quick: Quick) -> list[object]:
    quick.model = Path(shutil.copytree(quick.model, quick.out.parent / "bf16"))
    edit(quick.model / "generation_config.json", lambda c: c.update(max_denoising_steps=3))
    return []


def other_limit(quick: Quick) -> list[object]:
    return ["--limit", 40]


@pytest.mark.parametrize("change", [other_margin, other_sampler, other_limit])
def test_resumed_with_other_settings(change: Callable[[Quick], list[object]], quick: Quick) -> None:
    """Another run begins; what the first has found stays its own."""
    first, before = quick.folder, contents(quick.folder)
    done = quick.run("--resume", *change(quick))
    assert done.code == 0, done.err
    assert done.redone() == list(dict.fromkeys(FILES.values()))
    assert contents(first) == before
    assert len(list(quick.out.glob("quick-*"))) == 2


def test_questions_that_changed_are_asked_again(quick: Quick, tmp_path: Path) -> None:
    """A file of questions is no result of a stage, and a corrected one kept its old verdict."""
    (data := tmp_path / "data").mkdir()
    (data / f"{TASK}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    assert quick("evaluate", quick.folder.path, "--data-dir", data).code == 0
    assert quick.run("--resume", "--data-dir", data).redone() == ["report"]
    assert quick.run("--resume", "--data-dir", data).redone() == []
    assert quick.run("--resume").redone() == []  # `adopt` names no file either
    (data / f"{TASK}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 3"}\n')
    done = quick.run("--resume", "--data-dir", data)
    assert done.redone() == ["evaluate", "report"]
    assert f"evaluate: the questions of {TASK} changed since they were asked" in done.err


# Files that are damaged although every digest agrees.

READ_BY = {
    "manifest.json": ["push", "run", "report", "verify"],
    "verification.json": ["push", "run", "report"],
    "report.json": ["push", "run"],
    "conversion.json": ["verify"],
    "fidelity.json": ["push", "run", "report", "compare"],
    "calibration/coverage.json": ["report"],
    "evaluation/done.json": ["compare"],
    f"evaluation/quantized/{TASK}.conditions.json": ["push", "report", "compare"],
    f"evaluation/quantized/{TASK}.jsonl": ["push", "report", "compare"],
    "recipe.yaml": ["push", "report"],
    "checkpoint/config.json": ["push", "inspect", "verify"],
}


@pytest.mark.parametrize("path", READ_BY)
def test_a_file_that_is_no_json_a_list_or_lacks_keys(path: str, quick: Quick) -> None:
    """Every command that reads it says so in one line that names the file, and ends with 2."""
    run, whole = quick.folder, quick.out / "whole"
    run.path.rename(whole)
    folders = {"compare": [run.path, run.path], "inspect": [run.checkpoint]}
    for text, command in product(("{", "[]", "{}"), READ_BY[path]):
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(whole, run.path)
        (run.path / path).write_text(text)
        if path != "manifest.json":
            bless(run)
        if command in ("push", "run"):
            done = push(quick) if command == "push" else quick.run("--resume")
        else:
            done = quick(command, *folders.get(command, [run.path]))
        assert done.code == 2, (command, text, done.err)
        assert Path(path).name in done.last, (command, text, done.last)


def test_a_damaged_record_of_inputs_means_stale(quick: Quick) -> None:
    for text in ("", "[]", "{", '{"plan": 3}', "[" * 100_000):
        quick.folder.stages_json.write_text(text)
        refused = push(quick)
        assert refused.code == 2
        assert "plan is stale" in refused.last
    assert quick.run("--resume").redone() == list(dict.fromkeys(FILES.values()))
