"""Tokens/s of evaluation beside those of `quantize bench`, and what a recipe's evaluation would take.

    python -m tests.benchmarks.evaluate_rates measure CHECKPOINT REPORT.jsonl [--activations none]
    python -m tests.benchmarks.evaluate_rates measure CHECKPOINT REPORT.jsonl --gpu-memory 22 --slots 16
    python -m tests.benchmarks.evaluate_rates measure CHECKPOINT REPORT.jsonl --behind 16384 --slots 16
    python -m tests.benchmarks.evaluate_rates project REPORT.jsonl [REPORT.jsonl ...]

`measure` needs a GPU. At each number of slots it answers twice as many chats, of four canvases
each and a fixed number of steps, as evaluation does: batch-invariantly, slots refilled as samples end,
every answer stored and synced. Loading and the first chats, which compile and capture, are left out.
Within `--gpu-memory` weights may be streamed, in lockstep: `slots` are those of a pass, `at_once` all.
`bench` then measures the same checkpoint at the same batches and steps behind 512 tokens, which is the
mean of what these canvases stand behind. A line of REPORT.jsonl is one number of slots, with what the
seconds went into (`split`).

Activations are rounded as the checkpoint states unless --activations says otherwise. `none` simulates
the weights alone: beside 8-bit weights, which the kernels multiply with 8-bit rows, every pass
dequantizes every weight to BF16. FP8 at the 26B shape answers 253 tokens/s so at 4 slots and 567 at 16,
where `bench` measures 3,172 and 3,882 of the same checkpoint (an H200, random weights, 16 steps).

`--behind N` measures late canvases of long answers: chats of about N tokens are answered, each slot
once, first with one canvas and then, other chats of that length, with five; the rate is that of the
four canvases between, without the encoding of prompts. `bench` measures behind N tokens then.

`project` computes hours from these rates: tokens a side over tokens/s, where a canvas of N steps takes
N + 1 forwards. Several GPUs share the batches and exchange nothing, so hours are divided by their
number. That is arithmetic, not a measurement.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from quantize.recovery.samples import Finished, Request, SampleStore, Waiting
from quantize.schemes.modes import ACTIVATION_MODES, ActivationMode
from quantize.stages.plan.estimate import SEQUENTIAL

WAVES, CANVASES = 2, 4  # chats a slot, canvases a chat
CONTEXT = 512  # tokens that a measured canvas stands behind, on average
WORDS = "Add these numbers and say how you did it: "
TOKENS_A_NUMBER = 4.5  # of a prompt, by the tokenizer of Gemma
Facts = dict[str, Any]


@dataclass
class Clock:
    """Counts the positions of finished canvases, and the seconds they took."""

    canvas: int
    tokens: int = 0
    seconds: float = 0.0

    def timed(self, finished: Iterator[Finished], _: int) -> Iterable[Finished]:
        """Pass on what is finished; what `SampleStore.complete` wraps them in."""
        started = time.perf_counter()
        for request, completion in finished:
            self.tokens += len(completion.denoising_steps) * self.canvas
            yield request, completion
        self.seconds = time.perf_counter() - started


@contextmanager
def split(engine: Any) -> Generator[Facts]:
    """Yield what an engine's seconds go into, complete when the block ends.

    encoding: on the GPU, of prompts and finished canvases, with the gaps between passes
    between: of the host, while no canvas is denoised; admitting: its part in which prompts are taken
    encoder_passes: how many have so many sequences
    """
    facts: Facts = {"encoding": 0.0, "between": 0.0, "admitting": 0.0}
    passes, events, ended = Counter[int](), list[tuple[Any, Any]](), time.perf_counter()
    encoder = engine.encoder
    own = {name: getattr(engine, name) for name in ("admit", "denoise")}
    own |= {name: getattr(encoder, name) for name in ("encode", "waiting_passes")}

    def admit(*given: Any) -> None:
        started = time.perf_counter()
        own["admit"](*given)
        facts["admitting"] += time.perf_counter() - started

    def denoise(*given: Any) -> Any:
        nonlocal ended
        facts["between"] += time.perf_counter() - ended
        done = own["denoise"](*given)
        ended = time.perf_counter()
        return done

    def encode(rows: list[Any], length: int) -> None:
        passes[len(rows)] += 1
        own["encode"](rows, length)

    def waiting_passes(slots: Any) -> Any:
        both = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        both[0].record()
        found = own["waiting_passes"](slots)
        both[1].record()
        events.append((both[0], both[1]))
        return found

    vars(engine).update(admit=admit, denoise=denoise)
    vars(encoder).update(encode=encode, waiting_passes=waiting_passes)
    try:
        yield facts
    finally:
        for name in own:
            delattr(engine if name in vars(engine) else encoder, name)
    torch.cuda.synchronize()
    facts["encoding"] = sum(start.elapsed_time(end) for start, end in events) / 1e3
    facts["between"] += time.perf_counter() - ended
    facts["encoder_passes"] = dict(sorted(passes.items()))


def chats(count: int, tokens: int, first: int = 0, behind: int | None = None) -> list[Request]:
    """Return requests of about 128 tokens, or `behind`, to be answered with so many."""
    numbers = 26 if behind is None else int(behind / TOKENS_A_NUMBER)
    return [
        Request(
            prompt=WORDS + ", ".join(str((i * 7919 + n * 31) % 997) for n in range(numbers)),
            seed=i, max_new_tokens=tokens, thinking=False,
        )
        for i in range(first, first + count)
    ]  # fmt: skip


def evaluated(
    folder: Path, activations: ActivationMode, capacity: int, steps: int, gpu_memory: float | None,
    behind: int | None = None,
) -> Facts:  # fmt: skip
    """Answer chats as evaluation does, and return what it took."""
    from quantize.bench.speed import NEVER
    from quantize.checkpoints.reader import Checkpoint
    from quantize.host.processes import best_device
    from quantize.runtime import Placement, Sampler
    from quantize.stages.evaluate.local_model import Answerer

    sampler = replace(
        Sampler.from_checkpoint(folder), max_denoising_steps=steps, confidence_threshold=NEVER,
        eos_token_ids=(),
    )  # fmt: skip
    canvas: int = Checkpoint.open(folder).config["canvas_length"]
    answerer = Answerer(
        folder, "measured", sampler,
        Placement(
            best_device(), gpu_memory, activations,
            CONTEXT + CANVASES * canvas + int(1.3 * (behind or 0)),
        ),
        capacity=capacity,
    )  # fmt: skip
    first = chats(answerer.capacity, 2 * canvas)
    for _ in answerer(Waiting(first, iter(first))):
        pass  # loads, compiles and captures
    at_once = answerer.engine(0).slots

    def answer(asked: list[Request]) -> tuple[Clock, Facts]:
        clock = Clock(canvas)
        with tempfile.TemporaryDirectory() as scratch, split(answerer.engine(0)) as went:
            store = SampleStore(Path(scratch) / "samples.jsonl", {})
            store.complete(asked, answerer, clock.timed)
        return clock, went

    if behind is None:
        clock, went = answer(chats(WAVES * at_once, CANVASES * canvas, first=1000))
    else:
        begun, _ = answer(chats(at_once, canvas, 1000, behind))
        clock, went = answer(chats(at_once, (1 + CANVASES) * canvas, 2000, behind))
        clock = Clock(canvas, clock.tokens - begun.tokens, clock.seconds - begun.seconds)
    facts: Facts = {
        "slots": answerer.capacity,
        "at_once": at_once,
        "tokens_a_second": round(clock.tokens / clock.seconds, 1),
        "tokens": clock.tokens,
        "seconds": round(clock.seconds, 2),
        "went_into": went,
        "loading_seconds": round(answerer.loading_seconds, 1),
    }
    answerer.release()
    return facts


def served_mode(folder: Path) -> ActivationMode:
    """Return `per_layer` where config.json states rounded activations, else `none`."""
    from quantize.checkpoints.layout import stated_schemes
    from quantize.checkpoints.reader import Checkpoint

    schemes = stated_schemes(Checkpoint.open(folder).config)
    rounds = schemes is not None and any(each.config_activations for each in schemes.used)
    return "per_layer" if rounds else "none"


def benched(folder: Path, slots: list[int], steps: int, context: int) -> dict[int, float]:
    """Return `bench`'s tokens/s by batch."""
    from quantize.bench.speed import bench
    from quantize.runtime import Placement

    found = bench(
        folder, random=None, config=None, steps=[str(steps)], batches=slots, context=context,
        canvases=5, place=Placement.here(None),
    )  # fmt: skip
    return {row.batch: row.tokens_a_second for row in found.rows}


