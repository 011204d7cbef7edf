"""What GPTQ of one layer of the 26B model takes on this GPU, part by part.

    python tests/benchmarks/gptq.py [--experts 128] [--torch-experts 2]

Random weights, Hessians of random correlated activations, NVFP4. For both expert matrices it prints the
seconds of a layer: Hessians' sums from a pass of 1,024 tokens, then factors, GPTQ, coordinate descent
and losses of as many experts as `experts_at_once` says, projected to the layer; microseconds of each
kernel; and the same parts in torch for a few experts. The first call of a kernel compiles it.
"""

from collections.abc import Callable

import click
import torch
from torch import Tensor
from transfer import seconds

from quantize.schemes import gptq
from quantize.schemes.hessians import Hessians
from quantize.schemes.records import SCHEMES
from quantize.schemes.rounding import E2M1_GROUPS, block_scale, global_scale
from quantize.stages.round_weights.round_weights import experts_at_once

SHAPES = {"gate_up": (1408, 2816), "down": (2816, 704)}
TOKENS, TOPK = 1024, 8
GRID = E2M1_GROUPS


def accumulated(name: str, experts: int, inputs: int) -> tuple[Hessians, float]:
    """Return Hessians of two passes, and the seconds of the second."""
    hessians = Hessians([name], experts)
    mix = torch.eye(inputs, device="cuda")
    mix += torch.randn(inputs, inputs, device="cuda") / inputs**0.5
    took = 0.0
    for _ in range(2):
        rows = (torch.randn(TOKENS, inputs, device="cuda") @ mix).bfloat16()
        ids = torch.rand(TOKENS, experts, device="cuda").topk(min(TOPK, experts)).indices
        if name == "down":  # a row for each choice
            rows, ids = rows.repeat_interleave(ids.shape[1], 0), ids.flatten()[:, None]
        took = seconds(lambda rows=rows, ids=ids: hessians.see(name, rows, ids))
    return hessians, took


def parts(weight: Tensor, hessian: Tensor) -> dict[str, float]:
    """Return seconds of the parts of `gptq.gptq`, and of the whole."""
    scheme = SCHEMES["NVFP4"]
    ranges = scheme.observe(weight, "memoryless_minmax")
    shared = global_scale([ranges])
    whole = seconds(lambda: gptq.gptq(scheme, weight, hessian, shared))
    found = {"whole": whole}
    wide, one = weight.float(), shared[:, 0]
    scales, codes = block_scale(ranges, shared[..., None]), torch.empty_like(wide)
    kept: list[Tensor] = []
    found["factor"] = seconds(lambda: kept.append(gptq._factored(hessian)[0]))
    found["spread"] = seconds(lambda: gptq._spread_errors(wide, kept[0], one, codes, scales, GRID))
    kept.clear()
    found["descend"] = seconds(lambda: gptq._descend(wide, codes, scales, hessian, one, GRID))
    found["losses"] = seconds(lambda: gptq._losses(wide, (wide, wide), hessian))
    return found


def block_microseconds(experts: int, out: int) -> dict[str, float]:
    """Return microseconds of both kernels, and of the product within a span of inputs."""
    rows = torch.randn(experts, out, gptq.SPAN, device="cuda") * 0.05
    eye = torch.eye(gptq.SPAN, device="cuda").expand(experts, -1, -1).contiguous()
    codes, moved = torch.empty_like(rows), torch.empty_like(rows)
    shared, scales = torch.full((experts,), 7e3, device="cuda"), torch.ones_like(rows[..., 0])
    one, rest = slice(16), slice(16, None)
    own = (eye[:, one, one], shared, scales, codes[..., one], moved[..., one], GRID)
    works: dict[str, Callable[[], object]] = {
        "round_block": lambda: gptq.round_block(rows[..., one], *own),
        "descend_block": lambda: gptq.descend_block(rows[..., one], *own),
        "product of a block": lambda: gptq._subtract(
            rows[..., rest], moved[..., one], eye[:, one, rest]
        ),
    }
    found: dict[str, float] = {}
    for name, work in works.items():
        work()
        found[name] = seconds(lambda work=work: [work() for _ in range(50)]) / 50 * 1e6
    return found


def show(title: str, figures: dict[str, float], unit: str) -> None:
    """Print one line of figures."""
    print(f"{title}: " + ", ".join(f"{k} {v:.3g} {unit}" for k, v in figures.items()), flush=True)


def measure(name: str, experts: int, few: int) -> None:
    """Measure one matrix of the experts."""
    out, inputs = SHAPES[name]
    hessians, took = accumulated(name, experts, inputs)
    print(f"{name} [{experts}, {out}, {inputs}]: {took * 1e3:.1f} ms a pass of {TOKENS} tokens")
    at_once = experts_at_once(experts, out, inputs)
    weight = (torch.randn(at_once, out, inputs, device="cuda") * 0.02).bfloat16()
    first = seconds(lambda: block_microseconds(1, out))
    show(f"  {at_once} experts, first calls {first:.1f} s", block_microseconds(at_once, out), "us")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mean = hessians.mean(name, slice(at_once))
    found = parts(weight, mean)
    found["mean"] = seconds(lambda: hessians.mean(name, slice(at_once)))
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    show(f"  {at_once} experts ({peak:.1f} GB)", found, "s")
    show("  a layer", {k: v * experts / at_once for k, v in found.items()}, "s")
    if few:
        kernels, gptq.launches = gptq.launches, lambda _: False
        show(f"  {few} experts in torch", parts(weight[:few], mean[:few].clone()), "s")
        gptq.launches = kernels


@click.command()
@click.option("--experts", default=128, show_default=True, help="Experts of the layer.")
@click.option("--torch-experts", default=2, show_default=True, help="Experts in torch; 0 for none.")
def main(experts: int, torch_experts: int) -> None:
    """Measure both expert matrices of a layer."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in SHAPES:
        measure(name, experts, torch_experts)


if __name__ == "__main__":
    main()
