"""Tells which kernels run a recipe on a GPU, and how long a forward pass takes: least, and likely.

    least  = sum over parts of  max(bytes / bandwidth, FLOP / FLOP rate), by what the GPU's maker states
    likely = least, attention's part ATTENTION times, + OVER_FLOOR x (an H200's BF16 rate / this GPU's)

OVER_FLOOR was measured on an H100 and an H200, whose rates of products are equal: what a forward takes
above its floor agrees on both, though their bandwidths differ. For other GPUs it is an extrapolation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from numpy import interp
from rich.table import Table

from quantize.checkpoints.targets import QUANTIZABLE, Target
from quantize.runtime.gpu.gpus import GPUS, Gpu, at_hand, named, on_units, verdict
from quantize.runtime.gpu.rates import Rates
from quantize.schemes.modes import ActivationMode
from quantize.schemes.records import Scheme

CONTEXT = 1024  # positions before the canvas in an estimate
STEPS = 16  # denoising steps of a canvas; encoding it takes one more forward pass
# A pass in lockstep that streamed 72.6 GB on an H200 took 1.96 s, STREAMED times what the link's stated
# rate allows (docs/first-26b-run.md).
STREAMED = 1.7
# What a forward multiplies: BF16 weights; weights as they are stored, by rows as they are served; NVFP4
# by FP8 rows (W4A8), or by NVFP4 rows on FP4 units.
Products = Literal["bf16", "stored", "w4a8", "fp4 units"]
Range = tuple[float, float]
ATTENTION = 2.2  # measured time over the least, after 200,000 positions
MEASURED_BF16 = 989e12  # FLOP/s of the two GPUs that were measured
# Formats of experts and of dense products -> ms above the floor, for 1, 4 and 16 canvases at once:
# least and most of the rows in tests/data/measured_speeds.json (docs/runtime.md, docs/evaluation.md).
OVER_FLOOR: dict[str, tuple[Range, Range, Range]] = {
    "bf16": ((2.8, 3.4), (9.9, 10.5), (42.6, 45.9)),
    "fp8": ((2.6, 2.9), (7.6, 8.0), (29.0, 32.4)),
    "nvfp4": ((3.4, 4.8), (11.7, 12.8), (35.7, 40.3)),
    "nvfp4+fp8": ((4.1, 4.7), (10.9, 12.2), (38.0, 48.8)),
    "w4a8": ((2.8, 3.3), (9.1, 9.5), (31.3, 34.6)),
}
UNMEASURED = ((2.6, 4.8), (7.6, 12.8), (29.0, 48.8))  # other formats: all of the above together


@dataclass(frozen=True)
class CanvasWork:
    """What no shape tells: how many steps a canvas takes, and to how many experts its tokens go."""

    steps: float = STEPS
    hit: float = 1.0  # share of a layer's experts that one canvas gives a token

    def hit_by(self, canvases: int) -> float:
        """Return the share that `canvases` together give a token, as if they chose independently."""
        return 1.0 - (1.0 - self.hit) ** canvases


AS_ASSUMED = CanvasWork()


def gpu_of(name: str | None, memory: float | None = None) -> Gpu | None:
    """Return the GPU `name`, or without a name this machine's, or None; InputError as `gpus.named`."""
    if name is not None:
        return named(name, memory)
    return at_hand(torch.device("cuda")) if torch.cuda.is_available() else None


def planned_gpu(chosen: Gpu | None, memory: float | None) -> Gpu:
    """Return `chosen` (None: an H200) with `memory` bytes that may be used (None: all of it)."""
    gpu = chosen or GPUS["h200"]
    return replace(gpu, memory=memory or gpu.memory)


def kernel_schemes(targets: Sequence[Target], products: Products = "stored") -> dict[str, str]:
    """Return class -> format of the weights, by its name in the kernels."""
    schemes: dict[str, str] = dict.fromkeys(QUANTIZABLE, "bf16")
    for target in targets:
        if target.scheme is not None and target.module_class in schemes:
            schemes[target.module_class] = _kernel(target.scheme, products)
    return schemes


def _kernel(scheme: Scheme | None, products: Products) -> str:
    if scheme is None or products == "bf16":
        return "bf16"
    if products == "w4a8" and scheme.kernel == "nvfp4":
        return "fp8"
    return (
        on_units(scheme.kernel) if products == "fp4 units" and scheme.calibrated else scheme.kernel
    )


