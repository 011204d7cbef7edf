"""`quantize bench`: measures how fast a checkpoint denoises on this GPU, and compares with the floor.

A row is one batch size with one number of denoising steps. With a fixed number, a canvas never stops
early, so random weights take as long as real weights. N steps count as N + 1 forwards: the encoding of
the previous canvas counts as one, although it is part of the first step's pass. "Adaptive" canvases
stop by a sampler's settings (module `adaptive`). Rows of "one token" write as many tokens as a canvas
has, greedily, one token per forward (module `one_token`). Times include the host's work. Random weights
have the model's exact shapes, but their answers are noise.

    ms/canvas, ms/forward, tokens/s   median of `canvases` or more canvases, each after `context` tokens
    W, J/forward, tokens/J            means over SECONDS or more, from updates of an energy counter
    MHz, power-capped                 mean clock, and share of updates at which power limited the clock
    first canvas ms                   time to encode a prompt of `context` tokens and write a canvas
    ms/step                           mean of steps that encode nothing, launched back to back
    x floor                           ms/step divided by the floor, the least that bytes and FLOP allow
    parts                             GPU ms of one step's kernels, by part of the step, from a profile;
                                      the GPU's rates are measured again if a part took less than its
                                      floor, and bench fails if that remains
    unexplained                       ms/step minus its parts: gaps between kernels, minus overlaps
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from quantize.bench.adaptive import NEVER, AdaptiveRow, adaptive_rows, random_prompts, read_stops
from quantize.bench.one_token import Continuation
from quantize.bench.steps import PARTS, profile_step, time_step
from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.host.gauge import Gauge, watched
from quantize.host.progress import say
from quantize.runtime import Placement, Sampler, open
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.gpu.rates import Rates, measure_rates
from quantize.runtime.model.cost import decoder_floor, pass_floor
from quantize.runtime.opening import RandomModel

ADAPTIVE = "adaptive"  # in place of a number of steps
SECONDS = 10.0  # of work at least while the energy counter is watched
ONE_TOKEN = "one token"  # in place of a number of steps
# A part of a step is not faster than its floor, except for errors of this share. A part whose floor is
# lower than this many ms reads so little that a GPU's cache may hold it: it may be faster.
BELOW, CACHED_MS = 0.05, 0.5
MIXES = {name: (name,) * 3 for name in ("bf16", "fp8", "int8", "nvfp4")}
MIXES["nvfp4_fp8"] = ("nvfp4", "fp8", "fp8")  # experts, attention, dense MLP
# The columns of speed: title -> (field of Row, format).
SHOWN = {
    "batch": ("batch", "d"), "steps": ("steps", "s"), "ms/forward": ("ms_a_forward", ".2f"),
    "ms/canvas": ("ms_a_canvas", ".1f"), "tokens/s": ("tokens_a_second", ",.0f"),
    "W": ("watts", ".0f"), "J/forward": ("joules_a_forward", ".2f"),
    "tokens/J": ("tokens_a_joule", ".2f"), "MHz": ("clock_mhz", ".0f"),
    "power-capped": ("power_capped", ".0%"), "per million": ("price_a_million_tokens", ".2f"),
    "first canvas ms": ("first_canvas_ms", ".1f"), "ms/step": ("ms_a_step", ".2f"),
    "floor": ("floor_ms_a_step", ".2f"), "x floor": ("x_floor", ".2f"),
}  # fmt: skip


@dataclass(frozen=True)
class SpeedRow:
    """One batch size with one number of steps; ms per canvas and ms per forward are medians.

    If `steps` is ONE_TOKEN, each forward writes one token per sequence, a "step" is one forward, and
    `parts` is empty. Figures that the GPU does not report, and an unknown price, are None.
    """

    batch: int
    steps: str
    forwards_a_canvas: float
    ms_a_canvas: float
    ms_a_forward: float
    tokens_a_second: float
    watts: float | None
    joules_a_forward: float | None
    tokens_a_joule: float | None
    clock_mhz: float | None
    power_capped: float | None  # share of the counter's updates at which power held the clock down
    first_canvas_ms: float
    experts_hit: float
    ms_a_step: float
    floor_ms_a_step: float
    parts: dict[str, float]  # GPU ms of one denoising step with self-conditioning
    floor_parts: dict[str, float]  # the least ms of each part
    price_a_million_tokens: float | None

    @property
    def unexplained(self) -> float:
        """A step's ms minus the sum of its parts: gaps between kernels, minus overlaps of kernels."""
        return self.ms_a_step - sum(self.parts.values())

    @property
    def x_floor(self) -> float:
        """A step's time divided by the least time that its bytes and FLOP allow."""
        return self.ms_a_step / self.floor_ms_a_step


