"""Shards: what is finished stays, what is not is written again, and a failing disk is explained."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantize.checkpoints.shards
from quantize.checkpoints.layout import TensorSpec
from quantize.checkpoints.reader import DTYPES, Checkpoint, read_header
from quantize.checkpoints.shards import (
    WORKERS_A_FILE,
    Piece,
    Shard,
    plan_shards,
    state_path,
    write_pieces,
    write_shards,
)
from quantize.errors import InputError, ResourceError
from tests.support.conversions import recipe_for, run
from tests.support.synthetic import synthetic_config, write_synthetic

LENGTH = 1000


class Recorder:
    """Pieces of LENGTH bytes, each with a tensor of its own, that count how often they are made."""

    def __init__(self, count: int) -> None:
        self.made: Counter[int] = Counter()
        self.fails_at: int | None = None
        self.pieces = [
            Piece({f"t{i:02}": TensorSpec("U8", (LENGTH,))}, (partial(self._make, i),))
            for i in range(count)
        ]

    def _make(self, i: int) -> torch.Tensor:
        self.made[i] += 1
        if i == self.fails_at:
            raise ResourceError("the disk under piece gave up")
        return torch.full((LENGTH,), i, dtype=torch.uint8)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_a_shard_holds_what_safetensors_reads(tmp_path: Path):
    pieces = [
        Piece(
            {"b": TensorSpec("BF16", (2, 3)), "a": TensorSpec("F32", (1,))},
            (
                lambda: torch.arange(6).bfloat16().view(torch.uint8),
                lambda: torch.tensor([2.5]).view(torch.uint8),
            ),
        )
    ]
    hashes = write_shards(plan_shards(pieces, 5e9), tmp_path, "x")
    assert list(hashes) == ["model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["b"], torch.arange(6).bfloat16().view(2, 3))
    assert tensors["a"].tolist() == [2.5]
    header = (tmp_path / "model.safetensors").read_bytes()[8:-16]
    compact = json.dumps(json.loads(header), separators=(",", ":")).encode()
    assert header == compact + b" " * (-len(compact) % 8)


def test_limits_order_and_odd_sizes():
    odd = Piece({"scalar": TensorSpec("BF16", (1,))}, ())
    pieces = [odd, *Recorder(7).pieces]
    shards = plan_shards(pieces, 3 * LENGTH)
    assert [len(s.pieces) for s in shards] == [3, 3, 2]
    assert shards[-1].pieces[-1] is odd
    assert [len(s.pieces) for s in plan_shards(pieces, 10)] == [1] * 8
    with pytest.raises(InputError, match="'scalar' would be written twice"):
        plan_shards([odd, odd], 5e9)


def test_progress_ends_with_all_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recorder = Recorder(12)
    write_shards(plan_shards(recorder.pieces, 3 * LENGTH), tmp_path, "x")
    blocks = sum(recorder.made.values())
    assert f"convert: {blocks} blocks done in" in capsys.readouterr().err


def test_files_written_side_by_side_are_the_same(tmp_path: Path):
    """Three files at the same time; after an error what was finished stays, and nothing hangs."""
    recorder = Recorder(30)
    shards = plan_shards(recorder.pieces, 4 * LENGTH)
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    hashes = write_shards(shards, alone, "x", workers=1)
    recorder.fails_at, recorder.made = 17, Counter()  # in the fifth of eight files
    with pytest.raises(ResourceError, match="gave up"):
        write_shards(shards, together, "x", workers=3 * WORKERS_A_FILE)
    kept = json.loads(state_path(together).read_text())["finished"]
    assert kept.items() <= hashes.items()
    made = sum(recorder.made.values())
    recorder.fails_at, recorder.made = None, Counter()
    assert write_shards(shards, together, "x", workers=3 * WORKERS_A_FILE) == hashes
    assert contents(together) == contents(alone)
    assert made + sum(recorder.made.values()) < 2 * 30  # finished ones were not made again


def test_a_restart_makes_only_the_unfinished_shard(tmp_path: Path):
    recorder = Recorder(12)
    shards = plan_shards(recorder.pieces, 3 * LENGTH)
    recorder.fails_at = 8
    with pytest.raises(ResourceError, match="gave up"):
        write_shards(shards, tmp_path, "x", workers=1)
    assert list(json.loads(state_path(tmp_path).read_text())["finished"]) == [
        s.name for s in shards[:2]
    ]
    recorder.fails_at, recorder.made = None, Counter()
    resumed = write_shards(shards, tmp_path, "x", workers=1)
    assert sorted(recorder.made) == list(range(6, 12))

    fresh = tmp_path.parent / "fresh"
    fresh.mkdir()
    assert write_shards(shards, fresh, "x") == resumed
    assert contents(fresh) == contents(tmp_path)


def test_a_finished_shard_that_changed_is_written_again(tmp_path: Path):
    recorder = Recorder(6)
    shards = plan_shards(recorder.pieces, 2 * LENGTH)
    write_shards(shards, tmp_path, "x")
    good = contents(tmp_path)
    victim = tmp_path / shards[1].name
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x07")
    recorder.made.clear()
    write_shards(shards, tmp_path, "x")
    assert sorted(recorder.made) == [2, 3]
    assert contents(tmp_path) == good


def test_a_stretch_that_changed_is_written_again_with_those_behind_it(tmp_path: Path):
    """Stretches of one file: what lies before the change stays."""
    recorder = Recorder(6)
    shards = [
        Shard(
            "one",
            b"" if i else b"head",
            tuple(recorder.pieces[i : i + 2]),
            LENGTH * i + 4 * (i > 0),
        )
        for i in (0, 2, 4)
    ]
    write_shards(shards, tmp_path, "x")
    good = contents(tmp_path)
    assert list(good) == ["one"]  # no index of a single file
    damaged = bytearray(good["one"])
    damaged[4 + 3 * LENGTH] ^= 1
    (tmp_path / "one").write_bytes(damaged)
    recorder.made.clear()
    write_shards(shards, tmp_path, "x")
    assert sorted(recorder.made) == [2, 3, 4, 5]
    assert contents(tmp_path) == good


def test_two_files_have_an_index(tmp_path: Path):
    shards = plan_shards(Recorder(4).pieces, 2 * LENGTH)
    write_shards(shards, tmp_path, "x")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * LENGTH}
    places = {f"t{i:02}": f"model-{1 + i // 2:05}-of-00002.safetensors" for i in range(4)}
    assert index["weight_map"] == places


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"identity": 1}'])
def test_a_damaged_record_starts_over(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
):
    recorder = Recorder(4)
    shards = plan_shards(recorder.pieces, 2 * LENGTH)
    write_shards(shards, tmp_path, "x")
    state_path(tmp_path).write_text(damage)
    recorder.made.clear()
    write_shards(shards, tmp_path, "x")
    assert len(recorder.made) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "belongs to another source or plan; starting over" in said


def test_another_source_starts_over_and_leaves_nothing_behind(tmp_path: Path):
    write_shards(plan_shards(Recorder(9).pieces, LENGTH), tmp_path, "x")
    (tmp_path / "folder").mkdir()
    recorder = Recorder(2)
    write_shards(plan_shards(recorder.pieces, 5e9), tmp_path, "y")
    assert len(recorder.made) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_a_record_must_agree_with(tmp_path: Path):
    """The same file names with another source, or with another header, are written again."""
    recorder = Recorder(4)
    shards = plan_shards(recorder.pieces, 2 * LENGTH)
    write_shards(shards, tmp_path, "x")
    write_shards(shards, tmp_path, "x")
    assert set(recorder.made.values()) == {1}
    write_shards(shards, tmp_path, "y")
    assert set(recorder.made.values()) == {2}
    other = [
        Piece({name: TensorSpec("I8", (LENGTH,)) for name in piece.layout}, piece.tasks)
        for piece in recorder.pieces
    ]
    write_shards(plan_shards(other, 2 * LENGTH), tmp_path, "y")
    assert set(recorder.made.values()) == {3}
    assert load_file(tmp_path / shards[0].name)["t00"].dtype == torch.int8


@pytest.mark.parametrize("workers", [3, 2 * WORKERS_A_FILE])
def test_few_blocks_exist_at_a_time(tmp_path: Path, workers: int):
    alive, most = 0, 0

    class Block:
        pass

    recorder = Recorder(64)
    written = 0
    make = recorder._make
    original = quantize.checkpoints.shards.bytes_of

    def counting(i: int) -> torch.Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return make(i)

    def consumed(block: torch.Tensor) -> memoryview:
        nonlocal alive, written
        alive -= 1
        written += 1
        time.sleep(0.002)  # a slow disk
        return original(block)

    pieces = [Piece(p.layout, (partial(counting, i),)) for i, p in enumerate(recorder.pieces)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize.checkpoints.shards, "bytes_of", consumed)
        write_shards(plan_shards(pieces, 8 * LENGTH), tmp_path, "x", workers=workers)
    assert written == 64
    assert most <= 2 * workers + workers // WORKERS_A_FILE + 1


def test_syncs_on_the_way_and_tells_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorder, synced = Recorder(8), 0

    def sync(path: Path) -> None:
        nonlocal synced
        synced += 1
        if synced == 3:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(quantize.checkpoints.shards, "WRITE_BLOCK", 300)
    monkeypatch.setattr(quantize.checkpoints.shards, "SYNC_BYTES", 2 * LENGTH)
    monkeypatch.setattr(quantize.checkpoints.shards, "sync_file", sync)
    shards = plan_shards(recorder.pieces, 5e9)
    with pytest.raises(ResourceError, match=r"cannot be written .*Input/output error"):
        write_shards(shards, tmp_path, "x")
    assert not state_path(tmp_path).exists()
    write_shards(shards, tmp_path, "x")
    assert synced == 3 + 5  # after 2, 4, 6 and 8 blocks, and when the shard is finished
    tensors = load_file(tmp_path / shards[0].name)
    assert [tensors[f"t{i:02}"].tolist() for i in range(8)] == [[i] * LENGTH for i in range(8)]


class FullDisk:
    """Makes the n-th write of a shard fail as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.left = after
        original = quantize.checkpoints.shards.bytes_of

        def failing(block: torch.Tensor) -> memoryview:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(block)

        monkeypatch.setattr(quantize.checkpoints.shards, "bytes_of", failing)