@click.group()
def main() -> None:
    """Measure the rates of evaluation, and project its hours."""


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True))
@click.argument("report", type=click.Path(path_type=Path))
@click.option("--name", help="What the checkpoint is called; else its folder's name.")
@click.option(
    "--activations", "modes", multiple=True, type=click.Choice(ACTIVATION_MODES),
    help="How activations are rounded; as the checkpoint states without it.",
)  # fmt: skip
@click.option("--slots", multiple=True, type=int, default=(4, 16, 32), show_default=True)
@click.option("--steps", default=16, show_default=True, help="Denoising steps of every canvas.")
@click.option("--behind", type=int, help="Tokens of each prompt, in place of 128.")
@click.option("--bench/--no-bench", "with_bench", default=True)
@click.option(
    "--gpu-memory", type=float, help="GB of the GPU that may be used; `bench` is left out."
)
def measure(
    checkpoint: Path, report: Path, name: str | None, modes: tuple[ActivationMode, ...],
    slots: tuple[int, ...], steps: int, behind: int | None, with_bench: bool,
    gpu_memory: float | None,
) -> None:  # fmt: skip
    """Measure CHECKPOINT; REPORT gets a JSON line a number of slots."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    budget = None if gpu_memory is None else gpu_memory * 1e9
    measured = with_bench and budget is None
    rates = benched(checkpoint, list(slots), steps, behind or CONTEXT) if measured else {}
    with report.open("a") as file:
        for mode in modes or (served_mode(checkpoint),):
            for capacity in slots:
                facts = {"model": name or checkpoint.resolve().name, "activations": mode}
                facts |= {"gpu_memory": gpu_memory, "behind": behind}
                facts |= {"device": device, "steps": steps}
                facts |= evaluated(checkpoint, mode, capacity, steps, budget, behind)
                if own := rates.get(capacity):
                    facts["bench_tokens_a_second"] = round(own, 1)
                    facts["share_of_bench"] = round(facts["tokens_a_second"] / own, 3)
                print(json.dumps(facts), flush=True)
                file.write(json.dumps(facts) + "\n")
                file.flush()


@main.command()
@click.argument("reports", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--base", default="bf16", show_default=True, help="The model that others are paired with."
)
@click.option("--tokens", default=50.4e6, show_default=True, help="Tokens of a side's answers.")
@click.option("--steps", default=26.0, show_default=True, help="Steps that a canvas takes.")
@click.option("--gpus", multiple=True, type=int, default=(1, 8), show_default=True)
def project(
    reports: tuple[Path, ...], base: str, tokens: float, steps: float, gpus: tuple[int, ...]
) -> None:
    """Print the rates, and the hours that a recipe's evaluation of both sides would take."""
    lines = [json.loads(line) for path in reports for line in path.read_text().splitlines()]
    console = Console()
    console.print(rates_table(lines), hours_table(lines, base, tokens, steps, gpus))


