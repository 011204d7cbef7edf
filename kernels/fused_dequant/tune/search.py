"""Finds this GPU's fastest launch configurations, which `quantize tune` writes into a table.

It tunes each product of the real model that the GPU can run, at several numbers of tokens. Candidates
are compiled in parallel, with operands that have no storage. Candidates that do not fit the device are
dropped. Each candidate must give the first one's result. It is timed as a CUDA graph over buffers
larger than the L2, and the fastest is kept. Both products of the experts read the same blocks of rows,
so they are tuned as a pair. The untuned default is a candidate too, to show what tuning gains. On an
H200, tuning for 64, 256 and 1,024 tokens takes about two minutes; more tokens were not timed.

No candidate has more than `candidates.MAX_ACCUMULATORS` accumulator registers per thread. Products
are timed in a child process. If a candidate breaks its CUDA context, a warning names the candidate,
and a new process times the others.
"""

import itertools
import json
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton

from fused_dequant.inputs import quantize
from fused_dequant.launch.targets import Capability, capability, name_of
from fused_dequant.launch.timing import measure
from fused_dequant.products import routing
from fused_dequant.reference import relative_error
from fused_dequant.tune import cases
from fused_dequant.tune.candidates import Product, candidates
from fused_dequant.vocabulary import dense
from fused_dequant.weights import tuning
from fused_dequant.weights.tuning import Config, Table
from fused_dequant.weights.weight import Weight

BUFFER_BYTES = 200 * 2**20  # several times the L2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Operands:
    """A product's operands; on "meta" they have no storage, and serve only to compile a launch."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: Weight
    row_weight: torch.Tensor | None
    blocks: dict[int, routing.Routing]  # by number of rows per block; empty for a dense product


def operands(product: Product, device: str) -> Operands:
    """Return a product's operands: random numbers, or tensors without storage on "meta"."""
    grouped, down = product.verb.startswith("experts"), product.verb == "experts_down"
    rows = product.M * (cases.TOPK if down else 1)
    # The soft embedding takes logits; its weight has the embedding's layout.
    soft = product.verb == "soft_embedding"
    N, K = (product.K, product.N) if soft else (product.N, product.K)
    experts = cases.EXPERTS if grouped else 1
    scheme = product.scheme
    if device == "meta":
        x, x_scale = quantize.room(rows, product.K, scheme, torch.device(device))
        weight = cases.blank_weight(scheme, experts, N, K, device)
    else:
        x, x_scale = cases.random_tokens(rows, product.K, device), None
        weight = cases.random_weight(scheme.removesuffix("_fragments"), experts, N, K, device)
        if not soft:
            x, x_scale = weight.reads(x)
    row_weight = torch.ones(rows, device=device) if down else None
    return Operands(x, x_scale, weight, row_weight, _blocks(product, device) if grouped else {})


def _blocks(product: Product, device: str) -> dict[int, routing.Routing]:
    """Route the batch once for each block size, so that a product is timed without routing."""
    configs = candidates(product, capability(torch.device(device)))
    sizes = {tuning.block_rows(config) for config in configs}
    if device != "meta":
        ids, _ = cases.random_routing(
            product.M, cases.EXPERTS, cases.TOPK, device, spread=cases.SPREAD[product.M]
        )
        return {size: routing.route(ids, cases.EXPERTS, size) for size in sizes}
    blank = torch.empty(8192, dtype=torch.int32, device=device)
    return {size: routing.Routing(blank, blank, blank, blank, size, cases.TOPK) for size in sizes}


def call(product: Product, o: Operands, config: Config) -> torch.Tensor:
    """Launch one product, as `operations` would, with the configuration `config`; return its result."""
    if product.verb == "soft_embedding":
        sharpness = torch.full((len(o.x),), 1.5, device=o.x.device)
        return dense.soft_embedding(o.x, o.weight.data[0], sharpness, config=config)
    if product.verb == "lm_head":
        return dense.lm_head(o.x, o.weight.data[0], 30.0, config=config)
    blocks = o.blocks[tuning.block_rows(config)] if o.blocks else None
    return o.weight.multiply(o.x, o.x_scale, config, blocks, o.row_weight)


def _compile(job: tuple[Product, Config]) -> str | None:
    triton.runtime.jit.KernelInterface.__getitem__ = lambda self, grid: partial(
        self.run, grid=grid, warmup=True
    )
    try:
        call(job[0], operands(job[0], "meta"), job[1])
    except Exception as error:
        return f"{job}: {type(error).__name__}: {error}"
    return None