@dataclass(frozen=True)
class Bench:
    """All rows that `bench` measured, and facts about the device and the weights."""

    model: str
    device: str
    torch: str
    context: int  # positions before each canvas
    weight_bytes: int
    peak_bytes: int
    load_seconds: float
    experts_hit: list[int]  # per layer, by one denoising step of one canvas
    rates: Rates
    rows: list[SpeedRow] = field(default_factory=list[SpeedRow])
    adaptive: list[AdaptiveRow] = field(default_factory=list[AdaptiveRow])


def bench(
    checkpoint: Path | None,
    *,
    random: str | None,
    config: dict[str, Any] | None,
    steps: Sequence[str],
    batches: Sequence[int],
    context: int,
    canvases: int,
    place: Placement,
    autoregressive: bool = False,
    hourly_price: float | None = None,
    stops: Path | None = None,
    hit_by: Callable[[int], float] = lambda _: 1.0,
) -> Bench:
    """Measure a checkpoint, or random weights, at every batch size and number of steps.

    If `checkpoint` is None, the model has the shapes of `config`, and random weights in the schemes of
    MIXES[`random`]; a batch reaches the share of a layer's experts that `hit_by` gives it. Each of
    `steps` is a fixed number or "adaptive". Adaptive canvases take the numbers of steps in the JSON
    file `stops`, in turn; without `stops` they stop by themselves. A row times at least `canvases`
    canvases after `context` tokens. `autoregressive` adds rows of one token per forward, `hourly_price`
    adds a price per million tokens. Raise ResourceError if there is no GPU or it has too little memory.
    Raise InputError if a mix or number of steps is unknown, or loading fails.
    """
    if not torch.cuda.is_available():
        raise ResourceError("bench needs an NVIDIA GPU: the kernels' speed on a CPU says nothing")
    samplers, batches = {name: _sampler(name, checkpoint) for name in steps}, sorted(set(batches))
    stopping = None if stops is None else read_stops(stops)
    rates = measure_rates(torch.device("cuda"))
    stated = Checkpoint.open(checkpoint).config if checkpoint else config or {}
    length = context + 2 * model_config(stated).canvas_length  # an adaptive request's, too
    model = checkpoint or _random(random, config)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    engine = open(model, replace(place, capacity=max(batches), max_context=length))
    torch.cuda.synchronize()
    loaded, weights = time.monotonic() - started, engine.model.weights
    say(f"{weights.nbytes / 1e9:.1f} GB of weights after {loaded:.0f} s")
    prompts = random_prompts(weights, context, max(batches))
    routers = [] if checkpoint else [layer.router.to("cpu", copy=True) for layer in weights.layers]
    hit = _reach(engine, routers, hit_by(1), prompts[0])
    if checkpoint is None:  # making random numbers took memory that loading would not
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    name = str(checkpoint) if checkpoint else f"random weights, {random}"
    name += f", activations {place.activations}" if place.activations else ""
    result = Bench(
        name, torch.cuda.get_device_name(), torch.__version__, context, weights.nbytes,
        peak_bytes=0, load_seconds=loaded, experts_hit=hit, rates=rates,
    )  # fmt: skip
    if (adaptive := samplers.pop(ADAPTIVE, None)) is not None:
        for batch in batches:
            say(f"batch {batch}, adaptive steps")
            _reach(engine, routers, hit_by(batch), prompts[0])
            result.adaptive.extend(adaptive_rows(engine, prompts[:batch], adaptive, stopping))
    for batch in batches:
        batch_prompts = prompts[:batch]
        reached = statistics.mean(_reach(engine, routers, hit_by(batch), prompts[0]))
        if autoregressive:
            say(f"batch {batch}, one token a forward")
            times, own_hit = _measure_tokens(engine, batch_prompts, canvases)
            floor = pass_floor(weights, rates, (batch, 1), context, own_hit)
            result.rows.append(_row(batch, ONE_TOKEN, own_hit, floor, times, hourly_price))
        shape = batch, context, reached
        for name, sampler in samplers.items():
            say(f"batch {batch}, {name} steps")
            times = _measure(engine, batch_prompts, sampler, canvases)
            floor = decoder_floor(weights, rates, *shape)
            if _below(
                floor, times
            ):  # the gauge was the slower one: read it again, now that it is hot
                rates = rates.or_faster(measure_rates(torch.device("cuda")))
                floor = decoder_floor(weights, rates, *shape)
            result.rows.append(_row(batch, name, reached, floor, times, hourly_price))
    return replace(result, peak_bytes=torch.cuda.max_memory_allocated(), rates=rates)


