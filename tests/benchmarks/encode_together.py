"""Times how finished canvases are encoded where no sample may depend on its batch, on one GPU.

    python -m tests.benchmarks.encode_together [--mixes fp8,nvfp4,nvfp4+fp8,bf16]

Random weights of the 26B shape, each canvas behind its own number of tokens. Prints a JSON line for
every mix (NVFP4 with "+fp8" behind it is multiplied as W4A8) and number of canvases: ms in passes of
one; in one pass with the launches of one, and whether all keys and values have the same bits; in one
pass with its own launches, and the same. Medians of ROUNDS, each of graphs in turns.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from quantize.bench.speed import MIXES  # noqa: E402
from quantize.checkpoints.reader import known_config  # noqa: E402
from quantize.cli.options import REAL_MODEL  # noqa: E402
from quantize.runtime.engine.graphs import Replayed  # noqa: E402
from quantize.runtime.gpu.rates import seconds_of  # noqa: E402
from quantize.runtime.model.cells import Cache  # noqa: E402
from quantize.runtime.model.text_stack import FusedModel  # noqa: E402
from quantize.runtime.weights.random_weights import random_weights  # noqa: E402

COUNTS, ROUNDS, REPEATS = (1, 2, 3, 4, 6, 8), 5, 4
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.no_grad()
def measured(fused: FusedModel, given: Given) -> dict[str, Any]:
    """Encode canvases each way; return milliseconds, and whether the bits are those of each alone."""
    count, pool = len(given[0]), torch.cuda.graph_pool_handle()
    alone = Replayed(fused.encode, pool)

    def one_by_one() -> None:
        for row in range(count):
            alone(*(tensor[row : row + 1] for tensor in given))

    def cells() -> list[torch.Tensor]:
        return [layer.clone() for layer in (*fused.cache.keys, *fused.cache.values)]

    fused.encodes_alike = True
    one_by_one()
    wanted, found, works = cells(), dict[str, Any](), {"one by one": one_by_one}
    for name, alike in (("as one", True), ("as all", False)):
        fused.encodes_alike, replayed = alike, Replayed(fused.encode, pool)
        replayed(*given)  # captures
        works[name] = lambda replayed=replayed: replayed(*given)
        works[name]()
        same = all(torch.equal(own, other) for own, other in zip(cells(), wanted, strict=True))
        found[f"{name}: same bits"] = same
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(seconds_of(work, REPEATS) * 1e3)
    return {name: round(statistics.median(each), 3) for name, each in times.items()} | found


@click.command(help=__doc__)
@click.option("--mixes", default="fp8,nvfp4,nvfp4+fp8,bf16", show_default=True)
def main(mixes: str) -> None:
    """Measure every mix at every number of canvases."""
    config = known_config(REAL_MODEL)
    assert config is not None
    for mix in mixes.split(","):
        named, _, activations = mix.partition("+")
        schemes = dict(zip(("experts", "attention", "mlp"), MIXES[named], strict=True))
        weights = random_weights(config, schemes, "cuda", in_fp8=activations == "fp8")
        length, device = weights.config.canvas_length, torch.device("cuda")
        cache = Cache.allocate(weights.config, max(COUNTS), 2048, 1152, device)
        fused, generator = FusedModel(weights, cache), torch.Generator().manual_seed(1)
        shape = max(COUNTS), 4 * length
        prompts = torch.randint(1000, 200_000, shape, generator=generator).to(device)
        slots = torch.arange(max(COUNTS), dtype=torch.int32, device=device)
        for row in range(max(COUNTS)):
            fused.encode(prompts[row : row + 1], slots[row : row + 1], 0 * slots[:1])
        starts = 1024 - 37 * slots
        for count in COUNTS:
            canvas = prompts[:count, :length].flip(1).contiguous()
            line = {"device": torch.cuda.get_device_name(), "mix": mix, "canvases": count}
            print(json.dumps(line | measured(fused, (canvas, slots[:count], starts[:count]))))
        del fused, cache, weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
