"""Behind convert, verify trusts what convert's witness saw in memory, and nothing else."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.checkpoints import shards
from quantize.checkpoints.reader import Checkpoint, TensorInfo
from quantize.checkpoints.targets import plan_targets
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.recipe.sections import Recipe
from quantize.runs.folder import RunDir
from quantize.runs.manifest import checksums
from quantize.stages.convert.convert import convert, quantized_config
from quantize.stages.device import PIECE_BYTES
from quantize.stages.verify import verify_weights
from quantize.stages.verify import witness as witness_module
from quantize.stages.verify.decompression import Decompressor
from quantize.stages.verify.verify import VerificationResult, verify
from quantize.stages.verify.witness import BEHIND_CONVERT, Witness, recall
from tests.support.conversions import recipe_for, write_input_scales
from tests.support.tiny import EXPERTS

LAYER = "model.decoder.layers.2."
EXPERT = f"{LAYER}experts.1."
SHARD = "model.safetensors"


class Run:
    """A run folder of the tiny model: what `quantize run` does of convert and verify."""

    def __init__(self, folder: Path, source: Path, recipe: Recipe) -> None:
        self.folder, self.recipe, self.source = RunDir(folder), recipe, Checkpoint.open(source)
        self.targets = plan_targets(self.source.tensors, recipe.quantization)

    def convert(self, **options: Any) -> None:
        self.folder.calibration.mkdir(parents=True)
        scales = self.folder.calibration / "input_scales.safetensors"
        write_input_scales(scales, self.targets)
        config = quantized_config(self.source.config, self.targets, self.recipe)
        seen = Witness(self.source, config, self.recipe)
        convert(
            self.source, self.targets, self.folder.checkpoint, recipe=self.recipe,
            input_scales=scales, record=self.folder.conversion_json, look=seen.check, **options,
        )  # fmt: skip
        seen.write(self.targets, self.folder)

    def verify(self, **options: Any) -> VerificationResult:
        artifact = Checkpoint.open(self.folder.checkpoint)
        return verify(artifact, self.source, self.targets, self.recipe, self.folder, **options)

    def copied(self, folder: Path) -> "Run":
        shutil.copytree(self.folder.path, folder)
        return Run(folder, self.source.folder, self.recipe)

    def blame_the_writer(self) -> None:
        """Let convert's records be of the bytes on disk: its writer hashed what it wrote."""
        files = checksums(Checkpoint.open(self.folder.checkpoint))
        write_json(self.folder.conversion_json, {"files": files})
        found = read_json(self.folder.witness_json)
        found["of"] = witness_module._identity(self.folder, self.source, self.recipe)
        write_json(self.folder.witness_json, found)


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("witness") / "run", tiny_checkpoint, recipe_for("NVFP4"))
    run.convert()
    return run


@pytest.fixture
def run(whole: Run, tmp_path: Path) -> Run:
    return whole.copied(tmp_path / "run")


