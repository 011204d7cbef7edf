"""Copies tensors of a checkpoint to one device, byte by byte as on disk, as fast as the link goes.

Tensors that are adjacent in a file, or nearly, are copied as one run. There are two ways to a GPU:

    pinned       16 threads read the file into two pinned buffers in turn. This works for any
                 file. Used for tensors that are read once, and for files on a disk
    registered   the file is mapped read-only and registered with the driver, which then copies from
                 the map. Used for files in memory (tmpfs) that are read repeatedly, not for files on
                 a disk, since registering pins every page

On a CPU, the threads read straight into the tensors' memory.
"""

import ctypes
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from quantize.checkpoints.reader import DTYPES, FIX, TensorInfo, bytes_of
from quantize.errors import InputError, ResourceError
from quantize.runtime.gpu.memory import rounded_up

THREADS = 16
PIECE = 1 << 20  # bytes that a thread reads at once, at least
PINNED = 128 << 20  # bytes of each of the two pinned buffers
GAP = 64 << 10  # bytes that may lie between tensors of one run: a second run would take longer
ALIGNED = 256  # bytes; alignment of runs in the buffer, and what kernels may expect of a tensor
MEMORY_FILES = ("tmpfs", "ramfs", "hugetlbfs")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly


@dataclass(frozen=True)
class _ByteRun:
    """Bytes `begin` to `end` of a file, which go to position `at` of the buffer."""

    file: Path
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Layout:
    """The places of tensors in files, and their places in a buffer of `size` bytes."""

    infos: dict[str, TensorInfo]
    runs: list[_ByteRun]
    starts: dict[str, int]
    size: int

    @classmethod
    def of(cls, infos: Sequence[TensorInfo]) -> "Layout":
        """Return a layout: nearby tensors of a file form a run; runs begin at multiples of ALIGNED."""
        runs: list[_ByteRun] = []
        starts: dict[str, int] = {}
        size = 0
        for info in sorted(infos, key=lambda info: (str(info.file), info.begin)):
            last = runs[-1] if runs else None
            if last is not None and last.file == info.file and info.begin - last.end <= GAP:
                runs[-1] = _ByteRun(last.file, last.begin, info.end, last.at)
            else:
                at = rounded_up(size, ALIGNED)
                runs.append(_ByteRun(info.file, info.begin, info.end, at))
            starts[info.name] = runs[-1].at + info.begin - runs[-1].begin
            size = starts[info.name] + info.nbytes
        return cls({info.name: info for info in infos}, runs, starts, size)


