"""Reading checkpoints: by range, through the Hub's cache, and which folder a name stands for."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import httpx
from safetensors.torch import load_file, save_file

from quantize.checkpoints.reader import Checkpoint, known_config, read_header, resolve
from quantize.errors import InputError, ResourceError

EXPERTS = "model.decoder.layers.0.experts.down_proj"


def test_reads_what_safetensors_reads(tiny_checkpoint: Path):
    checkpoint = Checkpoint.open(tiny_checkpoint)
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        mine = checkpoint.read(name)
        assert mine.dtype == tensor.dtype
        assert torch.equal(mine, tensor)
    assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())
    assert not checkpoint.is_quantized


def test_reads_rows_alone(tiny_checkpoint: Path):
    checkpoint = Checkpoint.open(tiny_checkpoint)
    whole = checkpoint.read(EXPERTS)
    assert torch.equal(checkpoint.read_rows(EXPERTS, 2, 5), whole[2:5])
    assert checkpoint.read_rows(EXPERTS, 3, 3).shape == (0, *whole.shape[1:])
    with pytest.raises(IndexError, match=r"rows 5:9 of .*, which has 8"):
        checkpoint.read_rows(EXPERTS, 5, 9)
    with pytest.raises(InputError, match="'nothing' is missing"):
        checkpoint.read("nothing")


def test_neighbours_in_a_file_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: torch.full((3, 2), i).bfloat16() for i, name in enumerate("abcdef")}
    for name, own in (("x", "abcd"), ("y", "ef")):
        save_file({key: tensors[key] for key in own}, tmp_path / f"{name}.safetensors")
    headers = [read_header(tmp_path / f"{name}.safetensors") for name in "xy"]
    reader = Checkpoint(tmp_path, {}, headers[0] | headers[1])
    assert {"a", "b", "e"} < reader.tensors.keys()
    calls: list[int] = []
    preadv = os.preadv

    def noting(file: int, rooms: list[memoryview], begin: int) -> int:
        calls.append(len(rooms[0]))
        return preadv(
            file, [room[:7] for room in rooms], begin
        )  # as a call of over 2 GiB ends early

    monkeypatch.setattr(os, "preadv", noting)
    order = ["a", "b", "d", "e", "f", "c", "b"]
    assert torch.equal(reader.read_stacked(order), torch.stack([tensors[name] for name in order]))
    sizes = [24, 12, 24, 12, 12]  # a b, d, e f, c, b
    assert calls == [left for size in sizes for left in range(size, 0, -7)]
    os.truncate(headers[0]["c"].file, headers[0]["c"].end - 1)
    with pytest.raises(InputError, match=r"x\.safetensors: ends inside tensor 'c'"):
        reader.read_stacked(["a", "b", "c"])


def test_every_dtype_survives(tmp_path: Path):
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "f8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "u8": torch.arange(7, dtype=torch.uint8),
        "i64": torch.tensor([-(2**62)]),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    reader = Checkpoint(tmp_path, {}, read_header(tmp_path / "model.safetensors"))
    for name, tensor in tensors.items():
        mine = reader.read(name)
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(mine.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_a_file_that_changes_after_its_header_was_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"first": torch.ones(4), "second": torch.ones(4)}, file)
    reader = Checkpoint(tmp_path, {}, read_header(file))
    file.write_bytes(file.read_bytes()[:-1])
    assert reader.read("first").tolist() == [1.0] * 4
    with pytest.raises(InputError, match="ends inside tensor 'second'; download"):
        reader.read("second")
    file.unlink()
    with pytest.raises(ResourceError, match=r"reading tensor 'first' failed \(No such file"):
        reader.read("first")


def test_links_of_the_hubs_cache_are_followed_and_no_others(tiny_checkpoint: Path, tmp_path: Path):
    blobs, snapshot = tmp_path / "models--o--n/blobs", tmp_path / "models--o--n/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(tiny_checkpoint.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert len(Checkpoint.open(snapshot).tensors) == len(Checkpoint.open(tiny_checkpoint).tensors)

    elsewhere = tmp_path / "elsewhere.safetensors"
    shutil.copyfile(tiny_checkpoint / "model.safetensors", elsewhere)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(elsewhere)
    with pytest.raises(InputError, match=r"leads out of .*name that folder"):
        Checkpoint.open(snapshot)


def test_a_file_is_not_looked_for_on_the_hub(tiny_checkpoint: Path):
    with pytest.raises(InputError, match=r"model\.safetensors: a file; name the folder"):
        resolve(str(tiny_checkpoint / "model.safetensors"))


def test_a_folder_stands_for_itself_and_a_runs_for_its_checkpoint(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    assert resolve(str(tiny_checkpoint)) == tiny_checkpoint
    with pytest.raises(InputError, match=r"no config\.json there; name the folder of a"):
        resolve(str(tmp_path))
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    assert resolve(str(tmp_path)) == tmp_path / "checkpoint"
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    assert resolve(str(tmp_path)) == tmp_path  # a checkpoint that has another one in it


@pytest.mark.parametrize("name", ["no/such/folder", "./missing", "plainword", "org/name;rm"])
def test_neither_folder_nor_hub_id(name: str):
    with pytest.raises(InputError, match="no such folder, and not a Hub id"):
        resolve(name)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (LocalEntryNotFoundError("offline"), ResourceError, "Hub cannot be reached"),
        (
            RepositoryNotFoundError.__new__(RepositoryNotFoundError),
            InputError,
            "no such model or revision",
        ),
        (OSError("no route"), ResourceError, "Hub cannot be reached"),
        (httpx.ReadError("it broke off"), ResourceError, "Hub cannot be reached"),
    ],
)
def test_hub_errors_become_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
):
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=message):
        resolve("org/name")


def test_a_download_asks_for_no_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[str] = []

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name", "abc") == tmp_path
    assert "*.safetensors" in asked
    assert not any(word in pattern for pattern in asked for word in ("bin", "pt", "pkl", "py"))


def test_the_real_models_config_ships_with_quantize():
    config = known_config("google/diffusiongemma-26B-A4B-it")
    assert config is not None
    assert json.dumps(config)
    assert config["text_config"]["num_experts"] == 128
    assert known_config("org/unknown") is None
