"""Convert side by side with its peers on a synthetic checkpoint of real layer shapes.

    python benchmarks/convert.py SCRATCH_FOLDER [--runs 5] [--experts 128]

  FP8_DYNAMIC  ours against llm-compressor's model_free_ptq
  NVFP4A16     ours against compressed-tensors' own functions, Linear by Linear (model_free_ptq stops
               at the full-attention layers, which have no v_proj); gate/up and q/k/v share a scale

Every measurement is a process of its own; imports are left out, reading and writing are in. The source
is in the page cache; ours also syncs to disk and hashes what it writes, the peers do not. Prints a
table of medians, GB of BF16 input a second, and peak resident memory, with the load average.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click


def ours(source: Path, out: Path, recipe_name: str) -> None:
    """Convert with this project."""
    from quantize.checkpoint import Checkpoint
    from quantize.convert import convert
    from quantize.recipe import load_recipe
    from quantize.targets import plan_targets

    recipe = load_recipe(recipe_name)
    checkpoint = Checkpoint.open(source)
    targets = plan_targets(checkpoint.tensors, recipe.quantization)
    started = time.perf_counter()
    convert(checkpoint, targets, out, recipe=recipe)
    report(started)


def model_free(source: Path, out: Path) -> None:
    """Convert with llm-compressor's model_free_ptq, FP8_DYNAMIC."""
    from llmcompressor import model_free_ptq

    ignore = ["re:.*embed.*", "re:.*router.*", "re:.*vision.*", "re:.*self_conditioning.*"]
    started = time.perf_counter()
    model_free_ptq(
        source,
        out,
        scheme="FP8_DYNAMIC",
        ignore=[*ignore, "lm_head", "re:.*norm.*", "re:.*scalar"],
        max_workers=len(os.sched_getaffinity(0)),
        device="cpu",
    )
    report(started)


def compressed_tensors(source: Path, out: Path) -> None:
    """Quantize to NVFP4 with the observers and compressors of the libraries, one Linear at a time."""
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.entrypoints.model_free.converter import split_fused_moe_experts
    from llmcompressor.entrypoints.model_free.lifecycle import initialize_quantized_linear
    from llmcompressor.modifiers.quantization.calibration import (
        apply_calibration_status,
        freeze_module_quantization,
        initialize_observer,
        observe,
        update_qparams,
    )
    from llmcompressor.observers.fusion import FusionHandler
    from safetensors.torch import safe_open, save_file

    from quantize.checkpoint import Checkpoint
    from quantize.recipe import load_recipe
    from quantize.targets import plan_targets

    planned = plan_targets(Checkpoint.open(source).tensors, load_recipe("nvfp4a16").quantization)
    quantized = {target.name for target in planned if target.scheme}
    started = time.perf_counter()
    out.mkdir()
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written = {n: t for n, t in tensors.items() if n not in quantized}
        units: dict[str, dict[str, object]] = {}
        for name in quantized & tensors.keys():
            for module, weight in split_fused_moe_experts({name: tensors[name]}).items():
                base, projection = module.removesuffix(".weight").rsplit(".", 1)
                alone = projection in ("o_proj", "down_proj")
                units.setdefault(module if alone else base, {})[module] = weight
        for unit in units.values():
            modules = {}
            for name, weight in unit.items():
                scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
                modules[name] = initialize_quantized_linear(weight, scheme, "cpu")
                initialize_observer(modules[name], "weight")
                apply_calibration_status(modules[name])
            FusionHandler.fuse([(m.weight_observer, m) for m in modules.values()])
            observe(modules.values(), base_name="weight")
            update_qparams(modules.values(), base_name="weight")
            for name, module in modules.items():
                freeze_module_quantization(module)
                compress_module(module)
                written |= module.state_dict(prefix=name.removesuffix("weight"))
        save_file(written, out / shard.name, metadata={"format": "pt"})
    report(started)


WORK: dict[str, Callable[[Path, Path], None]] = {
    "FP8_DYNAMIC ours": lambda source, out: ours(source, out, "fp8_dynamic"),
    "FP8_DYNAMIC model_free_ptq": model_free,
    "NVFP4A16 ours": lambda source, out: ours(source, out, "nvfp4a16"),
    "NVFP4A16 compressed-tensors": compressed_tensors,
}


def report(started: float) -> None:
    """Print seconds and peak resident bytes of this process, for the parent to read."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    anonymous = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    print(json.dumps([time.perf_counter() - started, peak, int(anonymous) * 1024]))


def measure(name: str, source: Path, out: Path) -> tuple[float, int]:
    """Run one conversion in a process of its own; return seconds and peak resident bytes."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--work", name, str(source), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    seconds, peak, _ = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(out)
    return seconds, peak


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--runs", default=5, show_default=True)
@click.option("--experts", default=128, show_default=True, help="3.4 GB; 60 make 1.9 GB.")
@click.option("--only", default="", help="Measure only what has this in its name.")
@click.option("--work", hidden=True)
@click.option("--out", type=click.Path(path_type=Path), hidden=True)
def main(
    folder: Path, runs: int, experts: int, only: str, work: str | None, out: Path | None
) -> None:
    """Measure in FOLDER, which is created and removed."""
    if work and out:
        WORK[work](folder, out)
        return
    from quantize.checkpoint import Checkpoint
    from quantize.synthetic import synthetic_config, write_synthetic

    source = write_synthetic(folder / "bf16", synthetic_config(2, experts, 1, 4096))
    gigabytes = Checkpoint.open(source).nbytes / 1e9
    print(f"{gigabytes:.2f} GB in, {len(os.sched_getaffinity(0))} cores, {runs} runs, medians")
    found: dict[str, list[tuple[float, int]]] = {n: [] for n in WORK if only in n}
    for _ in range(runs):
        for name, results in found.items():
            results.append(measure(name, source, folder / "out"))
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name, results in found.items():
        seconds = statistics.median(s for s, _ in results)
        spread = f"{min(s for s, _ in results):.1f}-{max(s for s, _ in results):.1f}"
        peak = max(p for _, p in results)
        print(
            f"{name:30} {seconds:7.1f} s ({spread}) {gigabytes / seconds:6.3f} GB/s "
            f"{peak / 1e9:5.2f} GB peak"
        )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