def compile_all(jobs: list[tuple[Product, Config]]) -> None:
    """Compile (product, configuration) jobs into Triton's cache, one process per core; log failures."""
    # One job per kernel: all shapes share a kernel, except those whose K leaves a remainder.
    kernels = {(p.verb, p.scheme, p.K % c.get("BK", 1), str(c)): (p, c) for p, c in jobs}
    with multiprocessing.get_context("spawn").Pool() as pool:
        for failure in pool.imap_unordered(_compile, kernels.values(), chunksize=4):
            if failure:
                _log.info("did not compile: %s", failure[:300])


class BrokenCandidateError(Exception):
    """Configuration args[0] caused CUDA error args[1], so this process can run no more kernels."""


def time_candidates(product: Product, excluded: list[Config]) -> list[tuple[float, Config]]:
    """Return pairs (us, config) of candidates that fit the GPU and are not `excluded`, fastest first.

    Raise ValueError if results differ, BrokenCandidateError if a candidate causes a CUDA error.
    """
    first = operands(product, "cuda")
    copies = max(1, min(16, BUFFER_BYTES // first.weight.bytes))
    sets = [first, *(replace(first, weight=first.weight.clone()) for _ in range(copies - 1))]
    expected, timed = None, []
    for config in candidates(product, capability(torch.device("cuda"))):
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
        except RuntimeError as failure:  # torch's form of a CUDA error
            raise BrokenCandidateError(config, str(failure).splitlines()[0]) from None
        if not error < 1e-2:
            raise ValueError(f"{product} {config}: differs from the first candidate by {error:.1e}")
        timed.append((microseconds, config))
    return sorted(timed, key=lambda pair: pair[0])


Timed = list[tuple[float, Config]]
Work = Callable[[Product, list[Config]], Timed]


class Timer:
    """Times products in a child process, which is replaced when a candidate breaks it."""

    def __init__(self, work: Work = time_candidates) -> None:
        self._work, self._child = work, _child()

    def __call__(self, product: Product) -> Timed:
        """Return what `time_candidates` returns, without candidates that broke a process."""
        excluded: list[Config] = []
        while True:
            try:
                return self._child.submit(self._work, product, excluded).result()
            except BrokenCandidateError as broken:
                config, reason = broken.args
                _log.warning("left out, %s: %s %s", reason, product, config)
                excluded.append(config)
                self._child.shutdown()
                self._child = _child()


def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@dataclass(frozen=True)
class TunedProduct:
    """A product's chosen configuration, and the times of a launch with the new and the old one."""

    product: Product
    config: Config
    microseconds: float  # time of a launch with `config`
    before: float | None  # its time with the configuration used before; None if not timed


def tuned(
    chosen: Sequence[Product],
    now: Callable[[Product], Config],
    timer: Callable[[Product], Timed] | None = None,
) -> Iterator[TunedProduct]:
    """Time the candidates of the `chosen` products, and yield the fastest for each.

    Each experts_up must be followed by its experts_down. They are tuned as a pair, with equal rows
    per block. `now` returns a product's configuration before tuning. `timer` returns a product's timed
    candidates; if None, a `Timer` on this GPU does.
    """
    timer = timer or Timer()
    waiting: Iterator[Product] = iter(chosen)
    for product in waiting:
        both = [product, next(waiting)] if product.verb == "experts_up" else [product]
        timed = [timer(half) for half in both]
        ways = itertools.product(*timed)
        if len(both) == 2:
            rows = tuning.block_rows
            ways = (pair for pair in ways if rows(pair[0][1]) == rows(pair[1][1]))
        best = min(ways, key=lambda way: sum(microseconds for microseconds, _ in way))
        for tuned_product, results, (microseconds, config) in zip(both, timed, best, strict=True):
            before = next((us for us, tried in results if tried == now(tuned_product)), None)
            yield TunedProduct(tuned_product, config, microseconds, before)


def write_table(
    path: Path, device_name: str, target: Capability, choices: Iterable[TunedProduct]
) -> None:
    """Add `choices` to the table at `path`, or create it; the file is replaced atomically."""
    kernels: Table = json.loads(path.read_text())["kernels"] if path.exists() else {}
    for choice in choices:
        kernels.setdefault(choice.product.key, {})[str(choice.product.M)] = choice.config
    table = {
        "device": device_name,
        "capability": name_of(target),
        "triton": triton.__version__,
        "kernels": dict(sorted(kernels.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(table, indent=1) + "\n")
    aside.replace(path)
