"""The cost of the server on a GPU, without one.

    python -m tests.benchmarks.serve_overhead CHECKPOINT [ROUNDS]

An engine that only sleeps takes the place of the model: 25 ms a prompt, 260 ms a canvas alone, 500 ms
four; it queues a step while the one before runs, as `FusedEngine` does. CHECKPOINT gives tokenizer and
settings. Prints the medians of the time between two canvases and of tokens a second over those of the
engine without prompts, one connection and eight for four slots.
"""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from quantize.runtime.engine.interface import Canvas, Meanwhile, OnDraft
from quantize.runtime.prompt.images import Images
from quantize.runtime.sampler.known_tokens import Given
from quantize.runtime.sampler.sampler import Sampler
from tests.benchmarks.full_size_serve import CANVASES, CONTEXT, FIXED, STEPS, asked, serving
from tests.support.streams import rate

PROMPT = 0.025
SECONDS = {1: 0.26, 2: 0.35, 3: 0.5, 4: 0.5}  # a canvas of so many slots


class SleepingEngine:
    """Takes its time and says anything."""

    capacity, canvas_length, max_length = 4, 256, 8192
    prefixes, device = None, torch.device("cpu")

    def __init__(self) -> None:
        self.between: list[float] = []  # seconds between two canvases without an admission
        self._ended: float | None = None

    def admit(
        self, slot: int, prompt: Sequence[int], seed: int, sampler: Sampler,
        images: Images | None = None, given: Given | None = None,
    ) -> None:  # fmt: skip
        time.sleep(PROMPT)
        self._ended = None

    def denoise(
        self, slots: Sequence[int], on_draft: OnDraft | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Canvas]:  # fmt: skip
        begun = over = time.perf_counter()
        if self._ended is not None:
            self.between.append(begun - self._ended)
        for step in range(STEPS):
            before = over
            over = max(over, time.perf_counter()) + SECONDS[len(slots)] / STEPS
            if step == 0 and meanwhile is not None:
                meanwhile()
            time.sleep(max(0.0, before - time.perf_counter()))
        canvases = [Canvas(random.choices(range(300, 200_000), k=256), STEPS) for _ in slots]
        time.sleep(max(0.0, over - time.perf_counter()))
        self._ended = time.perf_counter()
        return canvases

    def release(self, slot: int) -> None:
        pass


def main() -> None:
    """Measure and print."""
    checkpoint, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    engine = SleepingEngine()
    given = {"canvases": CANVASES, "length": CONTEXT, **FIXED}
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as client,
        serving(checkpoint, engine),
    ):
        asked(client, [0], 1, canvases=1, length=CONTEXT)
        for slots, connections, answers in ((1, 1, 2), (4, 8, 12)):
            engine.between.clear()
            alone = 256 * slots / SECONDS[slots]
            shares = [
                rate(asked(client, list(range(answers)), connections, **given), slots, 0) / alone
                for _ in range(rounds)
            ]
            milliseconds = 1e3 * statistics.median(engine.between)
            print(
                f"{connections} connections, {slots} slots: {milliseconds:.2f} ms between two "
                f"canvases, tokens/s {statistics.median(shares):.4f} of the engine's ({shares})"
            )


if __name__ == "__main__":
    main()
