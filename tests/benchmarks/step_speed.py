"""Times a forward of random 26B weights at many batch sizes, and what each change brought, on one GPU.

    python -m tests.benchmarks.step_speed rows --out FILE [--mixes fp8,nvfp4] [--batches 1,4]
    python -m tests.benchmarks.step_speed compile       what `rows` launches, with all cores
    python -m tests.benchmarks.step_speed table --out FILE [--mixes nvfp4+fp8] [--batches 1,4,16,32]
    python -m tests.benchmarks.step_speed bundled --out FILE
    python -m tests.benchmarks.step_speed all --out FOLDER [--seconds 480]

`rows` appends a JSON line to FILE for every mix and batch as soon as it is measured, and prints it. A
mix of NVFP4 with "+fp8" behind it is multiplied as W4A8.
Variants alternate in one process over the same weights, as `--compare` says:

    joins        "one pass": a canvas is encoded with the next one's first step, as it is served
                 "two passes": it is encoded before
    looks        "looking": lm_head leaves what the sampler and the soft embedding would read it for
                 "reading": both read the logits
    nothing      "served"

`table` is `quantize bench` at 16 steps, of each mix. It appends a JSON line to FILE for each.

`--seconds` ends the run before a row that would begin later. Each row: ms a canvas (median) and a
forward (16 steps and the commit), tokens/s, ms a step, its parts, its floor, experts hit, peak GB.

`bundled` answers problems with the bundled model at 4 slots, going on step by step and canvas by
canvas, and records the steps of its canvases. `all` runs what was measured least first: each command
with a limit of its own, and what a cut-off run has measured is in its files.
"""

import argparse
import gc
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from fused_dequant.weights import tuning  # noqa: E402

from quantize.bench import speed as bench  # noqa: E402
from quantize.bench.adaptive import NEVER, SomeSlots, random_prompts  # noqa: E402
from quantize.bench.steps import profile_step, time_step  # noqa: E402
from quantize.bundled import CHECKPOINT, HELDOUT  # noqa: E402
from quantize.checkpoints.reader import known_config  # noqa: E402
from quantize.cli.options import REAL_MODEL  # noqa: E402
from quantize.runtime import Placement, Sampler  # noqa: E402
from quantize.runtime import open as open_engine  # noqa: E402
from quantize.runtime.engine.fused_engine import FusedEngine  # noqa: E402
from quantize.runtime.engine.interface import complete  # noqa: E402
from quantize.runtime.gpu.rates import measure_rates  # noqa: E402
from quantize.runtime.model import text_stack  # noqa: E402
from quantize.runtime.model.cost import decoder_floor  # noqa: E402
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer  # noqa: E402
from quantize.runtime.weights.load import TextWeights  # noqa: E402
from quantize.runtime.weights.random_weights import random_weights  # noqa: E402

CONTEXT, STEPS = 1024, 16
SAMPLER = replace(Sampler(), max_denoising_steps=STEPS, confidence_threshold=NEVER)
ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PARITY = "one_pass or step_by_step or replay or batch or early"
WORKERS = min(16, os.cpu_count() or 1)  # that compile
COMMANDS = ("rows", "compile", "table", "bundled")


