"""A server says which activation mode a gate judged, and which it multiplies in."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.host.files import read_json, write_json
from quantize.reports.card import eval_results
from quantize.runs.folder import RESULTS
from quantize.runs.manifest import fingerprint
from quantize.runtime import Placement
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import SCHEMES
from quantize.serve import server
from quantize.serve.judged import judged_modes, mode_line, served_mode
from quantize.serve.options import Options
from quantize.serve.service import Service
from tests.support.finished_run import finished_run
from tests.support.serving import TellingEngine


def checkpoint_of(*schemes: str) -> Any:
    """A checkpoint's config alone, with these schemes."""
    groups = {
        name: SCHEMES[name].config_group([f"re:{name}"], "memoryless_minmax") for name in schemes
    }
    stated = {"quant_method": "compressed-tensors", "config_groups": groups}
    return SimpleNamespace(config={"quantization_config": stated})


def test_a_run_and_a_release_tell_what_was_judged(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    digest = fingerprint(Checkpoint.open(run.checkpoint))
    assert judged_modes(run.checkpoint, digest) == ["per_layer"]
    assert judged_modes(run.checkpoint, "other weights") is None
    released = tmp_path / "released"
    (released / RESULTS).mkdir(parents=True)
    for name, text in eval_results(read_json(run.report_json)).items():
        (released / name).write_text(text)
    assert judged_modes(released, digest) == ["per_layer"]
    assert judged_modes(CHECKPOINT, digest) is None


def test_half_a_run_is_no_error(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    digest = fingerprint(Checkpoint.open(run.checkpoint))
    write_json(run.report_json, {"tasks": [{"task": "gsm8k"}]})
    assert judged_modes(run.checkpoint, digest) is None
    run.verification_json.unlink()
    assert judged_modes(run.checkpoint, digest) is None


@pytest.mark.parametrize(
    ("schemes", "judged", "served", "differs"),
    [
        (["NVFP4"], "per_layer", None, True),
        (["NVFP4"], "per_layer", "per_layer", False),
        (["NVFP4"], "none", None, False),
        (["NVFP4"], "none", "fp8", True),
        (["NVFP4", "NVFP4A16"], "per_layer", None, True),
        (["NVFP4", "FP8_DYNAMIC"], "per_layer", "per_layer", False),
        (["FP8_DYNAMIC"], "per_layer", None, False),
        (["FP8_DYNAMIC"], "none", None, True),
        (["NVFP4A16"], "per_layer", None, False),
        (["NVFP4A16"], "none", "fp8", True),
        (["MXFP4A16"], "per_layer", None, False),
    ],
)
def test_where_both_differ_the_sentence_names_the_options(
    schemes: list[str], judged: str, served: ActivationMode | None, differs: bool
) -> None:
    line = mode_line(checkpoint_of(*schemes), served, [judged])
    assert line is not None
    assert (f"`--activations {judged}` serves what was judged" in line) is differs
    assert ("as they were judged" in line) is not differs
    assert f"{judged}" in line


@pytest.mark.parametrize(
    ("schemes", "asked", "served"),
    [
        (["NVFP4", "NVFP4A16"], None, "none"),
        (["NVFP4"], "per_layer", "per_layer"),
        (["FP8_DYNAMIC"], None, "8 bits"),
        (["FP8_DYNAMIC"], "none", "none"),
        (["NVFP4", "FP8_DYNAMIC"], None, "none beside 4 bits, 8 bits beside 8 bits"),
    ],
)
def test_the_served_mode_is_named(
    schemes: list[str], asked: ActivationMode | None, served: str
) -> None:
    assert served_mode(checkpoint_of(*schemes), asked) == served
    assert served_mode(Checkpoint.open(CHECKPOINT), None) == "none"


def test_what_nobody_judged_is_said_and_bf16_has_no_line() -> None:
    line = mode_line(checkpoint_of("NVFP4"), None, None)
    assert line is not None
    assert "no report or score here" in line
    assert mode_line(Checkpoint.open(CHECKPOINT), None, None) is None


def test_it_stands_at_start_and_among_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` of a run's checkpoint; what would load and listen is left out."""
    run = finished_run(tmp_path)
    opened = checkpoint_of("NVFP4")
    opened.config |= json.loads((CHECKPOINT / "config.json").read_text())
    digest, tokenizer = (
        fingerprint(Checkpoint.open(run.checkpoint)),
        server.sound_tokenizer(CHECKPOINT),
    )
    monkeypatch.setattr(server, "sound_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(server.Checkpoint, "open", lambda _: opened)
    monkeypatch.setattr(server, "fingerprint", lambda _: digest)
    monkeypatch.setattr(server, "open_engine", lambda *_: TellingEngine())
    services: list[Service] = []
    monkeypatch.setattr(server, "create_app", services.append)
    monkeypatch.setattr(server, "run", lambda *_: None)
    monkeypatch.setattr(server, "Server", lambda *_: None)
    server.serve(run.checkpoint, Options("x", port=0), Placement("cpu"))
    assert "judged with activations per_layer, and served with others" in capsys.readouterr().err
    (service,) = services
    assert service.model["judged_activations"] == ["per_layer"]
    assert service.model["activations"] == "none"  # it said "as served"
    service.leave()
