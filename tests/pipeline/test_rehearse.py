"""A rehearsal tries every stage whatever it finds, and projects the whole run from what it measured."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantize.host.files import read_json, write_json
from quantize.host.units import duration
from quantize.pipeline import rehearse
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Recipe
from quantize.stages.evaluate.tasks import open_tasks
from quantize.stages.fidelity.fidelity import find_faults
from tests.support.quick_run import Done, Quick, made_up_replay, made_up_scores

STAGES = ["plan", "calibrate", "convert", "verify", "fidelity", "evaluate", "report"]
CHECKS = ["weights", "disk", "GPU memory", "calibration prompts", "tasks"]


class Rehearsal(Quick):
    """`quantize rehearse` on the tiny model, with prompts that are at hand."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, model, monkeypatch)
        self.change("calibration", datasets=["bundled"], prompts=64, canvases=2)
        monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", measured_scores)
        monkeypatch.setattr("quantize.stages.evaluate.tasks.open_tasks", open_tasks)

    def change(self, section: str, **fields: Any) -> None:
        recipe = yaml.safe_load(self.recipe.read_text())
        recipe[section] |= fields
        self.recipe.write_text(yaml.safe_dump(recipe))

    def rehearse(self, *more: object) -> Done:
        words = ("rehearse", "--recipe", self.recipe, "--model", self.model, "--out", self.out)
        return self(*words, *more)

    @property
    def result(self) -> Any:
        (path,) = self.out.glob("quick_rehearsal-*/rehearsal.json")
        return read_json(path)

    def findings(self) -> dict[str, str]:
        return {each["name"]: each["finding"] for each in self.result["tried"] if each["finding"]}


def measured_scores(*given: Any, **more: Any) -> dict[str, Any]:
    """Made-up scores of 3 tokens an answer, at 60 and 30 tokens/s."""
    made_up_scores(*given, **more)
    sides = {"bf16": 3.0, "quantized": 6.0}
    return {side: {"samples": 60, "tokens": 180, "seconds": s} for side, s in sides.items()}


