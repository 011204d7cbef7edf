"""The denoising runtime: block-diffusion generation with counter-based noise.

`open` returns the engine of a checkpoint; `noise` (addressed random numbers) -> `sampler` (one step's
decisions on logits) -> an engine's passes -> canvases, batches, stopping.
"""

from quantize.runtime.batch import generate
from quantize.runtime.opening import open
from quantize.runtime.placement import Placement, sized
from quantize.runtime.sample import Sample
from quantize.runtime.sampler import Sampler, StepRecord

__all__ = ["Placement", "Sample", "Sampler", "StepRecord", "generate", "open", "sized"]
