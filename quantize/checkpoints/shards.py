"""Writes safetensors shards in one pass: bounded memory, restartable, the same bytes every time.

All headers are known before the first weight is read: dtype and shape of every tensor follow from the
plan. A shard is its header, followed by the bytes of its pieces, which tasks return block by block.
Worker threads read and quantize the next few blocks. Meanwhile one thread writes a finished block, one
hashes that block, and one syncs earlier blocks to disk. One core hashes 0.85 GB/s, as much as four
cores quantize. So several files are written side by side, one for every four workers.

Restart: a shard is finished when it is on disk (fsync) and `<folder>.state.json` holds its sha256. A
later try keeps finished shards whose bytes still have this hash. It writes all other shards from their
first byte. A try with another source or plan starts over, since its bytes would differ. In a format
with one large file, several shards are stretches of that file: see `Shard.begin`.
"""

import errno
import hashlib
import io
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import xxhash

from quantize.checkpoints.layout import TensorSpec
from quantize.checkpoints.reader import DTYPES, INDEX, SINGLE, bytes_of
from quantize.errors import InputError, ResourceError
from quantize.host.files import read_json, sync_file, sync_folder, write_json
from quantize.host.progress import metered, say

# Returns the next bytes of a shard as a uint8 tensor [n].
Task = Callable[[], torch.Tensor]

RESUME = "then run the same command again (`run` with --resume): finished shards are kept"
FULL = (errno.ENOSPC, errno.EDQUOT)
HASH_BLOCK = 1 << 24
# Bytes of one write call. For larger calls Linux (6.18, ext4) looks for large pages: that takes 0.25 s
# of system time per GB at best, 2.3 s if memory is fragmented. Up to 256 KB it is always 0.3 s.
WRITE_BLOCK = 1 << 18
WORKERS_A_FILE = 4
SYNC_BYTES = 1 << 28  # bytes between two syncs of an unfinished shard; the last sync is then short


@dataclass(frozen=True)
class Piece:
    """Tensors that are adjacent in one shard, and the tasks that return their bytes, in order."""

    layout: dict[str, TensorSpec]  # name -> spec, in writing order
    tasks: tuple[Task, ...]  # each is called on a thread and returns one block of the bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the piece's tensors."""
        return sum(spec.nbytes for spec in self.layout.values())


@dataclass(frozen=True)
class Shard:
    """One file to be written, or the stretch of a file that starts at byte `begin`.

    `header` holds the bytes before the first tensor. The stretches of a file are written in order. If
    a stretch is written again, so are all later stretches of its file, even finished stretches.
    """

    name: str
    header: bytes
    pieces: tuple[Piece, ...]
    begin: int = 0

    @property
    def key(self) -> str:
        """The shard's key in the state file: its file's name, then `@begin` unless `begin` is 0."""
        return f"{self.name}@{self.begin}" if self.begin else self.name

    @property
    def nbytes(self) -> int:
        """Bytes of the file or stretch, header included."""
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


def plan_shards(pieces: Sequence[Piece], max_shard_bytes: float) -> list[Shard]:
    """Return shards of `pieces`; only a shard of one piece may exceed `max_shard_bytes`.

    Order is kept, but layer scalars (no multiple of 4 bytes) go last, so FP32 scales stay aligned.
    Raise InputError if a tensor would be written twice.
    """
    groups: list[list[Piece]] = [[]]
    filled = 0
    for piece in sorted(pieces, key=lambda piece: piece.nbytes % 4 != 0):
        if filled and filled + piece.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.nbytes
    named = Counter(name for piece in pieces for name in piece.layout)
    if twice := [name for name, count in named.items() if count > 1]:
        raise InputError(
            f"tensor {twice[0]!r} would be written twice: two source tensors map to it"
        )
    many = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    names = many if len(groups) > 1 else [SINGLE]
    return [Shard(n, _header(g), tuple(g)) for n, g in zip(names, groups, strict=True)]


