"""The whole chain at the real size, from a BF16 folder to report.html, at budgets of GPU memory.

    python tests/benchmarks/full_size_run.py FOLDER REPORT.jsonl
        [--recipe nvfp4 --recipe fp8_dynamic] [--gpu-memory 141 --gpu-memory 76 --gpu-memory 22]
        [--gptq-layers 6 --until convert]

FOLDER (in memory: /dev/shm) gets a synthetic BF16 checkpoint once, prompts and problems as local jsonl
files, and one run a recipe and budget: 64 prompts x 1 canvas x 16 steps of calibration, 16 held-out
trajectories, 64 problems x 1 canvas x 16 steps a side. Every stage is a process of its own. The same
command goes on where the last one stopped (--seconds says when it stops); finished runs lose their
checkpoint, so BF16 and one artifact are there at a time. Without a GPU, and with --layers 2
--vocabulary 4096, everything runs in a few minutes anywhere.

With --gptq-layers N only the first N layers are quantized, their weights rounded by GPTQ; the model
that denoises is whole, so a pass of the loop over it and a layer's rounding can be projected.

A line of REPORT.jsonl is one process: seconds, the GPU's peak, the most anonymous memory of the host
(page cache and pinned buffers are `mapped_gb`), bytes that went to the GPU, the floor, those bytes at
the rate of a copy from pinned memory here, and `parts`, what its progress lines say. At the end stages
are summed, and results that must not depend on the budget are compared byte by byte.
"""

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from full_size import QUESTION, Peak, shipped, write

LEAST_SECONDS = 10  # a process takes that to start
ENDED = (0, 1, 4)  # random weights may well fail the gate: the report is there all the same
TASK = "word_problems"  # one canvas an answer
SAME = ("calibration/input_scales.safetensors", "fidelity.json")
SCORES = f"evaluation/*/{TASK}.jsonl"
PART = re.compile(r"^([^\n:]+): .*done.* in (.+)$", re.MULTILINE)  # of a progress line
Facts = dict[str, Any]


def prepare(folder: Path, shape: dict[str, int], count: int, steps: int) -> None:
    """Write the BF16 checkpoint, prompts, problems and recipes, where they are not there yet."""
    from quantize.run_dir import read_json

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "bf16").exists():
        write(folder, **shape)
    settings = folder / "bf16" / "generation_config.json"
    settings.write_text(json.dumps(read_json(settings) | {"max_denoising_steps": steps}))
    questions = [QUESTION.format(3 + i % 50, 5 + i % 7, i) for i in range(2 * count + 16)]
    prompts = [json.dumps({"question": question}) for question in questions[: count + 16]]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    problems = [json.dumps({"question": q, "answer_number": 7}) for q in questions[-count:]]
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / f"{TASK}.jsonl").write_text("\n".join(problems))


