"""Times canvases that stop by themselves, in slots that wait for each other and in slots that do not.

Real canvases differ: some take a few denoising steps, some all. A slot holds one sequence of a batch.
"By step", as in `serve`, a slot whose canvas has stopped takes its next canvas or another request at
once. "By canvas", the slot first waits until every canvas of the batch has stopped. Each slot gets
REQUESTS requests of two canvases, and the time includes encoding the prompts. Canvases of random
weights never stop by themselves: they take recorded numbers of steps, as all do in `speeds`.
"""

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from quantize.errors import InputError
from quantize.runtime import Placement, Sampler, open
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Canvas, Engine, complete
from quantize.runtime.weights.load import TextWeights

REQUESTS = 4  # of each slot
STOPS = TypeAdapter(Annotated[list[PositiveInt], Field(min_length=1)])
NEVER = 1e-30  # nats: no canvas has a mean entropy below it


@dataclass(frozen=True)
class AdaptiveRow:
    """The speed of one batch; `slots_go_on` says whether its slots wait for each other."""

    batch: int
    slots_go_on: str  # "by step": they never wait; "by canvas": they wait
    tokens_a_second: float
    steps_of_canvases: list[int]  # steps of each canvas, two canvases per request, in their order


class SomeSlots:
    """An engine's first `slots` slots; with `whole`, each slot waits until all slots have a canvas."""

    def __init__(self, engine: Engine, slots: int, *, whole: bool) -> None:
        self._engine, self.slots, self._whole = engine, slots, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def denoise(self, slots: Sequence[int], *_: Any) -> list[Canvas | None]:
        """Denoise until a slot, or all if `whole`, has a canvas; return each slot's canvas or None."""
        finished: dict[int, Canvas] = {}
        while not finished or (self._whole and len(finished) < len(slots)):
            running = [slot for slot in slots if slot not in finished]
            done = zip(running, self._engine.denoise(running), strict=True)
            finished |= {slot: canvas for slot, canvas in done if canvas}
        return [finished.get(slot) for slot in slots]


def adaptive_rows(
    engine: FusedEngine, prompts: list[list[int]], sampler: Sampler, stops: Sequence[int] | None
) -> list[AdaptiveRow]:
    """Time `prompts`, one per slot, "by step" and then "by canvas"; return both rows in this order.

    Each prompt makes REQUESTS requests of two canvases; these must fit the engine. `stops` has the
    canvases' numbers of steps, in turn; if None, the sampler stops canvases. All slots are freed first.
    """
    for slot in range(engine.capacity):
        engine.release(slot)
    batch, length = len(prompts), engine.canvas_length
    requests = [prompt for _ in range(REQUESTS) for prompt in prompts]
    endless = replace(sampler, max_length=None, eos_token_ids=())
    if stops is not None:
        endless = replace(endless, confidence_threshold=NEVER)
        lengths = list(itertools.islice(itertools.cycle(stops), 2 * len(requests)))
        engine.denoiser.stops = lambda seed, canvas: lengths[2 * seed + canvas]
    rows: list[AdaptiveRow] = []
    ways = {"by step": False, "by canvas": True}
    for name, whole in [*ways.items()] * 2:  # the first time captures graphs
        held: Any = SomeSlots(engine, batch, whole=whole)
        started, seeds = time.perf_counter(), range(len(requests))
        samples = complete(held, requests, seeds, max_new_tokens=2 * length, sampler=endless)
        seconds = time.perf_counter() - started
        steps = [count for sample in samples for count in sample.steps_per_canvas]
        rows.append(AdaptiveRow(batch, name, len(steps) * length / seconds, steps))
    engine.denoiser.stops = None
    return rows[len(ways) :]


def speeds(
    checkpoint: Path, place: Placement, context: int, steps: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return tokens/s by sampler setting; `steps` maps settings to the recorded steps of canvases.

    Canvases take these numbers of steps. Prompts have `context` random tokens. Slots go on "by step".
    """
    engine = open(checkpoint, place)
    prompts = random_prompts(engine.model.weights, context, engine.capacity)
    stated, count = Sampler.from_checkpoint(checkpoint), 2 * REQUESTS * engine.capacity
    rates = {
        name: adaptive_rows(engine, prompts, stated, spread(counts, count))[0].tokens_a_second
        for name, counts in steps.items()
    }
    engine.close()
    return rates


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return `count` of the sorted `steps`, evenly spaced, shuffled with a fixed seed."""
    ordered = sorted(steps)
    quantiles = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
    random.Random(0).shuffle(quantiles)
    return quantiles


def random_prompts(weights: TextWeights, length: int, count: int) -> list[list[int]]:
    """Return `count` prompts of `length` random tokens: no placeholder of a picture, no control token.

    Control tokens have low ids.
    """
    vocabulary = weights.config.text_config.vocab_size
    generator = torch.Generator().manual_seed(0)
    low, high = vocabulary // 8, vocabulary - 8
    prompts = torch.randint(low, high, (count, length), generator=generator)
    prompts[prompts == (weights.config.image_token_id or 0)] = low
    return prompts.tolist()


def read_stops(path: Path) -> list[int]:
    """Return a JSON file's steps per canvas; InputError unless it lists integers above 0."""
    try:
        return STOPS.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]["msg"]
        raise InputError(
            f"{path}: not a JSON list of numbers of steps above 0 ({wrong})"
        ) from error