def _header(pieces: Sequence[Piece]) -> bytes:
    """Return length and JSON of a safetensors header, padded with spaces to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for piece in pieces:
        for name, spec in piece.layout.items():
            offsets = [position, position + spec.nbytes]
            entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
            position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shards(
    shards: Sequence[Shard],
    folder: Path,
    identity: str,
    *,
    workers: int | None = None,
    workers_a_file: int = WORKERS_A_FILE,
    what: str = "convert",
) -> dict[str, str]:
    """Write all shards to `folder`, with an index for several files; return `Shard.key` -> sha256.

    Shards that an earlier try with the same `identity` finished are kept. So `identity` must change
    with every source or setting that changes bytes. `workers` threads produce blocks, by default one
    for each usable core. `workers` / `workers_a_file` files, at least one, are written side by side.
    `what` titles the progress bar. Raise ResourceError if the disk is too small or fails.
    """
    try:
        state = _State.open(folder, shards, identity)
        todo = [shard for shard in shards if shard.key not in state.finished]
        _check_free_disk(folder, todo)
        workers = workers or len(os.sched_getaffinity(0))
        _write_all(todo, state, workers, workers // workers_a_file, what)
        if len({shard.name for shard in shards}) > 1:
            names = {n: s.name for s in shards for piece in s.pieces for n in piece.layout}
            total = sum(piece.nbytes for shard in shards for piece in shard.pieces)  # no headers
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            write_json(folder / INDEX, index)
    except OSError as error:
        what = "the disk is full" if error.errno in FULL else f"cannot be written ({error})"
        raise ResourceError(f"{folder}: {what}; mend that, {RESUME}") from error
    return {shard.key: state.finished[shard.key] for shard in shards}


def _write_all(todo: Sequence[Shard], state: "_State", workers: int, lanes: int, what: str) -> None:
    """Write up to `lanes` files side by side, two blocks per worker in flight; record each shard."""
    files = [list(same) for _, same in groupby(todo, lambda shard: shard.name)]
    lanes = max(1, min(len(files), lanes))
    count, lock = sum(len(piece.tasks) for shard in todo for piece in shard.pieces), Lock()
    with (
        metered(what, count, "blocks") as meter,
        ThreadPoolExecutor(1) as recorder,
        ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as makers,
        ThreadPoolExecutor(lanes) as writers,
    ):

        def done() -> None:
            with lock:
                meter.add()

        one = partial(_write_file, state, recorder, makers, 2 * workers // lanes, done)
        writing = [writers.submit(one, shards) for shards in files]
        try:
            for written in as_completed(writing):
                written.result()
        finally:  # after an error the other writers end when they miss a block
            for pool in (writers, makers):
                pool.shutdown(wait=False, cancel_futures=True)


def _write_file(
    state: "_State", recorder: ThreadPoolExecutor, makers: ThreadPoolExecutor, ahead: int,
    done: Callable[[], None], shards: Sequence[Shard],
) -> None:  # fmt: skip
    """Write the shards of one file, with `ahead` blocks in flight."""
    tasks = [task for shard in shards for piece in shard.pieces for task in piece.tasks]
    blocks = _in_order(makers, tasks, ahead)
    with ThreadPoolExecutor(1) as syncer, ThreadPoolExecutor(1) as hasher:
        finished: list[Future[None]] = []
        for shard in shards:
            digest = _write(state.folder / shard.name, shard, blocks, hasher, syncer, done)
            finished.append(recorder.submit(state.finish, shard, digest))
        for future in finished:
            future.result()


def state_path(folder: Path) -> Path:
    """Return the path of the state file beside `folder`, which records finished shards."""
    return folder.with_name(folder.name + ".state.json")


@dataclass(frozen=True)
class _State:
    """The record of finished shards. `finish` runs on one thread."""

    folder: Path
    identity: str
    finished: dict[str, str]

    @classmethod
    def open(cls, folder: Path, shards: Sequence[Shard], identity: str) -> "_State":
        """Find finished shards whose bytes still have their hash; remove all other files."""
        digest = hashlib.sha256(identity.encode())
        for shard in shards:
            digest.update(shard.key.encode() + shard.header)
        state = cls(folder, digest.hexdigest(), {})
        recorded = _recorded_shards(state_path(folder), state.identity)
        ends = {shard.name: shard.begin + shard.nbytes for shard in shards}
        broken: set[str] = set()  # files in which something must be written again
        for shard in shards:
            file = folder / shard.name
            if shard.name not in broken and shard.key in recorded and file.is_file():
                same = _sha256(file, shard) == recorded[shard.key]
                if same and file.stat().st_size <= ends[shard.name]:
                    state.finished[shard.key] = recorded[shard.key]
                    continue
                say(f"{file}: its bytes have changed since it was finished; written again")
            broken.add(shard.name)
        kept = {shard.name for shard in shards if shard.key in state.finished}
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in kept:
                entry.unlink()
        if state.finished:
            say(f"{len(state.finished)} of {len(shards)} shards are finished already")
        return state

    def finish(self, shard: Shard, sha256: str) -> None:
        sync_file(self.folder / shard.name)
        sync_folder(self.folder)
        self.finished[shard.key] = sha256
        write_json(state_path(self.folder), {"identity": self.identity, "finished": self.finished})


def _recorded_shards(path: Path, identity: str) -> dict[str, str]:
    if not path.is_file():
        return {}
    with suppress(InputError, ValueError, TypeError):
        state = read_json(path, "identity", "finished")
        if state["identity"] == identity:
            return dict(state["finished"])
    say(f"{path}: belongs to another source or plan; starting over")
    return {}


def _sha256(path: Path, shard: Shard) -> str:
    """Return the sha256 of a shard's bytes in its file; if the file is too short, of what is there."""
    digest, remaining = hashlib.sha256(), shard.nbytes
    with path.open("rb") as file:
        file.seek(shard.begin)
        while block := file.read(min(HASH_BLOCK, remaining)):
            digest.update(block)
            remaining -= len(block)
    return digest.hexdigest()


