"""Calibrate and GPTQ at the real size and budgets of GPU memory: seconds by part, peaks, bytes, sha256.

    python -m tests.benchmarks.layer_by_layer exact FOLDER
    python -m tests.benchmarks.layer_by_layer run FOLDER --gpu-memory 22 --gpu-memory 76

FOLDER (in memory: /dev/shm) gets a synthetic BF16 checkpoint and prompts, unless these are there.
`exact` compares Hessians of some layers, summed in the loop and layer by layer, bit for bit; `run`
takes each budget through `calibrate` and `round`, each a process of its own; the same command goes on
where it was stopped, and leaves out what FOLDER/layers.jsonl says is done. Codes are removed once they
are hashed: three budgets' would not fit. The recording and what the stages write lie in --scratch.

A line has the seconds of the stage and of its parts, GPU and host peaks, bytes over the link and on
scratch, and a sha256 of every artifact. `run` ends with what is equal between budgets. With --profile
it also prints which kernels and functions of torch took how long; take few --layers and steps then.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import torch

from tests.benchmarks.full_size import Peak, shipped
from tests.benchmarks.full_size_run import gpu_bytes, link_rate, prepare, shape_options

Facts = dict[str, Any]
REPORT = "layers.jsonl"
LEAST_SECONDS = 15
CONDITIONS = ("prompts", "canvases", "steps", "batch", "layers")  # of a run


def recipe_of(folder: Path, count: int, canvases: int, batch: int) -> Any:
    """Return the recipe nvfp4 with FOLDER's prompts."""
    recipe = shipped("nvfp4")
    assert recipe.calibration is not None
    changes = {
        "datasets": [str(folder / "prompts.jsonl")], "prompts": count, "canvases": canvases,
        "batch_size": batch,
    }  # fmt: skip
    return recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update=changes)})


