"""The whole chain at the real size, from a BF16 folder to report.html, at budgets of GPU memory.

    python -m tests.benchmarks.full_size_run prepare FOLDER
    python -m tests.benchmarks.full_size_run run FOLDER --parallel 4 [--gptq-layers 6 --until convert]
    python -m tests.benchmarks.full_size_run summary FOLDER

FOLDER (in memory: /dev/shm) gets a synthetic BF16 checkpoint, unless FOLDER/bf16 is there, prompts and
problems as local jsonl files. A chain is one recipe at one budget: 64 prompts x 1 canvas x 16 steps of
calibration, 16 held-out trajectories, 64 problems x 1 canvas x 16 steps a side. It is one process, a
`quantize run`, and the same command goes on where it was stopped. Several chains run at the same time,
each on a GPU and a share of the cores of its own. A finished chain loses its checkpoint, unless it is
named by --keep. Without a GPU, and with --layers 2 --vocabulary 4096, everything runs in a few minutes
anywhere.

With --gptq-layers N only the first N layers are quantized, their weights rounded by GPTQ; the model
that denoises is whole, so a pass of the loop over it and a layer's rounding can be projected.

FOLDER/chains/RECIPE-GB/report.jsonl has a line a stage: seconds, the most that was taken of the GPU,
the most anonymous memory of the host (page cache and pinned buffers are `mapped_gb`), bytes that went
to the device, and the floor, those bytes at the rate of a copy from pinned memory; and a line for each
process: its seconds beside its stages', and `parts`, what its progress lines say. The summary adds up
stages, and compares results that must not depend on the budget.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import yaml

from tests.benchmarks.full_size import QUESTION, Peak, shipped, write
from tests.benchmarks.full_size_compare import compare_runs

LEAST_SECONDS = 10  # a process takes that to start
ENDED = (0, 1, 4)  # random weights may well fail the gate: the report is there all the same
BESIDE = "beside stages"  # the seconds of a process that none of its stages took: imports, plans
TASK = "word_problems"  # one canvas an answer
PART = re.compile(r"^([^\n:]+): .*done.* in (.+)$", re.MULTILINE)  # of a progress line
Facts = dict[str, Any]


@dataclass(frozen=True)
class Chain:
    """One recipe at one budget of GPU memory, in GB."""

    folder: Path
    recipe: str
    gb: float

    @property
    def name(self) -> str:
        """What it is called, here and for --keep."""
        return f"{self.recipe}-{self.gb:g}"

    @property
    def path(self) -> Path:
        """Where its run, its log and its report lie."""
        return self.folder / "chains" / self.name

    @property
    def report(self) -> Path:
        """A JSON line for every stage that ended, and for every process."""
        return self.path / "report.jsonl"

    @property
    def log(self) -> Path:
        """What the last process showed."""
        return self.path / "run.log"

    @property
    def run(self) -> Path | None:
        """The run folder, None where there is none yet."""
        return next((path.parent for path in self.path.glob("*/manifest.json")), None)

    @property
    def reported(self) -> bool:
        """Whether its report is there; a failed check writes one without the stage `report`."""
        return self.run is not None and (self.run / "report.html").exists()

    def done(self, stage: str) -> bool:
        """Whether a stage has come to its end."""
        return any(line["stage"] == stage and line["done"] for line in self.lines())

    def lines(self) -> list[Facts]:
        """What is in the report so far."""
        text = self.report.read_text() if self.report.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


def prepare(folder: Path, shape: dict[str, int], count: int, steps: int) -> None:
    """Write the BF16 checkpoint, prompts and problems, where they are not there yet.

    The chains read FOLDER/model: the same shards, and a generation config with their steps.
    """
    from quantize.host.files import read_json

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "bf16").exists():
        write(folder, **shape)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for file in (folder / "bf16").iterdir():
        if not (model / file.name).exists() and file.name != "generation_config.json":
            os.link(file, model / file.name)
    settings = read_json(folder / "bf16" / "generation_config.json")
    _write(model / "generation_config.json", json.dumps(settings | {"max_denoising_steps": steps}))
    questions = [QUESTION.format(3 + i % 50, 5 + i % 7, i) for i in range(2 * count + 16)]
    prompts = [json.dumps({"question": question}) for question in questions[: count + 16]]
    _write(folder / "prompts.jsonl", "\n".join(prompts))
    problems = [json.dumps({"question": q, "answer_number": 7}) for q in questions[-count:]]
    (folder / "tasks").mkdir(exist_ok=True)
    _write(folder / "tasks" / f"{TASK}.jsonl", "\n".join(problems))


def _write(path: Path, text: str) -> None:
    """Write a file, unless it has that text already: another chain may be reading it."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def recipe_of(chain: Chain, count: int, batch: int, gptq: range) -> Path:
    """Write a shipped recipe with these prompts, problems and batch.

    `gptq` names the layers that stay BF16 where GPTQ rounds the others; empty for the recipe's own.
    """
    recipe = shipped(chain.recipe).model_dump(mode="json", exclude={"bundled"})
    if gptq:
        kept = "|".join(map(str, gptq))
        recipe["quantization"]["ignore"].append(rf"re:.*\.layers\.({kept})\..*")
        recipe["quantization"]["rounding"] = "gptq"
    if recipe["calibration"] is not None:
        recipe["calibration"] |= {
            "datasets": [str(chain.folder / "prompts.jsonl")], "prompts": count, "canvases": 1,
            "batch_size": batch,
        }  # fmt: skip
    limits = {"tasks": [TASK], "limit": {TASK: count}, "repeats": {}, "batch_size": batch}
    recipe["evaluation"] |= limits
    recipe["gate"] |= {"margin_pp": {TASK: 5.0}, "max_kl_nats": {}}
    path = chain.path / "recipe.yaml"
    _write(path, yaml.safe_dump(recipe, sort_keys=False))
    return path