def _sampler(steps: str, checkpoint: Path | None) -> Sampler:
    stated = Sampler.from_checkpoint(checkpoint) if checkpoint else Sampler()
    if steps == ADAPTIVE:
        return stated
    if not steps.isdigit() or int(steps) < 1:
        raise InputError(f"steps {steps!r}: a number above 0, or adaptive")
    return replace(stated, max_denoising_steps=int(steps), confidence_threshold=NEVER)


def _random(mix: str | None, config: dict[str, Any] | None) -> RandomModel:
    if mix not in MIXES or config is None:
        raise InputError(f"random weights {mix!r}: one of {', '.join(MIXES)}")
    kinds = ("experts", "attention", "mlp")
    return RandomModel(config, dict(zip(kinds, MIXES[mix], strict=True)))


def _reach(
    engine: FusedEngine, routers: Sequence[Tensor], share: float, prompt: list[int]
) -> list[int]:
    """Let random `routers` choose among the first `share` of experts; return how many a canvas hits.

    Experts beyond it score 0, less than the best 8 of many random scores.
    """
    for layer, router in zip(engine.model.weights.layers, routers, strict=False):
        layer.router.copy_(router)
        layer.router[math.ceil(share * len(router)) :] = 0
    return _experts_hit(engine, prompt)


def _experts_hit(engine: FusedEngine, prompt: list[int]) -> list[int]:
    """Return how many experts one denoising step of one canvas reaches, layer by layer."""
    probe = FusedEngine(
        engine.model.weights, capacity=1, max_context=engine.max_length, graphs=False
    )
    probe.admit(0, prompt, 0, Sampler(max_denoising_steps=1))
    probe.model.routed = []
    probe.denoise([0])
    layers = len(probe.model.weights.layers)
    step = probe.model.routed[-layers:]  # without a short prompt's encoding
    return [int(ids.unique().numel()) for ids, _ in step]


def _measure(
    engine: FusedEngine, prompts: list[list[int]], sampler: Sampler, canvases: int
) -> dict[str, Any]:
    """Time the first canvas from its prompt on, then canvases with the encoding of the one before."""
    slots = list(range(len(prompts)))
    _admit(engine, prompts, 0, sampler)
    for _ in range(2):  # captures the graphs: the step's, and from the second canvas the encoder's
        engine.denoise(slots)
    started = time.perf_counter()
    _admit(engine, prompts, 0, sampler)
    engine.denoise(slots)
    first = time.perf_counter() - started
    _admit(engine, prompts, engine.canvas_length, sampler)
    before = engine.denoise(slots)

    def canvas() -> int:
        done = engine.denoise(slots)
        for slot, sequence in zip(slots, before, strict=True):
            engine.rewind(slot, sequence.tokens if sequence else [])
        return max(canvas.steps for canvas in done if canvas) + 1

    times = _repeated(canvas, canvases, engine.device, len(slots) * engine.canvas_length)
    steps = {"ms_a_step": time_step(engine, slots), "parts": profile_step(engine, slots)}
    return times | steps | {"first_canvas_ms": first * 1e3}


def _admit(engine: FusedEngine, prompts: list[list[int]], left_out: int, sampler: Sampler) -> None:
    for slot, prompt in enumerate(prompts):
        engine.release(slot)
        engine.admit(slot, prompt[: max(1, len(prompt) - left_out)], slot, sampler)


