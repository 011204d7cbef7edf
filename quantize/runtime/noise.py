"""Sampling noise as a function of (sample seed, canvas, denoising step, position).

Philox4x32-10 (Salmon et al., SC 2011; Random123) is a keyed bijection of a 128-bit counter:

    key     = the sample's seed (64 bits, low word first)
    counter = (position in the canvas, denoising step, canvas index, 0)

so every draw has an address. A sample's noise does not depend on what else is in its batch, on the
number of processes, or on a resumed run, and BF16 and quantized runs with equal seeds meet the same
noise (common random numbers). Of the four 32-bit words, word 0 samples a token by inverse CDF, word 1
is its replacement when the token is not accepted; step 0 holds the initial canvas. Plain int64
tensor arithmetic: the same bits on any device.

`ReferenceNoise` draws what transformers' `generate()` draws from torch's global generator, in the
same order, for parity tests. It has no addresses: it works only while no row leaves the batch.
"""

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Return Philox4x32-10 of 32-bit words held in int64 tensors that broadcast: [..., 4]."""
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


def uniforms(seeds: Tensor, canvas: int | Tensor, step: int | Tensor, length: int) -> Tensor:
    """Return the noise of one denoising step: [B, length, 2] float32 in [0, 1).

    Args:
        seeds: [B] int64, one seed a sample.
        canvas: index of the canvas, from 0; [B, 1] when the samples are at different ones.
        step: denoising step, from 1; 0 is the initial canvas; [B, 1] likewise.
        length: canvas length.
    """
    position = torch.arange(length, device=seeds.device)[None, :]
    zero = torch.zeros_like(position)
    counter = (position, zero + step, zero + canvas, zero)  # [1 or B, length] each
    key = (seeds[:, None] & MASK32, (seeds[:, None] >> 32) & MASK32)
    words = philox(counter, key)[..., :2]
    return (words >> 8).to(torch.float32) * 2.0**-24  # 24 bits: exact in float32, never 1


def sample_by_inverse_cdf(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes `u`.

    Args:
        probabilities: [..., V] float32; need not sum to exactly 1.
        u: [...] in [0, 1).

    Returns:
        [...] int64. A token of probability 0 is never returned.
    """
    cdf = probabilities.cumsum(-1)
    total = cdf[..., -1:]
    token = torch.searchsorted(cdf, u[..., None] * total, right=True)
    # u * total may round up to total; the first index that reaches it has a probability above 0.
    return torch.minimum(token, torch.searchsorted(cdf, total.contiguous())).squeeze(-1)


class CounterNoise:
    """Addressed noise: `rows` are indices into `seeds`.

    Args:
        seeds: [B] int64.
        first: [B] canvases that each sample has behind it, when it did not begin with this batch;
            a canvas' index is counted from there.
    """

    rows_may_leave = True

    def __init__(self, seeds: Tensor, first: Tensor | None = None) -> None:
        self.seeds = seeds
        self.first = torch.zeros_like(seeds) if first is None else first

    def _uniforms(self, canvas: int, step: int | Tensor, rows: Tensor, length: int) -> Tensor:
        step = step[:, None] if isinstance(step, Tensor) else step
        return uniforms(self.seeds[rows], self.first[rows, None] + canvas, step, length)

    def initial_canvas(self, canvas: int, rows: Tensor, length: int, vocab: int) -> Tensor:
        """Return uniformly random tokens [B, length]."""
        return (self._uniforms(canvas, 0, rows, length)[..., 1] * vocab).long()

    def draw(
        self, probabilities: Tensor, canvas: int, step: int | Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (tokens sampled from `probabilities` [B, L, V], replacement tokens), both [B, L]."""
        _, length, vocab = probabilities.shape
        u = self._uniforms(canvas, step, rows, length)
        return sample_by_inverse_cdf(probabilities, u[..., 0].contiguous()), (
            u[..., 1] * vocab
        ).long()


class ReferenceNoise:
    """transformers' noise: torch's global generator, multinomial then randint at each step."""

    rows_may_leave = False

    def initial_canvas(self, canvas: int, rows: Tensor, length: int, vocab: int) -> Tensor:
        """Return uniformly random tokens [B, length]."""
        return torch.randint(0, vocab, (len(rows), length), device=rows.device)

    def draw(
        self, probabilities: Tensor, canvas: int, step: int | Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (tokens sampled from `probabilities` [B, L, V], replacement tokens), both [B, L]."""
        batch, length, vocab = probabilities.shape
        sampled = torch.multinomial(probabilities.view(-1, vocab), 1).view(batch, length)
        return sampled, self.initial_canvas(canvas, rows, length, vocab)


Noise = CounterNoise | ReferenceNoise
