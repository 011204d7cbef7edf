"""Times a forward of random 26B weights at many batch sizes, and what each change brought, on one GPU.

    python tests/benchmarks/step_speed.py rows --out FILE [--mixes fp8,nvfp4] [--batches 1,4]
    python tests/benchmarks/step_speed.py compile       what `rows` launches, with all cores
    python tests/benchmarks/step_speed.py candidates    what `quantize tune` will time, likewise
    python tests/benchmarks/step_speed.py bundled --out FILE
    python tests/benchmarks/step_speed.py small         kernels between products, by warps
    python tests/benchmarks/step_speed.py all --out FOLDER [--seconds 1300]

`rows` appends a JSON line to FILE for every mix and batch as soon as it is measured, and prints it.
Variants alternate in one process over the same weights:

    one pass     a canvas is encoded with the next one's first step, as it is served
    two passes   it is encoded before

`--seconds` ends the run before a row that would begin later. Each row: ms a canvas (median) and a
forward (16 steps and the commit), tokens/s, ms a step, its parts, its floor, experts hit, peak GB.

`bundled` answers problems with the bundled model at 4 slots, going on step by step and canvas by
canvas, and records the steps of its canvases. `all` runs the GPU tests of what was changed, `rows`,
`quantize tune` into a cache below FOLDER, `rows` by that table, and adaptive rows with the recorded
steps: each with a limit of its own, the most telling first.
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]

from fused_dequant import tuning  # noqa: E402

from quantize import bench  # noqa: E402
from quantize.adaptive import NEVER, SomeSlots  # noqa: E402
from quantize.bundled import CHECKPOINT, HELDOUT  # noqa: E402
from quantize.checkpoints.reader import known_config  # noqa: E402
from quantize.cli.options import REAL_MODEL  # noqa: E402
from quantize.runtime import Sampler  # noqa: E402
from quantize.runtime import open as open_engine  # noqa: E402
from quantize.runtime.chat import encode_chat, load_tokenizer  # noqa: E402
from quantize.runtime.engine import complete  # noqa: E402
from quantize.runtime.fused.cost import decoder_floor, measure_rates  # noqa: E402
from quantize.runtime.fused.engine import FusedEngine  # noqa: E402
from quantize.runtime.fused.random_weights import random_weights  # noqa: E402

CONTEXT, STEPS = 1024, 16
SAMPLER = replace(Sampler(), max_denoising_steps=STEPS, confidence_threshold=NEVER)
ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PARITY = "one_pass or step_by_step or replay or batch or early"
WORKERS = min(16, os.cpu_count() or 1)  # that compile
COMMANDS = ("rows", "compile", "candidates", "bundled", "small")
TUNED = (  # what no table holds yet, what serves most first
    r"(experts/(fp8|nvfp4_fragments)|linear/fp8)/.* M=(512|2048|8192)$|linear/fp8/9216",
    r"(lm_head|soft_embedding)/.* M=(512|2048)$",
    r"(experts/bf16|linear/(bf16|nvfp4_fragments))/.* M=(512|2048|8192)$|linear/bf16/9216",
)


def compile_launches(job: tuple[str, int]) -> str:
    """Compile, in a worker, what a pass of so many rows launches, on tensors without storage."""
    from kernels_support import launches
    from triton.runtime.jit import KernelInterface

    made: Any = lambda self, grid: partial(self.run, grid=grid, warmup=True)  # noqa: E731
    KernelInterface.__getitem__ = made
    scheme, rows = job
    try:
        launches._products(scheme, rows)  # pyright: ignore[reportPrivateUsage]
        launches._layer(scheme, rows)  # pyright: ignore[reportPrivateUsage]
        if scheme == "bf16" and rows <= 2048:
            launches._vocabulary(rows)  # pyright: ignore[reportPrivateUsage]
            launches._sampler(max(1, rows // 256))  # pyright: ignore[reportPrivateUsage]
    except Exception as error:  # the run compiles it then
        return f"{job}: {type(error).__name__}: {error}"[:300]
    return "compiled"


def compile_all() -> None:
    """Fill Triton's cache."""
    jobs = [(scheme, rows) for rows in ROWS for scheme in ("nvfp4_fragments", "fp8", "bf16")]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        print(json.dumps(Counter(pool.imap_unordered(compile_launches, jobs))), flush=True)


