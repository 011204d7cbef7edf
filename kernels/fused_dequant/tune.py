"""Make this device's tuning table: `python -m fused_dequant.tune [--only REGEX]`.

For each product of the real model and each bucket of tokens: compile every candidate (in parallel,
against tensors without storage), drop those that do not fit the device, check that each gives the
result of the first, time it as a CUDA graph over buffers larger than the L2, keep the fastest. The
two products of the experts share one block of rows, so their pair is chosen together. About two
minutes on an H200, all products.

Two things keep a bad candidate out of the table. Candidates whose accumulators take more than
`MAX_ACCUMULATORS` registers a thread are never made. And products are timed in a child process: a
candidate that breaks the CUDA context of that process is named, and a new process times the others.
"""

# M, N, K and tile sizes are the field's names, not constants.

import argparse
import itertools
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from fused_dequant import cases, quantize_rows, routing, tuning, vocabulary
from fused_dequant.formats import EIGHT_BIT
from fused_dequant.reference import relative_error
from fused_dequant.timing import measure
from fused_dequant.tuning import Config
from fused_dequant.weights import Weight, is_hopper

TOKENS = (64, 256, 1024)
BUFFER_BYTES = 200 * 2**20  # several times the L2
# A thread has 255 registers, and decoded weights and addresses lie beside the accumulators. A sweep
# that allowed 256 accumulators ended in "illegal instruction"; none within this limit has.
MAX_ACCUMULATORS = 128
SHARED = 226 * 2**10  # bytes of shared memory a Hopper block may fill with tiles


@dataclass(frozen=True)
class Product:
    """One matrix product to tune: verb is linear, experts_up, experts_down, lm_head or
    soft_embedding.
    """

    verb: str
    scheme: str
    M: int
    N: int
    K: int

    @property
    def key(self) -> str:
        """Its key in the table."""
        return f"{self.verb.split('_up')[0].split('_down')[0]}/{self.scheme}/{self.N}x{self.K}"


def products() -> Iterator[Product]:
    """Everything the table holds."""
    for scheme, M in itertools.product(("bf16", "fp8", "int8", "nvfp4_fragments"), TOKENS):
        yield Product("experts_up", scheme, M, 2 * cases.INNER, cases.HIDDEN)
        yield Product("experts_down", scheme, M, cases.HIDDEN, cases.INNER)
    for scheme, M, (N, K) in itertools.product(
        ("fp8", "nvfp4_fragments"), TOKENS[1:], (*cases.LINEAR_SHAPES, (9216, 2816))
    ):
        yield Product("linear", scheme, M, N, K)
    for M in TOKENS[1:]:
        yield Product("lm_head", "bf16", M, cases.VOCABULARY, cases.HIDDEN)
        yield Product("soft_embedding", "bf16", M, cases.HIDDEN, cases.VOCABULARY)
    for scheme, M, (N, K) in itertools.product(("int8", "bf16"), TOKENS[1:], cases.LINEAR_SHAPES):
        yield Product("linear", scheme, M, N, K)


def _config(names: str, *values: int) -> Config:
    return dict(zip(names.split(), values, strict=True))


def candidates(product: Product) -> Iterator[Config]:
    """Configurations worth timing whose accumulators fit the registers."""
    if product.verb == "lm_head" and _hopper_or_none():  # a kernel whose tiles are fixed
        yield {"STAGES": 3}
        yield {"STAGES": 4}
    for config in _sweep(product):
        accumulators = tuning.block_rows(config) * config["BN"] // (32 * config["num_warps"])
        if accumulators <= MAX_ACCUMULATORS:
            yield config


def _hopper_or_none() -> bool:
    """Whether no GPU is here that lacks Hopper's instructions."""
    return not torch.cuda.is_available() or is_hopper(torch.device("cuda"))


