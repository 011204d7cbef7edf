"""Stores the passes of a denoising run: the rows that entered the first layer, batch by batch.

    batch-00008.rows     bf16 [rows, H]: h of every pass, one pass after the other
    batch-00008.passes   safetensors: slots and positions of each pass' rows, and which are not padding
    recording.json       what the run depended on, and a CRC32 of every file; written last

h is the hidden state that layers add to, one row per token. In the 26B model a row takes 5,632 bytes,
and a canvas 1.44 MB per step. `layer_by_layer` makes normed rows from h, and angles from positions.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantize.checkpoints.reader import bytes_of
from quantize.errors import InputError, ResourceError
from quantize.host.files import read_json, write_json
from quantize.host.processes import ALONE, Processes
from quantize.host.progress import say
from quantize.runtime.model.passes import Pass

INDEX = "recording.json"
PIECE = 1 << 24  # bytes of a file that are read at once


@dataclass(frozen=True)
class PassesShape:
    """The size of the cache that recorded passes need: `capacity` slots of `max_length` positions."""

    capacity: int
    max_length: int


@dataclass(frozen=True)
class RecordedPass:
    """A recorded pass: its slice `rows` of the batch's file, and fields of `Pass` and `PassRows`."""

    rows: slice
    decoded: int
    slots: Tensor
    positions: Tensor
    visible: dict[bool, tuple[Tensor, Tensor]]
    real: Tensor | None

    @property
    def count(self) -> int:
        """How many rows the pass has."""
        return self.rows.stop - self.rows.start

    def stands_as(self, other: "RecordedPass") -> bool:
        """Return whether the rows of both passes have exactly the same places in the cache."""
        ours, theirs = (
            (recorded.slots, recorded.positions, *recorded.visible[True], *recorded.visible[False])
            for recorded in (self, other)
        )
        return all(map(torch.equal, ours, theirs))


@dataclass(frozen=True)
class RecordedBatch:
    """One batch: its passes in the order they were made, and the `file` of their `count` rows."""

    file: Path
    count: int
    passes: tuple[RecordedPass, ...]