@pytest.fixture
def quick(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    return Rehearsal(tmp_path, tiny_checkpoint, monkeypatch)


def test_every_check_and_stage_is_tried_and_the_whole_run_projected(quick: Rehearsal) -> None:
    done = quick.rehearse()
    assert done.code == 0, done.err
    result = quick.result
    assert [each["name"] for each in result["tried"]] == [*CHECKS, *STAGES]
    assert quick.findings() == {}
    here = Recipe.model_validate(result["recipe"]["here"])
    written = load_recipe(str(next(quick.out.glob("*/recipe.yaml"))))
    assert here.evaluation == written.evaluation
    assert here.calibration
    assert (here.calibration.prompts, here.calibration.canvases) == (32, 1)
    assert here.evaluation.limit == {"word_problems": 4}
    seconds = result["whole_run"]["seconds"]
    took = {name: facts["seconds"] for name, facts in result["stages"].items()}
    assert list(seconds) == STAGES[1:]
    assert seconds["convert"] == took["convert"]
    assert seconds["calibrate"] == pytest.approx(took["calibrate"] * (64 + 16) / (32 + 16) * 2)
    assert seconds["fidelity"] == pytest.approx(took["fidelity"] * 2 * 16 / 4)
    assert seconds["evaluate"] == pytest.approx(2000 * 3 / 60 + 2000 * 3 / 30)
    assert result["whole_run"]["disk_bytes"] > result["source"]["bytes"]
    assert {"tool", "versions", "hardware", "notes"} <= result.keys()
    assert "2,000 answers" in done.out
    again = quick.rehearse()
    assert (again.code, again.redone()) == (0, [])  # what stands is not done again
    four, words = quick.rehearse("--gpus", "4"), "calibrate, fidelity, evaluate divided by 4 GPUs"
    assert words in " ".join(four.out.split())
    for said, gpus in ((again.out, 1), (four.out, 4)):
        assert re.search(rf"evaluate\W+{duration(seconds['evaluate'] / gpus)}\W", said)
        assert re.search(rf"convert\W+{duration(seconds['convert'])}\W", said)


def test_the_file_holds_neither_questions_nor_answers_nor_the_home_folder(
    quick: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(quick.out.parent))
    quick.rehearse()
    text = json.dumps(quick.result)
    assert str(quick.out.parent) not in text
    for secret in ("How many", "Question", "HF_TOKEN", "text"):
        assert secret not in text


def test_what_is_found_does_not_end_it(quick: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few prompts, a full disk, a replay that fails: all are told, and the rest is done."""
    quick.change("calibration", datasets=["bundled"], prompts=4000)

    def damaged(*given: Any, **_: Any) -> None:
        made_up_replay(*given)
        write_json(given[3], read_json(given[3]) | {"faults": ["two experts are swapped"]})

    monkeypatch.setattr("quantize.stages.fidelity.fidelity.fidelity", damaged)
    usage = shutil.disk_usage(quick.model)._replace(free=10)
    monkeypatch.setattr(rehearse.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr("quantize.checkpoints.shards._check_free_disk", lambda *_: None)
    done = quick.rehearse()
    assert done.code == 3  # the first finding's
    found = quick.findings()
    assert list(found) == ["disk", "calibration prompts", "fidelity"]
    assert "10 B free" in found["disk"]
    assert "and 4016 are needed" in found["calibration prompts"]
    assert found["fidelity"].endswith("two experts are swapped")
    assert "evaluate" in done.redone()


@pytest.mark.parametrize(
    ("low", "more", "code"), [(0.024, [], 0), (0.0251, [], 1), (0.024, ["two experts"], 1)]
)
def test_a_distance_of_few_trajectories_ends_nothing_unless_it_is_certain(
    quick: Rehearsal, monkeypatch: pytest.MonkeyPatch, low: float, more: list[str], code: int
) -> None:
    def far(*given: Any, **_: Any) -> None:
        made_up_replay(*given)
        replay, limits = read_json(given[3]), {"none": 0.025}
        replay["activations"]["none"]["kl_nats"] = {"mean": 0.0262, "interval": [low, 0.031]}
        faults = [*find_faults(replay["activations"], limits, {}), *more]
        write_json(given[3], replay | {"max_kl_nats": limits, "faults": faults})

    monkeypatch.setattr("quantize.stages.fidelity.fidelity.fidelity", far)
    done = quick.rehearse()
    assert (done.code, list(quick.findings())) == (code, ["fidelity"] * code)
    tried = {attempt["name"]: attempt for attempt in quick.result["tried"]}["fidelity"]
    assert "KL from BF16 is 0.0262 nats" in (tried["finding"] or tried["found"])
    assert ("of so few trajectories" in tried["found"]) == (code == 0)


def test_a_stage_that_breaks_leaves_out_what_reads_it(
    quick: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", broken)
    done = quick.rehearse()
    assert done.code == 70
    assert list(quick.findings()) == ["evaluate"]
    tried = {each["name"]: each["found"] for each in quick.result["tried"]}
    assert tried["report"] == "not tried: a stage before it has no result"
    assert quick.result["whole_run"]["seconds"]["evaluate"] is None
    assert "not measured" in done.out
    monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", measured_scores)
    again = quick.rehearse()  # mended, it goes on
    assert (again.code, again.redone()) == (0, ["evaluate", "report"])


def test_an_interrupted_rehearsal_goes_on_by_its_own_command(
    quick: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` named the stages' commands, and the interruption none."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantize.stages.evaluate.evaluate.evaluate", stop)
    stopped = quick.rehearse()
    (path,) = quick.out.glob("*_rehearsal-*")
    (line,) = (text for text in quick("status", path).out.splitlines() if "go on" in text)
    assert line.startswith("go on with `quantize rehearse ")
    assert (stopped.code, stopped.last) == (
        130, f"error: interrupted; {line.removeprefix('go on with ')} goes on"
    )  # fmt: skip


def test_a_run_is_refused_as_by_run(quick: Rehearsal) -> None:
    done = quick.rehearse("--model", quick.out / "nothing")
    assert done.code == 2
    assert "no such folder" in done.last