def recipe_of(folder: Path, name: str, count: int, batch: int, gptq: range) -> Path:
    """Write a shipped recipe with this run's prompts, problems and batch.

    `gptq` names the layers that stay BF16 where GPTQ rounds the others; empty for the recipe's own.
    """
    recipe = shipped(name).model_dump(mode="json", exclude={"bundled"})
    if gptq:
        kept = "|".join(map(str, gptq))
        recipe["quantization"]["ignore"].append(rf"re:.*\.layers\.({kept})\..*")
        recipe["quantization"]["rounding"] = "gptq"
    if recipe["calibration"] is not None:
        recipe["calibration"] |= {
            "datasets": [str(folder / "prompts.jsonl")], "prompts": count, "canvases": 1,
            "batch_size": batch,
        }  # fmt: skip
    limits = {"tasks": [TASK], "limit": {TASK: count}, "repeats": {}, "batch_size": batch}
    recipe["evaluation"] |= limits
    recipe["gate"] |= {"margin_pp": {TASK: 5.0}, "max_kl_nats": {}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def stage(words: list[str]) -> Facts:
    """Run the command line in this process and say what it took."""
    import torch

    from quantize import cli
    from quantize.runtime.fused import transfer

    taken: list[int] = []
    fetch = transfer.Transfer.fetch

    def counted(self: transfer.Transfer, layout: transfer.Layout) -> transfer.Fetched:
        taken.append(layout.size)
        return fetch(self, layout)

    transfer.Transfer.fetch = counted
    on_gpu = torch.cuda.is_available()
    link = link_rate() if on_gpu else None
    peak, started = Peak(), time.perf_counter()
    with peak.watching():
        sys.argv = ["quantize", *words]
        code = cli._exit_code()
    facts: Facts = {
        "code": code,
        "seconds": round(time.perf_counter() - started, 1),
        "own_memory_gb": round(peak.most / 1e9, 2),
        "mapped_gb": round(peak.mapped / 1e9, 2),
        "to_device_gb": round(sum(taken) / 1e9, 2),
    }
    if link is not None:
        facts |= {
            "gpu_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
            "link_gb_s": round(link / 1e9, 1),
            "floor_s": round(sum(taken) / link, 1),
        }
    return facts


def link_rate() -> float:
    """Return the bytes/s of a copy of 1 GB from pinned memory."""
    import torch

    pinned = torch.ones(1 << 30, dtype=torch.uint8, pin_memory=True)
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


def run_folder(out: Path) -> Path | None:
    """Return the run in an outputs folder, None where there is none yet."""
    return next((path.parent for path in out.glob("*/manifest.json")), None)


def digests(run: Path) -> dict[str, str]:
    """Return the checksums of what must not depend on the budget."""
    found = [run / name for name in SAME] + sorted(run.glob(SCORES))
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in found
        if path.exists()
    }


def chains(
    folder: Path, recipes: tuple[str, ...], budgets: tuple[float, ...]
) -> Iterator[tuple[str, float, Path]]:
    """Yield recipe, budget and outputs folder of every run."""
    for name in recipes:
        for gb in budgets:
            yield name, gb, folder / f"runs-{name}-{gb:g}"


def summary(lines: list[Facts], folder: Path) -> list[str]:
    """Sum processes by stage, and compare results over budgets."""
    shown: list[str] = []
    keys = list(dict.fromkeys((line["recipe"], line["gb"]) for line in lines))
    for recipe, gb in keys:
        own = [line for line in lines if (line["recipe"], line["gb"]) == (recipe, gb)]
        shown.append(f"{recipe} at {gb:g} GB: {sum(line['seconds'] for line in own):.0f} s")
        for name in dict.fromkeys(line["stage"] for line in own):
            parts = [line for line in own if line["stage"] == name]
            seconds = sum(line["seconds"] for line in parts)
            floor = sum(line.get("floor_s", 0) for line in parts)
            most = {key: max(p.get(key, 0) for p in parts) for key in ("gpu_gb", "own_memory_gb")}
            moved = sum(line.get("to_device_gb", 0) for line in parts)
            over = f", {seconds / floor:.1f} x the floor of {floor:.1f} s" if floor else ""
            shown.append(
                f"  {name:10} {seconds:7.1f} s, GPU {most['gpu_gb']:.1f} GB, host "
                f"{most['own_memory_gb']:.2f} GB, to the device {moved:.1f} GB{over}"
            )
    for recipe in dict.fromkeys(key[0] for key in keys):
        outs = sorted(folder.glob(f"runs-{recipe}-*"))
        runs = [(out.name, run) for out in outs if (run := run_folder(out)) is not None]
        found = {name: digests(run) for name, run in runs if (run / "report.html").exists()}
        for file in sorted({file for each in found.values() for file in each}):
            kinds = {each.get(file) for each in found.values()}
            word = "the same" if len(kinds) == 1 else "DIFFERENT"
            shown.append(f"{recipe}, {file}: {word} at {len(found)} budgets")
    return shown


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("report", type=click.Path(path_type=Path))
@click.option(
    "--recipe", "recipes", multiple=True, default=("nvfp4", "fp8_dynamic"), show_default=True
)
@click.option(
    "--gpu-memory",
    "budgets",
    multiple=True,
    type=float,
    default=(141.0, 76.0, 22.0),
    show_default=True,
)
@click.option("--layers", default=30, show_default=True)
@click.option("--experts", default=128, show_default=True)
@click.option("--vocabulary", default=262_144, show_default=True)
@click.option(
    "--count", default=64, show_default=True, help="Prompts of the calibration, and problems."
)
@click.option("--denoising-steps", default=16, show_default=True)
@click.option("--batch", default=16, show_default=True, help="Canvases at once.")
@click.option("--seconds", default=560, show_default=True, help="When this command stops.")
@click.option("--gptq-layers", default=0, help="Quantize these first layers alone, by GPTQ.")
@click.option("--until", default="report", show_default=True, help="The last stage.")
@click.option("--only", hidden=True)
def main(
    folder: Path,
    report: Path,
    recipes: tuple[str, ...],
    budgets: tuple[float, ...],
    layers: int,
    experts: int,
    vocabulary: int,
    count: int,
    denoising_steps: int,
    batch: int,
    seconds: float,
    gptq_layers: int,
    until: str,
    only: str | None,
) -> None:
    """Run every recipe at every budget in FOLDER; REPORT gets one JSON line a process."""
    if only:
        print(json.dumps(stage(json.loads(only))))
        return
    end = time.monotonic() + seconds
    shape = {"layers": layers, "experts": experts, "vocabulary": vocabulary}
    prepare(folder, shape, count, denoising_steps)
    print(f"prepared; {end - time.monotonic():.0f} s left", flush=True)
    gptq = range(gptq_layers, layers) if gptq_layers else range(0)
    for name, gb, out in chains(folder, recipes, budgets):
        words = ["run", "--recipe", str(recipe_of(folder, name, count, batch, gptq))]
        words += ["--model", str(folder / "bf16"), "--out", str(out), "--gpu-memory", f"{gb:g}"]
        words += ["--data-dir", str(folder / "tasks"), "--all", "--resume"]
        if not chain(words, {"recipe": name, "gb": gb}, out, report, end, until):
            break
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    print("\n".join(summary(lines, folder)))