def test_both_forms_find_the_same(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    full, short = run.verify(full=True), run.verify()
    assert full.passed, full.checks
    assert short.passed, short.checks
    assert short.relative_error == full.relative_error
    assert {name: short.checks[name] for name in full.checks} == full.checks
    assert short.checks.keys() - full.checks.keys() == set(BEHIND_CONVERT)
    parts = len(read_json(run.folder.witness_json)["digests"])
    assert short.checks["as encoded"].looked_at == parts
    assert parts / 20 <= short.checks["read back"].looked_at < parts / 10
    assert capsys.readouterr().err.count("is compared with") == 1  # the full form says why


def test_only_a_sample_of_the_source_is_read_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    read_rows = Checkpoint.read_rows

    def noting(self: Checkpoint, name: str, *rows: int, **named: Any) -> torch.Tensor:
        if self.folder == run.source.folder:
            read.append(name)
        return read_rows(self, name, *rows, **named)

    monkeypatch.setattr(Checkpoint, "read_rows", noting)
    monkeypatch.setattr(Decompressor, "weight", None)  # nor is compressed-tensors imported again
    check = run.verify().checks["read back"]
    assert len(read) == check.looked_at < len(run.targets) / 10
    first = list(read)
    run.verify()
    assert sorted(read) == sorted(first * 2)  # the sample is seeded


# What a writer may do to bytes that were right in memory: the file changes, its headers do not.

Fault = Callable[[bytearray, dict[str, TensorInfo]], None]


def exchanged(a: str, b: str) -> Fault:
    """Write two tensors each at the other's place."""

    def fault(data: bytearray, at: dict[str, TensorInfo]) -> None:
        first, second = (slice(at[name].begin, at[name].end) for name in (a, b))
        data[first], data[second] = data[second], data[first]

    return fault


def copied(a: str, b: str) -> Fault:
    """Write the bytes of all tensors whose names begin with `a` for those of `b` too."""

    def fault(data: bytearray, at: dict[str, TensorInfo]) -> None:
        for name in [name for name in at if name.startswith(a)]:
            other = at[b + name.removeprefix(a)]
            data[other.begin : other.end] = data[at[name].begin : at[name].end]

    return fault


def cut(data: bytearray, at: dict[str, TensorInfo]) -> None:
    """End the last piece early; its header ends there too, or the file could not be opened."""
    data[-1:] = b"\0"


def scale_of_the_row_before(data: bytearray, at: dict[str, TensorInfo]) -> None:
    scale = at[f"{EXPERT}up_proj.weight_scale"]
    row = scale.nbytes // scale.shape[0]
    data[scale.begin + row : scale.end] = data[scale.begin : scale.end - row]


def stale(data: bytearray, at: dict[str, TensorInfo]) -> None:
    """Leave 64 bytes of what an earlier try with other scales had written."""
    codes = at[f"{EXPERT}down_proj.weight_packed"]
    data[codes.begin : codes.begin + 64] = bytes(64)


def nibbles(data: bytearray, at: dict[str, TensorInfo]) -> None:
    """Exchange the halves of one byte's pair of codes, so that no count or sum changes."""
    codes = at[f"{LAYER}mlp.up_proj.weight_packed"]
    place = next(i for i in range(codes.begin, codes.end) if data[i] >> 4 != data[i] & 15)
    data[place] = data[place] >> 4 | (data[place] & 15) << 4


def global_scale_lost(data: bytearray, at: dict[str, TensorInfo]) -> None:
    scale = at[f"{LAYER}self_attn.o_proj.weight_global_scale"]
    data[scale.begin : scale.end] = bytes(4)


def kept_bit(data: bytearray, at: dict[str, TensorInfo]) -> None:
    data[at["model.decoder.embed_tokens.weight"].begin] ^= 1


WRITER: dict[str, Fault] = {
    "a tensor at another's offset": exchanged(
        f"{LAYER}mlp.gate_proj.weight_packed", f"{LAYER}mlp.up_proj.weight_packed"
    ),
    "bytes of a neighbour expert": copied(f"{LAYER}experts.2.", EXPERT),
    "a piece written twice and one skipped": copied(
        f"{LAYER}experts.0.down_proj", f"{EXPERT}down_proj"
    ),
    "the last byte lost": cut,
    "the scale of the row before": scale_of_the_row_before,
    "stale bytes": stale,
    "nibbles exchanged": nibbles,
    "a global scale lost": global_scale_lost,
    "a bit of a kept weight": kept_bit,
}


@pytest.mark.parametrize("fault", WRITER.values(), ids=WRITER)
def test_a_writer_s_fault_has_another_digest(fault: Fault, run: Run) -> None:
    """Its own checksums agree with it, and no value need look wrong."""
    path, made = run.folder.checkpoint / SHARD, Checkpoint.open(run.folder.checkpoint)
    data = bytearray(path.read_bytes())
    before = bytes(data)
    fault(data, made.tensors)
    assert len(data) == len(before)
    assert data != before
    path.write_bytes(data)
    run.blame_the_writer()
    found = run.verify()
    assert found.checks["unchanged"].passed
    assert not found.passed
    assert "not the bytes that were encoded" in found.checks["as encoded"].faults[0]


def test_a_fault_names_the_rows_and_one_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness_module, "SHARE", 1)
    path, made = run.folder.checkpoint / SHARD, Checkpoint.open(run.folder.checkpoint)
    data = bytearray(path.read_bytes())
    codes = made.tensors[
        f"{EXPERT}down_proj.weight_packed"
    ]  # the expert is dead, and far from BF16's
    data[codes.begin : codes.end] = bytes(codes.nbytes)
    path.write_bytes(data)
    run.blame_the_writer()
    whole, found = run.verify(full=True), run.verify()
    faults = [fault for check in whole.checks.values() for fault in check.faults]
    assert len(faults) > 1
    where = f"{LAYER}experts.down_proj, rows 0 to {EXPERTS - 1}: "
    assert found.checks["as encoded"].faults == [f"{where}not the bytes that were encoded"]
    assert found.checks["read back"].faults == [where + faults[0]]


