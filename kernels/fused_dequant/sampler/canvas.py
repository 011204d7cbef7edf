"""Canvases in torch: their denoising state, their random numbers, and a step of the sampler.

Without a GPU, `operations.sample` and `operations.accept` call this module. `sampling` describes
the sampler's rules, and how a random number follows from seed, canvas, step and position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Draw(NamedTuple):
    """What one denoising step drew at each position of B canvases; all fields are [B, L]."""

    sampled: Tensor  # int64, from softmax(logits / T)
    replacement: Tensor  # int64, drawn uniformly, used where `sampled` is not accepted
    argmax: Tensor  # int64, the most probable token; of equal ones, the lowest id
    entropy: Tensor  # f32, in nats

    @classmethod
    def join(cls, parts: Sequence["Draw"]) -> "Draw":
        """Return the draw of a whole batch from the draws of its parts, given in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))


class Rules(NamedTuple):
    """Limits in nats: the bound of `accepted`, and the mean entropy below which a canvas may stop."""

    entropy_bound: float
    confidence_threshold: float


@dataclass(frozen=True)
class Probabilities:
    """Memory for unnormalised probabilities: p / total is softmax(logits / T).

    p is bf16 [M, V], total f32 [M].
    """

    p: Tensor
    total: Tensor

    @classmethod
    def room(cls, logits: Tensor) -> "Probabilities":
        """Return uninitialised probabilities for logits [M, V]."""
        return cls(torch.empty_like(logits), torch.empty(len(logits), device=logits.device))

    def first(self, rows: int) -> "Probabilities":
        """Return the probabilities of the first `rows` rows, in the same memory."""
        return Probabilities(self.p[:rows], self.total[:rows])


@dataclass(frozen=True)
class CanvasState:
    """The denoising state of one canvas of L tokens in each of B sequences; `accept` updates it."""

    seeds: Tensor  # int64 [B]
    canvas_index: Tensor  # int64 [B], from 0
    step: Tensor  # int32 [B], number of the next step, from 1; fixed once a sequence has finished
    finished: Tensor  # bool [B], whether `stopped` has held for the sequence
    inverse_temperature: Tensor  # f32 [B, L], 1 / T of the last step, 0 before step 1
    canvas: Tensor  # int64 [B, L], tokens that the decoder reads next
    argmax: Tensor  # int64 [B, L], tokens that a commit would keep
    history: Tensor  # int64 [S, B, L], argmax of the last S (stability_threshold) steps, -1 if none
    accepted: Tensor  # bool [B, L], whether the last step accepted the position

    @classmethod
    def begin(cls, canvas: Tensor, seeds: Tensor, stability: int, index: int = 0) -> "CanvasState":
        """Return the state before step 1 of canvas number `index` with tokens int64 [B, L]."""
        B, device = len(canvas), canvas.device
        return cls(
            seeds=seeds,
            canvas_index=torch.full((B,), index, device=device),
            step=torch.ones(B, dtype=torch.int32, device=device),
            finished=torch.zeros(B, dtype=torch.bool, device=device),
            inverse_temperature=torch.zeros(canvas.shape, device=device),
            canvas=canvas.clone(),
            argmax=canvas.clone(),
            history=torch.full((stability, *canvas.shape), -1, device=device),
            accepted=torch.zeros(canvas.shape, dtype=torch.bool, device=device),
        )

    def part(self, sequences: slice | Tensor) -> "CanvasState":
        """Return the state of the given sequences; a slice shares memory, int64 indices make a copy."""
        tensors = {name: old[sequences] for name, old in vars(self).items() if name != "history"}
        return CanvasState(history=self.history[:, sequences], **tensors)


def sample(logits: Tensor, state: CanvasState, schedule: Tensor) -> Draw:
    """Draw one step's tokens in torch; `operations.sample` describes the arguments."""
    scaled = logits.float() / _temperature(state, schedule)[:, None, None]
    u = uniforms(state.seeds, state.canvas_index, state.step, logits.shape[1])
    sampled = sample_by_inverse_cdf(scaled.softmax(-1), u[..., 0].contiguous())
    replacement = (u[..., 1] * logits.shape[-1]).long()
    return Draw(sampled, replacement, scaled.argmax(-1), token_entropy(scaled))


