"""The whole run on the bundled model, in small: verdicts, damage, interruption."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

import quantize
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.pipeline.stages import STAGES
from quantize.pipeline.staleness import input_digests, remember
from quantize.recipe.reading import shipped_recipes
from quantize.runs.folder import RunDir
from quantize.stages import denoising
from quantize.stages.calibrate import calibrate as calibrate_stage
from quantize.stages.evaluate import recording
from quantize.stages.evaluate.tasks import open_tasks
from tests.support.quick_run import Quick, command, made_up_scores

NAMES = ("calibrate", "convert", "verify", "fidelity", "evaluate", "report")
PROBLEMS = 30


@pytest.fixture(scope="module")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nvfp4 with few prompts and problems, and a margin that so few problems can decide."""
    fields = yaml.safe_load(shipped_recipes()["nvfp4_w4a4"])
    fields["name"] = "small"
    fields["bundled"]["calibration"] |= {"prompts": 6, "canvases": 1, "min_tokens_per_expert": 8}
    fields["bundled"]["evaluation"]["limit"] = {"word_problems": PROBLEMS}
    fields["bundled"]["gate"]["margin_pp"] = {"word_problems": 50}
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def arguments(recipe: Path, out: Path, *more: str) -> list[str]:
    return ["run", "--recipe", str(recipe), "--out", str(out), *more]