def measured(report: Path, words: list[str]) -> int:
    """Run the command line here, with a line of `report` for every stage; return its exit code."""
    import torch

    from quantize import cli
    from quantize.pipeline import run as pipeline
    from quantize.runtime.gpu import transfer

    taken: list[int] = []
    fetch, work = transfer.Transfer.fetch, pipeline.work

    def counted(self: transfer.Transfer, layout: transfer.Layout) -> transfer.Fetched:
        taken.append(layout.size)
        return fetch(self, layout)

    def watched(run: Any, stage: Any) -> None:
        taken.clear()
        if link is not None:
            torch.cuda.reset_peak_memory_stats()
        peak, started, done = Peak(), time.perf_counter(), False
        try:
            with peak.watching():
                work(run, stage)
            done = True
        finally:
            facts: Facts = {
                "stage": stage.name,
                "done": done,
                "seconds": round(time.perf_counter() - started, 1),
                "own_memory_gb": round(peak.most / 1e9, 2),
                "mapped_gb": round(peak.mapped / 1e9, 2),
                "to_device_gb": round(sum(taken) / 1e9, 2),
            }
            if link is not None:
                facts |= {
                    "gpu_gb": round(gpu_bytes() / 1e9, 2),
                    "link_gb_s": round(link / 1e9, 1),
                    "floor_s": round(sum(taken) / link, 1),
                }
            _add_line(report, facts)

    transfer.Transfer.fetch, pipeline.work = counted, watched
    link = link_rate() if torch.cuda.is_available() else None
    sys.argv = ["quantize", *words]
    return cli._exit_code()


def _add_line(report: Path, facts: Facts) -> None:
    with report.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def gpu_bytes() -> int:
    """Return the most bytes taken of the GPU: torch's largest, and what is held beside torch now.

    Beside torch are the context and compiled kernels, which only grow. Asking on the way, from another
    thread, could disturb the capture of a graph.
    """
    import torch

    free, there = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_reserved() + there - free - torch.cuda.memory_reserved()


def link_rate() -> float:
    """Return the bytes/s of a copy of 0.25 GB from pinned memory."""
    import torch

    pinned = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    seconds = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    rate = len(pinned) / seconds
    del pinned, there
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return rate


