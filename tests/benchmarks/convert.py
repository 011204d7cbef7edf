"""Convert side by side with its peers on a synthetic checkpoint of real layer shapes.

    python -m tests.benchmarks.convert SCRATCH_FOLDER [--runs 5] [--experts 128]

  FP8_DYNAMIC  ours against llm-compressor's model_free_ptq
  NVFP4A16     ours against compressed-tensors' own functions, Linear by Linear (model_free_ptq stops
               at the full-attention layers, which have no v_proj); gate/up and q/k/v share a scale

Every measurement is a process of its own; imports are left out, reading and writing are in. The source
is in the page cache; ours also syncs to disk and hashes what it writes, the peers do not. Prints
medians of wall and CPU seconds, GB of BF16 input a second and the most anonymous memory held (mapped
input is not counted), with the machine's load average: on a busy machine trust the CPU seconds.
"""

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

# Each function imports what it needs and returns the work to be measured.
Work = Callable[[], object]
IMPORTED_BY_CONVERT = (
    "compressed_tensors.quantization",
    "transformers.models.gemma4.modeling_gemma4",
)


def ours(source: Path, out: Path, recipe_name: str) -> Work:
    """Convert with this project."""
    from quantize.checkpoints.reader import Checkpoint
    from quantize.checkpoints.targets import plan_targets
    from quantize.recipe.reading import load_recipe
    from quantize.stages.convert.convert import convert

    for module in IMPORTED_BY_CONVERT:
        importlib.import_module(module)
    recipe = load_recipe(recipe_name)
    checkpoint = Checkpoint.open(source)
    targets = plan_targets(checkpoint.tensors, recipe.quantization)
    return partial(convert, checkpoint, targets, out, recipe=recipe)


def model_free(source: Path, out: Path) -> Work:
    """Convert with llm-compressor's model_free_ptq."""
    from llmcompressor import model_free_ptq

    ignore = ["lm_head", "re:.*embed.*", "re:.*router.*", "re:.*vision.*", "re:.*self_cond.*"]
    return partial(
        model_free_ptq,
        source,
        out,
        scheme="FP8_DYNAMIC",
        ignore=[*ignore, "re:.*norm.*", "re:.*scalar"],
        max_workers=len(os.sched_getaffinity(0)),
        device="cpu",
    )


def compressed_tensors(source: Path, out: Path) -> Work:
    """Quantize to NVFP4 with the libraries' observers and compressors, one fused unit at a time."""
    from llmcompressor.entrypoints.model_free.converter import split_fused_moe_experts
    from safetensors.torch import safe_open, save_file

    from quantize.checkpoints.reader import Checkpoint
    from quantize.checkpoints.targets import plan_targets
    from quantize.recipe.reading import load_recipe

    planned = plan_targets(Checkpoint.open(source).tensors, load_recipe("nvfp4a16").quantization)
    quantized = {target.name for target in planned if target.scheme}

    def work() -> None:
        out.mkdir()
        for shard in sorted(source.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            written = {n: t for n, t in tensors.items() if n not in quantized}
            units: dict[str, dict[str, torch.Tensor]] = {}
            for name in quantized & tensors.keys():
                for module, weight in split_fused_moe_experts({name: tensors[name]}).items():
                    base, projection = module.removesuffix(".weight").rsplit(".", 1)
                    alone = projection in ("o_proj", "down_proj")
                    units.setdefault(module if alone else base, {})[module] = weight
            for unit in units.values():
                written |= compress_unit(unit)
            save_file(written, out / shard.name, metadata={"format": "pt"})

    return work


def compress_unit(unit: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantize Linears that share a global scale, the way model_free_ptq does it."""
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.entrypoints.model_free.lifecycle import initialize_quantized_linear
    from llmcompressor.modifiers.quantization.calibration import (
        apply_calibration_status,
        freeze_module_quantization,
        initialize_observer,
        observe,
        update_qparams,
    )
    from llmcompressor.observers.fusion import FusionHandler

    modules: dict[str, Any] = {}
    for name, weight in unit.items():
        scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
        modules[name] = initialize_quantized_linear(weight, scheme, "cpu")
        initialize_observer(modules[name], "weight")
        apply_calibration_status(modules[name])
    FusionHandler.fuse([(module.weight_observer, module) for module in modules.values()])
    observe(modules.values(), base_name="weight")
    update_qparams(modules.values(), base_name="weight")
    written: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        freeze_module_quantization(module)
        compress_module(module)
        written |= module.state_dict(prefix=name.removesuffix("weight"))
    return written


WORK: dict[str, Callable[[Path, Path], Work]] = {
    "FP8_DYNAMIC ours": lambda source, out: ours(source, out, "fp8_dynamic"),
    "FP8_DYNAMIC model_free_ptq": model_free,
    "NVFP4A16 ours": lambda source, out: ours(source, out, "nvfp4a16"),
    "NVFP4A16 compressed-tensors": compressed_tensors,
}


@dataclass(frozen=True)
class Measurement:
    """One conversion: wall and CPU seconds, and the most anonymous memory it held."""

    seconds: float
    cpu_seconds: float
    own_bytes: int


def measured(work: Work) -> Measurement:
    """Run and measure; mapped files are not counted as own memory, imported libraries' heap is."""
    most, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.02):
            status = Path("/proc/self/status").read_text()
            most = max(most, int(status.split("RssAnon:")[1].split()[0]) * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    stop.set()
    watcher.join()
    return Measurement(seconds, cpu_seconds, most)


def measure(name: str, source: Path, out: Path) -> Measurement:
    """Run one conversion in a process of its own."""
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.convert",
        "--work",
        name,
        str(source),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    shutil.rmtree(out)
    return Measurement(*json.loads(done.stdout.splitlines()[-1]))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--runs", default=5, show_default=True)
@click.option("--experts", default=128, show_default=True, help="128: 3.4 GB in, 72: 2.1 GB.")
@click.option("--only", default="", help="Measure only what has this in its name.")
@click.option("--work", hidden=True)
@click.option("--out", type=click.Path(path_type=Path), hidden=True)
def main(
    folder: Path, runs: int, experts: int, only: str, work: str | None, out: Path | None
) -> None:
    """Measure in FOLDER, which is created and removed."""
    if work and out:
        print(json.dumps(astuple(measured(WORK[work](folder, out)))))
        return
    from quantize.checkpoints.reader import Checkpoint
    from tests.support.synthetic import synthetic_config, write_synthetic

    source = write_synthetic(folder / "bf16", synthetic_config(2, experts, 1, 4096))
    gigabytes = Checkpoint.open(source).nbytes / 1e9
    cores = len(os.sched_getaffinity(0))
    print(f"{gigabytes:.2f} GB in, {cores} cores, medians of {runs}", flush=True)
    found: dict[str, list[Measurement]] = {name: [] for name in WORK if only in name}
    loads: list[float] = []
    for _ in range(runs):
        for name, results in found.items():
            results.append(measure(name, source, folder / "out"))
            loads.append(os.getloadavg()[0])
            print(f"  {name:30} {results[-1].seconds:6.1f} s, load {loads[-1]:.1f}", flush=True)
    for name, results in found.items():
        seconds = statistics.median(m.seconds for m in results)
        cpu = statistics.median(m.cpu_seconds for m in results)
        own = max(m.own_bytes for m in results) / 1e9
        print(
            f"{name:30} {seconds:6.1f} s  {gigabytes / seconds:6.3f} GB/s  "
            f"{cpu:6.1f} CPU s  {own:5.2f} GB own memory"
        )
    print(f"load average {min(loads):.1f} to {max(loads):.1f}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
