"""The real size on one machine: write, convert, verify, load and calibrate 25.2B random parameters.

    python -m tests.benchmarks.full_size SCRATCH_FOLDER REPORT.jsonl [STEP ...]

Steps, in the order of their worth: write, fp8_dynamic, verify-fp8_dynamic, nvfp4a16,
verify-nvfp4a16, load-nvfp4a16, calibrate. Each is a process of its own under its own time limit; one
that fails or runs out of time is reported and the next one starts. An artifact is removed when no
later step needs it: 85 GB of memory-backed storage do (`mount -o remount,size=100G /dev/shm`).

Every step adds one line to REPORT.jsonl: seconds of the work itself (imports left out), the most
anonymous memory of its process (tmpfs and mapped files are not counted), on the GPU the most
allocated there, and what it found. With `--layers 2 --vocabulary 4096` everything runs in minutes
anywhere.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from quantize.checkpoints.reader import Checkpoint, read_header
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Calibration, Recipe
from quantize.runs.folder import RunDir

Facts = dict[str, Any]
# Step -> seconds allowed.
STEPS = {
    "write": 150,
    "fp8_dynamic": 150,
    "verify-fp8_dynamic": 150,
    "nvfp4a16": 200,
    "verify-nvfp4a16": 150,
    "load-nvfp4a16": 150,
    "calibrate": 300,
}
OVER_WHEN = {"verify-fp8_dynamic": "fp8_dynamic", "load-nvfp4a16": "nvfp4a16"}
QUESTION = "A shop sells {0} boxes of {1} apples and {2} single ones. How many apples is that?"


class Peak:
    """The most memory this process held, in bytes, sampled 20 times a second.

    `most` is anonymous; `mapped` are pages of files and of shared memory: page cache, pinned buffers.
    """

    def __init__(self) -> None:
        self.most = self.mapped = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.05):
                status = Path("/proc/self/status").read_text()
                held = {
                    kind: int(status.split(f"Rss{kind}:")[1].split()[0]) * 1024
                    for kind in ("Anon", "File", "Shmem")
                }
                self.most = max(self.most, held["Anon"])
                self.mapped = max(self.mapped, held["File"] + held["Shmem"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()


def shipped(name: str) -> Recipe:
    """Load a recipe of this checkout: the project need not be installed."""
    return load_recipe(str(Path(__file__).parents[2] / "recipes" / f"{name}.yaml"))


def write(folder: Path, layers: int, vocabulary: int, experts: int = 128) -> Facts:
    """Write the synthetic BF16 checkpoint."""
    from tests.support.synthetic import synthetic_config, write_synthetic

    vision = 27 if layers == 30 else 1
    config = synthetic_config(layers, experts, vision, vocabulary)
    checkpoint = Checkpoint.open(write_synthetic(folder / "bf16", config))
    return {
        "bytes": checkpoint.nbytes,
        "tensors": len(checkpoint.tensors),
        "shards": len(checkpoint.shards),
    }


def convert(folder: Path, name: str) -> Facts:
    """Convert with a shipped recipe."""
    from quantize.stages.convert.convert import convert as convert_checkpoint
    from quantize.stages.convert.convert import quantized_config
    from quantize.stages.verify.witness import Witness

    source, recipe = Checkpoint.open(folder / "bf16"), shipped(name)
    targets = plan_targets(source.tensors, recipe.quantization)
    run = RunDir(folder / f"{name}-run")
    seen = Witness(source, quantized_config(source.config, targets, recipe), recipe)
    done = convert_checkpoint(
        source, targets, folder / name, recipe=recipe, record=run.conversion_json, look=seen.check
    )
    seen.write(targets, run)
    return {
        "bytes_in": done.bytes_in,
        "bytes": done.bytes_out,
        "tensors": done.tensors,
        "quantized": done.modules,
        "shards": len(done.shards),
    }


def verify(folder: Path, name: str) -> Facts:
    """Run every static check on an artifact."""
    from quantize.stages.verify.verify import verify as verify_checkpoint

    source, recipe = Checkpoint.open(folder / "bf16"), shipped(name)
    targets = plan_targets(source.tensors, recipe.quantization)
    run = RunDir(folder / f"{name}-run")
    run.path.mkdir(exist_ok=True)
    found = verify_checkpoint(Checkpoint.open(folder / name), source, targets, recipe, run)
    return {
        "faults": [fault for check in found.checks.values() for fault in check.faults],
        "looked_at": {check.name: check.looked_at for check in found.checks.values()},
        "worst_relative_error": max(
            error for error in found.relative_error.values() if error is not None
        ),
    }


def load(folder: Path, name: str) -> Facts:
    """Load an artifact, run encoder and decoder once, and say how tokens spread over experts."""
    import torch

    from quantize.checkpoints.load import load as load_checkpoint
    from quantize.stages.calibrate.coverage import Coverage
    from tests.support.modules_oracle.inputs import watch_inputs
    from tests.support.modules_oracle.passes import text_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    model = load_checkpoint(folder / name, dtype=torch.bfloat16, device=device)
    seconds = time.perf_counter() - started
    coverage = Coverage(text_config(model).num_experts)
    ids = torch.arange(200, 200 + 256, device=device)[None]
    with torch.no_grad(), watch_inputs(model, coverage.see):
        logits = model(input_ids=ids, decoder_input_ids=ids).logits
    counts = torch.tensor(list(coverage.tokens.values())).double()
    return {
        "load_seconds": round(seconds, 1),
        "finite_logits": bool(logits.isfinite().all()),
        "logit_std": round(logits.std().item(), 3),
        "busiest_expert_share": round((counts.amax(1) / counts.sum(1)).max().item(), 4),
        "idle_experts": int((counts == 0).sum()),
    }


def calibrate(folder: Path, prompts: int, steps: int) -> Facts:
    """Calibrate NVFP4 on prompts x 1 canvas x steps."""
    from quantize.host.files import read_json
    from quantize.runtime import Placement
    from quantize.stages.calibrate.calibrate import calibrate as calibrate_checkpoint

    source = folder / "bf16"
    path = folder / "prompts.jsonl"
    questions = [QUESTION.format(3 + i, 5 + i % 7, i % 11) for i in range(prompts + 16)]
    path.write_text("\n".join(json.dumps({"question": q}) for q in questions))
    settings = source / "generation_config.json"
    changed = read_json(settings) | {"max_denoising_steps": steps}
    settings.write_text(json.dumps(changed))
    out = folder / "calibration"
    shutil.rmtree(out, ignore_errors=True)
    place = Placement.here(None)
    calibrate_checkpoint(source, calibration_recipe(path, prompts), out, place)
    coverage = read_json(out / "coverage.json")
    return {
        "scales": len(read_header(out / "input_scales.safetensors")),
        "fallbacks": len(coverage["fallbacks"]),
    }


def calibration_recipe(prompts_file: Path, prompts: int) -> Recipe:
    """Return the nvfp4 recipe with prompts from a file and one canvas each."""
    settings = Calibration(
        datasets=[str(prompts_file)],
        prompts=prompts,
        canvases=1,
        thinking=0.5,
        batch_size=16,
        min_tokens_per_expert=64,
    )
    return shipped("nvfp4").model_copy(update={"calibration": settings})


def measured(work: Callable[[], Facts]) -> Facts:
    """Run one step and add seconds and peak memory to its facts."""
    import torch

    peak, started = Peak(), time.perf_counter()
    with peak.watching():
        facts = work()
    seconds = time.perf_counter() - started
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        facts["gpu_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return {"seconds": round(seconds, 1), "own_memory_gb": round(peak.most / 1e9, 2)} | facts


def run_step(command: list[str], step: str) -> Facts:
    """Run one step in a process of its own; a failure or a time limit becomes its result."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--only", step], stdout=subprocess.PIPE, text=True, timeout=STEPS[step]
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {STEPS[step]} s"}
    facts = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    failed = {} if done.returncode == 0 else {"failed": f"exit code {done.returncode}"}
    return facts | failed | {"process_seconds": round(time.perf_counter() - started, 1)}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("report", type=click.Path(path_type=Path))