def go_through(
    chain: Chain, recipe: Path, place: dict[str, str], cores: set[int], *, end: float, until: str
) -> bool:
    """Run the stages of a chain that are not done, up to `until`; return whether all are.

    Where fidelity ends the run, as it may with random weights, evaluate and report follow all the same.
    """
    budget = ["--gpu-memory", f"{chain.gb:g}"]
    data = ["--data-dir", str(chain.folder / "tasks"), "--all"]
    words = ["run", "--recipe", str(recipe), "--model", str(chain.folder / "model"), *budget, *data]
    code = process(
        chain, [*words, "--out", str(chain.path), "--resume", "--until", until], end, place, cores
    )
    run = str(chain.run)
    if code == 1 and until == "report" and chain.done("fidelity") and not chain.done("evaluate"):
        code = process(chain, ["evaluate", run, *budget, *data], end, place, cores)
        code = process(chain, ["report", run], end, place, cores) if code == 0 else code
    return code == 0 or (code in ENDED and chain.done("evaluate") and chain.reported)


def process(
    chain: Chain, words: list[str], end: float, place: dict[str, str], cores: set[int]
) -> int | None:
    """Run the command line in a process of its own; return its exit code, None where time ended it."""
    left, started = end - time.monotonic(), time.perf_counter()
    if left < LEAST_SECONDS:
        print(f"{chain.name}: out of time; the same command goes on")
        return None
    before, code = len(chain.lines()), None
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.full_size_run",
        "command",
        str(chain.report),
        json.dumps(words),
    ]
    with chain.log.open("w") as shown, suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            command, stderr=shown, timeout=left, env=os.environ | place,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        ).returncode  # fmt: skip
    seconds, shown = time.perf_counter() - started, chain.log.read_text()
    beside = seconds - sum(line["seconds"] for line in chain.lines()[before:])
    facts: Facts = {"stage": BESIDE, "done": code in ENDED, "code": code}
    facts |= {"seconds": round(beside, 1), "parts": PART.findall(shown)}
    _add_line(chain.report, facts)
    for line in chain.lines()[before:]:
        print(json.dumps({"chain": chain.name} | line), flush=True)
    if code != 0:
        why = "out of time; the same command goes on" if code is None else f"exit code {code}"
        print(f"{chain.name}: {why}", *shown.splitlines()[-12:], sep="\n", flush=True)
    return code


def release(chain: Chain) -> None:
    """Remove a finished run's weights: the next run needs the room."""
    for shard in (chain.run or chain.path).glob("checkpoint/*.safetensors"):
        shard.unlink()