def _measure_tokens(
    engine: FusedEngine, prompts: list[list[int]], canvases: int
) -> tuple[dict[str, Any], float]:
    """Time a canvas' number of tokens, one per forward; return also how many experts a forward hits."""
    slots, length = list(range(len(prompts))), engine.canvas_length
    last = [prompt[-1] for prompt in prompts]
    _admit(engine, prompts, 1, Sampler())
    texts = Continuation(engine, slots, last)
    texts.run(length)  # compiles, and captures the graphs
    started = time.perf_counter()
    _admit(engine, prompts, 1, Sampler())
    texts.begin(slots, last)
    texts.run(length)
    first = time.perf_counter() - started
    _admit(engine, prompts, 1 + length // 2, Sampler())
    texts.begin(slots, last)
    hit = statistics.mean(texts.experts_hit())

    def canvas() -> int:
        texts.rewind()
        texts.run(length)
        return length

    times = _repeated(canvas, canvases, engine.device, len(slots) * length)
    for slot in slots:
        engine.release(slot)
    figures = {"first_canvas_ms": first * 1e3, "ms_a_step": times["ms_a_forward"], "parts": {}}
    return times | figures, hit


def _repeated(
    canvas: Callable[[], int], count: int, device: torch.device, tokens: int
) -> dict[str, Any]:
    """Time `canvas`, which returns its forwards, `count` times, or longer if energy is counted."""
    gauge = Gauge.of(device)
    least = SECONDS if gauge and gauge.joules() is not None else 0.0
    seconds: list[float] = []
    forwards = 0
    with watched(gauge) as seen:
        while len(seconds) < count or sum(seconds) < least:
            started = time.perf_counter()
            forwards += canvas()
            seconds.append(time.perf_counter() - started)
    median, per_run = statistics.median(seconds), forwards / len(seconds)
    watts, clocks = seen.watts, seen.clocks
    joules = watts and watts * sum(seconds) / forwards
    return {
        "forwards_a_canvas": per_run,
        "ms_a_canvas": median * 1e3,
        "ms_a_forward": median * 1e3 / per_run,
        "tokens_a_second": tokens / median,
        "watts": watts,
        "joules_a_forward": joules,
        "tokens_a_joule": tokens / (joules * per_run) if joules else None,
        "clock_mhz": statistics.mean(clock.mhz for clock in clocks) if clocks else None,
        "power_capped": statistics.mean(clock.capped for clock in clocks) if clocks else None,
    }


def _below(floor: dict[str, float], times: dict[str, Any]) -> list[str]:
    """Return the parts of a step that took less than their floor, which no part can."""
    taken = times["parts"]
    return [
        name
        for name, seconds in floor.items()
        if seconds * 1e3 >= CACHED_MS and taken.get(name, math.inf) < (1 - BELOW) * seconds * 1e3
    ]


def _row(
    batch: int,
    steps: str,
    hit: float,
    floor: dict[str, float],
    times: dict[str, Any],
    hourly_price: float | None,
) -> SpeedRow:
    price = hourly_price and hourly_price / times["tokens_a_second"] / 3600 * 1e6
    parts = {name: value * 1e3 for name, value in floor.items()}
    for name in _below(floor, times):
        raise ResourceError(
            f"bench: at batch {batch}, {name} took {times['parts'][name]:.2f} ms, less than its "
            f"floor of {parts[name]:.2f} ms: the GPU's rates were measured while it was slower. End "
            f"what else runs on it, and run bench again"
        )
    return SpeedRow(
        batch=batch, steps=steps, experts_hit=hit, price_a_million_tokens=price,
        floor_ms_a_step=sum(floor.values()) * 1e3, floor_parts=parts, **times,
    )  # fmt: skip


def tables(result: Bench) -> list[Table]:
    """Return the tables of a result that have rows: speeds, a step's parts, adaptive canvases."""
    title = (
        f"{result.model} on {result.device}: {result.weight_bytes / 1e9:.1f} GB of weights, "
        f"{result.peak_bytes / 1e9:.1f} GB at most, context {result.context}, "
        f"loaded in {result.load_seconds:.0f} s"
    )
    speed = _table(title, *SHOWN)
    heads = ("batch", "steps", *PARTS, "rest", "unexplained")
    parts = _table("ms of one denoising step, and x floor", *heads)
    for row in result.rows:
        values = [(getattr(row, name), form) for name, form in SHOWN.values()]
        speed.add_row(*("" if value is None else format(value, form) for value, form in values))
        if row.parts:
            cells = [_part(row, name) for name in (*PARTS, "rest")]
            parts.add_row(str(row.batch), row.steps, *cells, f"{row.unexplained:.2f}")
    adaptive = _table(
        "canvases that stop by themselves", "batch", "slots go on", "tokens/s", "steps a canvas"
    )
    for row in result.adaptive:
        mean = f"{statistics.mean(row.steps_of_canvases):.1f}"
        adaptive.add_row(str(row.batch), row.slots_go_on, f"{row.tokens_a_second:,.0f}", mean)
    return [table for table in (speed, parts, adaptive) if table.row_count]


def _table(title: str, *heads: str) -> Table:
    columns = (Column(head, justify="right") for head in heads)
    return Table(*columns, title=title, title_justify="left")


def _part(row: SpeedRow, name: str) -> str:
    floor = row.floor_parts.get(name)
    ratio = f" ({row.parts[name] / floor:.2f})" if floor else ""
    return f"{row.parts[name]:.2f}{ratio}"
