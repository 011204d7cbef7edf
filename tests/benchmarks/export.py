"""Export a checkpoint as GGUF: seconds, memory, and whether the `gguf` package reads all of it.

    python -m tests.support.synthetic BF16      # or with --layers 2 --vision-layers 1
    python -m tests.benchmarks.export BF16 SCRATCH_FOLDER

The BF16 checkpoint is exported as BF16 and as Q8_0; then it is quantized to NVFP4A16 (whose files hold
what NVFP4's do, without input scales) and exported so. Each export is a process of its own; imports are
left out, reading, writing, hashing and syncing are in. Prints one line of JSON each: bytes, wall and
CPU seconds, the most anonymous memory held, and the tensors that the package finds in the file.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from tests.benchmarks.convert import measured, ours


def export(source: Path, out: Path, kept_as: str) -> dict[str, Any]:
    """Export in this process; return what the line says."""
    import gguf

    from quantize.checkpoints.reader import Checkpoint
    from quantize.exports.gguf_file import export_gguf

    checkpoint = Checkpoint.open(source)
    found = measured(partial(export_gguf, checkpoint, out, name="measured", kept_as=kept_as))
    tensors = gguf.GGUFReader(out).tensors
    end = max(int(each.data_offset) + int(each.n_bytes) for each in tensors)
    size = out.stat().st_size
    if not end <= size < end + 32:
        raise RuntimeError(f"{out}: {size} bytes, and its tensors end at {end}")
    return {
        "bytes_in": checkpoint.nbytes,
        "bytes_out": size,
        **asdict(found),
        "tensors": len(tensors),
        "types": sorted({each.tensor_type.name for each in tensors}),
        "cores": len(os.sched_getaffinity(0)),
    }


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--work", hidden=True)
def main(source: Path, folder: Path, work: str | None) -> None:
    """Measure in FOLDER, which is created and removed."""
    if work:
        print(json.dumps(export(source, folder, work)))
        return
    folder.mkdir(parents=True)
    out, quantized = folder / "model.gguf", folder / "nvfp4a16"
    for kept_as, checkpoint in (("BF16", source), ("Q8_0", source), ("BF16", quantized)):
        if not checkpoint.exists():
            ours(source, quantized, "nvfp4a16")()
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.export",
            "--work",
            kept_as,
            str(checkpoint),
            str(out),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        about = {"checkpoint": checkpoint.name, "type": kept_as}
        print(json.dumps(about | json.loads(done.stdout)), flush=True)
        out.unlink()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
