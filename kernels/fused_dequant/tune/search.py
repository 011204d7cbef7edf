"""Finds this GPU's fastest launch configurations, which `quantize tune` writes into a table.

It tunes each product of the real model that the GPU can run, at several numbers of tokens. Candidates
are compiled in parallel, with operands that have no storage. Candidates that do not fit the device are
dropped, and so are those that err more than the self-test allows. Each is timed as a CUDA graph over
buffers larger than the L2, and the fastest is kept. Both products of the experts read the same blocks
of rows, so they are tuned as a pair. The untuned default is a candidate too, to show what tuning gains.
On an H200, tuning for 64, 256 and 1,024 tokens took about two minutes when candidates were not yet
compared with the exact result; more tokens were not timed.

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

from fused_dequant.launch.targets import Capability, capability, name_of
from fused_dequant.launch.timing import measure
from fused_dequant.reference import relative_error
from fused_dequant.tune.candidates import Product, candidates
from fused_dequant.tune.launches import call, exact, operands
from fused_dequant.tune.selftest import LARGEST_ERROR, one_line
from fused_dequant.weights import tuning
from fused_dequant.weights.tuning import Config, Table

BUFFER_BYTES = 200 * 2**20  # several times the L2
_log = logging.getLogger(__name__)


def _compile(job: tuple[Product, Config]) -> str | None:
    triton.runtime.jit.KernelInterface.__getitem__ = lambda self, grid: partial(
        self.run, grid=grid, warmup=True
    )
    try:
        call(job[0], operands(job[0], "meta", [job[1]]), job[1])
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


def time_candidates(
    product: Product, excluded: list[Config], device: str = "cuda"
) -> list[tuple[float, Config]]:
    """Return pairs (us, config) of candidates that fit the GPU and are not `excluded`, fastest first.

    Candidates that err more than the self-test allows are left out, with a warning. Raise ValueError
    if none is left, and BrokenCandidateError if a candidate causes a CUDA error.
    """
    configs = [
        c for c in candidates(product, capability(torch.device(device))) if c not in excluded
    ]
    first = operands(product, device, configs)
    copies = max(1, min(16, BUFFER_BYTES // first.weight.bytes))
    sets = [first, *(replace(first, weight=first.weight.clone()) for _ in range(copies - 1))]
    expected, timed, wrong = exact(product, first), [], ""
    for config in configs:
        try:
            error = relative_error(call(product, first, config), expected)
            if not error <= LARGEST_ERROR:  # NaN is no smaller
                wrong = f"a relative error of {error:.1e}: {product} {config}"
                _log.warning("left out, %s", wrong)
                continue
            calls = [partial(call, product, operand, config) for operand in sets]
            microseconds = measure(calls, replays=8)
        except triton.TritonError as failure:  # it does not compile, or takes too much memory
            wrong = f"{one_line(failure)}: {product} {config}"
            continue
        except RuntimeError as failure:  # torch's form of a CUDA error
            raise BrokenCandidateError(config, str(failure).splitlines()[0]) from None
        timed.append((microseconds, config))
    if not timed:
        raise ValueError(f"no configuration runs and is right, the last: {wrong or product}")
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
