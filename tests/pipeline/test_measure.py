"""`quantize measure` on the bundled model: two files, no text of prompts or answers, bad input."""

import json
import zipfile
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jsonschema_rs
import pytest
import torch
from safetensors import SafetensorError

import quantize
from quantize.bundled import CHECKPOINT, KINDS
from quantize.host.files import read_json
from quantize.pipeline import measure
from quantize.runtime import Sampler
from quantize.runtime.model.choices import Choices
from quantize.runtime.record.ranges import Channels
from quantize.runtime.record.step_figures import POSITIONS, StepFigures
from tests.support.quick_run import command, in_few_steps


def test_prompts_of_four_kinds_ship() -> None:
    rows = [json.loads(line) for line in KINDS.read_text("utf-8").splitlines()]
    kinds = [row["kind"] for row in rows]
    assert {kind: kinds.count(kind) >= 26 for kind in kinds} == dict.fromkeys(
        ("structured", "code", "chat", "prose"), True
    )
    texts = [row["prompt"] for row in rows]
    assert len({*texts}) == len(texts)
    assert max(map(len, texts)) < 200
    assert len(texts) == 4 * 26
    assert all(text[:1].isupper() for text in texts)  # no line of another prompt


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_model_is_measured_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_few_steps(monkeypatch, steps=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "HELD_OUT", 1)
    monkeypatch.setattr(measure, "best_device", lambda: "cpu")
    quantize.convert(None, "fp8", "fp8_dynamic")
    words = ("--prompts", 1, "--canvases", 1, "--checkpoint", "fp8", "--out", "m")
    full = SafetensorError("Error while serializing: I/O error: No space left (os error 28)")
    with monkeypatch.context() as patch:
        patch.setattr(measure, "record", Mock(side_effect=full))
        done = command(monkeypatch, "measure", "bundled", *words)
        assert (done.code, "the disk is full" in done.last) == (3, True), done.err
    with monkeypatch.context() as patch:
        patch.setattr(measure, "fidelity", interrupted)
        for prompts in (2, 1):  # the first try's parts are of other settings
            done = command(monkeypatch, "measure", "bundled", *words, "--prompts", prompts)
            assert done.code == 130
            assert "quantize measure bundled" in done.last
            names = sorted(path.name for path in Path("m/measured.parts").iterdir())
            assert names == ["denoised", "routing.partial", "speed"]
        assert [path.name for path in Path("m").iterdir()] == ["measured.parts"]
    Path("m/parts").mkdir()  # somebody's files stay
    Path("m/parts/notes.txt").touch()
    monkeypatch.setattr(measure, "record", interrupted)  # what was denoised is kept
    done = command(monkeypatch, "measure", "bundled", *words)
    assert done.code == 0, done.err
    measured = read_json(Path("m/measured.json"))
    schema = files("quantize.reports").joinpath("measured.schema.json").read_text("utf-8")
    assert list(jsonschema_rs.validator_for(json.loads(schema)).iter_errors(measured)) == []

    assert list(measured["kinds"]) == ["all", "chat", "code", "prose", "structured"]
    assert measured["kinds"]["all"]["samples"] == 4
    assert [step["canvases"] for step in measured["by_step"]] == [4, 4]
    config = read_json(CHECKPOINT / "config.json")
    text, layers = config["text_config"], config["text_config"]["num_hidden_layers"]
    tokens = [sum(counts) for counts in measured["tokens_per_expert"].values()]
    drawn = 2 * 4 * config["canvas_length"] * text["top_k_experts"]
    assert len(tokens) == layers
    assert min(tokens) > drawn  # the prompts', too
    for step in measured["by_step"]:
        assert len(step["experts_hit"]) == layers
        assert all(0 < hit <= text["num_experts"] for hit in step["experts_hit"])
    assert len([e for e in measured["inputs"] if "median_expert" in e]) == 2 * layers
    assert measured["ms_a_forward"] is None
    assert 0.5 < measured["routing"]["routing_overlap"][-1] < 1

    names = sorted(path.name for path in Path("m").iterdir())
    assert names == ["measured.html", "measured.json", "parts"]
    assert Path("m/parts/notes.txt").exists()
    page = Path("m/measured.html").read_text("utf-8")
    assert "4 answers of at most 1 canvas, 1 to each kind" in page
    assert page.count("<svg") == 6
    assert "http" not in page
    prompts = [json.loads(line)["prompt"] for line in KINDS.read_text("utf-8").splitlines()]
    written = page + Path("m/measured.json").read_text("utf-8")
    assert not [prompt for prompt in prompts if prompt[:20] in written]
    assert str(tmp_path) not in written
    assert command(monkeypatch, "bundle", "m").code == 0
    with zipfile.ZipFile("m.zip") as archive:
        assert archive.namelist() == ["m/measured.json"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fp8"], "fp8: is quantized; name a BF16 model, and this by --checkpoint"),
        (
            ["bundled", "--checkpoint", CHECKPOINT],
            "is not quantized; --checkpoint names one that is",
        ),
        (["bundled", "--checkpoint", "other"], "num_experts is 8, 16 in "),
        (["bundled", "--checkpoint", "fp8", "--activations", "fp8"], "fp8"),
        (["bundled", "--out", "file"], "file: is a file; name a folder with --out"),
        (["bundled", "--out", "m"], "m/measured.json: exists already; remove it or name another"),
        (["nowhere"], "nowhere"),
        (["bundled", "--prompts", "27"], "27"),
    ],
)
def test_bad_input_is_one_line(
    words: list[Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("m").mkdir()
    Path("m/measured.json").touch()
    quantize.convert(None, "fp8", "fp8_dynamic")
    if "other" in words:
        Path("fp8").rename("other")
        config = read_json(Path("other/config.json"))
        config["text_config"]["num_experts"] = 8
        Path("other/config.json").write_text(json.dumps(config))
    before = sorted(Path().iterdir())
    done = command(monkeypatch, "measure", *words)
    assert (done.code, says in done.last) == (2, True), done.err
    assert sorted(Path().iterdir()) == before


def test_figures_of_a_step_are_those_of_its_distributions() -> None:
    """Half of 64 positions hold 100 equal tokens, half one; canvas 0 hits one expert, canvas 1 two."""
    logits = torch.full((2, 64, 1000), -1e4)
    logits[:, ::4, :100] = 1.0
    logits[:, 2::4, 7] = 1.0
    experts = torch.zeros(2, 3, 64, 1, dtype=torch.int32)
    experts[1, :, :16] = 4
    decoded = SimpleNamespace(
        choices=Choices(experts, experts.float()),
        pieces=lambda: [slice(0, 1), slice(1, 2)],
        logits=lambda piece: logits[piece],
    )
    entropy = torch.tensor([[1.0], [3.0]]).repeat(1, 64)
    record: Any = SimpleNamespace(step=2, decoded=decoded, entropy=entropy)
    sums, other = StepFigures(5, Sampler()), StepFigures(5, Sampler())
    sums.see(record)
    other.see(record)
    sums.add(other)
    (step,) = sums.by_step()
    assert (step["step"], step["canvases"], step["entropy_nats"]) == (2, 4, 2.0)
    assert step["tokens_of_mass"] == {"mean": 50.5, "median": 1, "p90": 100}
    assert step["experts_hit"] == [1.5] * 3
    assert step["largest_share_of_load"] == [0.875] * 3
    assert POSITIONS == 32


def test_channels_far_above_the_median_are_outliers() -> None:
    channels = Channels()
    channels.see("a", torch.tensor([[1.0, -2, 3, 30], [0, 1, 1, 1]]), None)
    channels.see("a", torch.tensor([[[2.0, 2, -2, 2]]]), None)
    assert channels.outliers(8) == {"a": {"largest": 30.0, "median": 2.0, "outliers": 1}}