def _sweep(product: Product) -> Iterator[Config]:
    """What the kernels' structure and earlier sweeps leave open."""
    if product.verb == "soft_embedding":
        for splits, (BM, BN, warps), BK, stages in itertools.product(
            (3, 6, 12),
            ((128, 256, 8), (128, 128, 8), (256, 128, 8), (64, 256, 4)),
            (32, 64),
            (3, 4),
        ):
            yield _config("SPLITS BM BN BK num_warps num_stages", splits, BM, BN, BK, warps, stages)
    elif product.verb == "lm_head":
        for (BM, BN, warps), BK, stages in itertools.product(
            ((128, 256, 8), (256, 128, 8), (128, 128, 8)), (64, 128), (3, 4)
        ):
            yield _config("BM BN BK num_warps num_stages", BM, BN, BK, warps, stages)
    elif product.scheme == "nvfp4_fragments":
        for rows, (BN, warps), (BK, stages), parts in itertools.product(
            _hopper_rows(product), *_hopper_shapes(product)
        ):
            stage = 2 * tuning.block_rows(rows) * BK + BN * BK * 9 // 16
            fits = parts * stages * stage <= SHARED and (parts == 1 or stages * BK >= 2 * BN)
            if product.N % BN == 0 and fits:
                yield rows | _config("BN BK PARTS STAGES num_warps", BN, BK, parts, stages, warps)
    elif product.verb.startswith("experts"):
        tiles = ((64, 4), (128, 4), (128, 8), (256, 8))
        depths = (64, 128) if product.M == 1024 else (64, 128, 256)
        for rows, (BN, warps), BK, stages in itertools.product(
            _expert_rows(product.M), tiles, depths, (2, 3, 4)
        ):
            yield rows | _config("BN BK SWAP num_warps num_stages", BN, BK, 1, warps, stages)
    else:
        tiles = (
            (64, 32, 4),
            (64, 64, 4),
            (64, 128, 4),
            (128, 64, 4),
            (128, 128, 8),
            (128, 256, 8),
            (256, 128, 8),
        )
        for (BM, BN, warps), swap, BK, stages in itertools.product(
            tiles, (0, 1), (64, 128), (3, 4, 5)
        ):
            if stages < 5 or BM * BN <= 64 * 128:
                names = "BM MORE BN BK SWAP num_warps num_stages"
                yield _config(names, BM, 0, BN, BK, swap, warps, stages)


def _hopper_rows(product: Product) -> list[Config]:
    if product.verb == "linear":
        sizes = ((64, 0), (64, 32), (128, 0)) if product.M < 1024 else ((128, 0), (256, 0))
        return [{"BM": BM, "MORE": MORE} for BM, MORE in sizes]
    return _expert_rows(product.M)


def _hopper_shapes(
    product: Product,
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], tuple[int, ...]]:
    """(BN, warps), (BK, stages) and parts of K."""
    if product.verb == "linear":
        steps = ((64, 5), (64, 6), (128, 3), (128, 4), (128, 6), (256, 3))
        return ((64, 4), (128, 8)), steps, (1, 2)
    tiles = ((64, 4), (128, 4), (128, 8), (256, 8))
    return tiles, tuple(itertools.product((64, 128), (3, 4))), (1,)


def _expert_rows(M: int) -> list[Config]:
    """Blocks around the mean number of tokens of an expert, M * 8 / 128, and the sizes below."""
    sizes = {
        64: ((16, 0, 0),),
        256: ((16, 0, 0), (32, 0, 0), (32, 16, 2), (32, 32, 3)),
        1024: ((64, 0, 0), (64, 16, 0), (64, 16, 2), (64, 16, 4), (64, 32, 3)),
    }[M]
    return [_config("BM MORE NARROWER", *size) for size in sizes]