def test_a_file_that_changed_after_convert(run: Run) -> None:
    path = run.folder.checkpoint / SHARD
    data = bytearray(path.read_bytes())
    kept_bit(data, Checkpoint.open(run.folder.checkpoint).tensors)
    path.write_bytes(data)
    found = run.verify()
    assert found.checks["unchanged"].faults == [
        f"{SHARD} is not what convert wrote; `quantize convert RUN` writes it again"
    ]
    assert found.checks["as encoded"].faults


def test_blocks_in_another_order(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer itself takes one expert's block twice and skips the next, which is as long."""
    in_order = shards._in_order

    def twice(*given: Any) -> Any:
        blocks = list(in_order(*given))
        sizes = [len(block) for block in blocks]
        at = next(i for i, size in enumerate(sizes) if i and size == sizes[i - 1] > 1000)
        blocks[at] = blocks[at - 1]
        return iter(blocks)

    experts = Checkpoint.open(tiny_checkpoint).tensors[f"{LAYER}experts.down_proj"]
    monkeypatch.setitem(PIECE_BYTES, "cpu", experts.nbytes // experts.shape[0])
    monkeypatch.setattr(shards, "_in_order", twice)
    run = Run(tmp_path / "run", tiny_checkpoint, recipe_for("NVFP4A16"))
    run.convert()
    found = run.verify()
    assert [check.name for check in found.checks.values() if not check.passed] == ["as encoded"]
    assert len(found.checks["as encoded"].faults) == 1


OTHER = f"{LAYER}experts.3.down_proj."


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("layout", [('"dtype":"F8_E4M3"', '"dtype":"F8_E5M2"')]),
        (
            "as encoded",
            [(f"{EXPERT}down_proj.", "@"), (OTHER, f"{EXPERT}down_proj."), ("@", OTHER)],
        ),
    ],
    ids=["a wrong dtype", "names exchanged"],
)
def test_a_header_that_a_writer_gets_wrong(
    check: str, changes: list[tuple[str, str]], run: Run
) -> None:
    path = run.folder.checkpoint / SHARD
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].decode()
    for a, b in changes:
        header = header.replace(a, b)
    path.write_bytes(data[:8] + header.encode() + data[end:])
    run.blame_the_writer()
    assert run.verify().checks[check].faults


@pytest.mark.parametrize("count", [1, 2])
def test_a_file_of_another_length_or_another_s_header_cannot_be_opened(
    tiny_checkpoint: Path, tmp_path: Path, count: int
) -> None:
    run = Run(tmp_path / "run", tiny_checkpoint, recipe_for("NVFP4A16"))
    size = sum(target.bytes_after for target in run.targets)
    run.convert(max_shard_bytes=size / count)
    files = sorted(run.folder.checkpoint.glob("*.safetensors"))
    data = [file.read_bytes() for file in files]
    ends = [8 + int.from_bytes(content[:8], "little") for content in data]
    files[0].write_bytes(data[-1][: ends[-1]] + data[0][ends[0] : -1 if count == 1 else None])
    with pytest.raises(InputError, match="truncated or overlong"):
        run.verify()


# What an encoder may get wrong of one expert: in codes, block scales, global and input scales, each
# [experts, bytes].


def neighbour(codes: torch.Tensor, *scales: torch.Tensor) -> str:
    codes[1] = codes[2]
    return "error"


def row_before(codes: torch.Tensor, scale: torch.Tensor, *more: torch.Tensor) -> str:
    scale[1, 3:] = scale[1, :-3].clone()
    return "error"


def other_nibbles(codes: torch.Tensor, *scales: torch.Tensor) -> str:
    codes[1] = codes[1] >> 4 | (codes[1] & 15) << 4
    return "error"


def lost_global_scale(codes: torch.Tensor, scale: torch.Tensor, *more: torch.Tensor) -> str:
    more[0][1] = 0
    return "scales"


def dead(codes: torch.Tensor, *scales: torch.Tensor) -> str:
    codes[1] = 0
    return "experts"