def compile_launches(job: tuple[str, int]) -> str:
    """Compile, in a worker, what a pass of so many rows launches, on tensors without storage."""
    from triton.runtime.jit import KernelInterface

    from tests.support.kernels_support import launches

    made: Any = lambda self, grid: partial(self.run, grid=grid, warmup=True)  # noqa: E731
    KernelInterface.__getitem__ = made
    scheme, rows = job
    try:
        launches.launch_scheme(scheme, rows)
        if scheme == "bf16" and rows <= 2048:
            launches._vocabulary(rows)
            launches._sampler(max(1, rows // 256))
    except Exception as error:  # the run compiles it then
        return f"{job}: {type(error).__name__}: {error}"[:300]
    return "compiled"


def compile_all() -> None:
    """Fill Triton's cache."""
    schemes = ("nvfp4_fragments", "nvfp4_e4m3", "fp8", "bf16")
    jobs = [(scheme, rows) for rows in ROWS for scheme in schemes]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        print(json.dumps(Counter(pool.imap_unordered(compile_launches, jobs))), flush=True)


Variants = dict[str, tuple[FusedEngine, bool]]


def variants(weights: TextWeights, compare: str, batch: int) -> Variants:
    """Return engines by name, each with whether a canvas is encoded with the next one's first step."""

    def engine(**options: bool) -> FusedEngine:
        longest = CONTEXT + 2 * weights.config.canvas_length
        return FusedEngine(weights, capacity=batch, max_context=longest, **options)

    if compare == "looks":
        return {"looking": (engine(), True), "reading": (engine(), True)}
    own = engine()
    if compare == "joins":
        return {"one pass": (own, True), "two passes": (own, False)}
    return {"served": (own, True)}


def begin(engine: FusedEngine, joins: bool, prompts: list[list[int]]) -> None:
    """Put the prompts into the slots; their first canvas, of one step, stands for the prompts' ends."""
    engine.denoiser.joins = joins
    engine.denoiser.stops = lambda seed, canvas: STEPS if canvas else 1
    for slot, prompt in enumerate(prompts):
        engine.release(slot)
        engine.admit(slot, prompt[: CONTEXT - engine.canvas_length], slot, SAMPLER)
    engine.denoise(range(len(prompts)))


def measured(compared: Variants, prompts: list[list[int]], canvases: int) -> dict[str, Any]:
    """Time canvases by each variant in turns, each first in every second; then a step and its parts."""
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    slots, tokens = list(range(len(prompts))), dict[str, torch.Tensor]()
    steps: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for turn in range(canvases + 1):  # the first captures graphs
        for variant in list(compared)[:: 1 if turn % 2 else -1]:
            engine, joins = compared[variant]
            if variant in ("looking", "reading"):
                text_stack.LOOKING = variant == "looking"
            begin(engine, joins, prompts)
            torch.cuda.synchronize()
            started = time.perf_counter()
            done = engine.denoise(slots)
            seconds[variant] += [time.perf_counter() - started] if turn else []
            tokens[variant] = torch.tensor([canvas.tokens for canvas in done if canvas])
            assert [canvas.steps for canvas in done if canvas] == [STEPS] * len(slots)
    for variant, (engine, _) in compared.items():  # each still holds its last canvas
        steps[variant] = time_step(engine, slots)
    for variant, (engine, _) in compared.items():
        parts[variant] = profile_step(engine, slots)
    each = {name: [own * 1e3 for own in times] for name, times in seconds.items()}
    rows = {name: statistics.median(own) for name, own in each.items()}
    first = next(iter(compared))
    count = len(slots) * compared[first][0].canvas_length
    return {
        "ms_a_canvas": rows,
        "ms_of_each_canvas": each,
        "ms_a_forward": {name: ms / (STEPS + 1) for name, ms in rows.items()},
        "tokens_a_second": {name: count / ms * 1e3 for name, ms in rows.items()},
        "tokens_that_differ": {
            name: (own != tokens[first]).float().mean().item() for name, own in tokens.items()
        },
        "ms_a_step": steps,
        "parts": parts,
        "unexplained": steps[first] - sum(parts[first].values()),
    }


def rows(args: argparse.Namespace) -> None:
    """Measure every mix at every batch size."""
    begun = time.monotonic()
    config = json.loads(args.config.read_text()) if args.config else known_config(REAL_MODEL)
    rates = measure_rates(torch.device("cuda"))
    facts: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for mix in args.mixes.split(","):
        named, _, activations = mix.partition("+")
        schemes = dict(zip(("experts", "attention", "mlp"), bench.MIXES[named], strict=True))
        weights = random_weights(config, schemes, "cuda", in_fp8=activations == "fp8")
        facts["tables"] = [len(list(folder.glob("*.json"))) for folder in tuning._folders]
        hit: list[int] = []
        for batch in map(int, args.batches.split(",")):
            if time.monotonic() - begun > args.seconds:
                return
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            compared = variants(weights, args.compare, batch)
            prompts = random_prompts(weights, CONTEXT, batch)
            engine = next(iter(compared.values()))[0]
            hit = hit or bench._experts_hit(engine, prompts[0])
            own = measured(compared, prompts, args.canvases)
            del engine, compared
            floor = decoder_floor(weights, rates, batch, CONTEXT, statistics.mean(hit))
            row = {"mix": mix, "batch": batch, **facts, **own, "floor": sum(floor.values()) * 1e3}
            row |= {"experts_hit": [min(hit), max(hit)], "at": time.monotonic() - begun}
            row |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        del weights


def table(args: argparse.Namespace) -> None:
    """Run `quantize bench` over every mix."""
    config = json.loads(args.config.read_text()) if args.config else known_config(REAL_MODEL)
    for mix in args.mixes.split(","):
        named, _, activations = mix.partition("+")
        place = Placement("cuda", None, cast("Any", activations or None))
        batches = [int(batch) for batch in args.batches.split(",")]
        measured = bench.bench(
            None, random=named, config=config, steps=[str(STEPS)], batches=batches,
            context=CONTEXT, canvases=5, place=place,
        )  # fmt: skip
        with args.out.open("a") as file:
            file.write(json.dumps({"mix": mix} | asdict(measured)) + "\n")
        for shown in bench.tables(measured):
            Console(width=200).print(shown)
        gc.collect()
        torch.cuda.empty_cache()


def bundled(args: argparse.Namespace) -> None:
    """Record the steps of the bundled model's canvases, and time 4 slots with and without waiting."""
    tokenizer = load_tokenizer(CHECKPOINT)
    problems = [
        json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()[: args.problems]
    ]
    prompts = [
        encode_chat(tokenizer, [{"role": "user", "content": p["question"]}], thinking=True)
        for p in problems
    ]
    sampler = Sampler.from_checkpoint(CHECKPOINT)
    for capacity, invariant in ((4, False), (32, True)):  # as served, as evaluated
        engine = open_engine(
            CHECKPOINT, device=args.device, capacity=capacity, max_context=1024,
            batch_invariant=invariant,
        )  # fmt: skip
        steps: list[list[int]] = []
        for name, whole in [
            ("by step", False),
            ("by canvas", True),
        ] * 2:  # first it captures graphs
            held: Any = SomeSlots(engine, capacity, whole=whole)
            started = time.perf_counter()
            seeds = range(len(prompts))
            samples = complete(held, prompts, seeds, max_new_tokens=512, sampler=sampler)
            seconds = time.perf_counter() - started
            steps.append([count for sample in samples for count in sample.steps_per_canvas])
            row: dict[str, Any] = {"slots": capacity, "invariant": invariant, "go on": name}
            row |= {"seconds": seconds, "same_steps": steps[-1] == steps[0]}
            row["tokens_a_second"] = sum(sample.new_tokens for sample in samples) / seconds
            print(json.dumps(row), flush=True)
        if not invariant:
            args.out.write_text(json.dumps(steps[0]))


def run(command: list[str], limit: float, log: Path) -> int | str:
    """Run a command and return its exit code, or end it and all that it started at its limit."""
    with log.open("w") as file:
        done = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
        try:
            return done.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGTERM)
        try:
            done.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
    return "limit"


def queue(out: Path) -> list[tuple[float, list[str]]]:
    """Return seconds at most and command, in their order."""
    me, cli = [sys.executable, __file__], [sys.executable, "-m", "quantize"]
    steps, stops = [*me, "rows", "--out", str(out / "rows.jsonl")], str(out / "stops.json")
    many = [*steps, "--compare", "nothing", "--batches", "8,32", "--canvases", "1"]
    adaptive = [*cli, "bench", "--steps", "adaptive", "--batch", "4", "--stops", stops, "--json"]
    parity = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "gpu"]
    parity += ["--basetemp", str(out / "tests"), "tests/runtime/test_fused_gpu.py", "-k", PARITY]
    return [
        (220, [*many, "--mixes", "nvfp4_fp8,nvfp4,bf16,fp8", "--seconds", "200"]),
        (60, [*me, "bundled", "--out", stops, "--problems", "100"]),
        (90, [*adaptive, "--random-weights", "fp8"]),
        (80, [sys.executable, "-m", "tests.benchmarks.kernel_turns"]),
        (200, [*steps, "--batches", "1,4"]),
        (200, parity),
    ]