def test_full_disk_in_the_middle_is_explained_and_resumed(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = recipe_for("NVFP4")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        FullDisk(patch, after=60)
        with pytest.raises(ResourceError, match=r"the disk is full.*--resume") as caught:
            run(tiny_checkpoint, out, recipe, max_shard_bytes=100_000)
    assert caught.value.exit_code == 3
    assert not out.exists()
    finished = json.loads(state_path(tmp_path / "out.partial").read_text())["finished"]
    assert finished
    times = {name: (tmp_path / "out.partial" / name).stat().st_mtime_ns for name in finished}
    run(tiny_checkpoint, out, recipe, max_shard_bytes=100_000)
    assert times == {name: (out / name).stat().st_mtime_ns for name in finished}
    run(tiny_checkpoint, tmp_path / "whole", recipe, max_shard_bytes=100_000)
    assert contents(out) == contents(tmp_path / "whole")


def test_full_small_disk(tiny_checkpoint: Path, tmp_path: Path):
    """A real full disk: a tmpfs of 256 KiB, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs more rights")
    try:
        free = shutil.disk_usage(disk)
        with pytest.MonkeyPatch.context() as patch:  # as if another program filled the disk later
            patch.setattr(shutil, "disk_usage", lambda _: free._replace(free=1 << 40))
            with pytest.raises(ResourceError, match="the disk is full"):
                run(tiny_checkpoint, disk / "out", recipe_for("FP8_DYNAMIC"))
        assert not (disk / "out").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_read_error_in_the_middle_is_explained_and_resumed(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = recipe_for("FP8_DYNAMIC")
    left = 40
    read = os.preadv

    def failing(file: int, rooms: list[memoryview], begin: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, rooms, begin)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(
            ResourceError, match=r"model.safetensors: reading tensor 'model\..*Input/output"
        ):
            run(tiny_checkpoint, tmp_path / "out", recipe, max_shard_bytes=100_000)
    assert not (tmp_path / "out").exists()
    run(tiny_checkpoint, tmp_path / "out", recipe, max_shard_bytes=100_000)
    run(tiny_checkpoint, tmp_path / "whole", recipe, max_shard_bytes=100_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_shrinks_is_named(tiny_checkpoint: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    source = Checkpoint.open(folder)
    last = max(source.tensors.values(), key=lambda info: info.end)
    os.truncate(last.file, last.end - 2)
    with pytest.raises(InputError, match=f"ends inside tensor '{last.name}'"):
        source.read(last.name)


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a forked child, SIGKILL it after `seconds`; return whether it was still busy."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    busy = os.waitpid(child, os.WNOHANG) == (0, 0)
    if busy:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return busy


def kill_and_resume(source: Path, folder: Path, kills: int, seed: int, least: int) -> None:
    """Kill conversions at random moments: `kills` of them, `least` with shards that are finished.

    A busy machine makes the moments come early, so there may be eight times as many.
    """
    recipe = recipe_for("NVFP4")
    whole, out = folder / "whole", folder / "out"
    size = Checkpoint.open(source).nbytes / 40
    work = partial(run, source, out, recipe, max_shard_bytes=size)
    started = time.monotonic()
    run(source, whole, recipe, max_shard_bytes=size)
    duration = time.monotonic() - started
    expected, rng, hits, kept = contents(whole), random.Random(seed), 0, 0
    while hits < kills or (kept < least and hits < 8 * kills):
        hits += killed_after(rng.uniform(0, 1.1 * duration), work)
        if out.exists():
            assert contents(out) == expected
            shutil.rmtree(out)
        else:
            state = state_path(folder / "out.partial")
            kept += state.exists() and bool(json.loads(state.read_text())["finished"])
            if rng.random() < 0.5:
                work()
                assert contents(out) == expected
                shutil.rmtree(out)
    work()
    assert contents(out) == expected
    assert sorted(p.name for p in folder.iterdir()) == ["input_scales.safetensors", "out", "whole"]
    assert kept >= least


def test_sigkill_at_any_moment_and_resume_gives_the_same_bytes(
    tiny_checkpoint: Path, tmp_path: Path
):
    kill_and_resume(tiny_checkpoint, tmp_path, kills=5, seed=0, least=1)


@pytest.mark.slow
def test_25_sigkills_on_real_layer_shapes(tmp_path: Path):
    source = write_synthetic(tmp_path / "bf16", synthetic_config(2, 8, 1, 4096))
    folder = tmp_path / "kills"
    folder.mkdir()
    kill_and_resume(source, folder, kills=25, seed=1, least=5)


def test_pieces_of_a_file_are_aligned(tmp_path: Path) -> None:
    """Three bytes come first in memory, and last in the file."""
    given = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.rand(2, 1),
        "c": torch.rand(3).half(),
    }
    names = {torch.uint8: "U8", torch.float32: "F32", torch.float16: "F16"}
    pieces = [
        Piece(
            {name: TensorSpec(names[own.dtype], tuple(own.shape))},
            (partial(torch.Tensor.view, own.flatten(), torch.uint8),),
        )
        for name, own in given.items()
    ]  # fmt: skip
    write_pieces(tmp_path / "one.safetensors", pieces)
    found = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(found[name], own) for name, own in given.items())
    for info in read_header(tmp_path / "one.safetensors").values():
        assert info.begin % DTYPES[info.dtype].itemsize == 0