@dataclass(frozen=True)
class Fetched:
    """Tensors in one buffer on a device, uint8 [layout.size]."""

    buffer: Tensor
    layout: Layout

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in its own dtype and shape; it may share the buffer's memory."""
        info, start = self.layout.infos[name], self.layout.starts[name]
        raw = self.buffer[start : start + info.nbytes]
        if start % ALIGNED:
            raw = raw.clone()
        return raw.view(DTYPES[info.dtype]).view(info.shape)

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Return tensors of one dtype and shape as a new tensor [len(names), *shape]."""
        starts = [self.layout.starts[name] for name in names]
        info = self.layout.infos[names[0]]
        steps = {b - a for a, b in pairwise(starts)}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            rows = self._strided(starts[0], step, (len(names), info.nbytes))
        else:
            rows = torch.stack([self.buffer[s : s + info.nbytes] for s in starts])
        return rows.view(DTYPES[info.dtype]).view(len(names), *info.shape)

    def _strided(self, start: int, step: int, shape: tuple[int, int]) -> Tensor:
        """Copy runs of bytes that are `step` apart, in the widest words that all of them consist of."""
        count, nbytes = shape
        size = math.gcd(start, step, nbytes, 8)
        words = self.buffer[: len(self.buffer) // size * size].view(WORDS[size])
        runs = words.as_strided((count, nbytes // size), (step // size, 1), start // size)
        return runs.clone(memory_format=torch.contiguous_format).view(torch.uint8)


class Transfer:
    """Copies from checkpoint files to one device, on the current stream, for one thread at a time.

    If `register`, files in memory (tmpfs) are registered with the GPU's driver, for repeated reads.
    `bytes_read` counts the bytes read from the files so far.
    """

    def __init__(self, device: torch.device, *, register: bool = False) -> None:
        self.device = device
        self.bytes_read = 0
        self._register = register and device.type == "cuda"
        self._files: dict[Path, int] = {}
        self._maps: dict[Path, Tensor | None] = {}
        self._pool = ThreadPoolExecutor(THREADS)
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        weakref.finalize(self, _close, self._files)

    def fetch(self, layout: Layout) -> Fetched:
        """Copy tensors to the device; on a GPU, later work of the current stream sees all their bytes.

        Raise ResourceError if a file cannot be read, and InputError if it ends inside a tensor.
        """
        buffer = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        for run in layout.runs:
            self._copy(run, buffer[run.at : run.at + run.end - run.begin])
            self.bytes_read += run.end - run.begin
        return Fetched(buffer, layout)

    def _copy(self, run: _ByteRun, out: Tensor) -> None:
        if self.device.type != "cuda":
            self._read(run.file, run.begin, out)
        elif (mapped := self._mapped(run.file)) is not None:
            # In pieces, or keys and values of the layer in use would wait for the whole next layer.
            parts = mapped[run.begin : run.end].split(PINNED)
            for part, target in zip(parts, out.split(PINNED), strict=True):
                target.copy_(part, non_blocking=True)
        else:
            self._through_pinned(run, out)

    def _through_pinned(self, run: _ByteRun, out: Tensor) -> None:
        if not self._pinned:
            self._pinned = [
                (torch.empty(PINNED, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]
        for start in range(0, len(out), PINNED):
            pinned, copied = self._pinned[0]
            self._pinned.reverse()
            copied.synchronize()
            part = pinned[: min(PINNED, len(out) - start)]
            self._read(run.file, run.begin + start, part)
            out[start : start + len(part)].copy_(part, non_blocking=True)
            copied.record(torch.cuda.current_stream(self.device))

    def _read(self, file: Path, begin: int, out: Tensor) -> None:
        """Read bytes of a file into host memory, in pieces by all threads."""
        handle, into = self._open(file), bytes_of(out)
        size = max(PIECE, -(-len(into) // THREADS))

        def read(start: int) -> int:
            target, done = into[start : start + size], 0
            while count := os.preadv(
                handle, [target[done:]], begin + start + done
            ):  # 2 GiB at most
                done += count
            return done

        try:
            count = sum(self._pool.map(read, range(0, len(into), size)))
        except OSError as error:
            raise ResourceError(
                f"{file}: reading at byte {begin} failed ({error.strerror}); check the disk"
            ) from error
        if count != len(into):
            raise InputError(f"{file}: ends inside the {len(into)} bytes at byte {begin}; {FIX}")

    def _open(self, file: Path) -> int:
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise ResourceError(f"{file}: cannot be read ({error.strerror})") from error
        return self._files[file]

    def _mapped(self, file: Path) -> Tensor | None:
        """Return a registered map of a file; None if that is not wanted or not possible."""
        if self._register and file not in self._maps:
            handle = self._open(file)
            self._maps[file] = _registered(self, handle, self.device) if in_memory(file) else None
        return self._maps.get(file)


def in_memory(file: Path) -> bool:
    """Return whether a file is in memory (tmpfs), where pinning its pages costs nothing but time."""
    device = file.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in MEMORY_FILES
    return False


def _close(files: dict[Path, int]) -> None:
    for handle in files.values():
        os.close(handle)


def _registered(owner: object, handle: int, device: torch.device) -> Tensor | None:
    """Map a whole file and register it until `owner` is gone; None if the driver refuses."""
    view = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors
        mapped = torch.frombuffer(view, dtype=torch.uint8)
    return mapped if pinned_until(owner, mapped, device, REGISTER_READ_ONLY) else None


def pinned_until(owner: object, tensor: Tensor, device: torch.device, flags: int = 0) -> bool:
    """Let the driver pin a host tensor's memory until `owner` is gone; return whether that worked."""
    if (runtime := _cuda_runtime()) is None:
        return False
    memory = tensor.untyped_storage()
    address = ctypes.c_void_p(memory.data_ptr())
    with torch.cuda.device(device):
        if runtime.cudaHostRegister(address, ctypes.c_size_t(memory.nbytes()), flags):
            runtime.cudaGetLastError()  # or torch reports it at its next kernel
            return False
    unregister: Callable[..., int] = runtime.cudaHostUnregister
    ending = weakref.finalize(owner, _unregister, unregister, address, tensor, device)
    ending.atexit = False  # pyrefly: ignore[missing-attribute]
    return True


def _unregister(
    unregister: Callable[..., int], address: ctypes.c_void_p, _: Tensor, device: torch.device
) -> None:
    """Let a device finish what it reads, then give the pages back; the tensor lives until then."""
    torch.cuda.synchronize(device)
    unregister(address)


def _cuda_runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded; None if it is part of torch itself."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart.so" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None
