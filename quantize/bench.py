"""Measures how fast a checkpoint denoises on this GPU, and how far from the floor: `quantize bench`.

A row is one batch size with one number of steps. "Fixed" steps never stop early, so their canvases cost
the same for random weights as for real ones; "adaptive" stops as the checkpoint's own generation config
committed canvas: N steps make N + 1 forwards a canvas. Times are of whole canvases, host work included.

    ms a canvas, ms a forward, tokens/s   over `canvases` canvases, each behind `context` tokens
    first canvas                          ms to encode a prompt of `context` tokens and denoise a canvas
    x floor                               time of a step over the least its bytes and FLOP allow
    parts                                 GPU ms of one step's kernels by what they do, from a profile

Random weights have the model's exact shapes and routing, but their answers are noise.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from quantize.checkpoints.reader import Checkpoint
from quantize.errors import InputError, ResourceError
from quantize.progress import say
from quantize.runtime import Sampler, open
from quantize.runtime.fused.cost import Rates, decoder_floor, measure_rates
from quantize.runtime.fused.engine import PARTS, FusedEngine
from quantize.runtime.fused.weights import TextWeights, model_config
from quantize.runtime.opening import RandomModel

NEVER = 1e-30  # nats: no canvas has a mean entropy below it
MIXES = {
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8": ("fp8", "fp8", "fp8"),
    "int8": ("int8", "int8", "int8"),
    "nvfp4": ("nvfp4", "nvfp4", "nvfp4"),
    "nvfp4_fp8": ("nvfp4", "fp8", "fp8"),
}  # experts, attention, dense MLP


@dataclass(frozen=True)
class Row:
    """One batch size and number of steps; times are medians over canvases, in milliseconds.

    `parts` and `floor_parts` are of one denoising step with self-conditioning.
    """

    batch: int
    steps: str
    forwards_a_canvas: float
    ms_a_canvas: float
    ms_a_forward: float
    tokens_a_second: float
    first_canvas_ms: float
    floor_ms_a_step: float
    parts: dict[str, float]
    floor_parts: dict[str, float]
    price_a_million_tokens: float | None


@dataclass(frozen=True)
class Bench:
    """All rows, and the device and weights that they were measured on."""

    model: str
    device: str
    torch: str
    context: int
    weight_bytes: int
    peak_bytes: int
    load_seconds: float
    experts_hit: list[int]
    rates: Rates
    rows: list[Row] = field(default_factory=list[Row])


def bench(
    checkpoint: Path | None,
    *,
    random: str | None,
    config: dict[str, Any] | None,
    steps: Sequence[str],
    batches: Sequence[int],
    context: int,
    canvases: int,
    experts_hit: int | None = None,
    hourly_price: float | None = None,
) -> Bench:
    """Measure a checkpoint, or random weights, at every batch size and number of steps.

    Args:
        checkpoint: a folder, or None with `random`.
        random: a key of MIXES: random weights of `config` in that mix.
        config: config.json of the random model.
        steps: numbers of fixed steps, or "adaptive".
        batches: canvases denoised together.
        context: tokens of the prompt.
        canvases: canvases measured for each row, at least 1.
        experts_hit: number of experts that random weights route to; None for all.
        hourly_price: price of an hour of the machine, for the cost of a million tokens.

    Raises:
        ResourceError: there is no GPU, or too little memory on it.
        InputError: a mix or a number of steps is unknown, or the checkpoint cannot be loaded.
    """
    if not torch.cuda.is_available():
        raise ResourceError("bench needs an NVIDIA GPU: the kernels' speed on a CPU says nothing")
    samplers = {name: _sampler(name, checkpoint) for name in steps}
    rates = measure_rates(torch.device("cuda"))
    length = context + 2 * _canvas_length(checkpoint, config)
    model = checkpoint or _random(random, config, experts_hit)
    engine, loaded = _loaded(model, max(batches), length)
    weights = engine.model.weights
    prompts = _prompts(weights, context, max(batches))
    hit = _experts_hit(engine, prompts[0])
    if checkpoint is None:  # making random numbers took memory that loading would not
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result = Bench(
        model=str(checkpoint) if checkpoint else f"random weights, {random}",
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        context=context,
        weight_bytes=weights.nbytes,
        peak_bytes=0,
        load_seconds=loaded,
        experts_hit=hit,
        rates=rates,
    )
    for batch in batches:
        floor = decoder_floor(weights, rates, batch, context, statistics.mean(hit))
        for name, sampler in samplers.items():
            say(f"batch {batch}, {name} steps")
            row = _measure(engine, prompts[:batch], sampler, canvases)
            result.rows.append(_row(row, batch, name, weights, floor, hourly_price))
    return replace(result, peak_bytes=torch.cuda.max_memory_allocated())


def _loaded(
    model: Path | RandomModel, capacity: int, max_context: int
) -> tuple[FusedEngine, float]:
    """Return the kernels' engine, and the seconds that loading took."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    engine = open(model, device="cuda", capacity=capacity, max_context=max_context, kind="fused")
    assert isinstance(engine, FusedEngine)  # as asked
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    say(f"{engine.model.weights.nbytes / 1e9:.1f} GB of weights after {seconds:.0f} s")
    return engine, seconds


def _sampler(steps: str, checkpoint: Path | None) -> Sampler:
    own = Sampler.from_checkpoint(checkpoint) if checkpoint else Sampler()
    if steps == "adaptive":
        return own
    if not steps.isdigit() or int(steps) < 1:
        raise InputError(f"steps {steps!r}: a number above 0, or adaptive")
    return replace(own, max_denoising_steps=int(steps), confidence_threshold=NEVER)