def floor(
    config: Mapping[str, Any],
    targets: Sequence[Target],
    rates: Rates,
    batch: int,
    context: int,
    products: Products = "stored",
    hit: float = 1.0,
) -> dict[str, float]:
    """Return the least seconds of a denoising step, by part of the model.

    The seconds follow from the GPU's stated `rates`. Each of `batch` canvases follows `context`
    positions. The share `hit` of a layer's experts get a token.
    """
    text, L = config["text_config"], config["canvas_length"]
    V, H, experts = text["vocab_size"], text["hidden_size"], text["num_experts"]
    rows, parts = batch * L, {"experts": 0.0, "dense": 0.0, "attention": 0.0}

    def product(target: Target, tokens: float, share: float = 1.0) -> float:
        kernel = _kernel(target.scheme, products)
        nbytes = target.bytes_before if kernel == "bf16" else target.bytes_after
        flop = tokens * target.bytes_before  # two for each BF16 weight
        return rates.seconds(share * nbytes, flop, kernel)

    for target in targets:
        if target.module_class == "experts":
            parts["experts"] += product(target, rows * text["top_k_experts"] / experts, hit)
        elif target.module_class in QUANTIZABLE:
            parts["dense"] += product(target, rows)
    for kind in text["layer_types"]:
        sliding = kind == "sliding_attention"
        seen = (min(context, text["sliding_window"] - 1) if sliding else context) + L
        dim = text["head_dim" if sliding else "global_head_dim"]
        heads = text["num_key_value_heads" if sliding else "num_global_key_value_heads"]
        cells = 4 * batch * seen * heads * dim
        flop = 4 * rows * seen * text["num_attention_heads"] * dim
        parts["attention"] += rates.seconds(cells, flop, "bf16")
    # lm_head, then the soft embedding
    vocabulary = 2 * rates.seconds(2 * V * H, 2 * rows * V * H, "bf16")
    return parts | {"vocabulary": vocabulary}


def tokens_a_second(
    config: Mapping[str, Any],
    targets: Sequence[Target],
    gpu: Gpu,
    batch: int,
    context: int,
    products: Products,
    streamed: float = 0.0,
    denoising: CanvasWork = AS_ASSUMED,
) -> tuple[float, float]:
    """Return the likely tokens/s, least and most, of `batch` canvases that are denoised at once."""
    assert gpu.rates is not None
    parts = floor(config, targets, gpu.rates, batch, context, products, denoising.hit_by(batch))
    least = sum(parts.values()) + (ATTENTION - 1) * parts["attention"]
    slower = MEASURED_BF16 / gpu.rates.bf16
    ends = (least + slower * over for over in _over_floor(_formats(targets, products), batch))
    streaming = STREAMED * streamed / gpu.link if streamed else 0.0
    tokens = batch * config["canvas_length"] / (denoising.steps + 1)
    high, low = (tokens / max(seconds, streaming) for seconds in ends)
    return low, high


def _formats(targets: Sequence[Target], products: Products) -> str:
    """Return a key of OVER_FLOOR, or another word for formats that were not measured."""
    if products in ("bf16", "w4a8"):
        return products
    schemes = kernel_schemes(targets, products)
    return "+".join(dict.fromkeys((schemes["experts"], schemes["mlp"])))


def is_measured(targets: Sequence[Target], products: Products) -> bool:
    """Return whether some GPU has run these formats at the 26B shape and was timed."""
    return _formats(targets, products) in OVER_FLOOR


def _over_floor(formats: str, batch: int) -> Range:
    """Return least and most seconds above the floor."""
    ends = zip(*OVER_FLOOR.get(formats, UNMEASURED), strict=True)
    low, high = (max(1, batch / 16) * interp(batch, (1, 4, 16), ms) / 1e3 for ms in ends)
    return float(low), float(high)


def runs(targets: Sequence[Target], gpu: Gpu, products: Products = "stored") -> bool:
    """Return whether a GPU has kernels for every scheme of a plan."""
    schemes = {"fp8"} if products == "w4a8" else set(kernel_schemes(targets).values())
    return all(verdict(scheme, gpu).kernels for scheme in schemes)


def gpu_table(
    targets: Sequence[Target], config: dict[str, Any], gpu: Gpu, mode: ActivationMode
) -> Table:
    """Return a table of the kernels that run each part of a recipe; a caption estimates their time."""
    products: Products = "fp4 units" if gpu.fp4 and mode == "per_layer" else "stored"
    memory = f", {gpu.memory / 1e9:.0f} GB" if gpu.memory else ""
    title = f"{gpu.name} ({gpu.target}{memory})"
    table = Table("part", "scheme", "kernels", "", title=title, title_justify="left")
    for kind, scheme in kernel_schemes(targets, products).items():
        support = verdict(scheme, gpu)
        table.add_row(kind, support.scheme, support.kernels or "cannot run", support.note)
    if gpu.rates is not None and runs(targets, gpu):
        ways: list[Products] = [products, "stored"]
        least = [
            1e3 * sum(floor(config, targets, gpu.rates, 1, CONTEXT, way).values()) for way in ways
        ]
        table.caption = (
            f"estimate by arithmetic, not measured: one canvas behind {CONTEXT:,} positions takes at "
            f"least {least[0]:.1f} ms a forward, from the memory bandwidth and FLOP/s that the GPU's "
            f"maker states"
        )
        if least[1] != least[0]:
            table.caption += f"; {least[1]:.1f} without FP4 units"
    return table
