"""What GPTQ of one layer of the 26B model takes on this GPU, part by part.

    python -m tests.benchmarks.gptq [--torch-experts 2] [--llm-compressor]

Random weights, Hessians of random correlated activations, NVFP4. For every unit of a layer it prints
the time of a layer, and in brackets what the host took to launch it: Hessians of eight passes of 2,048
tokens under some launch configurations of `gram`; the mean, factors, GPTQ, coordinate descent and
losses of as many experts as `experts_at_once` says, projected to the layer; microseconds of each
kernel; and the same parts in torch for a few experts. With
--llm-compressor, also its batched GPTQ on the experts' same weights, Hessians, damping and global
scales, all experts at once or as many as fit, and the loss of both. The first call of a kernel compiles
it.
"""

import time
from collections.abc import Callable
from unittest.mock import patch

import click
import torch
from torch import Tensor

from quantize.schemes import gptq, hessians
from quantize.schemes.hessians import Hessians
from quantize.schemes.records import SCHEMES
from quantize.schemes.rounding import E2M1_GROUPS, block_scale, global_scale
from quantize.stages.round_weights.round_weights import experts_at_once
from tests.benchmarks.transfer import seconds

# experts, rows, inputs, choices of a token that are rows of the input, and those that are not
UNITS = {
    "experts gate_up": (128, 1408, 2816, 1, 8), "experts down": (128, 2816, 704, 8, 1),
    "q, k, v": (1, 8192, 2816, 1, 0), "o": (1, 2816, 4096, 1, 0),
    "o of a full layer": (1, 2816, 8192, 1, 0), "gate, up": (1, 4224, 2816, 1, 0),
    "down": (1, 2816, 2112, 1, 0),
}  # fmt: skip
TOKENS = 2048
GRID = E2M1_GROUPS
Times = tuple[float, float]


def timed(work: Callable[[], object]) -> Times:
    """Return the seconds of work on the device, and those until the host had launched it."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    launched = time.perf_counter() - started
    torch.cuda.synchronize()
    return time.perf_counter() - started, launched


def show(title: str, figures: dict[str, Times], factor: float = 1.0) -> None:
    """Print one line of milliseconds."""
    each = (f"{k} {v * factor * 1e3:.4g} ({h * factor * 1e3:.3g})" for k, (v, h) in figures.items())
    print(f"{title}: " + ", ".join(each), flush=True)


def accumulated(name: str) -> tuple[Hessians, dict[str, Times]]:
    """Return Hessians of three groups of passes, and milliseconds of the last by configuration."""
    from fused_dequant.gptq import gram

    experts, _, inputs, rows_each, topk = UNITS[name]
    found, times = Hessians([name], experts), dict[str, Times]()
    mix = torch.eye(inputs, device="cuda")
    mix += torch.randn(inputs, inputs, device="cuda") / inputs**0.5
    passes: list[tuple[Tensor, Tensor | None]] = []
    for _ in range(hessians.PASSES):
        rows = (torch.randn(TOKENS * rows_each, inputs, device="cuda") @ mix).bfloat16()
        ids = torch.rand(len(rows), experts, device="cuda").topk(max(1, topk)).indices
        passes.append((rows, ids if topk else None))
    for name_of, launch in {"usual": gram.USUAL, "Hopper's": gram.HOPPER}.items():
        with patch.object(gram, "USUAL", launch), patch.object(gram, "HOPPER", launch):
            for _ in range(2):
                times[name_of] = timed(lambda: [found.see(name, *each) for each in passes])
    return found, times


def parts(weight: Tensor, hessian: Tensor) -> dict[str, Times]:
    """Return the times of the parts of `gptq.gptq`, and of the whole."""
    scheme = SCHEMES["NVFP4"]
    ranges = scheme.observe(weight, "memoryless_minmax")
    shared = global_scale([ranges])
    gptq.gptq(scheme, weight, hessian)
    timings = {"whole": timed(lambda: gptq.gptq(scheme, weight, hessian))}
    wide, one = weight.float(), shared[:, 0]
    scales, codes = block_scale(ranges, shared[..., None]), torch.empty_like(wide)
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    undamped, kept = diagonal.clone(), list[Tensor]()
    for _ in range(2):  # the first gets its memory
        diagonal.copy_(undamped)
        kept.clear()
        timings["factors"] = timed(lambda: kept.append(gptq._factored(hessian)[0]))
    timings["spread"] = timed(lambda: gptq._spread_errors(wide, kept[0], one, codes, scales, GRID))
    kept.clear()
    timings["descend"] = timed(lambda: gptq._descend(wide, codes, scales, hessian, one, GRID))
    timings["losses"] = timed(lambda: [gptq.energy(wide, hessian) for _ in range(2)])
    return timings


def beside(weight: Tensor, hessian: Tensor, at_once: int) -> tuple[Times, float, float]:
    """Return the times of llm-compressor's GPTQ, and the mean losses: its own and ours."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    scheme = SCHEMES["NVFP4"]
    args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    ranges = scheme.observe(weight, "memoryless_minmax")
    shared = global_scale([ranges])
    scales = block_scale(ranges, shared[..., None])

    def theirs() -> Tensor:
        found = []
        for own in (slice(i, i + at_once) for i in range(0, len(weight), at_once)):
            taken = (weight[own].float(), hessian[own].clone(), scales[own])
            zeros = torch.zeros_like(scales[own])
            found.append(quantize_weight(*taken, zeros, shared[own, 0], args)[0])
        return torch.cat(found)

    theirs()
    taken = timed(theirs)
    wide = weight.float()
    mine = gptq.gptq(scheme, weight, hessian).loss
    lost = gptq.energy(wide - theirs().float(), hessian) / gptq.energy(wide, hessian)
    return taken, lost.mean().item(), mine.mean().item()