@dataclass(frozen=True)
class Operands:
    """What a product multiplies. On "meta" the tensors have no storage: enough to compile for."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: Weight
    row_weight: torch.Tensor | None
    blocks: dict[int, routing.Routing]  # by rows of a block; empty for a dense product


def operands(product: Product, device: str) -> Operands:
    """Random operands, or blank ones on "meta"."""
    grouped, down = product.verb.startswith("experts"), product.verb == "experts_down"
    rows = product.M * (cases.TOPK if down else 1)
    # The soft embedding takes logits; its weight lies as the embedding does.
    soft = product.verb == "soft_embedding"
    N, K = (product.K, product.N) if soft else (product.N, product.K)
    experts = cases.EXPERTS if grouped else 1
    scheme = product.scheme
    dtype = EIGHT_BIT.get(scheme, torch.bfloat16)
    row_weight = torch.ones(rows, device=device) if down else None
    if device == "meta":
        x = torch.empty(rows, product.K, dtype=dtype, device=device)
        x_scale = torch.empty(rows, device=device) if scheme in EIGHT_BIT else None
        weight = cases.blank_weight(product.scheme, experts, N, K, device)
        return Operands(x, x_scale, weight, row_weight, _blocks(product, device) if grouped else {})
    x, x_scale = cases.random_tokens(rows, product.K, device), None
    if scheme in EIGHT_BIT:
        x, x_scale = quantize_rows(x, scheme)
    weight = cases.random_weight(product.scheme.split("_")[0], experts, N, K, device)
    return Operands(x, x_scale, weight, row_weight, _blocks(product, device) if grouped else {})


def _blocks(product: Product, device: str) -> dict[int, routing.Routing]:
    """The batch routed once for each block size: timing a product leaves the routing out."""
    sizes = {tuning.block_rows(config) for config in candidates(product)}
    if device != "meta":
        ids, _ = cases.random_routing(
            product.M, cases.EXPERTS, cases.TOPK, device, spread=cases.SPREAD[product.M]
        )
        return {size: routing.route(ids, cases.EXPERTS, size) for size in sizes}
    blank = torch.empty(8192, dtype=torch.int32, device=device)
    return {size: routing.Routing(blank, blank, blank, blank, size, cases.TOPK) for size in sizes}


def call(product: Product, o: Operands, config: Config) -> torch.Tensor:
    """Launch one product as `operations` does, with a given configuration."""
    if product.verb == "soft_embedding":
        sharpness = torch.full((len(o.x),), 1.5, device=o.x.device)
        return vocabulary.soft_embedding(o.x, o.weight.data[0], sharpness, config)
    if product.verb == "lm_head":
        return vocabulary.lm_head(o.x, o.weight.data[0], 30.0, config=config)
    blocks = o.blocks[tuning.block_rows(config)] if o.blocks else None
    return o.weight.multiply(o.x, o.x_scale, config, blocks, o.row_weight)


def _compile(job: tuple[Product, Config]) -> str | None:
    """Compile a candidate in a worker process; returns what went wrong."""
    triton.runtime.jit.KernelInterface.__getitem__ = lambda self, grid: partial(
        self.run, grid=grid, warmup=True
    )
    try:
        call(job[0], operands(job[0], "meta"), job[1])
    except Exception as error:
        return f"{job}: {type(error).__name__}: {error}"
    return None


def distinct(jobs: list[tuple[Product, Config]]) -> list[tuple[Product, Config]]:
    """One job for each kernel: products of other shapes share theirs, unless K leaves a remainder."""
    keys = {(p.verb, p.scheme, p.K % c.get("BK", 1), str(c)): (p, c) for p, c in jobs}
    return list(keys.values())


def compile_all(jobs: list[tuple[Product, Config]]) -> None:
    """Fill Triton's cache, one worker a core."""
    kernels = distinct(jobs)
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool() as pool:
        failures = [f for f in pool.imap_unordered(_compile, kernels, chunksize=4) if f]
    print(f"compiled {len(kernels)} candidates in {time.monotonic() - started:.0f} s")
    for failure in failures:
        print("  did not compile:", failure[:300])