class Recorder:
    """Writes passes to a folder, which is emptied first; raises ResourceError if writing fails."""

    def __init__(self, folder: Path, processes: Processes = ALONE) -> None:
        self.folder, self._processes = folder, processes
        self._entries: dict[str, dict[str, Any]] = {}
        if processes.rank == 0:
            with _kept_in(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
        processes.wait()

    @contextmanager
    def batch(self, start: int) -> Generator[Callable[[Pass], None]]:
        """Yield a function that records a batch's passes; `start` is the index of its first prompt.

        If the `with` block raises, the batch is not recorded.
        """
        path = self.folder / f"batch-{start:05}.rows"
        with _kept_in(self.folder), ThreadPoolExecutor(1) as beside, path.open("wb") as file:
            batch = _BatchFile(file.fileno(), beside)
            yield batch.add
            batch.wait()
        with _kept_in(self.folder):
            placed = path.with_suffix(".passes")
            save_file(batch.placements(), placed)
            entry = {"rows": batch.count, "crc32": batch.crc, "passes_crc32": _crc32(placed)}
        self._entries[path.name] = entry

    def finish(self, identity: str, shape: PassesShape) -> None:
        """End the recording; all processes must call this. The first process writes recording.json."""
        for theirs in self._processes.others(self._entries):
            self._entries |= theirs
        if self._processes.rank > 0:
            return
        with _kept_in(self.folder):
            if not self.folder.is_dir():
                raise FileNotFoundError(2, "it was removed")
            batches = dict(sorted(self._entries.items()))
            content = {"identity": identity, "shape": asdict(shape), "batches": batches}
            write_json(self.folder / INDEX, content)


@contextmanager
def _kept_in(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{folder}: what the calibration run recorded cannot be kept there ({error.strerror}); "
            f"free some room, or name another disk with --scratch; the same command goes on"
        ) from error


class _BatchFile:
    """Rows on their way to a file, and their places in the cache."""

    def __init__(self, file: int, beside: ThreadPoolExecutor) -> None:
        self._file, self._beside = file, beside
        self._writing: Future[None] | None = None
        self.crc, self.count = 0, 0  # of the rows
        self._table: list[tuple[int, int, int, int]] = []
        self._slots: list[Tensor] = []
        self._places: list[Tensor] = []
        self._real: list[Tensor] = []

    def add(self, entered: Pass) -> None:
        """Take a pass; another thread writes its rows while the device goes on."""
        rows, real = entered.rows, -1
        self._slots.append(rows.slots.clone())  # a graph fills it again
        places = (rows.positions, *rows.visible[True], *rows.visible[False])
        self._places.append(torch.stack(places))
        if entered.real is not None:
            real = len(entered.real)
            self._real.append(entered.real)
        self._table.append((len(entered.h), len(rows.slots), entered.decoded, real))
        self.count += len(entered.h)
        h, copied = entered.h, None
        if h.is_cuda:
            h = torch.empty_like(h, device="cpu", pin_memory=True)
            h.copy_(entered.h, non_blocking=True)
            copied = torch.cuda.current_stream(entered.h.device).record_event()
        self.wait()
        self._writing = self._beside.submit(self._write, h, copied)

    def _write(self, rows: Tensor, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        unwritten = bytes_of(rows.view(torch.uint8).view(-1))
        self.crc = zlib.crc32(unwritten, self.crc)
        while unwritten:
            unwritten = unwritten[os.write(self._file, unwritten) :]

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def placements(self) -> dict[str, Tensor]:
        """Return the tensors from which `Recording` makes the passes."""
        none = torch.empty(0, dtype=torch.int64)
        return {
            "passes": torch.tensor(self._table, dtype=torch.int64).view(-1, 4),
            "slots": torch.cat(self._slots).cpu(),
            "places": torch.cat(self._places, 1).cpu().contiguous(),
            "real": torch.cat(self._real).cpu() if self._real else none,
        }


@dataclass(frozen=True)
class Recording:
    """A finished recording: its batches, in the order of their prompts."""

    folder: Path
    shape: PassesShape
    batches: tuple[RecordedBatch, ...]

    @classmethod
    def find(cls, folder: Path, identity: str, row_bytes: int) -> "Recording | None":
        """Return a folder's recording; None if there is none, or if it is unusable (then print why).

        A usable recording is undamaged, was made with `identity`, and has rows of `row_bytes` bytes.
        """
        if not (folder / INDEX).exists():
            return None
        try:
            index = read_json(folder / INDEX, "identity", "shape", "batches")
            if index["identity"] != identity:
                raise InputError("it is of another run")
            entries: Mapping[str, Any] = index["batches"]
            with ThreadPoolExecutor() as pool:
                for _ in pool.map(lambda n: _check(folder / n, entries[n], row_bytes), entries):
                    pass
            batches = tuple(_batch(folder / name, entry) for name, entry in entries.items())
            return cls(folder, PassesShape(**index["shape"]), batches)
        except (InputError, OSError, KeyError, TypeError, ValueError) as error:
            say(f"{folder}: this recording cannot be used ({error}); it is made again")
            return None


def _check(path: Path, entry: Mapping[str, Any], row_bytes: int) -> None:
    placed = path.with_suffix(".passes")
    if path.stat().st_size != entry["rows"] * row_bytes:
        raise InputError(f"{path.name} has not the {entry['rows']} rows that were written")
    for file, crc in ((path, entry["crc32"]), (placed, entry["passes_crc32"])):
        if _crc32(file) != crc:
            raise InputError(f"{file.name} was changed or damaged")


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def _batch(path: Path, entry: Mapping[str, Any]) -> RecordedBatch:
    tensors = load_file(path.with_suffix(".passes"))
    rows, sequences, decoded, real = tensors["passes"].unbind(1)
    counts = {"places": rows, "real": real.clamp(min=0), "slots": sequences}
    places, chosen, slots = (
        tensors[name].split(sizes.tolist(), -1) for name, sizes in counts.items()
    )
    ends = pairwise(accumulate(rows.tolist(), initial=0))
    passes = tuple(
        RecordedPass(
            slice(begin, end),
            int(decoded[i]),
            slots[i],
            places[i][0],
            {True: (places[i][1], places[i][2]), False: (places[i][3], places[i][4])},
            None if real[i] < 0 else chosen[i],
        )
        for i, (begin, end) in enumerate(ends)
    )
    return RecordedBatch(path, entry["rows"], passes)