def compile_candidates() -> None:
    """Compile what `quantize tune` will time of TUNED, in their order."""
    from fused_dequant import candidates, tune

    found = list(candidates.products((9, 0)))
    for only in TUNED:
        chosen = [p for p in found if re.search(only, f"{p.key} M={p.M}")]
        tune.compile_all(
            [(p, c) for p in chosen for c in candidates.candidates(p, (9, 0))], WORKERS
        )


def measured(engine: FusedEngine, prompts: list[list[int]], canvases: int) -> dict[str, Any]:
    """Time canvases by both variants in turns, then a step and its parts."""
    seconds: dict[str, list[float]] = {"one pass": [], "two passes": []}
    slots, tokens = list(range(len(prompts))), dict[str, torch.Tensor]()
    engine.stops = lambda seed, canvas: (
        STEPS if canvas else 1
    )  # the first stands for a prompt's end
    for turn in range(canvases + 1):  # the first captures graphs
        for variant, own in seconds.items():
            engine._joins = variant == "one pass"  # pyright: ignore[reportPrivateUsage]
            for slot in slots:
                engine.release(slot)
                prompt = prompts[slot][: CONTEXT - engine.canvas_length]
                engine.admit(slot, prompt, slot, SAMPLER)
            engine.denoise(slots)
            torch.cuda.synchronize()
            started = time.perf_counter()
            done = engine.denoise(slots)
            own += [time.perf_counter() - started] if turn else []
            tokens[variant] = torch.tensor([canvas.tokens for canvas in done if canvas])
            assert [canvas.steps for canvas in done if canvas] == [STEPS] * len(slots)
    rows = {name: statistics.median(own) * 1e3 for name, own in seconds.items()}
    step, parts = engine.time_step(slots), engine.profile_step(slots)
    for slot in slots:
        engine.release(slot)
    count = len(slots) * engine.canvas_length
    return {
        "ms_a_canvas": rows,
        "ms_a_forward": {name: ms / (STEPS + 1) for name, ms in rows.items()},
        "tokens_a_second": {name: count / ms * 1e3 for name, ms in rows.items()},
        "tokens_that_differ": (tokens["one pass"] != tokens["two passes"]).float().mean().item(),
        "ms_a_step": step,
        "parts": parts,
        "unexplained": step - sum(parts.values()),
    }


def rows(args: argparse.Namespace) -> None:
    """Measure every mix at every batch size."""
    begun = time.monotonic()
    config = json.loads(args.config.read_text()) if args.config else known_config(REAL_MODEL)
    rates = measure_rates(torch.device("cuda"))
    facts: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for mix in args.mixes.split(","):
        schemes = dict(zip(("experts", "attention", "mlp"), bench.MIXES[mix], strict=True))
        weights = random_weights(config, schemes, "cuda")
        facts["tables"] = [len(list(folder.glob("*.json"))) for folder in tuning._folders]  # pyright: ignore[reportPrivateUsage]
        hit: list[int] = []
        for batch in map(int, args.batches.split(",")):
            if time.monotonic() - begun > args.seconds:
                return
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            longest = CONTEXT + 2 * weights.config.canvas_length
            engine = FusedEngine(weights, capacity=batch, max_context=longest)
            prompts = bench._prompts(weights, CONTEXT, batch)  # pyright: ignore[reportPrivateUsage]
            hit = hit or bench._experts_hit(engine, prompts[0])  # pyright: ignore[reportPrivateUsage]
            own = measured(engine, prompts, args.canvases if batch <= 8 else 1)
            floor = decoder_floor(weights, rates, batch, CONTEXT, statistics.mean(hit))
            row = {"mix": mix, "batch": batch, **facts, **own, "floor": sum(floor.values()) * 1e3}
            row |= {"experts_hit": [min(hit), max(hit)], "at": time.monotonic() - begun}
            row |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}
            del engine
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        del weights


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
            CHECKPOINT, device=args.device, kind="fused", capacity=capacity, max_context=1024,
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


def small() -> None:
    """Time what lies between the products with other numbers of warps."""
    for M in (256, 512, 1024, 2048, 8192):
        for warps in (4, 8, 16):
            print(json.dumps({"rows": M, "warps": warps, **timed_between(M, warps)}), flush=True)


