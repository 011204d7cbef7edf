"""Today's code goes on with an earlier version's run: it only evaluates again, by today's looks."""

import importlib.metadata
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.cli import cli
from quantize.host.files import read_json, write_json
from quantize.recipe.reading import load_recipe
from quantize.runs.digests import sha256_of
from quantize.runs.folder import RunDir
from quantize.stages.convert.convert import convert

# `quantize run --recipe fp8_dynamic --limit 40` at commit 1bb3786, without its checkpoint and its
# report, and with the bundled model's folder left out of its manifest.
FIXTURE = Path(__file__).parents[1] / "data" / "run_of_1bb3786.tar.gz"
STAGES = ("plan", "convert", "verify", "fidelity", "evaluate")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    installed = importlib.metadata.version
    wrote = {
        "compressed-tensors": "0.19.0"
    }  # config.json names the version that was installed then
    monkeypatch.setattr(importlib.metadata, "version", lambda n: wrote.get(n) or installed(n))
    with tarfile.open(FIXTURE) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("fp8_dynamic-*")
    run = RunDir(folder)
    source, recipe = Checkpoint.open(CHECKPOINT), load_recipe("fp8_dynamic").for_bundled_model()
    targets = plan_targets(source.tensors, recipe.quantization)
    convert(source, targets, run.checkpoint, recipe=recipe, record=tmp_path / "again.json")
    # Today's config.json calls the vision tower's angles as Google does; that commit kept the model's.
    config = read_json(run.checkpoint / "config.json")
    config["vision_config"]["rope_parameters"]["rope_type"] = "axial"
    write_json(run.checkpoint / "config.json", config)
    return run


def test_the_checkpoint_has_the_same_bytes_today(run: RunDir) -> None:
    again = read_json(run.path.parent / "again.json")["files"]
    assert len(again) == 6
    again["config.json"] = sha256_of(run.checkpoint / "config.json")
    assert again == read_json(run.path / "conversion.json")["files"]


def test_a_run_goes_on_behind_what_an_earlier_commit_made(run: RunDir) -> None:
    command = ["run", "--recipe", "fp8_dynamic", "--limit", "40", "--resume"]
    done = CliRunner().invoke(cli, [*command, "--out", str(run.path.parent)])
    assert [stage for stage in STAGES if f"{stage}: done before" not in done.output] == ["evaluate"]
    assert "word_problems was asked by 3 looks and is judged by 5 since" in done.output
    assert "report: done in" in done.output
    report = read_json(run.report_json)
    assert report["verdict"]["outcome"] == "INCONCLUSIVE"  # 40 questions cannot decide, as then
    (task,) = report["tasks"]
    assert task["task"] == "word_problems"
    assert [task[f"{model}_counts"]["samples"] for model in ("bf16", "quantized")] == [40, 40]
