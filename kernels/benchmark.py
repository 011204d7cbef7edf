"""Times every kernel at the real model's shapes on this GPU: `python kernels/benchmark.py`.

Data are random; weights rotate through buffers larger than the L2; each figure is the median of CUDA
graph replays. `bytes` counts what must be read and written once: the weights of every expert hit,
tokens, results. `share` is bytes / time over the copy bandwidth measured before. `reference` is
torch on the same operands:

    experts         `torch._grouped_mm` in bf16, the two bare products, no activation
    linear, fp8     `torch._scaled_mm`, scales per token and channel; both sides get quantized tokens
    linear, nvfp4   bf16 `torch.mm` (cuBLAS)
    lm_head, soft   bf16 `torch.mm` alone, without softcap or softmax
    sampler         the same draw in separate torch operations (`canvas.sample`)

Experts "uneven" are routed as a random 26B model routes (`cases.SPREAD`), others evenly.
`error` is relative Frobenius against float64 of the dequantized operands, on a few tokens.
`floor` is the larger of moving the bytes and computing, at the rates measured before its part.
`target` is the time that the project asks for, and `met` whether the row reaches it.
"""

# M, N and K are the field's names, not constants; torch keeps its scaled and grouped products private.

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fused_dequant as fd
import torch
import triton
from fused_dequant import canvas, cases, reference, weights
from fused_dequant.cases import EXPERTS, HIDDEN, INNER, LINEAR_SHAPES, SPREAD, TOPK, VOCABULARY
from fused_dequant.timing import measure