def chain(words: list[str], key: Facts, out: Path, report: Path, end: float, until: str) -> bool:
    """Run the stages of one run that are not done, up to `until`; return whether all are."""
    from quantize.stage import STAGES

    last = [stage.name for stage in STAGES].index(until)
    for stage in STAGES[1 : last + 1]:  # the first one's process plans, too
        run = run_folder(out)
        if not is_needed(stage, words):
            continue
        if run is not None and ((run / stage.result).exists() or (run / "report.html").exists()):
            continue
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print("out of time: the same command goes on from here")
            return False
        log = out.parent / "run.log"
        facts = key | {"stage": stage.name} | process([*words, "--until", stage.name], left, log)
        facts["parts"] = PART.findall(log.read_text())
        print(json.dumps(facts), flush=True)
        with report.open("a") as file:
            file.write(json.dumps(facts) + "\n")
        if facts["code"] not in (ENDED if stage.name == "report" else (0,)):
            print("\n".join(log.read_text().splitlines()[-12:]))
            return False
    release(out)
    return True


def is_needed(stage: Any, words: list[str]) -> bool:
    """Whether the recipe that a command names has this stage at all."""
    from quantize.recipe import load_recipe

    recipe = load_recipe(words[words.index("--recipe") + 1])
    return stage.is_needed(recipe)


def process(words: list[str], left: float, log: Path) -> Facts:
    """Run one stage in a process of its own, which writes to `log` what it shows."""
    started = time.perf_counter()
    command = [sys.executable, __file__, ".", ".", "--only", json.dumps(words)]
    facts: Facts = {"code": None}
    try:
        with log.open("w") as shown:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=shown, text=True, timeout=left
            )
        if done.returncode == 0:
            facts = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        facts |= {"seconds": round(left, 1)}
    return {"seconds": 0.0} | facts | {"process_seconds": round(time.perf_counter() - started, 1)}


def release(out: Path) -> None:
    """Remove a finished run's weights: the next run needs the room."""
    run = run_folder(out)
    for shard in (run / "checkpoint").glob("*.safetensors") if run is not None else ():
        shard.unlink()


if __name__ == "__main__":
    main()
