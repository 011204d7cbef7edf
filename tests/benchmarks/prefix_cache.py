"""Time to the first canvas behind a long prefix that several prompts share, cold and warm.

    python tests/benchmarks/prefix_cache.py CHECKPOINT [--tokens 8000] [--rounds 5] [--device cuda]

Each round makes up another prefix and asks it twice, with questions of 50 tokens of its own: the first
one is encoded whole, the second finds the whole blocks of the prefix. A canvas takes one step, so that
the encoder is measured. Both answers are compared with those of an engine that keeps nothing.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from quantize.runtime import Sampler, open
from quantize.runtime.engine import Engine

SAMPLER = Sampler(max_denoising_steps=1)
QUESTION = 50


def first_canvas(engine: Engine, prompt: list[int], seed: int) -> tuple[float, list[int]]:
    """Seconds until the first canvas behind a prompt, and its tokens."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    engine.admit(0, prompt, seed, SAMPLER)
    (canvas,) = engine.denoise([0])
    seconds = time.perf_counter() - began
    engine.release(0)
    assert canvas is not None
    return seconds, canvas.tokens


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mib", type=int, default=8192)
    asked = parser.parse_args()
    made = {"device": asked.device, "capacity": 1}
    context = asked.tokens + QUESTION + 1024
    keeping = open(asked.checkpoint, max_context=context, prefix_bytes=asked.mib << 20, **made)
    keeping.warm_up(SAMPLER)
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    kept: list[tuple[list[int], int, list[int]]] = []
    noise = torch.Generator().manual_seed(0)
    for seed in range(asked.rounds):
        shared = torch.randint(110, 1000, (asked.tokens,), generator=noise).tolist()
        for name in times:
            prompt = shared + torch.randint(110, 1000, (QUESTION,), generator=noise).tolist()
            seconds, tokens = first_canvas(keeping, prompt, seed)
            times[name].append(seconds)
            kept.append((prompt, seed, tokens))
    assert keeping.prefixes is not None
    for name, found in times.items():
        print(f"{name}: {statistics.median(found) * 1e3:.1f} ms to the first canvas")
    print(f"{keeping.prefixes.reused} of {keeping.prefixes.asked} prompt tokens reused")
    print(f"{keeping.prefixes.nbytes / 1e6:.0f} MB kept")
    plain = open(asked.checkpoint, max_context=context, beside=keeping, **made)
    same = [first_canvas(plain, prompt, seed)[1] == tokens for prompt, seed, tokens in kept]
    print(f"the same tokens without: {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main()
