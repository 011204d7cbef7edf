"""A stage is done while its result and everything it was made from stand; else it is done again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.host.files import read_json, write_json
from quantize.pipeline.run import _set_by_the_machine
from quantize.pipeline.stages import STAGES, stage
from quantize.pipeline.staleness import why_stale
from quantize.recipe.reading import load_recipe
from quantize.runs.folder import RunDir
from quantize.stages.convert import convert
from tests.support.quick_run import Quick, made_up_replay

NAMES = [stage.name for stage in STAGES if stage.is_needed(load_recipe("nvfp4_w4a4"))]


def test_a_finished_run_is_shown_and_not_made_again(quick: Quick) -> None:
    done = quick.run("--resume")
    assert done.code == 0
    assert done.redone() == []
    assert done.err.count("done before") == len(NAMES)
    manifest = read_json(quick.folder.manifest_json)
    assert {each["threads"] for each in manifest["stages"].values()} == {torch.get_num_threads()}
    again = (
        f"Built again with the same versions on {manifest['hardware']['cpu']}, the checkpoint has"
    )
    assert again in quick.folder.report_md.read_text()
    source = manifest["source"] | {"fingerprint": "another model"}
    write_json(quick.folder.manifest_json, manifest | {"source": source})
    stages = [stage for stage in STAGES if stage.name in NAMES]
    assert {why_stale(quick.folder, stage) for stage in stages} == {"model changed since"}


def test_a_gpus_launch_table_stands_in_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the user's own changes bits."""
    monkeypatch.setattr("quantize.pipeline.run.launches_digest", lambda device: device.type)
    assert _set_by_the_machine(on_gpu=True) == {"launches": "cuda", "threads": None}


def test_a_result_that_comes_out_different_makes_what_follows_stale(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (quick.folder.checkpoint / "generation_config.json").exists()
    carried = [name for name in convert.CARRIED if name != "generation_config.json"]
    monkeypatch.setattr(convert, "CARRIED", carried)
    done = quick("convert", quick.folder.path)
    assert done.code == 0
    assert "this made verify, fidelity, evaluate, report stale" in done.err
    assert f"go on with quantize verify {quick.folder.path} && quantize fidelity" in done.err
    refused = quick("report", quick.folder.path)
    assert refused.code == 2
    assert "verify is stale, convert changed since" in refused.last
    assert quick.run("--resume").redone() == ["verify", "fidelity", "evaluate", "report"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("plan", "quantize run ... --resume"), ("verify", "quantize verify 'a run'")],
)
def test_a_stale_result_names_the_command_that_makes_it(name: str, said: str) -> None:
    assert stage(name).command(RunDir(Path("a run"))) == said


def test_a_stage_without_an_entry_is_stale(quick: Quick) -> None:
    records = read_json(quick.folder.stages_json)
    del records["verify"]
    write_json(quick.folder.stages_json, records)
    assert quick.run("--resume").redone() == ["verify"]


def test_the_noise_floor_asked_for_later_is_scored(quick: Quick) -> None:
    assert quick.run("--resume", "--noise-floor").redone() == ["evaluate", "report"]
    assert quick.run("--resume", "--noise-floor").redone() == []
    assert quick.run("--resume").redone() == []


def test_a_stage_that_fails_leaves_no_older_result(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed report the report of before must not pass for the run's."""

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("quantize.stages.report.report.report", fail)
    done = quick("report", quick.folder.path)
    assert done.code == 70
    assert done.last.startswith("error: unexpected RuntimeError: boom")
    assert "boom" in quick.folder.log.read_text()
    for name in ("report.json", "report.md", "report.html", "junit.xml"):
        assert not (quick.folder.path / name).exists()
    monkeypatch.undo()


def test_an_interrupted_evaluation_of_a_finished_run_leaves_it_publishable(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", stop)
    words = ("evaluate", quick.folder.path, "--batch-size", 4)
    done = quick(*words)
    assert done.code == 130
    assert done.last == f"error: interrupted; `quantize {' '.join(map(str, words))}` goes on"
    assert [why_stale(quick.folder, stage) for stage in STAGES if stage.name in NAMES] == [
        None for _ in NAMES
    ]
    (quick.folder.path / "report.md").unlink()
    refused = quick("card", quick.folder.path)
    assert f"`quantize report {quick.folder.path}` makes it again" in refused.last
    monkeypatch.setattr("quantize.pipeline.run.started", stop)
    assert quick.run().last.endswith(" --resume` goes on")


def test_another_source_ends_a_single_stage(quick: Quick, tmp_path: Path) -> None:
    """open_run compares the model with the one that the run began with, its tokenizer included."""
    copy = shutil.copytree(quick.model, tmp_path / "copy")
    manifest = read_json(quick.folder.manifest_json)
    write_json(
        quick.folder.manifest_json,
        manifest | {"source": manifest["source"] | {"folder": str(copy)}},
    )
    assert quick("verify", quick.folder.path).code == 0
    config = copy / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_denoising_steps": 3}))
    done = quick("verify", quick.folder.path)
    assert done.code == 2
    assert "the BF16 model has changed since this run began" in done.last


def test_a_stage_that_fails_before_evaluation_says_what_that_saves(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    def far(source: Path, checkpoint: Path, calibration: Path, out: Path, **_: Any) -> None:
        made_up_replay(source, checkpoint, calibration, out)
        write_json(out, read_json(out) | {"faults": ["KL from BF16 is 9 nats"]})

    monkeypatch.setattr("quantize.stages.fidelity.fidelity.fidelity", far)
    monkeypatch.setattr("quantize.pipeline.run.evaluation_seconds", lambda _: 7200.0)
    shutil.rmtree(quick.out)
    done = quick.run()
    assert done.code == 1
    said = "KL from BF16 is 9 nats; evaluate was not begun, which saves about 2.0 hours"
    assert done.last.endswith(said)
