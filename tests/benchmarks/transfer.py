"""How fast the bytes of a checkpoint reach this GPU, by every way there is.

    python -m tests.benchmarks.transfer FOLDER [--layers N]

FOLDER holds a checkpoint, in memory (/dev/shm) to measure the link and not a disk. Prints GB/s of one
copy from pinned memory, of both ways of `quantize.runtime.gpu.transfer`, what registering costs, and
the seconds of a pass over streamed layers with and without packing.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

from quantize.checkpoints.reader import Checkpoint
from quantize.runtime.gpu.transfer import Layout, Transfer, in_memory
from quantize.runtime.weights.load import load_packed
from quantize.runtime.weights.streaming import StreamedLayers


def seconds(work: Callable[[], object]) -> float:
    """Time work, until the device has done it."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", default=8, show_default=True, help="Layers of a measured fetch.")
def main(folder: Path, layers: int) -> None:
    """Measure the ways from FOLDER to the GPU."""
    device = torch.device("cuda")
    pinned = torch.ones(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device)
    seconds(lambda: there.copy_(pinned, non_blocking=True))
    link = len(pinned) / seconds(lambda: there.copy_(pinned, non_blocking=True)) / 1e9
    print(f"one copy from pinned memory: {link:.1f} GB/s")
    checkpoint = Checkpoint.open(folder)
    prefixes = tuple(f"model.decoder.layers.{index}." for index in range(layers))
    chosen = [info for name, info in checkpoint.tensors.items() if name.startswith(prefixes)]
    layout = Layout.of(chosen)
    print(f"{layout.size / 1e9:.2f} GB in {len(layout.runs)} runs; in memory: {in_memory(folder)}")
    files = sum(file.stat().st_size for file in {info.file for info in chosen}) / 1e9
    for register in (False, True):
        fetch = partial(Transfer(device, register=register).fetch, layout)
        first, second = seconds(fetch), seconds(fetch)
        print(
            f"register={register}: {layout.size / second / 1e9:.1f} GB/s; the first fetch took "
            f"{first - second:.2f} s more ({files:.1f} GB of files)"
        )
    started = time.perf_counter()
    weights = load_packed(folder, "cuda", resident=0)
    print(f"opened in {time.perf_counter() - started:.1f} s")
    assert isinstance(weights.layers, StreamedLayers)
    for number in range(4):
        took = seconds(lambda: [None for _ in weights.layers])
        print(f"pass {number} over {len(weights.layers)} streamed layers: {took:.2f} s")


if __name__ == "__main__":
    main()