class BrokenCandidateError(Exception):
    """A candidate ended in a CUDA error, after which its process can run nothing more."""

    def __init__(self, config: Config, reason: str) -> None:
        super().__init__(config, reason)
        self.config = config
        self.reason = reason


def time_candidates(product: Product, excluded: list[Config]) -> list[tuple[float, Config]]:
    """Microseconds of each candidate that fits and computes what the first one does, fastest first."""
    first = operands(product, "cuda")
    copies = max(1, min(16, BUFFER_BYTES // first.weight.bytes))
    sets = [first, *(replace(first, weight=first.weight.clone()) for _ in range(copies - 1))]
    expected, timed = None, []
    for config in candidates(product):
        if config in excluded:
            continue
        try:
            result = call(product, first, config)
            expected = result if expected is None else expected
            error = relative_error(result, expected)
            calls = [partial(call, product, operand, config) for operand in sets]
            microseconds = measure(calls, replays=8)
        except triton.runtime.errors.OutOfResources:
            continue
        except RuntimeError as failure:  # what torch makes of a CUDA error
            raise BrokenCandidateError(config, str(failure).splitlines()[0]) from None
        if not error < 1e-2:
            raise ValueError(f"{product} {config}: differs from the first candidate by {error:.1e}")
        timed.append((microseconds, config))
    return sorted(timed, key=lambda pair: pair[0])


Work = Callable[[Product, list[Config]], list[tuple[float, Config]]]


class Timer:
    """A child process that times products, replaced when a candidate breaks it."""

    def __init__(self, work: Work = time_candidates) -> None:
        self._work = work
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._child = ProcessPoolExecutor(1, mp_context=context)

    def __call__(self, product: Product) -> list[tuple[float, Config]]:
        """`time_candidates`, without the candidates that broke a process."""
        excluded: list[Config] = []
        while True:
            try:
                return self._child.submit(self._work, product, excluded).result()
            except BrokenCandidateError as broken:
                print(f"  left out, {broken.reason}: {product} {broken.config}", flush=True)
                excluded.append(broken.config)
                self._child.shutdown()
                self._start()


def choose_pair(
    up: list[tuple[float, Config]], down: list[tuple[float, Config]]
) -> list[tuple[float, Config]]:
    """Fastest up and down among those that share their rows."""
    pairs = [(u, d) for u in up for d in down if tuning.block_rows(u[1]) == tuning.block_rows(d[1])]
    return list(min(pairs, key=lambda pair: pair[0][0] + pair[1][0]))


def main() -> None:
    """Tune, print a line a product, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="regex over products such as linear/fp8/4096x2816 M=256"
    )
    pattern = re.compile(parser.parse_args().only)
    chosen = [p for p in products() if pattern.search(f"{p.key} M={p.M}")]
    compile_all([(p, c) for p in chosen for c in candidates(p)])
    name = torch.cuda.get_device_name()
    path = tuning.table_path(name)
    path.parent.mkdir(exist_ok=True)
    kernels = json.loads(path.read_text())["kernels"] if path.exists() else {}
    timer = Timer()
    pending: tuple[Product, list[tuple[float, Config]]] | None = None
    for product in chosen:
        timed = timer(product)
        best = [(product, timed[0])]
        if product.verb == "experts_up":
            pending = product, timed
            continue
        if product.verb == "experts_down":
            if pending is None:
                raise ValueError("--only must select both products of the experts or neither")
            pair = choose_pair(pending[1], timed)
            best = list(zip((pending[0], product), pair, strict=True))
        for owner, (microseconds, config) in best:
            kernels.setdefault(owner.key, {})[str(owner.M)] = config
            print(f"{owner.key} M={owner.M}: {microseconds:.1f} us {config}", flush=True)
        table = {
            "device": name,
            "triton": triton.__version__,
            "kernels": dict(sorted(kernels.items())),
        }
        path.write_text(json.dumps(table, indent=1) + "\n")  # after each product: a stop loses one
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