class Clock:
    """Seconds and bytes by part; where `waits`, a part's device work is waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    def timed(
        self, name: str, work: Callable[..., Any], *, waits: bool = True
    ) -> Callable[..., Any]:
        """Return `work`, timed."""

        def wrapped(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args, **options)
            finally:
                if waits and torch.cuda.is_available():
                    torch.cuda.synchronize()
                taken = time.perf_counter() - started
                self.seconds[name] = self.seconds.get(name, 0.0) + taken

        return wrapped

    def add(self, name: str, nbytes: int) -> None:
        """Count bytes."""
        self.bytes[name] = self.bytes.get(name, 0) + nbytes

    def facts(self) -> Facts:
        """Return what a line of the report has."""
        return {
            "parts_s": {name: round(value, 1) for name, value in self.seconds.items()},
            "bytes_gb": {name: round(value / 1e9, 2) for name, value in self.bytes.items()},
        }


class Events:
    """GPU seconds of many short calls that need not be waited for, from first launch to last."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.seconds = 0.0

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work`, timed on the device."""

        def wrapped(*args: Any, **options: Any) -> Any:
            if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
                return work(*args, **options)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            found = work(*args, **options)
            ended.record()
            self.pairs.append((begun, ended))
            return found

        return wrapped

    def settle(self) -> float:
        """Return the seconds since the last call."""
        if self.pairs:
            torch.cuda.synchronize()
        taken = sum(begun.elapsed_time(ended) for begun, ended in self.pairs) / 1e3
        self.pairs.clear()
        self.seconds += taken
        return taken


def instrumented(clock: Clock, parts: dict[str, Events]) -> None:
    """Wrap what the stages are made of; `parts` gets what is timed on the device."""
    from quantize.runtime import Sampler
    from quantize.runtime.engine.batch import FusedPasses
    from quantize.runtime.gpu import transfer
    from quantize.runtime.model.text_stack import FusedModel
    from quantize.runtime.record import layer_by_layer, recording, shuttle
    from quantize.runtime.weights import streaming
    from quantize.schemes import gptq
    from quantize.schemes.hessians import Hessians
    from quantize.stages import denoising
    from quantize.stages.round_weights import round_weights

    fetch, carry, wait = (
        transfer.Transfer.fetch, shuttle.Shuttle.run, streaming.StreamedLayers._take,
    )  # fmt: skip

    def timed(name: str, owner: Any, *works: str) -> None:
        for work in works:
            setattr(owner, work, parts.setdefault(name, Events()).timed(getattr(owner, work)))

    if torch.cuda.is_available():
        from fused_dequant.gptq import gram

        timed("products of Hessians", gram, "add")
    timed("Hessians", Hessians, "see", "mean")
    timed("passes of the decoder", FusedPasses, "decode")
    timed("passes of the encoder", FusedPasses, "_encode")
    timed("sampler and conditioning", FusedPasses, "draw")
    timed("sampler and conditioning", Sampler, "decide")
    timed("factors", gptq, "_factored")
    timed("GPTQ from left to right", gptq, "_spread_errors")
    timed("coordinate descent", gptq, "_descend")
    timed("losses", gptq, "energy")
    timed("layer passes", layer_by_layer.LayerByLayer, "_take")
    take, write = FusedModel.run, recording._Batch._write
    add = recording._Batch.add
    passes, began = [0], time.perf_counter()

    def fetched(self: Any, layout: Any) -> Any:
        clock.add("weights", layout.size)
        return fetch(self, layout)

    def carried(self: Any, pieces: Any, sources: Any, targets: Any, work: Any) -> None:
        rows = 2 * sum(piece.count for piece in pieces) * sources[0].shape[1]
        clock.add("rows", rows * (1 if targets is None else 2))
        started = time.perf_counter()
        clock.timed("layer passes", carry)(self, pieces, sources, targets, work)
        taken = time.perf_counter() - started
        on_gpu = {name: own.settle() for name, own in parts.items()}
        on_gpu = ", ".join(f"{name} {value:.2f}" for name, value in on_gpu.items() if value)
        print(f"  passes of a layer {taken:.2f} s; since the last one's: {on_gpu}", flush=True)

    def run(self: Any, own: Any) -> Any:
        found = take(self, own)
        passes[0] += 1
        if passes[0] % 48 == 0:
            print(
                f"  {passes[0]} turns of {len(own)} passes, {time.perf_counter() - began:.1f} s",
                flush=True,
            )
        return found

    def noted(self: Any, own: Any) -> None:
        clock.timed("taking rows to the host", add, waits=False)(self, own)

    def written(self: Any, rows: Any, copied: Any) -> None:
        clock.add("scratch", rows.numel() * rows.element_size())
        write(self, rows, copied)

    recording._Batch.add = noted
    transfer.Transfer.fetch, shuttle.Shuttle.run = fetched, carried
    streaming.StreamedLayers._take = clock.timed("waiting for a layer", wait, waits=False)
    FusedModel.run, recording._Batch._write = run, written
    round_weights._read = clock.timed("reading weights", round_weights._read, waits=False)
    round_weights.write_layer = clock.timed("writing", round_weights.write_layer, waits=False)
    round_weights.round_units = clock.timed("rounding", round_weights.round_units)
    denoising.open = clock.timed("loading", denoising.open)
    denoising.record_all = clock.timed("denoising", denoising.record_all)
    recording.Recording.find = clock.timed("checking the recording", recording.Recording.find)


def work_of(stage: str, model: Path, recipe: Any, run: Path, scratch: Path, gb: float) -> None:
    """Do one stage."""
    from quantize.checkpoints.reader import Checkpoint
    from quantize.checkpoints.targets import plan_targets
    from quantize.runtime import Placement
    from quantize.stages.calibrate.calibrate import calibrate
    from quantize.stages.round_weights.round_weights import round_weights

    place = Placement.here(gb * 1e9 if torch.cuda.is_available() else None)
    if stage == "calibrate":
        calibrate(model, recipe, run / "calibration", place, scratch=scratch)
        return
    source = Checkpoint.open(model)
    targets = plan_targets(source.tensors, recipe.quantization)
    round_weights(source, targets, recipe, run / "rounding", place, scratch=scratch)


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of a stage's result; those of layers as one."""
    found: dict[str, str] = {}
    codes = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            own = hashlib.file_digest(file, "sha256")
        if path.suffix == ".safetensors" and path.stem.startswith("layer-"):
            codes.update(own.digest())
            found["codes and scales"] = codes.hexdigest()
        elif path.name != "identity.json":
            found[path.name] = own.hexdigest()
    return found


def lines(folder: Path) -> list[Facts]:
    """Return what the report holds."""
    path = folder / REPORT
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def profiled(profiles: bool) -> Iterator[None]:
    """Print what took longest on the device, and what the host did most, of the block."""
    if not profiles:
        yield
        return
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as found:
        yield
    for key in ("self_device_time_total", "self_cpu_time_total"):
        print(found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=60))


def one_stage(
    stage: str, folder: Path, recipe: Any, scratch: Path, gb: float, conditions: Facts,
    profiles: bool,
) -> None:  # fmt: skip
    """Run one stage here, and add its line."""
    clock, parts, peak = Clock(), dict[str, Events](), Peak()
    on_gpu = torch.cuda.is_available()
    link = link_rate() if on_gpu else None
    instrumented(clock, parts)
    run, started = scratch.with_name(f"run-{gb:g}"), time.perf_counter()
    with peak.watching(), profiled(profiles):
        work_of(stage, folder / "model", recipe, run, scratch, gb)
    seconds = time.perf_counter() - started
    result = run / {"calibrate": "calibration", "round": "rounding"}[stage]
    for own in parts.values():
        own.settle()
    facts: Facts = conditions | {
        "stage": stage,
        "gb": gb,
        "seconds": round(seconds, 1),
        "gpu_s": {name: round(own.seconds, 2) for name, own in parts.items() if own.seconds},
        "own_memory_gb": round(peak.most / 1e9, 2),
        "mapped_gb": round(peak.mapped / 1e9, 2),
        "sha256": digests(result),
    }
    facts |= clock.facts()
    if on_gpu and link:
        facts |= {"gpu_gb": round(gpu_bytes() / 1e9, 2), "link_gb_s": round(link / 1e9, 1)}
        facts |= {"device": torch.cuda.get_device_name()}
    with (folder / REPORT).open("a") as file:
        file.write(json.dumps(facts) + "\n")
    print(json.dumps(facts), flush=True)
    if stage == "round":
        shutil.rmtree(result)


def summary(folder: Path) -> None:
    """Print what is equal between budgets, of each kind of run by itself."""
    kinds: dict[tuple[Any, ...], list[Facts]] = {}
    for line in lines(folder):
        kinds.setdefault(tuple(line[name] for name in ("stage", *CONDITIONS)), []).append(line)
    for (stage, *conditions), own in kinds.items():
        print(f"{stage}, {dict(zip(CONDITIONS, conditions, strict=True))}")
        for line in own:
            took = f"{line['seconds']} s, {line['parts_s']}, on the GPU {line['gpu_s']}"
            print(f"  at {line['gb']:g} GB: {took}")
        for name in sorted({name for line in own for name in line["sha256"]}):
            sums = {line["sha256"].get(name) for line in own}
            print(f"  {name}: {'equal' if len(sums) == 1 else 'DIFFERENT'} at {len(own)} budgets")


@click.group()
def main() -> None:
    """Measure calibrate and round at the real size."""


def run_options(command: click.decorators.FC) -> click.decorators.FC:
    """Add what a run is made of."""
    for option in (
        click.option("--canvases", default=2, show_default=True),
        click.option("--batch", default=8, show_default=True, help="Canvases of a batch."),
        click.option(
            "--scratch", type=click.Path(path_type=Path), default=Path("/tmp/layer-by-layer"),
            show_default=True,
        ),
        click.option(
            "--gpu-memory", "budgets", multiple=True, type=float, default=(22.0, 76.0, 141.0),
            show_default=True, help="Budgets in GB, in the order in which they are run.",
        ),
        click.option("--seconds", default=570, show_default=True, help="When this command stops."),
        click.option("--profile", is_flag=True, help="Print the longest kernels of each stage."),
        click.option("--only", default="", hidden=True),
    ):  # fmt: skip
        command = option(command)
    return command


@main.command("run")
@shape_options
@run_options
def run_command(
    folder: Path, count: int, denoising_steps: int, canvases: int, batch: int, scratch: Path,
    budgets: tuple[float, ...], seconds: float, profile: bool, only: str, **shape: int,
) -> None:  # fmt: skip
    """Calibrate and round at every budget."""
    numbers = count, canvases, denoising_steps, batch, shape["layers"]
    conditions = dict(zip(CONDITIONS, numbers, strict=True))
    recipe = recipe_of(folder, count, canvases, batch)
    if only:
        own = scratch / f"{budgets[-1]:g}"  # the last is that of this process
        one_stage(only, folder, recipe, own, budgets[-1], conditions, profile)
        return
    end = time.monotonic() + seconds
    prepare(folder, shape, count, denoising_steps)
    print(f"prepared; {end - time.monotonic():.0f} s left", flush=True)
    for gb in budgets:
        for stage in ("calibrate", "round"):
            asked = conditions | {"stage": stage, "gb": gb}
            if any(asked.items() <= line.items() for line in lines(folder)):
                continue
            left = end - time.monotonic()
            words = [sys.executable, *sys.argv, "--only", stage, "--gpu-memory", str(gb)]
            print(f"{stage} at {gb:g} GB, {left:.0f} s left", flush=True)
            code = None
            if left > LEAST_SECONDS:
                with suppress(subprocess.TimeoutExpired):
                    code = subprocess.run(words, timeout=left).returncode
            if code != 0:
                why = "out of time; the same command goes on" if code is None else f"exit {code}"
                print(f"{stage} at {gb:g} GB: {why}", flush=True)
                summary(folder)
                sys.exit(1)
    summary(folder)


@main.command("exact")
@shape_options
@click.option("--batch", default=8, show_default=True, help="Canvases of a batch.")
@click.option(
    "--compared", default=6, show_default=True, help="Layers whose Hessians are compared."
)
@click.option(
    "--scratch", type=click.Path(path_type=Path), default=Path("/tmp/layer-by-layer"),
    show_default=True,
)  # fmt: skip
def exact_command(
    folder: Path, count: int, denoising_steps: int, batch: int, compared: int, scratch: Path,
    **shape: int,
) -> None:  # fmt: skip
    """Compare Hessians, summed in the loop and layer by layer, bit for bit."""
    from quantize.checkpoints.reader import Checkpoint
    from quantize.host.processes import best_device
    from quantize.runtime.gpu.placement import Placement, free_unused
    from quantize.runtime.record.layer_by_layer import LayerByLayer
    from quantize.runtime.record.recording import Recorder
    from quantize.schemes.hessians import Hessians
    from quantize.stages.denoising import Denoising

    prepare(folder, shape, count, denoising_steps)
    model, device = folder / "model", best_device()
    settings = recipe_of(folder, count, 2, batch).calibration
    experts: int = Checkpoint.open(model).config["text_config"]["num_experts"]
    last = compared - 1
    kinds = (
        "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj",
        "experts.gate_up_proj", "experts.down_proj",
    )  # fmt: skip
    names = [f"model.decoder.layers.{i}.{kind}" for i in range(compared) for kind in kinds]
    denoising, loop = Denoising(model, settings, Placement(device)), Hessians(names, experts)
    started = time.perf_counter()
    denoising.run(title="the loop", observers=[loop.see], recorder=Recorder(scratch / "exact"))
    print(f"the loop: {time.perf_counter() - started:.1f} s", flush=True)
    free_unused(device)
    sums = {name: loop.sums(name).cpu() for name in names}
    counts = {name: loop.tokens(name) for name in names}
    loop = Hessians([], 0)
    started = time.perf_counter()
    recording = denoising.recording(scratch / "exact")
    layers = LayerByLayer(model, recording, device, scratch)
    found: dict[int, Hessians] = {}

    def observers(index: int) -> list[Any]:
        found[index] = Hessians(names, experts)
        return [found[index].see]

    unequal = 0
    for index in layers.run(observers, last):
        mine = found.pop(index)
        for name in names[index * len(kinds) : (index + 1) * len(kinds)]:
            tiles = mine.sums(name).cpu()
            if not (
                torch.equal(tiles, sums[name]) and torch.equal(mine.tokens(name), counts[name])
            ):
                unequal += 1
                worst = (tiles - sums[name]).abs().max() / sums[name].abs().max()
                print(f"{name}: DIFFERENT by {worst:.3g} of the largest", flush=True)
        print(f"layer {index}: {time.perf_counter() - started:.1f} s", flush=True)
    print(f"{unequal} of {len(names)} Hessians differ", flush=True)
    shutil.rmtree(scratch / "exact")
    sys.exit(unequal > 0)


if __name__ == "__main__":
    main()