def accept(draw, state, schedule, rules):
    """Update `state` after a step in torch; `operations.accept` describes the arguments."""
    s = state
    live = ~s.finished & (s.step <= len(schedule))
    taken = accepted(draw.entropy, rules.entropy_bound)
    after = {
        "accepted": taken,
        "canvas": torch.where(taken, draw.sampled, draw.replacement),
        "argmax": draw.argmax,
        "history": torch.cat([s.history, draw.argmax[None]])[1:],
        "inverse_temperature": 1 / _temperature(s, schedule)[:, None],
    }
    stop = stopped(s.history, draw.argmax, draw.entropy, rules.confidence_threshold)
    for name, new in after.items():
        old: Tensor = getattr(s, name)
        old.copy_(torch.where(live[:, None], new, old))
    s.finished.logical_or_(live & stop)
    s.step.add_(live.to(s.step.dtype))


def _temperature(state: CanvasState, schedule: Tensor) -> Tensor:
    """Return the temperature [B] of each sequence's step; past the last step, the last step's."""
    return schedule[state.step.clamp(max=len(schedule)).long() - 1]


def accepted(entropy: Tensor, bound: float) -> Tensor:
    """Return which positions are accepted, bool [B, L], by their entropy [B, L] in nats.

    A position is accepted if the entropies lower than its own, in its canvas, sum to at most `bound`.
    So the position of lowest entropy is always accepted.
    """
    ascending, order = entropy.sort(dim=-1, stable=True)
    lower = ascending.cumsum(-1) - ascending
    return torch.zeros_like(lower, dtype=torch.bool).scatter(-1, order, lower <= bound)


def stopped(history: Tensor, argmax: Tensor, entropy: Tensor, confidence: float) -> Tensor:
    """Return which sequences stop, bool [B]: those with a stable argmax and a low mean entropy.

    `argmax` int64 [B, L] must equal all of `history` [S, B, L], the S earlier argmaxes (S = 0: none).
    The mean of `entropy` [B, L] must be below `confidence`, both in nats.
    """
    stable = (history == argmax).all(-1).all(0)
    return stable & (entropy.mean(-1) < confidence)


def token_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) at each position, in nats: f32 [B, L] from [B, L, V]."""
    log_probabilities = logits.float().log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def sample_by_inverse_cdf(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the token int64 [...] at which the cumulative distribution passes `u` [...] in [0, 1).

    `probabilities` f32 [..., V] may have any sum; a token of probability 0 is never returned.
    """
    cdf = probabilities.cumsum(-1)
    total = cdf[..., -1:]
    token = torch.searchsorted(cdf, u[..., None] * total, right=True)
    # u * total may round up to total; the first index that reaches it has a probability above 0.
    return torch.minimum(token, torch.searchsorted(cdf, total.contiguous())).squeeze(-1)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Tensor:
    """Return the four words of Philox4x32-10 for counter and key: int64 [..., 4], with 32 bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The 64-bit product wraps around in int64; shifting and masking recover both halves.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK32) ^ c1 ^ k0,
            p1 & MASK32,
            ((p0 >> 32) & MASK32) ^ c3 ^ k1,
            p0 & MASK32,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def random_tokens(seeds: Tensor, canvas: int | Tensor, length: int, vocabulary: int) -> Tensor:
    """Return the uniform random tokens int64 [B, length] with which canvas number `canvas` begins."""
    return (uniforms(seeds, canvas, 0, length)[..., 1] * vocabulary).long()


def uniforms(seeds: Tensor, canvas: int | Tensor, step: int | Tensor, length: int) -> Tensor:
    """Return a denoising step's random numbers: f32 [B, length, 2] in [0, 1), of 24 bits each.

    The numbers are the first two words of Philox. The key of Philox is the sequence's seed, low word
    first (`seeds` is int64 [B]); the counter is (position, step, canvas, 0). Steps count from 1;
    step 0 draws the initial canvas. `canvas` and `step` are numbers, or integer tensors [B].
    """
    position = torch.arange(length, device=seeds.device)[None, :]
    zero = torch.zeros_like(position)
    one, two = (n[:, None].long() if isinstance(n, Tensor) else n for n in (step, canvas))
    key = (seeds[:, None] & MASK32, (seeds[:, None] >> 32) & MASK32)
    words = philox((position, zero + one, zero + two, zero), key)[..., :2]
    return (words >> 8).to(torch.float32) * 2.0**-24  # 24 bits: exact in float32, never 1