@click.argument("steps", nargs=-1, type=click.Choice(list(STEPS)))
@click.option("--layers", default=30, show_default=True)
@click.option("--vocabulary", default=262_144, show_default=True)
@click.option("--prompts", default=64, show_default=True, help="Prompts of the calibration.")
@click.option("--denoising-steps", default=16, show_default=True)
@click.option("--only", hidden=True)
def main(
    folder: Path,
    report: Path,
    steps: tuple[str, ...],
    layers: int,
    vocabulary: int,
    prompts: int,
    denoising_steps: int,
    only: str | None,
) -> None:
    """Run STEPS (all, when none is named) in FOLDER; REPORT gets one JSON line a step."""
    work: dict[str, Callable[[], Facts]] = {
        "write": lambda: write(folder, layers, vocabulary),
        "calibrate": lambda: calibrate(folder, prompts, denoising_steps),
    }
    for name in ("fp8_dynamic", "nvfp4a16"):
        work[name] = lambda name=name: convert(folder, name)
        work[f"verify-{name}"] = lambda name=name: verify(folder, name)
        work[f"load-{name}"] = lambda name=name: load(folder, name)
    if only:
        print(json.dumps(measured(work[only])))
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.benchmarks.full_size", str(folder), str(report)]
    command += ["--layers", str(layers), "--vocabulary", str(vocabulary)]
    command += ["--prompts", str(prompts), "--denoising-steps", str(denoising_steps)]
    print(
        f"{len(os.sched_getaffinity(0))} cores, {shutil.disk_usage(folder).free / 1e9:.0f} GB free"
    )
    with report.open("a") as file:
        for step in steps or STEPS:
            facts = {"step": step} | run_step(command, step)
            print(json.dumps(facts), flush=True)
            file.write(json.dumps(facts) + "\n")
            file.flush()
            if step in OVER_WHEN:
                shutil.rmtree(folder / OVER_WHEN[step], ignore_errors=True)


if __name__ == "__main__":
    main()
