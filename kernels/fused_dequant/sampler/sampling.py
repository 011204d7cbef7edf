"""The entropy-bound sampler on the GPU. It reads the logits once, and the host waits for nothing.

    l = logits / T,   T = schedule[step - 1] of the sequence
    per position   y ~ softmax(l) by inverse CDF,   a = argmax(l),   H = entropy of softmax(l) in nats
    per canvas     accept positions in order of H, while the sum of all lower H is <= bound
    next canvas    y where accepted, else a token drawn uniformly
    finished       if every `a` equals `a` of each step in `history`, and mean(H) < confidence

A step takes three launches, whatever the batch size:

    1. `statistics_kernel`  for each row and range of RANGE tokens: the largest logit (max), sum(e) and
                            sum(e x), with x = (logit - max) / T and e = exp(x)
    2. `draw_kernel`        for each row: combines its ranges; reads again the range of the maximum, and
                            the range in which the cumulative distribution passes a random number
    3. `accept_kernel`      for each sequence: acceptance, next canvas, stop, number of the next step

H = log(sum e) - sum(e x) / sum(e), so the distribution itself is never written. A canvas of 256
positions over 262,144 tokens in bf16 reads 134 MB. On Hopper, lm_head may itself store what
launch 1 stores (`dense_hopper`). RANGE is then 256, a tile's width, and launch 1 is left out.

A random number depends only on its place. Philox4x32-10 has the sequence's seed as key and (position,
step, canvas, 0) as counter. 24 bits of word 0 draw y, and 24 bits of word 1 draw the uniform token.
`accept_kernel` counts steps in device memory. So one CUDA graph replays every step, and sequences of
one batch may be at different steps. Sequences that are finished or past the last step do not change.

Of equal maxima, the lowest token is taken; of equal entropies, the lower position. A NaN logit makes
the position's entropy NaN: it is not accepted, its sequence does not finish, and tokens stay < V.
"""

import torch
import triton
import triton.language as tl

from fused_dequant.launch.chain import chained, follow
from fused_dequant.launch.tiles import LOG2_E, LOWEST
from fused_dequant.sampler.canvas import CanvasState, Draw

RANGE = 4096  # with two warps: 38 us for a canvas; 2,048 takes 43 us, 8,192 with four warps 38 us


