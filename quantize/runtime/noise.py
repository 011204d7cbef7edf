"""The streams that modules draw from: transformers', or addressed noise (`fused_dequant.canvas`).

Philox4x32-10 (Salmon et al., SC 2011; Random123) is a keyed bijection of a 128-bit counter:

    key     = the sample's seed (64 bits, low word first)
    counter = (position in the canvas, denoising step, canvas index, 0)

so every draw has an address. A sample's noise does not depend on what else is in its batch, on the
number of processes, or on a resumed run, and BF16 and quantized runs with equal seeds meet the same
noise (common random numbers). Of the four 32-bit words, word 0 samples a token by inverse CDF, word 1
is its replacement when the token is not accepted; step 0 holds the initial canvas. The arithmetic is
plain int64, so the bits are the same on any device.

`ReferenceNoise` draws what transformers' `generate()` draws from torch's global generator, in the
same order, for parity tests. It has no addresses: it works only while no row leaves the batch.
"""

import torch
from fused_dequant.canvas import sample_by_inverse_cdf, uniforms
from torch import Tensor


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
        return uniforms(self.seeds[rows], self.first[rows] + canvas, step, length)

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