def timed_between(M: int, warps: int) -> dict[str, float]:
    """Return the microseconds of both kernels for M rows of FP8 activations."""
    from fused_dequant import residual
    from fused_dequant.timing import measure

    H, dtype = 2816, torch.bfloat16
    h, dense, o, out, router = (torch.randn(M, H, device="cuda").to(dtype) for _ in range(5))
    routed = torch.randn(M, 8, H, device="cuda").to(dtype)
    codes = [torch.empty(M, H, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2)]
    scales = [torch.empty(M, device="cuda") for _ in range(2)]
    norms = torch.ones(4, H, device="cuda", dtype=dtype).unbind()
    one = torch.ones(1, device="cuda", dtype=dtype)
    rest: dict[str, Any] = {"BLOCK": 4096, "CHAINED": True, "launch_pdl": True, "num_warps": warps}

    def after_experts() -> None:
        residual.after_experts_kernel[(M,)](
            h, dense, routed, *norms[:3], one, one, norms[3], out, codes[0], scales[0], M, H,
            1e-6, CHOICES=8, LARGEST=448.0, **rest,
        )  # fmt: skip

    def after_attention() -> None:
        residual.after_attention_kernel[(M,)](
            h, o, *norms, out, codes[0], scales[0], codes[1], scales[1], router, H, 1e-6,
            H**-0.5, DENSE=448.0, EXPERTS=448.0, **rest,
        )  # fmt: skip

    return {call.__name__: measure([call] * 8) for call in (after_experts, after_attention)}


def run(command: list[str], limit: float, environment: dict[str, str], log: Path) -> int | str:
    """Run a command and return its exit code, or end it and all that it started at its limit."""
    with log.open("w") as file:
        done = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
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


def queue(out: Path) -> list[tuple[float, list[str], bool]]:
    """Return seconds at most, command, and whether it reads the table tuned before, in their order."""
    me, cli = [sys.executable, __file__], [sys.executable, "-m", "quantize"]
    steps, stops = [*me, "rows", "--out", str(out / "rows.jsonl")], str(out / "stops.json")
    parity = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-m",
        "gpu",
        "--basetemp",
        str(out / "tests"),
    ]
    parity += ["tests/runtime/test_fused_gpu.py", "-k", PARITY]
    tune = [[*cli, "tune", "--only", only] for only in TUNED]
    adaptive = [*cli, "bench", "--steps", "adaptive", "--batch", "4", "--stops", stops, "--json"]
    return [
        (200, parity, False),
        (230, [*steps, "--batches", "1,4", "--seconds", "200"], False),
        (300, tune[0], True),
        (60, tune[1], True),
        (330, [*steps, "--mixes", "fp8,nvfp4_fp8", "--seconds", "260"], True),
        (60, [*me, "bundled", "--out", stops], True),
        (40, [*me, "small"], False),
        (90, [*adaptive, "--random-weights", "fp8"], True),
        (200, tune[2], True),
        (240, [*steps, "--mixes", "nvfp4,bf16", "--batches", "1,4,32", "--seconds", "200"], True),
        (120, [*steps, "--mixes", "nvfp4,bf16", "--batches", "8,16", "--seconds", "90"], True),
    ]


def everything(args: argparse.Namespace) -> None:
    """Run the queue; every command has a limit, and none begins when the time is over."""
    begun, out = time.monotonic(), args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    plain, tuned = dict(os.environ), os.environ | {"XDG_CACHE_HOME": str(out / "cache")}

    def compile_aside() -> None:
        for name in ("compile", "candidates"):
            run([sys.executable, __file__, name], 280, plain, out / f"{name}.log")

    aside = Thread(target=compile_aside)  # on all cores, while the first commands use the GPU
    aside.start()
    for number, (limit, command, by_table) in enumerate(queue(out)):
        if by_table:
            aside.join()
        left = args.seconds - (time.monotonic() - begun)
        if left < 20:
            break
        started, log = time.monotonic(), out / f"{number}.log"
        code = run(command, min(limit, left), tuned if by_table else plain, log)
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
    parser.add_argument("--canvases", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1300)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", type=Path, help="config.json in place of the 26B model's")
    args = parser.parse_args()
    work: dict[str, Callable[[], None]] = {
        "rows": lambda: rows(args), "compile": compile_all, "candidates": compile_candidates,
        "bundled": lambda: bundled(args), "small": small,
        "all": lambda: everything(args),
    }  # fmt: skip
    work[args.command]()


if __name__ == "__main__":
    main()