@pytest.mark.parametrize("fault", [neighbour, row_before, other_nibbles, lost_global_scale, dead])
def test_one_expert_that_is_encoded_wrong_is_seen_in_memory(
    fault: Callable[..., str], run: Run
) -> None:
    seen = Witness(run.source, Checkpoint.open(run.folder.checkpoint).config, run.recipe)
    target = next(t for t in run.targets if t.name == f"{LAYER}experts.down_proj")
    part = target, 0, target.shape[0]
    encoded = seen._comparer.read(Checkpoint.open(run.folder.checkpoint), part)
    sizes = [spec.nbytes for spec in verify_weights._specs(target, target.scheme).values()]
    check = fault(*encoded.view(target.shape[0], -1).split(sizes, dim=1))
    seen.check(*part, encoded)
    ((_, found, _),) = seen._checked.values()
    assert found.checks[check].faults


def remove(run: Run, patch: pytest.MonkeyPatch) -> str:
    run.folder.witness_json.unlink()
    return "is missing"


def damage(run: Run, patch: pytest.MonkeyPatch) -> str:
    run.folder.witness_json.write_text('{"of": 3}')
    return "is damaged"


def interrupt(run: Run, patch: pytest.MonkeyPatch) -> str:
    found = read_json(run.folder.witness_json)
    del found["digests"][f"{LAYER}experts.down_proj"]
    write_json(run.folder.witness_json, found)
    return f"lacks a part of {LAYER}experts.down_proj: convert was interrupted"


def hole(run: Run, patch: pytest.MonkeyPatch) -> str:
    """A part in the middle is missing, and the first and last are there."""
    return _parts_of_experts(run, [(0, 2, "a"), (3, EXPERTS, "b")])


def overlap(run: Run, patch: pytest.MonkeyPatch) -> str:
    return _parts_of_experts(run, [(0, 3, "a"), (2, EXPERTS, "b")])


def late(run: Run, patch: pytest.MonkeyPatch) -> str:
    return _parts_of_experts(run, [(1, EXPERTS, "a")])


def early(run: Run, patch: pytest.MonkeyPatch) -> str:
    return _parts_of_experts(run, [(0, EXPERTS - 1, "a")])


def _parts_of_experts(run: Run, parts: list[tuple[int, int, str]]) -> str:
    found = read_json(run.folder.witness_json)
    found["digests"][f"{LAYER}experts.down_proj"] = parts
    write_json(run.folder.witness_json, found)
    return f"lacks a part of {LAYER}experts.down_proj: convert was interrupted"


def edit_code(run: Run, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(witness_module, "code_digest", lambda: "other")
    return "is of another code"


def change_recipe(run: Run, patch: pytest.MonkeyPatch) -> str:
    limits = {"max_relative_error": {"NVFP4": 0.2}}
    run.recipe = Recipe.model_validate(run.recipe.model_dump() | {"verification": limits})
    return "is of another recipe"


def change_source(run: Run, patch: pytest.MonkeyPatch) -> str:
    source = run.folder.path.with_name("bf16")
    shutil.copytree(run.source.folder, source)
    run.source = Checkpoint.open(source)
    assert not isinstance(recall(run.folder, run.source, run.targets, run.recipe), str)  # a copy
    path, before = source / SHARD, (source / SHARD).stat()
    content = bytearray(path.read_bytes())
    content[run.source.tensors[f"{LAYER}experts.down_proj"].begin] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return "is of another source"


def convert_again(run: Run, patch: pytest.MonkeyPatch) -> str:
    files = read_json(run.folder.conversion_json)["files"]
    write_json(run.folder.conversion_json, {"files": files | {"LICENSE": "0"}})
    (run.folder.checkpoint / "LICENSE").write_text("")
    return "is of another checkpoint"


DISTRUSTED = [
    remove, damage, interrupt, hole, overlap, late, early, edit_code, change_recipe, change_source,
    convert_again,
]  # fmt: skip


@pytest.mark.parametrize("change", DISTRUSTED)
def test_a_record_that_says_nothing_of_the_checkpoint(
    change: Callable[[Run, pytest.MonkeyPatch], str],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = change(run, monkeypatch)
    checks = run.verify().checks
    assert f"verify: conversion.checks.json {why}: all of it is compared" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not set(BEHIND_CONVERT) & checks.keys()
    assert all(check.passed for check in checks.values() if check.name != "unchanged")