def block_times(experts: int, out: int) -> dict[str, Times]:
    """Return the times of 20 calls: GPTQ of a block, descent of a span, and products of changes."""
    rows = torch.randn(experts, out, gptq.SPAN, device="cuda") * 0.05
    eye = torch.eye(gptq.SPAN, device="cuda").expand(experts, -1, -1).contiguous()
    wide = torch.zeros(experts, out, 2816, device="cuda")
    across = torch.zeros(experts, 2816, gptq.SPAN, device="cuda").mT  # columns of Hessians
    in_rows = across.contiguous()
    codes, moved = torch.empty_like(rows), torch.empty_like(rows)
    shared, scales = torch.full((experts,), 7e3, device="cuda"), torch.ones_like(rows[..., 0])
    each = torch.ones_like(rows[..., : gptq.SPAN // 16])
    one, rest = slice(16), slice(16, None)
    own = (eye[:, one, one], shared, scales, codes[..., one], moved[..., one], GRID)
    works: dict[str, Callable[[], object]] = {
        "round_block": lambda: gptq.round_block(rows[..., one], *own),
        "descend_span": lambda: gptq.descend_span(rows, eye, shared, each, codes, moved, GRID),
        "product of a block": lambda: rows[..., rest].baddbmm_(moved[..., one], eye[:, one, rest]),
        "product of a span": lambda: gptq.add_product(wide, moved, across),
        "that with rows": lambda: gptq.add_product(wide, moved, in_rows),
        "that in float32": lambda: wide.baddbmm_(moved, across),
    }
    found: dict[str, Times] = {}
    for name, work in works.items():
        work()
        found[name] = timed(lambda work=work: [work() for _ in range(20)])
    return found


def measure(name: str, few: int, compared: bool) -> None:
    """Measure one unit."""
    experts, out, inputs, *_ = UNITS[name]
    found, grams = accumulated(name)
    print(f"{name} [{experts}, {out}, {inputs}]", flush=True)
    show(f"  Hessians of {hessians.PASSES} passes of {TOKENS} tokens, ms", grams)
    at_once = experts_at_once(experts, out, inputs)
    weight = (torch.randn(at_once, out, inputs, device="cuda") * 0.02).bfloat16()
    seconds(lambda: block_times(1, 64))
    show(f"  {at_once} experts, us", block_times(at_once, out), 1e3 / 20)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mean = found.mean(name, slice(at_once))
    times = parts(weight, mean)
    times["mean"] = timed(lambda: found.mean(name, slice(at_once)))
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    show(f"  a layer, ms ({peak:.1f} GB)", times, experts / at_once)
    if compared and experts > 1:
        for halves in (1, 2) if name.endswith("gate_up") else (1,):  # two linears, or both as one
            rows = weight.unflatten(1, (halves, -1)).flatten(0, 1)
            taken, lost, mine = beside(rows, mean.repeat_interleave(halves, 0), halves * at_once)
            title = f"  llm-compressor, {halves * at_once} at once, a layer, ms"
            show(title, {"GPTQ": taken}, experts / at_once)
            print(f"  loss {lost:.4f}, ours {mine:.4f}", flush=True)
    if few and experts > 1:
        kernels, gptq.launches = gptq.launches, lambda _: False
        show(f"  {few} experts in torch, ms", parts(weight[:few], mean[:few].clone()))
        gptq.launches = kernels


@click.command()
@click.option("--torch-experts", default=0, show_default=True, help="Experts in torch; 0 for none.")
@click.option("--llm-compressor", "compared", is_flag=True, help="Its GPTQ beside ours.")
@click.option("--unit", "units", multiple=True, default=tuple(UNITS), type=click.Choice([*UNITS]))
def main(torch_experts: int, compared: bool, units: tuple[str, ...]) -> None:
    """Measure the units of a layer."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in units:
        measure(name, torch_experts, compared)


if __name__ == "__main__":
    main()
