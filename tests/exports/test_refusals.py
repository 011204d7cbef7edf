"""What cannot be exported: one clear line that says what and where, and nothing half-written."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize import cli
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError
from quantize.exports.gguf_file import export_gguf
from tests.support.conversions import MIXED, recipe_for, run
from tests.support.exported import copy_bundled

Edit = Callable[[Path], object]


def json_edit(name: str, change: Callable[[Any], object]) -> Edit:
    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text("utf-8"))
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def tensor_edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        change(tensors)
        path.unlink()
        save_file(tensors, path)

    return edit


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data[:-1000])


def removed(*names: str) -> Edit:
    return lambda folder: [(folder / name).unlink() for name in names]


def put(name: str, index: int, value: float) -> Edit:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[index] = value

    return tensor_edit(change)


DOWN = "model.decoder.layers.3.experts.down_proj"
SPLITTER = {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}
FAULTS: dict[str, tuple[Edit, str]] = {
    "another model": (
        json_edit("config.json", lambda c: c.update(model_type="llama")),
        r"config\.json: model_type is 'llama'.*DiffusionGemma only",
    ),
    "no config": (removed("config.json"), r"no config\.json there; name the folder"),
    "a truncated shard": (truncated, r"model\.safetensors: truncated or overlong"),
    "a missing tensor": (
        tensor_edit(lambda t: t.pop("model.decoder.norm.weight")),
        r"tensor 'model\.decoder\.norm\.weight' is missing",
    ),
    "NaN in an expert": (
        put(DOWN, 70000, float("nan")),
        r"tensor 'model\.decoder\.layers\.3\.experts\.down_proj' holds NaN",
    ),
    "infinity in a norm": (
        put("model.decoder.norm.weight", 3, float("inf")),
        r"tensor 'model\.decoder\.norm\.weight' holds NaN or infinity",
    ),
    "no tokenizer": (removed("tokenizer.json"), r"tokenizer\.json: missing; a GGUF file carries"),
    "a tokenizer that is no JSON": (
        lambda folder: (folder / "tokenizer.json").write_text("{")  and None,
        r"tokenizer\.json: not readable as JSON",
    ),
    "a tokenizer without a model": (
        json_edit("tokenizer.json", lambda t: t.pop("model")),
        r"tokenizer\.json: not a tokenizer\.json \(KeyError\('model'\)\)",
    ),
    "a Unigram tokenizer": (
        json_edit("tokenizer.json", lambda t: t["model"].update(type="Unigram")),
        r"its model is 'Unigram'; only BPE",
    ),
    "a tokenizer that splits otherwise": (
        json_edit("tokenizer.json", lambda t: t.update(pre_tokenizer=SPLITTER)),
        r"splits text by 'Sequence', which llama\.cpp has no name for",
    ),
    "a token outside of the embedding": (
        json_edit("tokenizer.json", lambda t: t["model"]["vocab"].update(extra=1024)),
        r"token 'extra' has the id 1024, and the embedding has 1024 rows",
    ),
    "two tokens of one id": (
        json_edit("tokenizer.json", lambda t: t["model"]["vocab"].update(extra=77)),
        r"two of its tokens have the same id",
    ),
    "a merge with a space": (
        json_edit("tokenizer.json", lambda t: t["model"]["merges"].append(["a b", "c"])),
        r"the merge \['a b', 'c'\] has a space",
    ),
    "a BOS that is no token": (
        json_edit("tokenizer_config.json", lambda t: t.update(bos_token="<start>")),
        r"bos_token '<start>' is no token of tokenizer\.json",
    ),
    "no chat template": (removed("chat_template.jinja"), r"no chat template there"),
    "another activation function": (
        json_edit("config.json", lambda c: c["text_config"].update(hidden_activation="silu")),
        r"hidden_activation is 'silu'; only 'gelu_pytorch_tanh' is computed here",
    ),
    "other angles": (
        json_edit(
            "config.json",
            lambda c: c["text_config"]["rope_parameters"]["full_attention"].update(
                rope_type="default"
            ),
        ),
        r"full_attention\.rope_type is 'default'; only 'proportional' is computed here",
    ),
    "a foreign quantization": (
        json_edit("config.json", lambda c: c.update(quantization_config={"quant_method": "awq"})),
        r"quant_method is 'awq'",
    ),
}  # fmt: skip


def complaint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> str:
    """Run `quantize export`, which must refuse with exit code 2; return its one line."""
    monkeypatch.setattr("sys.argv", ["quantize", "export", *map(str, words)])
    assert cli._exit_code() == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return error.splitlines()[-1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_checkpoint_is_refused_in_one_line(
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    edit, expected = FAULTS[fault]
    folder = copy_bundled(tmp_path / "model")
    edit(folder)
    out = tmp_path / "model.gguf"
    line = complaint(monkeypatch, capsys, folder, "--to", "gguf", out)
    assert line.startswith("error: ")
    assert re.search(expected, line), line
    assert not out.exists()


def test_a_bad_place_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    there = tmp_path / "there.gguf"
    there.write_text("mine")
    line = complaint(monkeypatch, capsys, "bundled", "--to", "gguf", there)
    assert "there.gguf: exists already; name another file or remove it" in line
    assert there.read_text() == "mine"
    line = complaint(monkeypatch, capsys, "bundled", "--to", "gguf", tmp_path)
    assert "must end in .gguf; name the file, not its folder" in line
    line = complaint(monkeypatch, capsys, "bundled", "--to", "onnx", tmp_path / "x.onnx")
    assert "'onnx' is not 'gguf'" in line


def test_a_run_without_checkpoint_and_a_gguf_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "manifest.json").write_text("{}")
    line = complaint(monkeypatch, capsys, tmp_path, "--to", "gguf", tmp_path / "a.gguf")
    assert "checkpoint: no config.json there" in line
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    line = complaint(monkeypatch, capsys, file, "--to", "gguf", tmp_path / "a.gguf")
    assert "a file; name the folder that holds it" in line


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC", "mixed"])
def test_a_scheme_that_gguf_cannot_hold_is_refused_by_name(scheme: str, tmp_path: Path):
    run(CHECKPOINT, tmp_path / "model", recipe_for(MIXED if scheme == "mixed" else scheme))
    name = "FP8_DYNAMIC" if scheme == "mixed" else scheme
    with pytest.raises(
        InputError, match=rf"q_proj is {name} \(\d+ Linears .*GGUF cannot hold: it has"
    ):
        export_gguf(Checkpoint.open(tmp_path / "model"), tmp_path / "a.gguf", name="a")


def test_widths_that_no_block_fits_are_refused(nvfp4_artifact: Path, tiny_checkpoint: Path):
    out = nvfp4_artifact.with_name("a.gguf")
    with pytest.raises(
        InputError, match=r"mlp\.down_proj has 96 inputs, and GGUF's NVFP4 blocks hold 64"
    ):
        export_gguf(Checkpoint.open(nvfp4_artifact), out, name="a")
    with pytest.raises(
        InputError, match=r"down_proj has 48 inputs, and GGUF's Q8_0 blocks hold 32"
    ):
        export_gguf(Checkpoint.open(tiny_checkpoint), out, name="a", kept_as="Q8_0")


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused") / "nvfp4"
    run(CHECKPOINT, folder, recipe_for("NVFP4A16"))
    return folder


@pytest.mark.parametrize(
    ("suffix", "value", "expected"),
    [
        ("weight_scale", -1.0, r"up_proj\.weight_scale' has negative or NaN scales"),
        ("weight_scale", float("nan"), r"up_proj\.weight_scale' holds NaN or infinity"),
        ("weight_global_scale", 0.0, r"up_proj\.weight_global_scale' is not above 0"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    suffix: str, value: float, expected: str, nvfp4: Path, tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(nvfp4, folder)
    put(f"model.decoder.layers.1.mlp.up_proj.{suffix}", 0, value)(folder)
    out = tmp_path / "a.gguf"
    with pytest.raises(InputError, match=expected):
        export_gguf(Checkpoint.open(folder), out, name="a")
    assert not out.exists()
