"""Times products and sampler at the real model's shapes on this GPU.

    python -m tests.benchmarks.kernel_table

Data are random. Weights do not stay in the L2: they are larger than the L2, or copies of them are
read in turn. A time is the median of CUDA graph replays. `MB` counts each byte that must be read or
written once: tokens, results, weights of every expert that gets a token. `share of copy` is MB / us,
divided by the measured copy rate. `reference` is torch on operands of the same shapes:

    experts         `torch._grouped_mm` in bf16: only the two products, no activation
    linear, fp8     `torch._scaled_mm`, scales per token and channel; quantizing tokens is not timed
    linear, nvfp4   bf16 `torch.mm` (cuBLAS)
    lm_head, soft   bf16 `torch.mm` only, without softcap or softmax
    sampler         the draw in separate torch operations (`canvas.sample`), without acceptance

In rows named "uneven", tokens choose experts as in a random 26B model (`cases.SPREAD`); in other rows
evenly. `error` is the relative Frobenius error on a few tokens, against float64 of the dequantized
operands; for the sampler, the error of entropies against torch in float32. `floor` is the longer of
two times, to move the bytes and to compute, at rates measured before each part of the table.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import fused_dequant as fd
import torch
import triton
from fused_dequant import reference, weights
from fused_dequant.launch.timing import measure
from fused_dequant.sampler import canvas
from fused_dequant.tune import cases
from fused_dequant.tune.cases import EXPERTS, HIDDEN, INNER, LINEAR_SHAPES, SPREAD, TOPK, VOCABULARY
from torch import Tensor

from quantize.runtime.gpu.rates import Rates, measure_rates

DEVICE = "cuda"
BUFFER_BYTES = 200 * 2**20  # several times the L2
COLUMNS = ("operation", "format", "M", "us", "MB", "GB/s", "share of copy", "floor us", "x floor",
           "reference us", "x reference", "error")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table; in us, `microseconds` is the kernels' time and `reference` torch's."""

    operation: str
    format: str
    tokens: int
    microseconds: float
    bytes: int
    flop: float
    reference: float
    error: float

    def line(self, rates: Rates) -> str:
        """Return the row as a line of the table; its share and floor follow from the GPU's `rates`."""
        speed = self.bytes / self.microseconds * 1e6
        floor = rates.seconds(self.bytes, self.flop, self.format) * 1e6
        cells = (
            self.operation, self.format, self.tokens, f"{self.microseconds:.1f}",
            f"{self.bytes / 1e6:.1f}", f"{speed / 1e9:.0f}", f"{speed / rates.copy:.0%}",
            f"{floor:.1f}", f"{self.microseconds / floor:.2f}", f"{self.reference:.1f}",
            f"{self.microseconds / self.reference:.2f}", f"{self.error:.1e}",
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


def experts_rows() -> Iterator[Row]:
    """Yield rows of `routed_experts`, timed with routing, both products, activation and weighting."""
    layouts = [(256, EXPERTS, 0.0), (256, EXPERTS, SPREAD[256]), (256, 40, 0.0)]
    layouts += [(1024, EXPERTS, 0.0), (1024, EXPERTS, SPREAD[1024]), (64, EXPERTS, 0.0)]
    routings = [
        (spread, cases.random_routing(M, EXPERTS, TOPK, DEVICE, used=used, spread=spread))
        for M, used, spread in layouts
    ]
    bare = [grouped_mm_time(ids) for _, (ids, _) in routings]
    for scheme in ("bf16", "fp8", "int8", "nvfp4"):
        # Memory of their own, as in a loader: in a larger freed block FP8 took 225 us instead of 210.
        torch.cuda.empty_cache()
        gate_up = cases.random_weight(scheme, EXPERTS, 2 * INNER, HIDDEN, DEVICE)
        down = cases.random_weight(scheme, EXPERTS, HIDDEN, INNER, DEVICE, seed=5)
        runs = [
            partial(
                fd.routed_experts, cases.random_tokens(len(own[0]), HIDDEN, DEVICE), None, *own,
                gate_up, down,
            )
            for _, own in routings
        ]  # fmt: skip
        times = [measure([run]) for run in runs]  # first: an error's float64 weights take gigabytes
        for (spread, (ids, share)), run, time, other in zip(
            routings, runs, times, bare, strict=True
        ):
            M, hit = len(ids), ids.unique().numel()
            bytes_ = (gate_up.bytes + down.bytes) * hit // EXPERTS + 4 * M * HIDDEN
            name = f"experts, {hit} of {EXPERTS} hit{', uneven' if spread else ''}"
            few = slice(0, 8)
            expected = reference.experts(
                run.args[0][few].double(),
                *(weights.dequantize(w, torch.float64) for w in (gate_up, down)),
                ids[few], share[few], torch.float64,
                activation=lambda t, scheme=scheme: cases.rounded(t.to(torch.bfloat16), scheme),
            )  # fmt: skip
            error = reference.relative_error(run()[few].float().sum(1), expected)
            yield Row(name, scheme, M, time, bytes_, 6.0 * M * TOPK * HIDDEN * INNER, other, error)


def grouped_mm_time(ids: Tensor) -> float:
    """Return the microseconds that torch's two bf16 grouped products take for expert ids [M, topk]."""
    counts = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    ends = counts.cumsum(0).to(torch.int32)
    up = cases.random_weight("bf16", EXPERTS, 2 * INNER, HIDDEN, DEVICE).data.transpose(1, 2)
    down = cases.random_weight("bf16", EXPERTS, HIDDEN, INNER, DEVICE).data.transpose(1, 2)
    x, h = (cases.random_tokens(ids.numel(), k, DEVICE) for k in (HIDDEN, INNER))
    grouped = torch._grouped_mm
    return measure([lambda: (grouped(x, up, offs=ends), grouped(h, down, offs=ends))])


def linear_rows() -> Iterator[Row]:
    """Yield timed rows of the dense projections; quantizing FP8 tokens, a norm's task, is not timed."""
    for scheme, M, (N, K) in itertools.product(("fp8", "nvfp4"), (256, 1024), LINEAR_SHAPES):
        weight = cases.random_weight(scheme, 1, N, K, DEVICE)
        x = cases.random_tokens(M, K, DEVICE)
        copies = [weight, *(weight.clone() for _ in range(max(1, BUFFER_BYTES // weight.bytes)))]
        q, scale = weight.reads(x)
        ours = [partial(fd.linear, q, w, scale) for w in copies]
        if scale is not None:
            how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
            theirs = [
                partial(torch._scaled_mm, q, w.data[0].T, scale[:, None], w.scale, **how)
                for w in copies
            ]
        else:
            dense = cases.random_weight("bf16", 1, N, K, DEVICE).data[0]
            count = max(2, BUFFER_BYTES // (2 * dense.numel()))
            theirs = [partial(torch.mm, x, dense.clone().T) for _ in range(count)]
        few = slice(0, 8)
        expected = cases.rounded(x[few], scheme) @ weights.dequantize(weight, torch.float64)[0].T
        error = reference.relative_error(ours[0]()[few], expected)
        bytes_ = weight.bytes + q.nbytes + 2 * M * N
        times = measure(ours), measure(theirs)
        yield Row(f"linear {N}x{K}", scheme, M, times[0], bytes_, 2.0 * M * N * K, times[1], error)


def vocabulary_rows() -> Iterator[Row]:
    """Yield timed rows of lm_head with softcap and of soft embedding, for a canvas of 256 tokens."""
    M, few = 256, slice(0, 4)
    x = cases.random_tokens(M, HIDDEN, DEVICE)
    weight = cases.random_weight("bf16", 1, VOCABULARY, HIDDEN, DEVICE)
    logits = cases.random_tokens(M, VOCABULARY, DEVICE, seed=3) * 5
    table, sharpness = weight.data[0], torch.full((M,), 1 / 0.6, device=DEVICE)
    bytes_, flop = weight.bytes + 2 * M * VOCABULARY, 2.0 * M * VOCABULARY * HIDDEN
    soft = (logits[few], table, sharpness[few], torch.float64)
    for name, run, bare, expected in (
        ("lm_head + softcap", partial(fd.lm_head, x, table, 30.0), partial(torch.mm, x, table.T),
         partial(reference.lm_head, x[few], table, 30.0, torch.float64)),
        ("soft embedding", partial(fd.soft_embedding, logits, table, sharpness),
         partial(torch.mm, logits, table), partial(reference.soft_embedding, *soft)),
    ):  # fmt: skip
        other, error = measure([bare]), reference.relative_error(run()[few], expected())
        yield Row(name, "bf16", M, measure([run]), bytes_, flop, other, error)


def sampler_rows() -> Iterator[Row]:
    """Yield timed rows of a sampler step (draw, acceptance); the floor is one read of the logits."""
    schedule = torch.linspace(0.8, 0.4, 2**14, device=DEVICE)
    for B in (1, 4):
        logits = cases.random_tokens(256 * B, VOCABULARY, DEVICE, seed=3).view(B, 256, -1) * 5
        tokens = torch.zeros(B, 256, dtype=torch.int64, device=DEVICE)
        state = fd.CanvasState.begin(tokens, torch.arange(B, device=DEVICE), 1)
        run = partial(sampler_step, logits, state, schedule)
        entropy = run().entropy[:, :4]
        expected = canvas.token_entropy(logits[:, :4].float() / schedule[0])
        error = reference.relative_error(entropy, expected)
        first = replace(state, step=torch.ones_like(state.step))
        theirs = measure([partial(canvas.sample, logits, first, schedule)])
        bytes_ = logits.numel() * 2
        yield Row("sampler", "bf16", 256 * B, measure([run]), bytes_, 0.0, theirs, error)


def sampler_step(logits: Tensor, state: fd.CanvasState, schedule: Tensor) -> fd.Draw:
    """Draw tokens from logits [B, L, V] and accept them into `state`; return the draw."""
    draw = fd.sample(logits, state, schedule)
    fd.accept(draw, state, schedule, fd.Rules(0.1, 0.005))
    return draw


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "experts": experts_rows, "linear": linear_rows, "vocabulary": vocabulary_rows,
    "sampler": sampler_rows,
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Print the times of all PARTS, or of the one that `--only` names; `--out` also writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write rows and rates as JSON")
    parser.add_argument("--only", choices=PARTS, help="time only this part")
    arguments = parser.parse_args(words)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}")
    rows: list[Row] = []
    measured: dict[str, Rates] = {}
    for name in [arguments.only] if arguments.only else PARTS:
        # before each part: a GPU that has worked for long has a lower clock
        rates = measured[name] = measure_rates(torch.device(DEVICE))
        for row in PARTS[name]():
            rows.append(row)
            print(row.line(rates), flush=True)
    print("\nMeasured before each part:")
    for name, rates in measured.items():
        bf16, fp8 = rates.bf16 / 1e12, rates.fp8 / 1e12
        print(
            f"{name}: copy {rates.copy / 1e12:.2f} TB/s, bf16 {bf16:.0f} and fp8 {fp8:.0f} TFLOP/s"
        )
    if arguments.out:
        found = {"ceilings": {name: asdict(own) for name, own in measured.items()}}
        arguments.out.write_text(json.dumps(found | {"rows": list(map(asdict, rows))}, indent=1))


if __name__ == "__main__":
    main()