@triton.jit
def finite(logits):
    """Return logits in float32, at least LOWEST: -inf - -inf would be NaN. A NaN logit stays NaN."""
    return tl.maximum(logits.to(tl.float32), LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sharpness_of(schedule, step, b, N):
    """Return log2(e) / T at sequence b's step; after the last step N, T of step N is used."""
    return LOG2_E / tl.load(schedule + tl.minimum(tl.load(step + b), N) - 1)


@triton.jit
def statistics_kernel(
    logits, schedule, step, tops, sums, moments, L, V, N, ranges,
    CHAINED: tl.constexpr, EVEN: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """Program (row, part) stores max, sum(e), sum(e x) as `tops`, `sums`, `moments` [rows, ranges]."""
    follow(CHAINED)
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * RANGE + tl.arange(0, RANGE)
    place = logits + row.to(tl.int64) * V + token
    values = tl.load(place) if EVEN else tl.load(place, mask=token < V, other=float("-inf"))
    sharpness = sharpness_of(schedule, step, row // L, N)
    values = finite(values)
    top = tl.max(values)
    x = (values - top) * sharpness
    e = tl.exp2(x)
    at = row * ranges + part
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(e))
    tl.store(moments + at, tl.sum(e * x) / LOG2_E)


@triton.jit
def uniform(word):
    """Return the upper 24 bits of a 32-bit word as a float32 in [0, 1)."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def draw_kernel(
    logits,
    schedule,
    seeds,
    canvas_index,
    step,
    tops,
    sums,
    moments,
    rounded,
    sampled,
    replacement,
    argmax,
    entropy,
    rounded_total,
    L,
    V,
    N,
    ranges,
    CHAINED: tl.constexpr,
    SURVEYED: tl.constexpr,
    RANGES: tl.constexpr,  # `ranges` rounded up to a power of two
    RANGE: tl.constexpr,
):
    """Program `row` combines its ranges and draws tokens; if SURVEYED, it also sums `rounded`."""
    follow(CHAINED)
    row = tl.program_id(0)
    b, position = row // L, row % L
    sharpness = sharpness_of(schedule, step, b, N)
    index = tl.load(canvas_index + b).to(tl.int32)
    word0, word1, _, _ = tl.philox(
        tl.load(seeds + b), position, tl.load(step + b), index, position * 0
    )

    part = tl.arange(0, RANGES)
    exists = part < ranges
    top_of = tl.load(tops + row * ranges + part, mask=exists, other=LOWEST)
    sum_of = tl.load(sums + row * ranges + part, mask=exists, other=0.0)
    moment_of = tl.load(moments + row * ranges + part, mask=exists, other=0.0)
    if SURVEYED:
        rounded_of = tl.load(rounded + row * ranges + part, mask=exists, other=0.0)
        tl.store(rounded_total + row, tl.sum(rounded_of))
    top = tl.max(top_of)
    shift = (top_of - top) * sharpness
    mass = tl.where(exists, tl.exp2(shift) * sum_of, 0.0)
    total = tl.sum(mass)
    moment = tl.sum(tl.exp2(shift) * (moment_of + shift / LOG2_E * sum_of))
    h = tl.log(total) - moment / total
    tl.store(entropy + row, tl.where(h < 0.0, 0.0, h))  # `maximum` would lose a NaN

    target = uniform(word0) * total
    passed = tl.cumsum(mass, 0)
    # Rounding may leave no range whose cumulative mass exceeds the target: then the last with any mass.
    chosen = tl.min(tl.where((passed > target) & (mass > 0.0), part, RANGES))
    chosen = tl.where(chosen < RANGES, chosen, tl.max(tl.where(mass > 0.0, part, 0)))
    before = tl.sum(tl.where(part < chosen, mass, 0.0))
    highest = tl.min(tl.where((top_of == top) & exists, part, ranges - 1))
    token, best = chosen * RANGE + tl.arange(0, RANGE), highest * RANGE + tl.arange(0, RANGE)
    line = logits + row.to(tl.int64) * V
    values = tl.load(line + token, mask=token < V, other=float("-inf"))
    largest = finite(tl.load(line + best, mask=best < V, other=float("-inf")))
    tl.store(argmax + row, tl.min(tl.where(largest == top, best, V - 1)).to(tl.int64))
    e = tl.exp2((finite(values) - top) * sharpness)
    passed = tl.cumsum(e, 0) + before
    drawn = tl.min(tl.where((passed > target) & (e > 0.0), token, V))
    drawn = tl.where(drawn < V, drawn, tl.max(tl.where(e > 0.0, token, 0)))
    tl.store(sampled + row, drawn.to(tl.int64))
    tl.store(replacement + row, (uniform(word1) * V).to(tl.int64))


def sample(logits: torch.Tensor, state: CanvasState, schedule: torch.Tensor) -> Draw:
    """Launch kernels 1 and 2 for `operations.sample`; logits [B, L, V] must be contiguous."""
    B, L, V = logits.shape
    width = min(RANGE, triton.next_power_of_2(V))
    row_statistics = statistics(logits.view(B * L, V), schedule, state.step, L, width)
    return draw(logits, row_statistics, width, state, schedule)


def statistics(
    logits: torch.Tensor, schedule: torch.Tensor, step: torch.Tensor, L: int, width: int
) -> torch.Tensor:
    """Return max, sum(e), sum(e x) of logits [M, V] in ranges of `width` tokens: f32 [3, M, ranges]."""
    (M, V), ranges = logits.shape, triton.cdiv(logits.shape[1], width)
    partial = torch.empty(3, M, ranges, dtype=torch.float32, device=logits.device)
    statistics_kernel[(M, ranges)](
        logits, schedule, step, *partial, L, V, len(schedule), ranges,
        EVEN=V % width == 0, RANGE=width, num_warps=2, **chained(logits.device),
    )  # fmt: skip
    return partial


def draw(
    logits: torch.Tensor,
    statistics: torch.Tensor,
    width: int,
    state: CanvasState,
    schedule: torch.Tensor,
    total: torch.Tensor | None = None,
) -> Draw:
    """Return a step's draw from logits [B, L, V], given `statistics` f32 [3 or 4, B * L, ranges].

    A range has `width` tokens. If given, `total` f32 [B * L] gets each row's sum of statistics[3].
    """
    B, L, V = logits.shape
    ranges, device = statistics.shape[2], logits.device
    tokens = [torch.empty(B, L, dtype=torch.int64, device=device) for _ in range(3)]
    drawn = Draw(*tokens, torch.empty(B, L, dtype=torch.float32, device=device))
    draw_kernel[(B * L,)](
        logits, schedule, state.seeds, state.canvas_index, state.step, *statistics[:3],
        statistics[-1], *drawn, drawn.entropy if total is None else total,
        L, V, len(schedule), ranges, SURVEYED=total is not None,
        RANGES=triton.next_power_of_2(ranges), RANGE=width, num_warps=4, **chained(device),
    )  # fmt: skip
    return drawn


@triton.jit
def accept_kernel(
    sampled,
    replacement,
    new_argmax,
    entropy,
    schedule,
    canvas,
    argmax,
    history,
    accepted,
    step,
    finished,
    inverse_temperature,
    bound,
    confidence,
    L,
    N,
    stride,
    CHAINED: tl.constexpr,
    STABILITY: tl.constexpr,
    POSITIONS: tl.constexpr,  # L rounded up to a power of two
    COLUMNS: tl.constexpr,
):
    """Program b runs `operations.accept` for sequence b; `history` has `stride` elements per step."""
    follow(CHAINED)
    b = tl.program_id(0)
    now = tl.load(step + b)
    if (tl.load(finished + b) != 0) | (now > N):
        return
    position = tl.arange(0, POSITIONS)
    at = b * L + position
    inside = position < L
    own_entropy = tl.load(entropy + at, mask=inside, other=float("inf"))
    # Each position against all others: a sort would be a chain of barriers.
    sums = tl.zeros((POSITIONS, COLUMNS), tl.float32)
    for start in range(0, L, COLUMNS):
        other = start + tl.arange(0, COLUMNS)[None, :]
        theirs = tl.load(entropy + b * L + other, mask=other < L, other=float("inf"))
        first = (theirs < own_entropy[:, None]) | (
            (theirs == own_entropy[:, None]) & (other < position[:, None])
        )
        sums += tl.where(first & (other < L), theirs, 0.0)
    lower = tl.sum(sums, 1)
    taken = (lower <= bound) & (own_entropy == own_entropy)  # a position of NaN is never taken
    tokens = tl.load(sampled + at, mask=inside, other=0)
    renewed = tl.load(replacement + at, mask=inside, other=0)
    tl.store(canvas + at, tl.where(taken, tokens, renewed), mask=inside)
    tl.store(accepted + at, taken, mask=inside)

    best = tl.load(new_argmax + at, mask=inside, other=0)
    same = tl.full((POSITIONS,), 1, tl.int32)
    for past in tl.static_range(STABILITY):
        seen = tl.load(history + past * stride + at, mask=inside, other=0)
        same = tl.where(seen == best, same, 0)
        if past > 0:
            tl.store(history + (past - 1) * stride + at, seen, mask=inside)
    if STABILITY > 0:
        tl.store(history + (STABILITY - 1) * stride + at, best, mask=inside)
    tl.store(argmax + at, best, mask=inside)
    mean = tl.sum(tl.where(inside, own_entropy, 0.0)) / L
    stop = (tl.min(same) == 1) & (mean < confidence)
    sharpness = tl.zeros((POSITIONS,), tl.float32) + 1.0 / tl.load(schedule + now - 1)
    tl.store(inverse_temperature + at, sharpness, mask=inside)
    tl.debug_barrier()  # every thread has read `finished` and `step`
    tl.store(finished + b, stop)
    tl.store(step + b, now + 1)


def accept(draw, state, schedule, rules):
    """Launch `accept_kernel` for `operations.accept`, which describes the arguments."""
    B, L = state.canvas.shape
    accept_kernel[(B,)](
        *draw, schedule, state.canvas, state.argmax, state.history, state.accepted, state.step,
        state.finished, state.inverse_temperature, *rules,
        L, len(schedule), state.history.stride(0),
        STABILITY=len(state.history), POSITIONS=triton.next_power_of_2(L), COLUMNS=32, num_warps=16,
        **chained(state.canvas.device),
    )  # fmt: skip