def places(parallel: int) -> list[tuple[dict[str, str], set[int]]]:
    """Return a GPU (as environment variables) and cores for each of the chains at the same time."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // parallel)
    return [
        ({"CUDA_VISIBLE_DEVICES": str(i)} if parallel > 1 else {}, set(own or cores))
        for i in range(parallel)
        for own in [cores[i * each : (i + 1) * each]]
    ]


def in_parallel(
    chains: list[Chain], parallel: int, work: Callable[[Chain, dict[str, str], set[int]], None]
) -> None:
    """Work on chains in order, so many at the same time, each in a place of its own."""
    free: SimpleQueue[tuple[dict[str, str], set[int]]] = SimpleQueue()
    for place in places(parallel):
        free.put(place)

    def begin(chain: Chain) -> None:
        place = free.get()
        try:
            work(chain, *place)
        finally:
            free.put(place)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(begin, chains))


def summary(chains: list[Chain]) -> Iterator[str]:
    """Yield the sums of processes by stage, and how results differ between budgets."""
    for chain in chains:
        lines = chain.lines()
        if not lines:
            continue
        finished = "a report" if chain.reported else "NO report"
        seconds = sum(line["seconds"] for line in lines)
        yield f"{chain.recipe} at {chain.gb:g} GB: {seconds:.0f} s, {finished}"
        for name in dict.fromkeys(line["stage"] for line in lines):
            yield _stage_line(name, [line for line in lines if line["stage"] == name])
    for recipe in dict.fromkeys(chain.recipe for chain in chains):
        runs = {c.name: c.run for c in chains if c.recipe == recipe and c.run is not None}
        yield from compare_runs(recipe, runs)


def _stage_line(name: str, parts: list[Facts]) -> str:
    seconds = sum(line["seconds"] for line in parts)
    floor = sum(line.get("floor_s", 0) for line in parts)
    gpu, host = (max(p.get(key, 0) for p in parts) for key in ("gpu_gb", "own_memory_gb"))
    moved = sum(line.get("to_device_gb", 0) for line in parts)
    over = f", {seconds / floor:.1f} x the floor of {floor:.1f} s" if floor else ""
    code = "" if parts[-1]["done"] else ", NOT done"
    return (
        f"  {name:13} {seconds:7.1f} s, GPU {gpu:.1f} GB, host {host:.2f} GB, to the device "
        f"{moved:.1f} GB{over}{code}"
    )


@click.group()
def main() -> None:
    """Run the whole chain at the real size."""


def shape_options(command: click.decorators.FC) -> click.decorators.FC:
    """Add what FOLDER is prepared with."""
    for option in (
        click.argument("folder", type=click.Path(path_type=Path)),
        click.option("--layers", default=30, show_default=True),
        click.option("--experts", default=128, show_default=True),
        click.option("--vocabulary", default=262_144, show_default=True),
        click.option(
            "--count",
            default=64,
            show_default=True,
            help="Prompts of the calibration, and problems.",
        ),
        click.option("--denoising-steps", default=16, show_default=True),
    ):
        command = option(command)
    return command


@main.command("prepare")
@shape_options
def prepare_command(folder: Path, count: int, denoising_steps: int, **shape: int) -> None:
    """Write the BF16 checkpoint, prompts and problems to FOLDER, where they are not there yet."""
    prepare(folder, shape, count, denoising_steps)


@main.command("run")
@shape_options
@click.option(
    "--recipe", "recipes", multiple=True, default=("nvfp4", "fp8_dynamic"), show_default=True
)
@click.option(
    "--gpu-memory", "budgets", multiple=True, type=float, default=(22.0, 76.0, 141.0),
    show_default=True, help="Budgets in GB, in the order in which they are run.",
)  # fmt: skip
@click.option("--batch", default=16, show_default=True, help="Canvases at once.")
@click.option(
    "--parallel", default=1, show_default=True, help="Chains at the same time, each on its GPU."
)
@click.option("--keep", multiple=True, help="RECIPE-GB: a chain that keeps its checkpoint.")
@click.option("--seconds", default=1800, show_default=True, help="When this command stops.")
@click.option("--gptq-layers", default=0, help="Quantize these first layers alone, by GPTQ.")
@click.option("--until", default="report", show_default=True, help="The last stage.")
def run_command(
    folder: Path, count: int, denoising_steps: int, recipes: tuple[str, ...],
    budgets: tuple[float, ...], batch: int, parallel: int, keep: tuple[str, ...], seconds: float,
    gptq_layers: int, until: str, **shape: int,
) -> None:  # fmt: skip
    """Run every recipe at every budget in FOLDER, and print the summary."""
    end = time.monotonic() + seconds
    prepare(folder, shape, count, denoising_steps)
    gptq = range(gptq_layers, shape["layers"]) if gptq_layers else range(0)
    chains = [Chain(folder, name, gb) for gb in budgets for name in recipes]
    print(f"prepared; {end - time.monotonic():.0f} s left", flush=True)

    def work(chain: Chain, place: dict[str, str], cores: set[int]) -> None:
        chain.path.mkdir(parents=True, exist_ok=True)
        recipe = recipe_of(chain, count, batch, gptq)
        done = go_through(chain, recipe, place, cores, end=end, until=until)
        if done and until == "report" and chain.name not in keep:
            release(chain)

    in_parallel(chains, parallel, work)
    print("\n".join(summary(chains)))


@main.command("summary")
@click.argument("folder", type=click.Path(path_type=Path))
def summary_command(folder: Path) -> None:
    """Print what the chains in FOLDER took so far, and compare their results."""
    names = [path.parent.name.rpartition("-") for path in folder.glob("chains/*/report.jsonl")]
    chains = [Chain(folder, recipe, float(gb)) for recipe, _, gb in names]
    print("\n".join(summary(sorted(chains, key=lambda c: (c.recipe, -c.gb)))))


@main.command("command", hidden=True)
@click.argument("report", type=click.Path(path_type=Path))
@click.argument("words", type=json.loads)
def command_command(report: Path, words: list[str]) -> None:
    """Run one command of the project, and add to REPORT what its stages took."""
    sys.exit(measured(report, words))


if __name__ == "__main__":
    main()