def _check_free_disk(folder: Path, shards: Sequence[Shard]) -> None:
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{folder}: {needed:,} bytes needed and {free:,} free on this disk; "
            f"free {needed - free:,} more, {RESUME}"
        )


def _in_order(
    pool: ThreadPoolExecutor, tasks: Sequence[Task], window: int
) -> Iterator[torch.Tensor]:
    ahead: deque[Future[torch.Tensor]] = deque()
    for task in tasks:
        ahead.append(pool.submit(task))
        if len(ahead) == window:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _write(
    path: Path, shard: Shard, blocks: Iterator[torch.Tensor], hasher: ThreadPoolExecutor,
    syncer: ThreadPoolExecutor, done: Callable[[], None],
) -> str:  # fmt: skip
    """Write one shard from the next blocks, hashing and syncing on the way; return the sha256."""
    digest = hashlib.sha256(shard.header)
    begun = shard.begin  # position at which the last sync began
    syncing: Future[None] | None = None
    with path.open("r+b" if shard.begin else "wb", buffering=0) as file:
        file.truncate(shard.begin)
        file.seek(shard.begin)
        _write_fully(file, memoryview(shard.header))
        for block in islice(blocks, sum(len(piece.tasks) for piece in shard.pieces)):
            data = bytes_of(block)
            hashed = hasher.submit(digest.update, data)
            _write_fully(file, data)
            hashed.result()
            if file.tell() - begun >= SYNC_BYTES:
                if syncing:
                    syncing.result()
                begun, syncing = file.tell(), syncer.submit(sync_file, path)
            done()
        if syncing:  # Linux reports a write error only once: read every result
            syncing.result()
        if file.tell() != shard.begin + shard.nbytes:
            raise RuntimeError(f"{path}: wrote {file.tell()} bytes, planned {shard.nbytes}")
    return digest.hexdigest()


def write_pieces(path: Path, pieces: Sequence[Piece]) -> str:
    """Write `pieces` to one new file, the widest dtypes first, so that all tensors are aligned.

    Return the XXH3 digest (128 bits, hexadecimal) of the bytes in memory, which the disk may spoil.
    """
    # Other threads run meanwhile; safetensors' `save_file` holds Python's lock until all is written.
    ordered = sorted(pieces, key=lambda p: -DTYPES[next(iter(p.layout.values())).dtype].itemsize)
    digest = xxhash.xxh3_128(_header(ordered))
    with path.open("wb", buffering=0) as file:
        _write_fully(file, memoryview(_header(ordered)))
        for block in (task() for piece in ordered for task in piece.tasks):
            digest.update(bytes_of(block))
            _write_fully(file, bytes_of(block))
    return digest.hexdigest()


def _write_fully(file: io.FileIO, data: memoryview) -> None:
    """Write all of `data`; if the disk fills up, a call writes only a part, and the next one raises."""
    while data:
        data = data[file.write(data[:WRITE_BLOCK]) :]
