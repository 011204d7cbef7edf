"""Where the seconds of convert and verify go: one run of each on a checkpoint that is there already.

    python -m tests.support.synthetic /dev/shm/bf16
    python -m tests.benchmarks.convert_and_verify /dev/shm/bf16 /dev/shm/out --recipe nvfp4

A recipe with GPTQ gets codes that were rounded to nearest, in files as the stage `round` writes them.
Prints what the machine does by itself (reading and writing files, sha256, the link), then for each
stage its seconds, the thread-seconds spent in each part of it, and where the threads stood when they
were looked at, 200 times a second. Thread-seconds of a GPU's parts include waiting for what other
threads launched.
"""

import gc
import hashlib
import os
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from quantize.checkpoints import reader, shards
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, plan_targets
from quantize.host.processes import best_device
from quantize.pipeline.stages import Run, _convert
from quantize.recipe.reading import load_recipe
from quantize.runs.folder import RunDir
from quantize.stages import device as devices
from quantize.stages.convert import shard_pieces
from quantize.stages.round_weights import round_weights
from quantize.stages.verify import decompression, verify_weights
from quantize.stages.verify.verify import VerificationResult, verify

BLOCK = 1 << 26
PARTS: dict[str, tuple[Any, str]] = {
    "read files": (reader, "_fill"),
    "copy to the device": (devices.Device, "take"),
    "encode": (shard_pieces.Quantizer, "_records"),
    "copy back": (devices.Device, "give"),
    "piece of experts, all of it": (shard_pieces.Quantizer, "_quantize_experts"),
    "other piece, all of it": (shard_pieces.Quantizer, "_quantize_linears"),
    "write": (shards, "_write_fully"),
    "sync": (shards, "sync_file"),
    "one file, all of it": (shards, "_write"),
    "part compared with the source": (verify_weights.Comparer, "check"),
    "sums of squares": (verify_weights, "_sums_of_squares"),
    "decompression": (decompression.Decompressor, "alike"),
}


class Timed:
    """Thread-seconds and calls by part."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._lock = threading.Lock()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed."""

        def timed(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                with self._lock:
                    self.found[name][0] += time.perf_counter() - started
                    self.found[name][1] += 1

        return timed


@contextmanager
def parts_timed() -> Generator[Timed]:
    """Time PARTS while the block runs."""
    timed = Timed()
    before = {key: getattr(*key) for key in PARTS.values()}
    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, timed.around(name, before[owner, attribute]))
    try:
        yield timed
    finally:
        for (owner, attribute), function in before.items():
            setattr(owner, attribute, function)


@contextmanager
def looked_at() -> Generator[Counter[str]]:
    """Count where threads stand: their innermost line, and the innermost one of quantize."""
    found: Counter[str] = Counter()
    stop, own = threading.Event(), threading.get_ident()

    def look() -> None:
        while not stop.wait(0.005):
            for thread, frame in sys._current_frames().items():
                if thread in (own, watcher.ident):
                    continue
                at, ours = frame, None
                while at and ours is None:
                    ours = at if "quantize" in at.f_code.co_filename else None
                    at = at.f_back
                if ours is not None:
                    found[
                        f"{_line(ours)} in {_line(frame)}" if ours is not frame else _line(frame)
                    ] += 1

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    yield found
    stop.set()
    watcher.join()


def _line(frame: Any) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def measured(what: str, work: Callable[[], Any]) -> Any:
    """Run a stage once as it is, print its seconds, then say where they went."""
    gc.freeze()  # as `pipeline.run.work` does
    started, cpu = time.perf_counter(), time.process_time()
    with parts_timed() as timed, looked_at() if PARTS else nullcontext(Counter[str]()) as lines:
        result = work()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    print(f"\n{what}: {seconds:.1f} s, {cpu_seconds:.1f} CPU s")
    for name, (own, calls) in timed.found.items():
        print(f"  {name:28} {own:8.2f} thread-s {calls:8,} calls {1e3 * own / calls:9.3f} ms each")
    if lines:
        print("  where threads stood:")
    for line, count in lines.most_common(25):
        print(f"    {count * 0.005:7.2f} thread-s  {line}")
    return result


def rate(nbytes: float, work: Callable[[], Any]) -> str:
    """Return GB/s."""
    started = time.perf_counter()
    work()
    return f"{nbytes / (time.perf_counter() - started) / 1e9:.2f} GB/s"


