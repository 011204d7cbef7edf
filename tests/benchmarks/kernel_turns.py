"""Times kernels with what would take their place, in turns, on one GPU of sm_90, in about a minute.

    python -m tests.benchmarks.kernel_turns

Parts are `logits_read_or_not`, `small` and `experts`, which run by default, and `products`.
JSON lines of microseconds: lm_head, sampler and soft embedding, reading the logits and looking at them
in lm_head's epilogue; the soft embedding by other tiles; what lies between the products by warps and
registers; experts by other tiles than the table's; their two products each by tiles of its own.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

import fused_dequant as fd
from fused_dequant.attention import attend
from fused_dequant.launch.timing import measure
from fused_dequant.layer import residual
from fused_dequant.products import routing
from fused_dequant.tune import cases, search
from fused_dequant.tune.candidates import Product
from fused_dequant.weights import Weight, tuning

STEPS, LOG2_E = 16, 1.4426950408889634
# Of experts, by scheme and rows, what differs from the table; SWAP concerns `down` alone.
ALTERNATIVES: dict[tuple[str, int], list[dict[str, int]]] = {
    ("fp8", 1024): [
        {"NARROWER": 2}, {"MORE": 32, "NARROWER": 3}, {"BM": 128, "MORE": 0, "NARROWER": 3}
    ],
    ("fp8", 256): [
        {"MORE": 16, "NARROWER": 2}, {"MORE": 32, "NARROWER": 3}, {"BM": 64, "NARROWER": 3}
    ],
    ("fp8", 2048): [{"SWAP": 0, "NARROWER": 0}],
    ("fp8", 8192): [{"SWAP": 0, "NARROWER": 0}],
    ("bf16", 1024): [{"NARROWER": 0}, {"NARROWER": 2}],
    ("bf16", 512): [{"BM": 64, "MORE": 16, "NARROWER": 0}, {"BM": 32, "MORE": 16, "NARROWER": 2}],
    ("bf16", 2048): [{"BM": 64, "MORE": 16, "NARROWER": 0, "num_stages": 4}],
}  # fmt: skip
# Of the two products of experts, by scheme and rows: what differs from the table for gate_up, and for
# down. 8 warps of 168 registers leave a processor one block, of 128 two; FP8's `down` then spills 160
# bytes, behind its loop.
WIDE = {"BN": 256, "num_warps": 8, "BK": 64, "maxnreg": 128}
ALONE = {"BN": 256, "num_warps": 8, "BK": 128, "num_stages": 4}  # one block a processor
TALL = {"BM": 128, "MORE": 0, "NARROWER": 3, "num_warps": 8, "num_stages": 3}
SMALL = {"BM": 64, "MORE": 16, "NARROWER": 4}
HALF = {"BK": 64}  # BF16's columns of as many bytes
PAIRS: dict[tuple[str, int], list[tuple[dict[str, int], dict[str, int]]]] = {
    ("fp8", 1024): [
        (WIDE | {"num_stages": 5}, {}), (WIDE | {"num_stages": 4}, {}), ({}, WIDE | {"num_stages": 5}),
        ({}, WIDE | {"maxnreg": 255, "num_stages": 5}),
        (ALONE, {}), ({}, ALONE), (ALONE | {"MORE": 32, "NARROWER": 3},) * 2,
        (ALONE | TALL | {"num_stages": 4},) * 2, (TALL,) * 2,
        ({"num_warps": 8}, {}), ({}, {"num_warps": 8}),
        ({"BK": 64, "num_stages": 5}, {}), ({"num_stages": 3}, {}),
        ({}, {"num_stages": 5}), ({}, {"num_stages": 6}),
        ({"BLOCKS_FIRST": 1}, {}), ({}, {"BLOCKS_FIRST": 1}),
        ({"BM": 64, "MORE": 0, "NARROWER": 3},) * 2,
    ],
    ("bf16", 1024): [
        (WIDE | {"BK": 32, "num_stages": 5}, {}), ({}, WIDE | {"BK": 32, "num_stages": 5}),
        (ALONE | HALF, {}), ({}, ALONE | HALF), (ALONE | HALF | {"MORE": 32, "NARROWER": 3},) * 2,
        (ALONE | TALL | HALF | {"num_stages": 4},) * 2, (TALL | HALF | {"num_stages": 4},) * 2,
        ({}, {"num_warps": 8}),
    ],
    ("fp8", 512): [
        ({"num_stages": 3}, {}), ({}, {"num_stages": 4}), (SMALL,) * 2, ({"BN": 64}, {}),
        ({}, {"BN": 64}), ({"num_warps": 8},) * 2, ({"NARROWER": 2},) * 2, ({}, {"BK": 64}),
    ],
    ("fp8", 2048): [
        ({"num_warps": 8},) * 2, (SMALL,) * 2, ({"BM": 256, "num_warps": 8, "NARROWER": 4},) * 2,
        ({}, {"BK": 64, "num_stages": 4}), ({"num_stages": 4},) * 2,
    ],
    **{("nvfp4_e4m3", M): [
        (SMALL,) * 2, ({"num_warps": 8},) * 2, ({"BM": 64, "MORE": 32, "NARROWER": 3},) * 2,
        ({"BM": 128, "MORE": 0, "NARROWER": 3, "num_warps": 8},) * 2,
        ({"BM": 256, "MORE": 0, "NARROWER": 4, "num_warps": 8, "STAGES": 3},) * 2,
        ({"BM": 64, "MORE": 0, "NARROWER": 3},) * 2, ({"STAGES": 3},) * 2,
    ] for M in (512, 2048, 8192)},
    ("fp8", 256): [
        ({"BN": 128}, {}), ({}, {"BN": 128}), ({}, {"num_stages": 4}), ({"BLOCKS_FIRST": 1}, {}),
        ({}, {"BLOCKS_FIRST": 1}), (WIDE | {"num_stages": 5}, {}), (ALONE, {}),
    ],
}  # fmt: skip
# Of the soft embedding.
TILES: tuple[dict[str, int], ...] = (
    {}, {"SPLITS": 3, "BK": 64}, {"SPLITS": 3, "BK": 64, "num_stages": 3}, {"BK": 64},
)  # fmt: skip


def small() -> None:
    """Time what lies between the products with other numbers of warps and of registers."""
    for M in (256, 1024, 2048):
        for warps, registers in ((8, None), (4, None), (16, None), (8, 80)):
            row = {"rows": M, "warps": warps, "registers": registers}
            print(json.dumps(row | timed_between(M, warps, registers)), flush=True)
        print(json.dumps({"rows": M} | timed_routing(M) | timed_heads(M)), flush=True)


def timed_routing(M: int) -> dict[str, float]:
    """Return the microseconds of the router of M rows, and of sorting their choices by chunk."""
    x, w = (torch.randn(n, cases.HIDDEN, device="cuda").bfloat16() for n in (M, cases.EXPERTS))
    choose = partial(fd.choose_experts, x, w, torch.ones_like(w[:, 0]), 8)
    found = {"router": measure([choose] * 8)}
    ids = cases.random_routing(M, cases.EXPERTS, 8, "cuda", spread=cases.SPREAD[M])[0]
    for chunk in (1024, 2048):
        with patch.object(routing, "CHUNK", chunk), patch.object(routing, "FEW", 0):
            work = partial(routing.route, ids, cases.EXPERTS, 64)
            found[f"route, chunks of {chunk}"] = measure([work] * 8)
    return found


def timed_heads(M: int) -> dict[str, float]:
    """Return the microseconds of norms, rope and cache of M rows, by kind of layer and warps."""
    found: dict[str, float] = {}
    slots = torch.arange(M // 256, dtype=torch.int32, device="cuda")
    positions = torch.arange(256, dtype=torch.int32, device="cuda").repeat(M // 256)
    for D, heads, capacity, kinds in ((256, 8, 1408, 2), (512, 2, 2048, 1)):
        qkv, angles, cache = (
            torch.randn(*shape, device="cuda").bfloat16()
            for shape in ((M, (16 + kinds * heads) * D), (2, M, D // 2),
                          (2, M // 256, capacity, heads, D))
        )  # fmt: skip
        weight = torch.ones(D, device="cuda", dtype=torch.bfloat16)
        call = partial(attend.attention_heads, qkv, weight, weight, *angles, slots, positions,
                       *cache, 16, 1e-6)  # fmt: skip
        for warps in (2, 4, 8):
            with launched(attend, "heads_kernel", num_warps=warps):
                found[f"heads of {D}, {warps} warps"] = measure([call] * 8)
    return found


def logits_read_or_not() -> None:
    """Time lm_head, sampler and soft embedding in turns, reading the logits and not."""
    table = torch.randn(262_144, 2816, device="cuda", dtype=torch.bfloat16) * 0.02
    for M in (256, 1024, 512, 2048):
        both_ways(M, table)


def both_ways(M: int, table: torch.Tensor) -> None:
    """Print the microseconds of M rows, and the share of positions at which draws differ."""
    V, H = table.shape
    schedule = torch.linspace(0.8, 0.42, STEPS, device="cuda")
    h = torch.randn(M, H, device="cuda", dtype=torch.bfloat16)
    canvas = torch.zeros(M // 256, 256, dtype=torch.int64, device="cuda")
    state = fd.CanvasState.begin(canvas, canvas[:, 0].contiguous(), 1)
    sharpness = torch.full((M,), 1 / 0.8, device="cuda")
    logits, p = (torch.empty(M, V, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    left = fd.Probabilities(p, torch.empty(M, device="cuda"))
    calls: dict[str, Callable[[], Any]] = {
        "lm_head": lambda: fd.lm_head(h, table, 30.0, logits),
        "sample": lambda: fd.sample(logits.view(*canvas.shape, V), state, schedule),
        "soft_embedding": lambda: fd.soft_embedding(logits, table, sharpness),
        "look": lambda: fd.look(h, table, 30.0, state, schedule, logits, left),
        "soft_embedding_of": lambda: fd.soft_embedding_of(left, table),
    }
    works = list(calls.values())
    for turn in range(3):
        row: dict[str, Any] = {"rows": M, "turn": turn}
        if not turn:
            row |= {name: measure([work], replays=10) for name, work in calls.items()}
        for name, way in (("reading", works[:3]), ("looking", works[3:])):
            row[name] = measure(way, replays=10) * len(way)
        print(json.dumps(row), flush=True)
    config = tuning.choose("soft_embedding", "bf16", M, H, V, table.device)
    row = {"rows": M}
    for tiles in TILES * 2:
        call = partial(fd.soft_embedding_of, left, table)
        with patch.object(tuning, "choose", lambda *_, tiles=tiles: config | tiles):
            row.setdefault(f"soft embedding {tiles}", []).append(measure([call], replays=10))
    print(json.dumps(row), flush=True)
    ours, theirs = calls["look"](), calls["sample"]()
    row = {
        "rows": M,
        "sampled that differ": (ours.sampled != theirs.sampled).float().mean().item(),
        "argmax that differ": (ours.argmax != theirs.argmax).float().mean().item(),
        "entropy error": (ours.entropy - theirs.entropy).abs().max().item(),
    }
    both = [calls[name]().double() for name in ("soft_embedding", "soft_embedding_of")]
    row["soft embedding error"] = float((both[1] - both[0]).norm() / both[0].norm())
    print(json.dumps(row), flush=True)


def compile_aside(parts: list[str]) -> None:
    """Compile on all cores what `experts` and `products` launch."""
    jobs: list[tuple[Product, dict[str, int]]] = []
    tried: dict[tuple[str, int], list[Any]] = {}
    if "experts" in parts:
        tried |= {key: [({}, {}), *zip(own, own, strict=True)] for key, own in ALTERNATIVES.items()}
    if "products" in parts:
        for key, pairs in PAIRS.items():
            tried[key] = [*tried.get(key, []), ({}, {}), *pairs]
    for (scheme, M), pairs in tried.items():
        up = Product("experts_up", scheme, M, 2 * cases.INNER, cases.HIDDEN)
        down = Product("experts_down", scheme, M, cases.HIDDEN, cases.INNER)
        for product, changes in zip((up, down), zip(*pairs, strict=True), strict=True):
            own = tuning.choose("experts", scheme, M, product.N, product.K, torch.device("cuda"))
            jobs += [(product, own | each) for each in changes]
    if jobs:
        search.compile_all(jobs)


def experts() -> None:
    """Time experts, by the table and with what ALTERNATIVES change of it, in turns."""
    choose, changes = tuning.choose, dict[str, int]()

    def chosen(verb: str, scheme: str, M: int, N: int, K: int, device: torch.device) -> Any:
        down_only = "SWAP" in changes and K != cases.INNER
        return choose(verb, scheme, M, N, K, device) | ({} if down_only else changes)

    weights: dict[str, tuple[Weight, ...]] = {}
    with patch.object(tuning, "choose", chosen):
        for (scheme, M), alternatives in ALTERNATIVES.items():
            if scheme not in weights:
                weights[scheme] = tuple(
                    cases.random_weight(scheme, cases.EXPERTS, N, K, "cuda")
                    for N, K in ((2 * cases.INNER, cases.HIDDEN), (cases.HIDDEN, cases.INNER))
                )
            x = cases.random_tokens(M, cases.HIDDEN, "cuda")
            ids, share = cases.random_routing(
                M, cases.EXPERTS, cases.TOPK, "cuda", spread=cases.SPREAD[M]
            )
            call = partial(fd.routed_experts, x, None, ids, share, *weights[scheme])
            row: dict[str, Any] = {"experts": scheme, "rows": M}
            for changes in [{}, *alternatives] * 2:
                row.setdefault(str(changes), []).append(measure([call], replays=10))
            print(json.dumps(row), flush=True)


def products() -> None:
    """Time experts with other tiles of each product, in turns; "!" marks other bits than its."""
    weights, table = dict[str, tuple[Weight, ...]](), tuning.choose
    for (scheme, M), pairs in PAIRS.items():
        if scheme not in weights:
            weights = {scheme: expert_weights(scheme)}
        call = routed(scheme, M, weights[scheme])
        expected, found = call(), dict[str, list[float | str]]()
        for up, down in [({}, {}), *pairs] * 2:

            def chosen(*product: Any, up: Any = up, down: Any = down) -> Any:
                return table(*product) | (up if product[4] == cases.HIDDEN else down)

            with patch.object(tuning, "choose", chosen):
                times = found.setdefault(f"{up} {down}", [])
                try:
                    times += [measure([call], replays=10)]
                    times += [] if torch.equal(call(), expected) else ["!"]
                except Exception as error:  # tiles that do not fit
                    times += [f"{type(error).__name__}: {error}"[:80]]
        print(json.dumps({"products": scheme, "rows": M} | found), flush=True)


def expert_weights(scheme: str) -> tuple[Weight, ...]:
    """Return random weights of the experts' two products."""
    return tuple(
        cases.random_weight(scheme, cases.EXPERTS, N, K, "cuda")
        for N, K in ((2 * cases.INNER, cases.HIDDEN), (cases.HIDDEN, cases.INNER))
    )