def everything(args: argparse.Namespace) -> None:
    """Run the queue; every command has a limit, and none begins when the time is over."""
    begun, out = time.monotonic(), args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    compiler = [sys.executable, __file__, "compile"]  # on all cores, while the first command loads
    aside = Thread(target=run, args=(compiler, 280, out / "compile.log"))
    aside.start()
    for number, (limit, command) in enumerate(queue(out)):
        left = args.seconds - (time.monotonic() - begun)
        if left < 20:
            break
        started, log = time.monotonic(), out / f"{number}.log"
        code = run(command, min(limit, left), log)
        line = {"command": command[1:], "code": code, "seconds": round(time.monotonic() - started)}
        line |= {"end": log.read_text()[-1500:]}
        with (out / "queue.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def main() -> None:
    """Read the command line and run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument("--out", type=Path, help="file, or folder of `all`")
    parser.add_argument("--mixes", default="fp8,nvfp4_fp8,nvfp4,bf16")
    parser.add_argument("--batches", default="1,4,8,16,32,64")
    parser.add_argument("--canvases", type=int, default=4)
    parser.add_argument("--compare", choices=("joins", "looks", "nothing"), default="joins")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", type=Path, help="config.json in place of the 26B model's")
    args = parser.parse_args()
    work: dict[str, Callable[[], None]] = {
        "rows": lambda: rows(args), "compile": compile_all, "table": lambda: table(args),
        "bundled": lambda: bundled(args), "all": lambda: everything(args),
    }  # fmt: skip
    work[args.command]()


if __name__ == "__main__":
    main()
