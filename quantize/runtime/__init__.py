"""The denoising runtime: block-diffusion generation with counter-based noise.

`open` returns the engine of a checkpoint; `noise` (addressed random numbers) -> `sampler` (one step's
decisions on logits) -> an engine's passes -> canvases, batches, stopping.
"""

from quantize.runtime.batch import generate
from quantize.runtime.opening import open, placed
from quantize.runtime.sample import Sample
from quantize.runtime.sampler import Sampler, StepRecord

__all__ = ["Sample", "Sampler", "StepRecord", "generate", "open", "placed"]
