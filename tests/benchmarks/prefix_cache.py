"""Time to the first canvas behind a long prefix that several prompts share, cold and warm.

    python -m tests.benchmarks.prefix_cache CHECKPOINT | --random-weights MIX
        [--tokens 8000] [--rounds 5] [--device cuda]

Each round makes up another prefix and asks it twice, with questions of 50 tokens of their own: the
first one is encoded whole, the second finds the whole blocks of the prefix. A canvas takes 1 step, so
that the encoder is measured, and 16, as a user would wait. A round before the others is not counted.
Tokens are compared with those of an engine that keeps nothing. A mix is one of `quantize bench`: random
weights of the 26B shape.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from quantize.bench.adaptive import NEVER
from quantize.bench.speed import MIXES
from quantize.checkpoints.reader import known_config
from quantize.cli.options import REAL_MODEL
from quantize.runtime import Sampler, open
from quantize.runtime.engine.interface import Engine
from quantize.runtime.opening import RandomModel

QUESTION, STEPS = 50, (1, 16)


def first_canvas(engine: Engine, prompt: list[int], seed: int, steps: int) -> tuple[float, Any]:
    """Seconds until the first canvas behind a prompt, and its tokens."""
    sampler = Sampler(max_denoising_steps=steps, confidence_threshold=NEVER)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    engine.admit(0, prompt, seed, sampler)
    (canvas,) = engine.denoise([0])
    seconds = time.perf_counter() - began
    engine.release(0)
    assert canvas is not None
    return seconds, canvas.tokens


def model_of(checkpoint: Path | None, mix: str) -> Path | RandomModel:
    """Return the folder, or random weights of a mix."""
    if checkpoint is not None:
        return checkpoint
    config = known_config(REAL_MODEL)
    assert config is not None
    return RandomModel(config, dict(zip(("experts", "attention", "mlp"), MIXES[mix], strict=True)))


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--random-weights", choices=MIXES, default="nvfp4_fp8")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mib", type=int, default=8192)
    asked = parser.parse_args()
    model = model_of(asked.checkpoint, asked.random_weights)
    made = {"device": asked.device, "capacity": 1, "max_context": asked.tokens + QUESTION + 1024}
    keeping = open(model, prefix_bytes=asked.mib << 20, **made)
    assert keeping.prefixes is not None
    times: dict[tuple[int, str], list[float]] = {}
    kept: list[tuple[list[int], int, int, list[int]]] = []
    noise = torch.Generator().manual_seed(0)
    for round_ in range(asked.rounds + 1):
        for steps in STEPS:
            shared = torch.randint(110, 1000, (asked.tokens,), generator=noise).tolist()
            for name in ("cold", "warm"):
                prompt = shared + torch.randint(110, 1000, (QUESTION,), generator=noise).tolist()
                seconds, tokens = first_canvas(keeping, prompt, round_, steps)
                if round_ == 0:
                    continue  # it compiles, and captures graphs
                times.setdefault((steps, name), []).append(seconds)
                kept.append((prompt, round_, steps, tokens))
    for (steps, name), found in times.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        print(
            f"{name}, {steps} steps: {middle * 1e3:.1f} ms to the first canvas "
            f"({low * 1e3:.1f} to {high * 1e3:.1f}, {len(found)} rounds)"
        )
    cache = keeping.prefixes
    print(f"{cache.reused} of {cache.asked} prompt tokens reused, {cache.nbytes / 1e6:.0f} MB kept")
    plain = open(model, beside=keeping, **made)
    same = [first_canvas(plain, *of)[1] == tokens for *of, tokens in kept]
    print(f"the same tokens without: {sum(same)} of {len(same)}", flush=True)


if __name__ == "__main__":
    main()
