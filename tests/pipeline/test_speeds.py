"""Tokens/s of scored models: which model runs where, under whose steps, and what a later call keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.bundled import CHECKPOINT
from quantize.host.files import read_json, write_json
from quantize.pipeline import speeds
from quantize.recipe.sections import OperatingPoint
from quantize.recovery.rows import Scoring
from quantize.reports.scores import write_scoring
from quantize.runs.folder import RunDir
from quantize.runtime.gpu.placement import Placement
from tests.support.quick_run import TASK, rows

POINTS = {"ten": OperatingPoint(max_denoising_steps=10), "w4a8": OperatingPoint(activations="fp8")}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    write_json(run.manifest_json, {"source": {"fingerprint": "bf16"}})
    models = ("bf16", "quantized", "quantized-at-ten", "quantized-at-w4a8")
    for answers, name in enumerate(models, start=1):  # of two steps each
        made_with = {"model": {"weights": "scored"}}
        scoring = Scoring(TASK, rows([1.0] * answers), {"task": TASK}, made_with)
        write_scoring(run.evaluation / name, scoring)
    write_json(run.evaluation / "done.json", {"tasks": [TASK, "not_asked_yet"]})
    return run


def asked(monkeypatch: pytest.MonkeyPatch, gpu: str, rate: float) -> list[Any]:
    """Stand in for a GPU and its bench, and note what it is asked for."""
    seen: list[Any] = []

    def timed(
        folder: Path, place: Placement, context: int, steps: Mapping[str, Sequence[int]]
    ) -> dict[str, float]:
        seen.append((folder, place.activations, context, dict(steps)))
        return dict.fromkeys(steps, rate)

    monkeypatch.setattr(speeds, "speeds", timed)
    monkeypatch.setattr(speeds, "free_unused", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    return seen


def test_each_model_runs_once_a_mode_under_the_steps_of_its_own_answers(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked(monkeypatch, "a GPU", 1234.56)
    speeds.measure_speeds(run, CHECKPOINT, POINTS, Placement("cpu"))
    assert seen == [
        (CHECKPOINT, None, 1024, {"bf16": [2]}),
        (run.checkpoint, None, 1024, {"quantized": [2, 2], "quantized-at-ten": [2, 2, 2]}),
        (run.checkpoint, "fp8", 1024, {"quantized-at-w4a8": [2, 2, 2, 2]}),
    ]
    told = read_json(run.evaluation / "speeds.json")
    assert (told["device"], told["weights"]) == ("a GPU", "scored")
    assert set(told["tokens_a_second"].values()) == {1234.6}


@pytest.mark.parametrize(
    ("gpu", "weights", "kept"),
    [("a GPU", "scored", True), ("another GPU", "scored", False), ("a GPU", "others", False)],
)
def test_rates_of_other_points_stay_only_where_they_were_measured_on_this_gpu(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, gpu: str, weights: str, *, kept: bool
) -> None:
    """And of these weights, whose answers took so many steps."""
    asked(monkeypatch, "a GPU", 100.0)
    speeds.measure_speeds(run, CHECKPOINT, POINTS, Placement("cpu"))
    asked(monkeypatch, gpu, 200.0)
    made_with = {"model": {"weights": weights}}
    scoring = Scoring(TASK, rows([1.0, 1.0]), {"task": TASK}, made_with)
    write_scoring(run.evaluation / "quantized", scoring)
    speeds.measure_speeds(run, CHECKPOINT, {}, Placement("cpu"))
    rates = read_json(run.evaluation / "speeds.json")["tokens_a_second"]
    assert rates["bf16"] == rates["quantized"] == 200
    assert rates.get("quantized-at-ten") == (100 if kept else None)