def machine(source: Path, out: Path) -> Iterator[str]:
    """Yield the machine's own rates."""
    files = sorted(source.glob("*.safetensors"))
    cores = len(os.sched_getaffinity(0))
    blocks = [(file, at) for file in files for at in range(0, file.stat().st_size, BLOCK)]
    rooms = [torch.empty(BLOCK, dtype=torch.uint8) for _ in range(cores)]
    free = list(rooms)

    def read(block: tuple[Path, int]) -> None:
        room = free.pop()
        with block[0].open("rb", buffering=0) as file:
            file.seek(block[1])
            file.readinto(memoryview(room.numpy()))
        free.append(room)

    def all_of(threads: int, work: Callable[..., Any], given: list[Any]) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, given))

    total = sum(file.stat().st_size for file in files)
    few = blocks[: max(1, len(blocks) // 20)]
    yield f"read, 1 thread {rate(len(few) * BLOCK, lambda: all_of(1, read, few))}"
    yield f"read, {cores} threads {rate(total, lambda: all_of(cores, read, blocks))}"
    content = memoryview(rooms[0].numpy())
    places = [out / f"rate-{i}" for i in range(min(4, cores))]

    def write(place: Path) -> None:
        with place.open("wb", buffering=0) as file:
            for _ in range(16):
                shards._write_fully(file, content)
            os.fsync(file.fileno())

    for some in (places[:1], places):
        written = 16 * BLOCK * len(some)
        yield f"write, {len(some)} files {rate(written, lambda: all_of(len(some), write, some))}"  # noqa: B023
    for place in places:
        place.unlink()
    for threads in (1, cores):
        hashed = [content] * (4 * threads)
        work = lambda: all_of(threads, lambda data: hashlib.sha256(data).digest(), hashed)  # noqa: B023, E731
        yield f"sha256, {threads} threads {rate(BLOCK * len(hashed), work)}"
    if torch.cuda.is_available():
        here = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")

        def copy(to: torch.Tensor, of: torch.Tensor) -> None:
            for _ in range(64):
                to.copy_(of, non_blocking=True)
            torch.cuda.synchronize()

        copy(there, here)
        yield f"to the GPU {rate(64 * BLOCK, lambda: copy(there, here))}"
        yield f"from the GPU {rate(64 * BLOCK, lambda: copy(here, there))}"


def write_inputs(bf16: Checkpoint, targets: list[Target], run: RunDir, device: str) -> None:
    """Write what calibrate and round would: an input scale of 100, and the codes of nearest."""
    run.calibration.mkdir(parents=True)
    modules = [m for t in targets if t.scheme and t.scheme.calibrated for m in t.modules]
    scales = {f"{module}.input_global_scale": torch.tensor([100.0]) for module in modules}
    save_file(scales, run.calibration / "input_scales.safetensors")
    run.rounding.mkdir()
    units = round_weights.units_of(targets)
    layers = [[u for u in units if u.layer == n] for n in sorted({u.layer for u in units})]

    def nearest(unit: round_weights.Unit) -> round_weights.Done:
        read = [bf16.read(target.name).to(device) for target in unit.targets]
        weight = torch.cat([each if each.dim() == 3 else each[None] for each in read], 1)
        ranges = unit.scheme.observe(weight, "memoryless_minmax")
        tensors = unit.scheme.quantize(weight, ranges, None, None)
        return round_weights.Done(unit, {s: tensor.cpu() for s, tensor in tensors.items()}, {})

    def write(layer: list[round_weights.Unit]) -> None:
        path = run.path / str(layer[0].layer)
        path.mkdir()
        round_weights.write_layer(path, layer, [nearest(unit) for unit in layer])
        for file in path.iterdir():
            file.rename(run.rounding / file.name)

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        list(pool.map(write, layers))


def _measure(bf16: Checkpoint, run: RunDir, name: str, device: str, full: bool) -> None:
    recipe = load_recipe(name)
    targets = plan_targets(bf16.tensors, recipe.quantization)
    write_inputs(bf16, targets, run, device)
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    stage = Run(run, recipe, bf16, targets, is_bundled=False)

    def check(full: bool) -> VerificationResult:
        written = Checkpoint.open(run.checkpoint)
        return verify(written, bf16, targets, recipe, run, device=device, full=full)

    measured(f"{name}: convert", lambda: _convert(stage))
    for what, whole in (("verify", False), ("verify --full", True))[: 1 + full]:
        checked = measured(f"{name}: {what}", lambda: check(whole))  # noqa: B023
        print(f"  {[check.as_json() for check in checked.checks.values()]}", flush=True)
    shutil.rmtree(run.path)


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--recipe", "names", multiple=True, default=("nvfp4a16",), show_default=True)
@click.option("--full/--no-full", default=True, help="Also compare everything with SOURCE.")
@click.option("--watch/--no-watch", default=True, help="Time parts and look where threads stand.")
def main(source: Path, out: Path, names: tuple[str, ...], full: bool, watch: bool) -> None:
    """Convert and verify SOURCE in the new folder OUT, which is removed."""
    if not watch:
        PARTS.clear()
    out.mkdir(parents=True)
    device = best_device()
    print(
        f"{device}, {len(os.sched_getaffinity(0))} cores; {'; '.join(machine(source, out))}",
        flush=True,
    )
    bf16, started = Checkpoint.open(source), time.perf_counter()
    import_module("compressed_tensors.compressors")  # in a chain a model has imported most of it
    print(f"compressed-tensors imported in {time.perf_counter() - started:.1f} s", flush=True)
    for name in names:
        _measure(bf16, RunDir(out / name), name, device, full)
    if device != "cpu":
        print(f"GPU memory held at most: {torch.cuda.max_memory_reserved() / 1e9:.2f} GB")
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