def _random(mix: str | None, config: dict[str, Any] | None, experts_hit: int | None) -> RandomModel:
    if mix not in MIXES or config is None:
        raise InputError(f"random weights {mix!r}: one of {', '.join(MIXES)}")
    kinds = ("experts", "attention", "mlp")
    return RandomModel(config, dict(zip(kinds, MIXES[mix], strict=True)), experts_hit)


def _canvas_length(checkpoint: Path | None, config: dict[str, Any] | None) -> int:
    own = Checkpoint.open(checkpoint).config if checkpoint else config or {}
    return model_config(own).canvas_length


def _prompts(weights: TextWeights, length: int, count: int) -> list[list[int]]:
    """Return random tokens, none of them reserved, above the control tokens where there is room."""
    vocabulary = weights.config.text_config.vocab_size
    generator = torch.Generator().manual_seed(0)
    low, high = vocabulary // 8, vocabulary - 8
    return torch.randint(low, high, (count, length), generator=generator).tolist()


def _experts_hit(engine: FusedEngine, prompt: list[int]) -> list[int]:
    """Return how many experts one denoising step of one canvas reaches, layer by layer."""
    own = FusedEngine(engine.model.weights, capacity=1, max_context=engine.max_length, graphs=False)
    own.admit(0, prompt, 0, Sampler(max_denoising_steps=1))
    own.model.routed = []
    own.denoise([0])
    step = own.model.routed[-len(own.model.weights.layers) :]  # without a short prompt's encoding
    return [int(ids.unique().numel()) for ids in step]


@dataclass(frozen=True)
class _Times:
    """Times in milliseconds; `forwards` a canvas include the encoder's."""

    first_canvas: float
    canvas: float
    forwards: float
    parts: dict[str, float]


def _measure(
    engine: FusedEngine, prompts: list[list[int]], sampler: Sampler, canvases: int
) -> _Times:
    """Time the first canvas from its prompt on, then canvases with the encoding of the one before.

    The later ones stand behind as many tokens as the prompts have, a canvas' tokens among them.
    """
    slots = list(range(len(prompts)))

    def admit(left_out: int) -> None:
        for slot in slots:
            engine.release(slot)
            prompt = prompts[slot]
            engine.admit(slot, prompt[: max(1, len(prompt) - left_out)], slot, sampler)

    def stand_behind_context() -> None:
        admit(engine.canvas_length)
        engine.denoise(slots)

    admit(0)
    for _ in range(2):  # captures the graphs: the step's, and from the second canvas the encoder's
        engine.denoise(slots)
    started = time.perf_counter()
    admit(0)
    engine.denoise(slots)
    first = time.perf_counter() - started
    seconds: list[float] = []
    steps = 0
    for _ in range(canvases):
        stand_behind_context()
        started = time.perf_counter()
        done = engine.denoise(slots)
        seconds.append(time.perf_counter() - started)
        steps += max(canvas.steps for canvas in done if canvas)
    stand_behind_context()
    parts = engine.profile_step(slots)
    forwards = steps / canvases + 1
    return _Times(first * 1e3, statistics.median(seconds) * 1e3, forwards, parts)


def _row(
    times: _Times,
    batch: int,
    steps: str,
    weights: TextWeights,
    floor: dict[str, float],
    hourly_price: float | None,
) -> Row:
    rate = batch * weights.config.canvas_length / times.canvas * 1e3
    return Row(
        batch=batch,
        steps=steps,
        forwards_a_canvas=times.forwards,
        ms_a_canvas=times.canvas,
        ms_a_forward=times.canvas / times.forwards,
        tokens_a_second=rate,
        first_canvas_ms=times.first_canvas,
        floor_ms_a_step=sum(floor.values()) * 1e3,
        parts=times.parts,
        floor_parts={name: value * 1e3 for name, value in floor.items()},
        price_a_million_tokens=None if hourly_price is None else hourly_price / rate / 3600 * 1e6,
    )


def tables(result: Bench) -> list[Table]:
    """Return a result as tables: speed, then where a step's time goes."""
    title = (
        f"{result.model} on {result.device}: {result.weight_bytes / 1e9:.1f} GB of weights, "
        f"{result.peak_bytes / 1e9:.1f} GB at most, context {result.context}, "
        f"loaded in {result.load_seconds:.0f} s"
    )
    speed = Table(title=title, title_justify="left")
    columns = ["batch", "steps", "ms/forward", "ms/canvas", "tokens/s", "first canvas ms", "floor"]
    for name in (*columns, "x floor", "per million tokens"):
        speed.add_column(name, justify="right")
    parts = Table(title="ms of one denoising step, and x floor", title_justify="left")
    for name in ("batch", "steps", *PARTS, "rest"):
        parts.add_column(name, justify="right")
    for row in result.rows:
        price = row.price_a_million_tokens
        speed.add_row(
            str(row.batch), row.steps, f"{row.ms_a_forward:.2f}", f"{row.ms_a_canvas:.1f}",
            f"{row.tokens_a_second:,.0f}", f"{row.first_canvas_ms:.1f}", f"{row.floor_ms_a_step:.2f}",
            f"{sum(row.parts.values()) / row.floor_ms_a_step:.2f}",
            "" if price is None else f"{price:.2f}",
        )  # fmt: skip
        cells = [_part(row, name) for name in (*PARTS, "rest")]
        parts.add_row(str(row.batch), row.steps, *cells)
    return [speed, parts]


def _part(row: Row, name: str) -> str:
    floor = row.floor_parts.get(name)
    ratio = f" ({row.parts[name] / floor:.2f})" if floor else ""
    return f"{row.parts[name]:.2f}{ratio}"


def to_json(result: Bench) -> str:
    """Return the result as JSON text."""
    return json.dumps(asdict(result), indent=1)