def run(recipe: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantize", *arguments(recipe, out, *more)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


def only_run(out: Path) -> Path:
    (folder,) = out.glob("small-*")
    return folder


@pytest.fixture(scope="module")
def finished(small_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that was never interrupted, with few trajectories to replay."""
    out = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(denoising, "HELD_OUT", 2)
        monkeypatch.setattr(recording, "RECORDED", 1)
        done = command(monkeypatch, *arguments(small_recipe, out))
    assert done.code == 0, done.err
    return only_run(out)


@pytest.fixture(scope="module")
def finished_alone(small_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in a process of its own, at full size."""
    out = tmp_path_factory.mktemp("alone")
    done = run(small_recipe, out)
    assert done.returncode == 0, done.stderr
    return only_run(out)


def contents(folder: Path) -> dict[str, bytes]:
    """Everything a run makes but for times, memory, paths and locks, which name processes."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    skip = {"manifest.json", "report.json", "report.md", "report.html", "junit.xml", "stages.json"}
    kept = [p for p in files if p.name not in skip and not p.name.endswith(".lock")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in kept}


def test_a_run_ends_with_a_verdict_and_a_recovery_table(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert report["verdict"]["outcome"] == "PASS"
    assert report["model"]["bundled"] is True
    (task,) = [t for t in report["tasks"] if t["gated"]]
    assert task["questions"] == task["looks"][-1]["questions"] < PROBLEMS  # it was certain before
    assert 0.4 < task["base"] <= 1
    assert report["sizes"]["quantized_modules"] == 6 * 16 * 3 + 6 * 3 + 6 * 4 - 1
    text = (finished / "report.md").read_text()
    assert "not Google's" in text
    assert "| word_problems |" in text


@pytest.mark.slow
def test_operating_points_of_other_weights_are_neither_shown_nor_adopted(
    finished: Path, small_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored at 10 steps; then calibrated otherwise, converted, and gone on with: as a user may."""
    monkeypatch.setattr(denoising, "HELD_OUT", 2)
    monkeypatch.setattr(recording, "RECORDED", 1)
    out = tmp_path / "outputs"
    shutil.copytree(finished.parent, out)
    folder = only_run(out)

    def do(*words: object) -> Any:
        return command(monkeypatch, *words)

    assert do("evaluate", folder, "--steps", 10).code == 0
    assert do("report", folder).code in (0, 4)
    (point,) = read_json(folder / "report.json")["operating_points"]
    assert point["name"] == "t10"
    weights = read_json(folder / "verification.json")["artifact"]
    calibrate = calibrate_stage.calibrate

    def wider(source: Path, recipe: Any, into: Path, *more: Any, **named: Any) -> None:
        calibrate(source, recipe, into, *more, **named)
        path = into / "input_scales.safetensors"
        save_file({name: scale * 0.98 for name, scale in load_file(path).items()}, path)

    monkeypatch.setattr(calibrate_stage, "calibrate", wider)
    assert do("calibrate", folder).code == 0
    resumed = do(*arguments(small_recipe, out, "--resume"))
    assert resumed.code in (0, 4), resumed.err
    assert read_json(folder / "verification.json")["artifact"] != weights
    report = read_json(folder / "report.json")
    assert report["operating_points"] == []
    (said,) = report["not_read"]
    assert "quantized-at-t10/word_problems.jsonl is not read: scored on other weights" in said
    assert said in " ".join(resumed.err.split())
    named = {task["made_with"]["model"]["weights"] for task in report["tasks"]}
    assert named == {read_json(folder / "verification.json")["scored_as"]}
    refused = do("adopt", folder, "t10")
    assert (refused.code, "no operating point" in refused.last) == (2, True)


def test_planned_bytes_are_the_bytes_written(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    shards = list((finished / "checkpoint").glob("*.safetensors"))
    written = sum(p.stat().st_size for p in shards)
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in shards)
    assert written - headers == report["sizes"]["quantized_bytes"]


def test_a_finished_run_is_shown_again_not_made_again(
    finished: Path, small_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(finished)
    done = command(monkeypatch, *arguments(small_recipe, finished.parent, "--resume"))
    assert done.code == 0, done.err
    assert done.redone() == []
    for stage in NAMES:
        assert f"{stage}: done before" in done.err
    assert contents(finished) == before


def test_exchanged_experts_fail_the_gate(
    finished: Path, small_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts of one layer move one place on, whole: every name, dtype and scale still fits."""
    folder = Path(shutil.copytree(finished, tmp_path / finished.name))
    (shard,) = folder.glob("checkpoint/*.safetensors")
    tensors = load_file(shard)
    layer = "model.decoder.layers.3.experts."
    moved = {
        name: tensors[_next_expert(name, layer)] if name.startswith(layer) else tensor
        for name, tensor in tensors.items()
    }
    save_file(moved, shard, metadata={"format": "pt"})
    (convert,) = (stage for stage in STAGES if stage.name == "convert")
    run_folder = RunDir(folder)
    recorded = read_json(run_folder.conversion_json)
    recorded["files"][shard.name] = hashlib.sha256(shard.read_bytes()).hexdigest()
    write_json(run_folder.conversion_json, recorded)
    remember(run_folder, convert, input_digests(run_folder, convert))  # as if convert had done it
    done = command(monkeypatch, *arguments(small_recipe, tmp_path, "--resume"))
    assert done.code == 1, done.err
    assert "convert: done before" in done.err
    assert "layers.3.experts" in done.last


def _next_expert(name: str, layer: str, experts: int = 16) -> str:
    expert, rest = name.removeprefix(layer).split(".", 1)
    return f"{layer}{(int(expert) + 1) % experts}.{rest}"


@pytest.mark.parametrize(
    ("scores", "code", "outcome"),
    [
        ({}, 0, "PASS"),
        ({"lost": 40}, 1, "FAIL"),
        ({"lost": 15}, 4, "INCONCLUSIVE"),
        ({"dtype": "torch.bfloat16"}, 4, "NOT COMPARABLE"),
    ],
)
def test_every_verdict_has_its_exit_code(
    scores: dict[str, Any], code: int, outcome: str, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the run, of the run that is shown again, and of `quantize report` alone."""
    quick = Quick(tmp_path, tiny_checkpoint, monkeypatch)
    monkeypatch.setattr(
        "quantize.stages.evaluate.evaluate.evaluate", partial(made_up_scores, **scores)
    )
    assert quick.run().code == code
    assert read_json(quick.folder.report_json)["verdict"]["outcome"] == outcome
    again = quick.run("--resume")
    assert (again.code, again.redone()) == (code, [])
    assert quick("report", quick.folder.path).code == code


@pytest.mark.parametrize("text", [None, "{"], ids=["missing", "broken"])
def test_data_that_cannot_be_read_end_a_run_before_its_first_stage(
    text: str | None, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a judgement, but not a run that will not come to them."""
    quick, data = Quick(tmp_path, tiny_checkpoint, monkeypatch), tmp_path / "data"
    monkeypatch.setattr("quantize.stages.evaluate.tasks.open_tasks", open_tasks)
    data.mkdir()
    if text:
        (data / "word_problems.jsonl").write_text(text)
    options = ("--data-dir", data)
    done = quick.run(*options)
    assert (done.code, done.redone()) == (3, [])
    assert str(data) in done.last
    done = quick.run(*options, "--until", "convert", "--resume")
    assert (done.code, done.redone()) == (0, ["plan", "calibrate", "convert"])
    theirs = (quick.folder.checkpoint, "--against", quick.model, "--recipe", quick.recipe)
    done = quick("judge", *theirs, "--out", quick.out, *options)
    assert (done.code, done.redone()) == (3, [])


@pytest.mark.parametrize("place", ["a file", "below a file", "below a device", "the run's name"])
def test_a_place_where_no_folder_can_be(
    place: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Quick(tmp_path, tiny_checkpoint, monkeypatch)
    file = tmp_path / "file"
    file.write_text("mine")
    if place == "the run's name":
        assert quick.run("--until", "plan").code == 0
        name = quick.folder.path.name
        shutil.rmtree(quick.folder.path)
        file = quick.out / name
        file.write_text("mine")
    else:
        outs = {"a file": file, "below a file": file / "x", "below a device": Path("/dev/null/x")}
        quick.out = outs[place]
    done = quick.run("--until", "plan")
    assert done.code == 2
    assert "no folder can be made there" in done.last
    assert "name another --out" in done.last
    assert file.read_text() == "mine"


def test_a_place_that_cannot_be_written(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only: said for root too, whom permissions do not stop."""
    quick = Quick(tmp_path, tiny_checkpoint, monkeypatch)
    mkdir = Path.mkdir

    def read_only(self: Path, *given: Any, **options: Any) -> None:
        if self.is_relative_to(quick.out):
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *given, **options)

    monkeypatch.setattr(Path, "mkdir", read_only)
    done = quick.run("--until", "plan")
    assert done.code == 3
    assert "cannot be made (Read-only file system); name another --out" in done.last


@pytest.mark.slow
@pytest.mark.parametrize("stage", NAMES)
@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_sigkill_in_a_stage_then_resume_gives_the_same_bytes(
    stage: str, delay: float, finished_alone: Path, small_recipe: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "quantize", *arguments(small_recipe, tmp_path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"{stage}: started"):
            time.sleep(delay)
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait(timeout=60)
    assert process.returncode in (-signal.SIGKILL, 0)
    done = run(small_recipe, tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    assert contents(only_run(tmp_path)) == contents(finished_alone)


def test_a_conversion_alone_does_not_pass_for_gptq(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nvfp4: rounding by GPTQ takes a whole run"):
        quantize.convert(None, tmp_path / "out", "nvfp4")
    assert not [*tmp_path.iterdir()]
