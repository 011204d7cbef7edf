"""Digests cover every byte at any size; a remembered one holds while its file is the same."""

import hashlib
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantize.checkpoints.reader import Checkpoint
from quantize.runs import digests, manifest
from quantize.runs.digests import (
    hashed,
    identities,
    remember,
    sampled,
    sha256_of,
    sha256_of_all,
    xxh3_of,
)
from quantize.runs.manifest import fingerprint, is_sampled_fingerprint

UNSEEN = 70_000  # a byte between two samples of a file of 5 MiB


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A memory of the test's own, and sets of files that count as large."""
    monkeypatch.setattr(digests, "REMEMBERED", tmp_path / "cache" / "digests.json")
    monkeypatch.setattr(digests, "TOGETHER", 1 << 20)
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that was written long ago."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(5 << 20))
    return path


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SETTLED", 0)


def flip(path: Path, at: int = UNSEEN) -> None:
    """Change a byte in place; size and time of change stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read for a sha256."""
    seen: list[Path] = []

    def noted(path: Path) -> str:
        seen.append(path)
        return sha256_of(path)

    monkeypatch.setattr(digests, "sha256_of", noted)
    return seen


def test_of_processes_that_ask_at_once_one_reads(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes of torchrun would each read a model of 52 GB."""
    settled(monkeypatch)
    began, read = threading.Barrier(2, timeout=60), list[Path]()

    def slowly(path: Path) -> str:
        read.append(path)
        time.sleep(0.2)
        return sha256_of(path)

    monkeypatch.setattr(digests, "sha256_of", slowly)
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda _: (began.wait(), sha256_of_all([large]))[1], range(2))
        assert list(both) == [[sha256_of(large)]] * 2
    assert read == [large]


def test_a_byte_that_no_sample_held_is_seen(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    files = {"large": large}
    before, samples = hashed(files), sampled(files)
    assert hashed(files) == before
    flip(large)
    assert sampled(files) == samples
    assert hashed(files) != before


def test_names_sizes_and_small_files_count_too(large: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x" * 100)
    seen = {hashed({"a": large, "b": small}), hashed({"a": large, "c": small})}
    seen |= {hashed({"c": large, "b": small}), hashed({"a": large})}
    small.write_bytes(b"x" * 99 + b"y")
    seen.add(hashed({"a": large, "b": small}))
    assert len(seen) == 5


def test_a_set_below_the_limit_has_the_digest_that_it_always_had(tmp_path: Path) -> None:
    """Run folders and scores of before name it."""
    path = tmp_path / "f"
    path.write_bytes(b"ab" * 100_000)
    digest = hashlib.sha256(b"f 200000\n" + b"ab" * 100_000).hexdigest()
    assert hashed({"f": path}) == sampled({"f": path}) == digest
    digests_of_many = hashed({"f": path, "g": path})
    both = b"f 200000\n" + b"ab" * 100_000 + b"g 200000\n" + b"ab" * 100_000
    assert digests_of_many == hashlib.sha256(both).hexdigest()


def test_a_file_is_read_once_while_it_is_the_same(
    large: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settled(monkeypatch)
    other = shutil.copy(large, tmp_path / "other")
    first = sha256_of_all([large, other])
    assert sha256_of_all([large, other]) == first == [sha256_of(large)] * 2
    assert sorted(reads) == [large, other]
    flip(large)
    assert sha256_of_all([large, other]) == [sha256_of(large), first[1]]
    assert reads[2:] == [large]
    shutil.copyfile(large, tmp_path / "again")
    (tmp_path / "again").replace(other)  # another inode
    assert sha256_of_all([other]) == [sha256_of(large)]
    assert reads[3:] == [other]


def test_a_young_file_is_not_remembered(large: Path, reads: list[Path], memory: Path) -> None:
    """It might change again within one tick of the clock, and then look the same."""
    sha256_of_all([large])
    assert not memory.exists()
    remember({large: "made up"})
    assert not memory.exists()
    sha256_of_all([large])
    assert reads == [large, large]


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    large: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)

    def slow(path: Path) -> str:
        flip(path)
        return sha256_of(path)

    monkeypatch.setattr(digests, "sha256_of", slow)
    sha256_of_all([large])
    assert not memory.exists()


@pytest.mark.parametrize("text", ["{", "[]", "[1]", "3", '{"a": 3}', ""])
def test_a_damaged_memory_is_an_empty_one(
    text: str, large: Path, memory: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    memory.parent.mkdir()
    memory.write_text(text)
    digest = sha256_of_all([large])
    assert sha256_of_all([large]) == digest == [sha256_of(large)]
    assert reads == [large]


def test_a_memory_that_cannot_be_written_costs_only_time(
    large: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    memory.parent.write_text("a file")
    assert sha256_of_all([large]) == [sha256_of(large)]


def test_the_memory_keeps_the_newest(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    monkeypatch.setattr(digests, "MOST_REMEMBERED", 2)
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_text(path.name)
        sha256_of_all([path])
    assert list(json.loads(memory.read_text())) == identities(paths[1:])
    sha256_of_all(paths)  # of which the first is forgotten
    assert list(json.loads(memory.read_text())) == identities([paths[2], paths[0]])
    monkeypatch.setattr(digests, "MOST_REMEMBERED", 1)
    memory.unlink()
    sha256_of_all(paths)
    assert list(json.loads(memory.read_text())) == identities(paths)


def test_a_writers_digests_are_remembered_of_large_sets_only(
    large: Path, tmp_path: Path, memory: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    small = tmp_path / "small"
    small.write_text("small")
    remember({small: sha256_of(small)})
    assert not memory.exists()
    remember({large: sha256_of(large), small: sha256_of(small)})
    assert sha256_of_all([large, small]) == [sha256_of(large), sha256_of(small)]
    assert reads == []


def test_a_file_older_than_the_clocks_tick_is_remembered(
    large: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time_ns() + digests.SETTLED + 10_000_000_000
    monkeypatch.setattr(digests, "time", type("Clock", (), {"time_ns": lambda: later}))
    sha256_of_all([large])
    assert list(json.loads(memory.read_text())) == identities([large])


def test_rot_is_seen_by_a_digest_of_the_bytes_now(large: Path) -> None:
    before = xxh3_of(large)
    assert xxh3_of(large) == before
    flip(large, at=(5 << 20) - 1)
    assert xxh3_of(large) != before


def test_two_checkpoints_that_differ_in_one_scale_have_two_fingerprints(
    nvfp4_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict, scores and a server name the fingerprint; so does the folder of a judgement."""
    settled(monkeypatch)
    monkeypatch.setattr(digests, "TOGETHER", 0)
    monkeypatch.setattr(digests, "LARGE", 1 << 10)
    copy = shutil.copytree(nvfp4_artifact, tmp_path / "copy")
    one, two = Checkpoint.open(nvfp4_artifact), Checkpoint.open(copy)
    assert fingerprint(one) == fingerprint(two)
    scale = next(info for name, info in two.tensors.items() if name.endswith("input_global_scale"))
    flip(scale.file, at=scale.begin)
    assert fingerprint(one) != fingerprint(two)
    settings = manifest.GENERATION
    (copy / settings).write_text("{}")
    assert fingerprint(two, settings_of=nvfp4_artifact) != fingerprint(two)


def test_a_fingerprint_of_samples_is_told_from_one_of_another_model(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Checkpoint.open(tiny_checkpoint)
    old = sampled(manifest._fingerprinted(source))
    monkeypatch.setattr(digests, "TOGETHER", 0)
    assert is_sampled_fingerprint(old, source)
    assert not is_sampled_fingerprint(fingerprint(source), source)
    assert not is_sampled_fingerprint("ab" * 32, source)


@pytest.mark.slow
def test_one_byte_of_a_sparse_file_above_2_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(digests, "REMEMBERED", tmp_path / "digests.json")
    monkeypatch.setattr(digests, "ANNOUNCED_FROM", 2_000_000_000)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2_100_000_000)
    before, samples = hashed({"sparse": path}), sampled({"sparse": path})
    assert "2.10 GB are read for their digests, once" in " ".join(capsys.readouterr().err.split())
    flip(path, at=1_234_567_890)
    assert sampled({"sparse": path}) == samples
    assert hashed({"sparse": path}) != before