EXPERTS_TARGET = {  # us: (format, tokens, experts used)
    ("bf16", 256, 128): 420, ("fp8", 256, 128): 225, ("nvfp4", 256, 128): 200,
    ("fp8", 1024, 128): 300, ("nvfp4", 1024, 128): 300,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds."""

    operation: str
    format: str
    tokens: int
    microseconds: float
    bytes: int
    floor: float
    reference: float
    error: float
    target: str
    met: bool | None


@dataclass(frozen=True)
class Ceilings:
    """Rates that this device reaches: bytes/s of a copy, FLOP/s of a bf16 and of an FP8 product."""

    copy: float
    bf16: float
    fp8: float

    def floor(self, bytes_: int, flop: float, format_: str) -> float:
        """Return the least microseconds that any kernel can take."""
        rate = self.bf16 if format_ in ("bf16", "nvfp4") else self.fp8
        return max(bytes_ / self.copy, flop / rate) * 1e6


def ceilings() -> Ceilings:
    """Measure the rates now: 2 GB read and written by a kernel (a graph would give `copy_` to the
    copy engine), and square products of 8192.
    """
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / measure([lambda: torch.neg(source, out=target)]) * 1e6
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    bf16 = 2 * 8192**3 / measure([lambda: a @ a.T]) * 1e6
    q, scale = fd.quantize_rows(a, "fp8")
    fp8 = 2 * 8192**3 / measure([lambda: scaled_mm(q, scale, q, scale)]) * 1e6
    return Ceilings(copy, bf16, fp8)


def scaled_mm(
    q: torch.Tensor, q_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    """Return torch's FP8 product with row-wise scales."""
    return torch._scaled_mm(
        q, w.T, q_scale[:, None], w_scale[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def grouped_mm_time(ids: torch.Tensor) -> float:
    """Return the microseconds of torch's two bf16 grouped products for this routing."""
    counts = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    ends = counts.cumsum(0).to(torch.int32)
    up = cases.random_weight("bf16", EXPERTS, 2 * INNER, HIDDEN, "cuda").data.transpose(1, 2)
    down = cases.random_weight("bf16", EXPERTS, HIDDEN, INNER, "cuda").data.transpose(1, 2)
    x, h = (cases.random_tokens(ids.numel(), k, "cuda") for k in (HIDDEN, INNER))
    grouped = torch._grouped_mm
    return measure([lambda: (grouped(x, up, offs=ends), grouped(h, down, offs=ends))])


def experts_rows(limits: Ceilings) -> Iterator[Row]:
    """Time whole expert blocks: routing, both products, activation, routing weights."""
    layouts = [(256, EXPERTS, 0.0), (256, EXPERTS, SPREAD[256]), (256, 40, 0.0)]
    layouts += [(1024, EXPERTS, 0.0), (1024, EXPERTS, SPREAD[1024]), (64, EXPERTS, 0.0)]
    routings = {
        (M, used, spread): cases.random_routing(M, EXPERTS, TOPK, "cuda", used=used, spread=spread)
        for M, used, spread in layouts
    }
    torch_time = {key: grouped_mm_time(ids) for key, (ids, _) in routings.items()}
    for scheme in ("bf16", "fp8", "int8", "nvfp4"):
        # Weights in memory of their own, as a loader's are: inside a larger freed block the same
        # FP8 call took 225 us instead of 210.
        torch.cuda.empty_cache()
        yield from scheme_rows(scheme, routings, torch_time, limits)


def scheme_rows(
    scheme: str,
    routings: dict[tuple[int, int, float], tuple[torch.Tensor, torch.Tensor]],
    torch_time: dict[tuple[int, int, float], float],
    limits: Ceilings,
) -> Iterator[Row]:
    """Return one format's rows: first times, then errors, whose float64 weights take gigabytes."""
    gate_up = cases.random_weight(scheme, EXPERTS, 2 * INNER, HIDDEN, "cuda")
    down = cases.random_weight(scheme, EXPERTS, HIDDEN, INNER, "cuda", seed=5)
    tokens = {key: cases.random_tokens(key[0], HIDDEN, "cuda") for key in routings}
    runs = {
        key: partial(fd.routed_experts, tokens[key], None, *routing, gate_up, down)
        for key, routing in routings.items()
    }
    times = {key: measure([run]) for key, run in runs.items()}
    for (M, used, spread), run in runs.items():
        x, _, ids, routing_weights, *_ = run.args
        error = experts_error(run().float().sum(1), x, ids, routing_weights, gate_up, down)
        hit = ids.unique().numel()
        bytes_ = (gate_up.bytes + down.bytes) * hit // EXPERTS + 4 * M * HIDDEN
        flop = 6.0 * M * TOPK * HIDDEN * INNER
        time = times[M, used, spread]
        limit = None if spread else EXPERTS_TARGET.get((scheme, M, used))
        yield Row(
            f"experts, {hit} of {EXPERTS} hit{', uneven' if spread else ''}", scheme, M, time, bytes_,
            limits.floor(bytes_, flop, scheme), torch_time[M, used, spread], error,
            f"<= {limit} us" if limit else "", time <= limit if limit else None,
        )  # fmt: skip


def experts_error(
    y: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: weights.Weight,
    down: weights.Weight,
) -> float:
    """Return the relative error on the first 8 tokens."""
    up, out = (weights.dequantize(w, torch.float64) for w in (gate_up, down))
    few = slice(0, 8)
    expected = reference.experts(
        x[few].double(), up, out, ids[few], routing_weights[few], torch.float64,
        activation=lambda t: cases.rounded(t.to(torch.bfloat16), gate_up.scheme),
    )  # fmt: skip
    return reference.relative_error(y[few], expected)


def linear_rows(limits: Ceilings) -> Iterator[Row]:
    """Time dense projections, FP8 with tokens already quantized, as after a fused norm."""
    for scheme, M, (N, K) in itertools.product(("fp8", "nvfp4"), (256, 1024), LINEAR_SHAPES):
        weight = cases.random_weight(scheme, 1, N, K, "cuda")
        x = cases.random_tokens(M, K, "cuda")
        copies = [weight, *(weight.clone() for _ in range(max(1, 200 * 2**20 // weight.bytes)))]
        if scheme == "fp8":
            q, scale = fd.quantize_rows(x, "fp8")
            ours = [partial(fd.linear, q, w, scale) for w in copies]
            theirs = [
                partial(scaled_mm, q, scale, w.data[0], w.scale[0])
                for w in copies
                if w.scale is not None
            ]
            allowed = 1.1
        else:
            ours = [partial(fd.linear, x, w) for w in copies]
            dense = cases.random_weight("bf16", 1, N, K, "cuda").data[0]
            others = [dense.clone() for _ in range(max(2, 200 * 2**20 // (2 * dense.numel())))]
            theirs = [partial(torch.mm, x, w.T) for w in others]
            allowed = 1.25 if M == 256 else 0.0
        yield compare(f"linear {N}x{K}", scheme, M, weight, x, ours, theirs, allowed, limits)


def compare(
    name: str,
    scheme: str,
    M: int,
    weight: weights.Weight,
    x: torch.Tensor,
    ours: list[Callable[[], torch.Tensor]],
    theirs: list[Callable[[], torch.Tensor]],
    allowed: float,
    limits: Ceilings,
) -> Row:
    """Compare our product with torch's; `allowed` is the ratio asked for, 0 where none is."""
    _, N, K = weight.shape
    few = slice(0, 8)
    expected = cases.rounded(x[few], scheme) @ weights.dequantize(weight, torch.float64)[0].T
    error = reference.relative_error(ours[0]()[few], expected)
    bytes_ = weight.bytes + M * (K * (1 if scheme == "fp8" else 2) + 2 * N)
    time, other = measure(ours), measure(theirs)
    return Row(
        name, scheme, M, time, bytes_, limits.floor(bytes_, 2.0 * M * N * K, scheme), other, error,
        f"<= {allowed} x reference" if allowed else "", time <= allowed * other if allowed else None,
    )  # fmt: skip


def vocabulary_rows(limits: Ceilings) -> Iterator[Row]:
    """Time lm_head with softcap, and the soft embedding, at one canvas."""
    M, flop = 256, 2.0 * 256 * VOCABULARY * HIDDEN
    x = cases.random_tokens(M, HIDDEN, "cuda")
    table = cases.random_weight("bf16", 1, VOCABULARY, HIDDEN, "cuda")
    few = slice(0, 4)
    head_time = measure([lambda: x @ table.data[0].T])
    floor = limits.floor(table.bytes, flop, "bf16")
    run = partial(fd.lm_head, x, table.data[0], 30.0)
    expected = reference.lm_head(x[few], table.data[0], 30.0, torch.float64)
    error = reference.relative_error(run()[few], expected)
    time = measure([run])
    yield Row("lm_head + softcap", "bf16", M, time, table.bytes + 2 * M * VOCABULARY, floor,
              head_time, error, "<= 1.25 x floor", time <= 1.25 * floor)  # fmt: skip
    logits = cases.random_tokens(M, VOCABULARY, "cuda", seed=3) * 5
    sharpness = torch.full((M,), 1 / 0.6, device="cuda")
    product_time = measure([lambda: logits @ table.data[0]])
    run = partial(fd.soft_embedding, logits, table.data[0], sharpness)
    expected = reference.soft_embedding(logits[few], table.data[0], sharpness[few], torch.float64)
    error = reference.relative_error(run()[few], expected)
    time = measure([run])
    yield Row("soft embedding", "bf16", M, time, table.bytes + 2 * M * VOCABULARY, floor,
              product_time, error, "<= 1.25 x floor", time <= 1.25 * floor)  # fmt: skip


def sampler_rows(limits: Ceilings) -> Iterator[Row]:
    """Time one step of the sampler, draw and acceptance; the floor is one read of the logits."""
    for B in (1, 4):
        logits = cases.random_tokens(256 * B, VOCABULARY, "cuda", seed=3).view(B, 256, -1) * 5
        tokens = torch.zeros(B, 256, dtype=torch.int64, device="cuda")
        seeds = torch.arange(B, device="cuda")
        state = fd.CanvasState.begin(tokens, seeds, 1)
        schedule = torch.linspace(0.8, 0.4, 2**14, device="cuda")
        run = partial(sampler_step, logits, state, schedule)
        draw = run()
        first = replace(state, step=torch.ones_like(state.step))
        expected = canvas.token_entropy(logits[:, :4].float() / schedule[0])
        error = reference.relative_error(draw.entropy[:, :4], expected)
        bytes_ = logits.numel() * 2
        theirs = measure([partial(canvas.sample, logits, first, schedule)])
        yield Row("sampler", "bf16", 256 * B, measure([run]), bytes_, bytes_ / limits.copy * 1e6,
                  theirs, error, "", None)  # fmt: skip


def sampler_step(logits: torch.Tensor, state: fd.CanvasState, schedule: torch.Tensor) -> fd.Draw:
    """Draw and accept, as at the end of a denoising step."""
    draw = fd.sample(logits, state, schedule)
    fd.accept(draw, state, schedule, entropy_bound=0.1, confidence_threshold=0.005)
    return draw


def line(row: Row, limits: Ceilings) -> str:
    """Return one line of a Markdown table."""
    speed = row.bytes / row.microseconds * 1e6
    met = {True: "yes", False: "NO", None: ""}[row.met]
    return (
        f"| {row.operation} | {row.format} | {row.tokens} | {row.microseconds:.1f} | "
        f"{row.bytes / 1e6:.1f} | {speed / 1e9:.0f} | {speed / limits.copy:.0%} | {row.floor:.1f} | "
        f"{row.microseconds / row.floor:.2f} | {row.reference:.1f} | "
        f"{row.microseconds / row.reference:.2f} | {row.error:.1e} | {row.target} | {met} |"
    )


def main() -> None:
    """Measure and print; `--out` also writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", default="", help="experts, linear, vocabulary or sampler")
    arguments = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}\n"
    )
    print("| operation | format | M | us | MB | GB/s | share of copy | floor us | x floor | "
          "reference us | x reference | error | target | met |")  # fmt: skip
    print("|---|---|" + "---:|" * 10 + "---|---|")
    rows: list[dict[str, Any]] = []
    rates: dict[str, Ceilings] = {}
    parts = {"experts": experts_rows, "linear": linear_rows, "vocabulary": vocabulary_rows}
    parts |= {"sampler": sampler_rows}
    for name, part in parts.items():
        if arguments.only and arguments.only != name:
            continue
        rates[name] = limits = ceilings()  # a GPU that has worked for long has a lower clock
        for row in part(limits):
            rows.append(asdict(row))
            print(line(row, limits), flush=True)
    print("\nMeasured before each part:")
    for name, limits in rates.items():
        print(
            f"{name}: copy {limits.copy / 1e12:.2f} TB/s, bf16 {limits.bf16 / 1e12:.0f} and "
            f"fp8 {limits.fp8 / 1e12:.0f} TFLOP/s"
        )
    if arguments.out:
        measured = {name: asdict(limits) for name, limits in rates.items()}
        arguments.out.write_text(json.dumps({"ceilings": measured, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
