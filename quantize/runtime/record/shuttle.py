"""Carries rows of recorded passes to the device and back to the host, while the device works.

    host --thread--> pinned --copy--> slot on the device, worked on --copy--> pinned --thread--> host

A piece is some consecutive passes of one batch. While the device works on one piece, the next piece
arrives and the previous piece leaves. So there are three slots on the device, and two pinned buffers
in each direction. On a CPU, the work is done on a copy in host memory.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.errors import ResourceError
from quantize.host.progress import say
from quantize.host.resources import free_memory
from quantize.runtime.record.recording import RecordedPass, Recording

Event = Any  # torch.cuda.Event, which torch's stubs define twice
PIECE_BYTES = 64 << 20  # of the rows of a piece, which has at least one pass
LEFT_BYTES = 6 << 30  # of host memory that stay free beside rows
SLOTS = 3


@dataclass(frozen=True)
class RowsPiece:
    """Consecutive passes of one batch; `batch` is the index of this batch in the recording."""

    batch: int
    passes: tuple[RecordedPass, ...]

    @property
    def rows(self) -> slice:
        """The slice of the batch's rows that these passes cover."""
        return slice(self.passes[0].rows.start, self.passes[-1].rows.stop)

    @property
    def count(self) -> int:
        """How many rows the piece has."""
        return self.rows.stop - self.rows.start


Work = Callable[[RowsPiece, Tensor], None]  # changes the rows [count, H] of a piece in place
Rows = Sequence[Tensor]  # bf16 [rows, H] of each batch, on the host


def pieces_of(recording: Recording, hidden: int) -> list[RowsPiece]:
    """Return a recording's passes in order, grouped into pieces; a row has `hidden` numbers."""
    most = max(1, PIECE_BYTES // (2 * hidden))
    pieces: list[RowsPiece] = []
    for index, batch in enumerate(recording.batches):
        group: list[RecordedPass] = []
        for recorded in batch.passes:
            if group and recorded.rows.stop - group[0].rows.start > most:
                pieces.append(RowsPiece(index, tuple(group)))
                group = []
            group.append(recorded)
        pieces.append(RowsPiece(index, tuple(group)))
    return pieces


def recorded_rows(recording: Recording, hidden: int) -> list[Tensor]:
    """Return the recorded rows of each batch, bf16 [rows, H], mapped from their files."""
    return [
        torch.from_file(str(batch.file), size=batch.count * hidden, dtype=torch.bfloat16).view(
            batch.count, hidden
        )
        for batch in recording.batches
    ]


def room_for_rows(recording: Recording, hidden: int, scratch: Path) -> list[Tensor]:
    """Return an uninitialised bf16 tensor [rows, H] per batch, in `scratch` if memory is short.

    Raise ResourceError if neither host memory nor `scratch` has enough room.
    """
    sizes = [batch.count * hidden for batch in recording.batches]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun started here
    if processes * 2 * sum(sizes) + LEFT_BYTES <= free_memory():
        return [torch.empty(n, dtype=torch.bfloat16).view(-1, hidden) for n in sizes]
    say(f"{scratch}: {2 * sum(sizes) / 1e9:.1f} GB of rows lie there, since memory is short")
    buffers: list[Tensor] = []
    path = scratch / f"rows-{os.getpid()}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        for n in sizes:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 2 * n)  # or a full disk would be a crash later
            rows = torch.from_file(str(path), shared=True, size=n, dtype=torch.bfloat16)
            buffers.append(rows.view(-1, hidden))
            path.unlink()  # nobody else needs it, and it is gone when we are
    except OSError as error:
        raise ResourceError(
            f"{scratch}: {2 * sum(sizes) / 1e9:.1f} GB of rows between two layers fit neither memory "
            f"nor this disk ({error.strerror}); free some room, or name another disk with --scratch; "
            f"the same command goes on"
        ) from error
    return buffers


class Shuttle:
    """Carries pieces of at most `most` rows, each of `hidden` bf16 numbers, to a device and back."""

    def __init__(self, most: int, hidden: int, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        if not self._on_gpu:
            return
        rows = torch.empty(SLOTS, most, hidden, dtype=torch.bfloat16, device=device)
        self._slots = list(rows)
        self._ways = [_Way(most, hidden, device) for _ in range(2)]

    def run(
        self, pieces: Sequence[RowsPiece], sources: Rows, targets: Rows | None, work: Work
    ) -> None:
        """Apply `work` to each piece's rows of `sources`; write the results to `targets`, if given."""
        if self._on_gpu:
            self._run_on_gpu(pieces, sources, targets, work)
            return
        for piece in pieces:
            rows = sources[piece.batch][piece.rows].clone()
            work(piece, rows)
            if targets is not None:
                targets[piece.batch][piece.rows] = rows

    def _run_on_gpu(
        self, pieces: Sequence[RowsPiece], sources: Rows, targets: Rows | None, work: Work
    ) -> None:
        coming, going = self._ways
        arriving: deque[Future[Event]] = deque()
        leaving: list[Future[None]] = []

        def bring(number: int) -> None:
            piece = pieces[number]
            before = leaving[number - SLOTS] if number >= SLOTS else None
            slot = self._slots[number % SLOTS][: piece.count]
            source = sources[piece.batch][piece.rows]
            arriving.append(coming.thread.submit(coming.bring, source, slot, before))

        for number in range(min(SLOTS - 1, len(pieces))):
            bring(number)
        for number, piece in enumerate(pieces):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arriving.popleft().result())
            slot = self._slots[number % SLOTS][: piece.count]
            work(piece, slot)
            target = None if targets is None else targets[piece.batch][piece.rows]
            done = stream.record_event()
            leaving.append(going.thread.submit(going.take_back, slot, target, done))
            if number + SLOTS - 1 < len(pieces):
                bring(number + SLOTS - 1)
        for copy in leaving:
            copy.result()


class _Way:
    """One direction: a stream, two pinned buffers, and the thread on which its methods are called."""

    def __init__(self, most: int, hidden: int, device: torch.device) -> None:
        self._device, self.thread = device, ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream(device)
        self._pinned = deque(
            (torch.empty(most, hidden, dtype=torch.bfloat16, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        )

    def bring(self, source: Tensor, slot: Tensor, before: Future[None] | None) -> Event:
        """Copy rows into `slot` once `before` has freed it; return the event of their arrival."""
        if before is not None:
            before.result()
        pinned, copied = self._pinned[0]
        self._pinned.rotate()
        copied.synchronize()
        pinned[: len(source)].copy_(source)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            slot.copy_(pinned[: len(source)], non_blocking=True)
            copied.record(self._stream)
            return self._stream.record_event()

    def take_back(self, slot: Tensor, target: Tensor | None, done: Event) -> None:
        """Copy rows to `target` once the work on them is done."""
        if target is None:
            done.synchronize()
            return
        pinned, copied = self._pinned[0]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(done)
            pinned[: len(slot)].copy_(slot, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()
        target.copy_(pinned[: len(slot)])