def rates_table(lines: list[Facts]) -> Table:
    """Return tokens/s of evaluation and their share of bench's."""
    table = Table(title=f"tokens/s, {lines[0]['steps']} steps a canvas, {lines[0]['device']}")
    for column in ("model", "activations", "slots", "evaluate", "bench", "share"):
        table.add_column(column, justify="left" if column in ("model", "activations") else "right")
    for line in lines:
        share = line.get("share_of_bench")
        bench = line.get("bench_tokens_a_second")
        table.add_row(
            line["model"], line["activations"], str(line["slots"]),
            f"{line['tokens_a_second']:,.0f}", f"{bench:,.0f}" if bench else "",
            f"{share:.0%}" if share else "",
        )  # fmt: skip
    return table


def hours_table(
    lines: list[Facts], base: str, tokens: float, steps: float, gpus: tuple[int, ...]
) -> Table:
    """Return the hours of the base and each other side at each number of slots that both have."""
    table = Table(title=f"hours of {tokens / 1e6:g} M tokens a side, {steps:g} steps a canvas")
    heads = [f"{n} GPU{'s' * (n > 1)}{kind}" for kind in ("", ", sequential") for n in gpus]
    for column in ("sides", "slots", *heads):
        table.add_column(column, justify="left" if column == "sides" else "right")
    ours = {line["slots"]: line for line in lines if line["model"] == base}
    for line in (each for each in lines if each["model"] != base and each["slots"] in ours):
        both = (ours[line["slots"]], line)
        hours = (
            sum(
                tokens / each["tokens_a_second"] * (steps + 1) / (each["steps"] + 1)
                for each in both
            )
            / 3600
        )
        cells = [f"{hours * share / n:.1f}" for share in (1.0, SEQUENTIAL) for n in gpus]
        sides = f"{base} and {line['model']}, {line['activations']}"
        table.add_row(sides, str(line["slots"]), *cells)
    return table


if __name__ == "__main__":
    main()
