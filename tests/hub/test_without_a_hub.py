"""The model card, and what a push would do, where there is no network or no token."""

import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from quantize import cli
from quantize.checkpoints.reader import Checkpoint
from quantize.host.files import read_json, write_text
from quantize.pipeline.stages import STAGES
from quantize.pipeline.staleness import why_stale
from quantize.recipe.reading import read_recipe
from quantize.runs.folder import README, RESULTS, RunDir
from quantize.runs.manifest import checksums
from tests.support.finished_run import BASE, COMMIT, finished_run

TASKS = ("aime25", "gpqa_diamond", "gsm8k")


@pytest.fixture(params=["offline", "no token", "no network"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An environment in which the Hub cannot be asked; returns what is said of it."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "offline")
    if request.param != "no token":
        monkeypatch.setenv("HF_TOKEN", "hf_planted")
    if request.param == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said = {"offline": "HF_HUB_OFFLINE is set", "no token": "no token; set HF_TOKEN"}
    return said.get(request.param, "cannot tell whose token this is")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path, judged=True)


@pytest.fixture
def quantize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run one command in this process; returns its code and all that it printed."""
    monkeypatch.setattr("quantize.host.progress.console.width", 1000)

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["quantize", *map(str, words)])
        capsys.readouterr()
        code = cli._exit_code()
        text = capsys.readouterr()
        assert "Traceback" not in text.err
        return code, text.out + text.err

    return call


def test_the_card_is_written_beside_the_checkpoint(
    run: RunDir, without: str, quantize: Any
) -> None:
    """With the scores, twice with equal bytes; every result stands after it, and so do checksums."""
    before = checksums(Checkpoint.open(run.checkpoint))
    write_text(run.checkpoint / RESULTS / "old.yaml", "an older run's")
    for _ in range(2):
        code, said = quantize("card", run.path, "--repo", "org/model")
        assert code == 0, said
        written = {path.name for path in (run.checkpoint / RESULTS).iterdir()}
        assert written == {f"{task}.yaml" for task in TASKS}
    text = (run.checkpoint / README).read_text()
    assert ModelCard(text).data.base_model == BASE
    assert "vllm serve org/model" in text
    assert COMMIT in text
    assert checksums(Checkpoint.open(run.checkpoint)) == before
    needed = [stage for stage in STAGES if stage.is_needed(read_recipe(run.recipe_yaml))]
    assert [why_stale(run, stage) for stage in needed] == [None] * len(needed)
    assert without not in said


def test_a_card_of_a_changed_report_is_refused(run: RunDir, quantize: Any) -> None:
    write_text(run.report_json, run.report_json.read_text().replace("PASS", "FAIL"))
    code, said = quantize("card", run.path)
    assert code == 2
    assert "report.json" in said
    assert not (run.checkpoint / README).exists()


def test_a_dry_run_says_what_it_could_not_check(run: RunDir, without: str, quantize: Any) -> None:
    quantize("card", run.path)  # a card that lies there already is no stray file
    code, said = quantize("push", run.path, "--repo", "org/model", "--dry-run")
    assert code == 0, said
    assert "not looked at" in said
    assert "as nobody yet" in said
    for name in (
        *read_json(run.verification_json)["sha256"],
        README,
        *(f"{t}.yaml" for t in TASKS),
    ):
        assert name in said
    not_checked = [line for line in said.splitlines() if line.startswith("push: not checked: ")]
    assert len(not_checked) == 2
    assert all(without in line for line in not_checked)
    assert "BF16 files are those of a revision on the Hub" in not_checked[0]
    assert "what org/model holds" in not_checked[1]
    assert not (run.path / "publication.json").exists()


def test_without_the_option_nothing_is_shown_that_was_not_checked(
    run: RunDir, without: str, quantize: Any
) -> None:
    code, said = quantize("push", run.path, "--repo", "org/model", "--yes")
    assert code == 3
    assert without in said
    assert "not checked" not in said