def routed(scheme: str, M: int, weights: tuple[Weight, ...]) -> Callable[[], torch.Tensor]:
    """Return a call of the experts on M rows as the norm before hands them out, routed unevenly."""
    x = weights[0].reads(cases.random_tokens(M, cases.HIDDEN, "cuda"))
    chosen = cases.random_routing(M, cases.EXPERTS, cases.TOPK, "cuda", spread=cases.SPREAD[M])
    return partial(fd.routed_experts, *x, *chosen, *weights)


@contextmanager
def launched(module: Any, name: str, **changed: int) -> Iterator[None]:
    """Have a kernel of a module launched with `changed` in place of its launcher's options."""
    kernel = getattr(module, name)

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *tensors, **options: kernel[grid](*tensors, **(options | changed))

    with patch.object(module, name, Launched()):
        yield


def timed_between(M: int, warps: int, registers: int | None) -> dict[str, float]:
    """Return the microseconds of the kernels for M rows of FP8 activations."""
    h, dense, o = (torch.randn(M, cases.HIDDEN, device="cuda").bfloat16() for _ in range(3))
    routed = torch.randn(M, 8, cases.HIDDEN, device="cuda").bfloat16()
    norms = tuple(torch.ones_like(h[:4]))
    calls = {
        "after_experts": (h, dense, routed, norms, (norms[0][:1],) * 2, M, "fp8"),
        "after_attention": (h, o, norms, ("fp8", "fp8")),
    }
    options = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
    found = dict[str, float]()
    for name, tensors in calls.items():
        with launched(residual, f"{name}_kernel", **options):
            found[name] = measure([partial(getattr(residual, name), *tensors)] * 8)
    return found


if __name__ == "__main__":
    parts = sys.argv[1:] or ["logits_read_or_not", "small", "experts"]
    aside = Thread(target=compile_aside, args=(parts,))
    aside.start()
    for part in (logits_read_or_not, small, aside.join, experts, products):
        if part.__name__ in (*parts, "join"):
            part()
