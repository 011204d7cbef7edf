"""The denoising runtime: block-diffusion generation with counter-based noise.

`noise` (addressed random numbers) -> `sampler` (one step's decisions on logits) -> `model` (encoder
and decoder passes) -> `generate` (canvases, batches, stopping).
"""

from quantize.runtime.modules.generate import generate
from quantize.runtime.sample import Sample
from quantize.runtime.sampler import Sampler, StepRecord

__all__ = ["Sample", "Sampler", "StepRecord", "generate"]
