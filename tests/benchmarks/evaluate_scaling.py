"""How far one evaluation scales over several processes: the same answers by 1, 2 and 4 of them.

    python -m tests.support.synthetic /dev/shm/bf16
    python -c "import quantize; quantize.convert('/dev/shm/bf16', '/dev/shm/fp8', 'fp8_dynamic')"
    python -m tests.benchmarks.evaluate_scaling measure /dev/shm/fp8 REPORT.json --answers 640

Each count of processes is a run of torchrun by itself (of one process: without torchrun), each process
on a GPU of its own or all on the CPU. They answer chats of about 128 tokens with one to four canvases,
by `max_new_tokens`, at a fixed number of steps: by evaluation's own store, queue and model. 640 answers
are 410,000 tokens at a canvas of 256; at 16 steps an H200 makes about 3,400 tokens/s of FP8 with 16
slots (docs/evaluation.md), so it takes them two minutes, and `--answers 2048 --steps 4` about as long.
On the bundled model (a canvas of 64) a CPU answers `--answers 24 --steps 2` in half a minute.

The first count warms files and compiled kernels, so `--warm` runs a few answers before. REPORT.json has
for each count, in seconds since torchrun was launched or between these times:

    startup           until the last process is ready: imports, connection, loading
    first_canvas      from ready until a canvas is finished, of the slowest: compiling, capturing too
    answers           from the first process being ready until the last answer
    idle              between the first and the last process' last answer
    whole             all, until torchrun has ended

and samples by process, tokens/s of `answers`, speed-ups over one process, and whether all answers
(text, tokens, steps) are those of the first count.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from quantize.recovery.samples import Finished, Request, SampleStore, Share
from tests.benchmarks.evaluate_rates import chats, served_mode

Facts = dict[str, Any]
CONTEXT = 512  # positions of a chat, at most


def asked_for(answers: int, canvas: int) -> list[Request]:
    """Return chats, of which each takes one canvas more than the one before, up to four."""
    return [
        replace(chat, max_new_tokens=canvas * (1 + index % 4))
        for index, chat in enumerate(chats(answers, canvas))
    ]


def answer(folder: Path, scratch: Path, answers: int, steps: int, slots: int) -> None:
    """Answer this process' samples; write its times and, from the first, a digest of all answers."""
    from quantize.bench.speed import NEVER
    from quantize.checkpoints.reader import read_config
    from quantize.host.processes import best_device, joined
    from quantize.runtime import Placement, Sampler
    from quantize.stages.evaluate.local_model import Answerer

    sampler = replace(
        Sampler.from_checkpoint(folder), max_denoising_steps=steps, confidence_threshold=NEVER,
        eos_token_ids=(),
    )  # fmt: skip
    canvas: int = read_config(folder)["canvas_length"]
    imported = time.time()
    with joined() as processes:
        place = Placement(best_device(), None, served_mode(folder), CONTEXT + 4 * canvas)
        model = Answerer(folder, "measured", sampler, place, slots)
        model.engine(0)
        facts: Facts = {"imported": imported, "ready": time.time(), "samples": 0, "tokens": 0}

        def noted(samples: int, tokens: int) -> None:
            facts.setdefault("first_canvas", time.time())
            facts["tokens"] += tokens

        def counted(finished: Iterator[Finished], _: int) -> Iterable[Finished]:
            for request, completion in finished:
                facts["samples"] += 1
                facts["last_answer"] = time.time()
                yield request, completion

        model.announce = noted
        every = processes
        share = Share(every.rank, every.count, every.wait, every.numbers)
        store = SampleStore(scratch / "answers.jsonl", model.made_with, share)
        store.complete(asked_for(answers, canvas), model, counted)
        if every.rank == 0:
            rows = [[key, asdict(done)] for key, done in sorted(store.done.items())]
            facts["sha256"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
            facts["device"] = model.made_with["device"]
        (scratch / f"{every.rank}.json").write_text(json.dumps(facts))
        model.release()


def launched(processes: int, folder: Path, *numbers: int) -> Facts:
    """Let so many processes answer; return what it took."""
    with tempfile.TemporaryDirectory() as place:
        scratch, words = Path(place), [sys.executable]
        if processes > 1:
            words += ["-m", "torch.distributed.run", "--standalone"]
            words += ["--nproc-per-node", str(processes)]
        words += ["-m", "tests.benchmarks.evaluate_scaling", "answer", str(folder), place]
        began = time.time()
        subprocess.run([*words, *map(str, numbers)], check=True)
        whole = time.time() - began
        ranks = [json.loads((scratch / f"{n}.json").read_text()) for n in range(processes)]
    at_work = [rank for rank in ranks if rank["samples"]]
    ready = [rank["ready"] for rank in ranks]
    last = [rank["last_answer"] for rank in at_work]
    tokens, seconds = sum(rank["tokens"] for rank in ranks), max(last) - min(ready)
    return {
        "processes": processes,
        "device": ranks[0]["device"],
        "imports": round(max(rank["imported"] for rank in ranks) - began, 2),
        "startup": round(max(ready) - began, 2),
        "first_canvas": round(max(rank["first_canvas"] - rank["ready"] for rank in at_work), 2),
        "answers": round(seconds, 2),
        "idle": round(max(last) - min(last), 2),
        "whole": round(whole, 2),
        "samples": [rank["samples"] for rank in ranks],
        "tokens": tokens,
        "tokens_a_second": round(tokens / seconds, 1),
        "sha256": ranks[0]["sha256"],
    }


@click.group()
def main() -> None:
    """Measure how far an evaluation scales over processes."""


@main.command("answer", hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("scratch", type=click.Path(path_type=Path))
@click.argument("numbers", nargs=3, type=int)
def answer_command(folder: Path, scratch: Path, numbers: tuple[int, int, int]) -> None:
    """Answer as one of the processes that `measure` launches."""
    answer(folder, scratch, *numbers)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True))
@click.argument("report", type=click.Path(path_type=Path))
@click.option("--answers", default=2048, show_default=True, help="Answers of one to four canvases.")
@click.option("--steps", default=16, show_default=True, help="Denoising steps of every canvas.")
@click.option("--slots", default=16, show_default=True, help="Samples of a pass.")
@click.option("--processes", multiple=True, type=int, default=(1, 2, 4), show_default=True)
@click.option("--warm/--cold", default=True, help="Whether a few answers are given before.")
def measure(
    checkpoint: Path, report: Path, answers: int, steps: int, slots: int,
    processes: tuple[int, ...], warm: bool,
) -> None:  # fmt: skip
    """Let 1, 2 and 4 processes answer with CHECKPOINT; write REPORT as one JSON object."""
    if warm:
        launched(1, checkpoint, 4, steps, slots)
    lines: list[Facts] = []
    content: Facts = {"checkpoint": checkpoint.name, "answers": answers, "steps": steps,
                      "slots": slots, "counts": lines}  # fmt: skip
    for count in processes:
        facts = launched(count, checkpoint, answers, steps, slots)
        first = lines[0] if lines else facts
        for name in ("answers", "whole"):
            facts[f"{name}_speed_up"] = round(first[name] / facts[name], 2)
        facts["identical"] = facts["sha256"] == first["sha256"]
        lines.append(facts)
        print(json.dumps(facts), flush=True)
        report.write_text(json.dumps(content, indent=1) + "\n")  # one count may be all there is


if __name__ == "__main__":
    main()
