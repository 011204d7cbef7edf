"""The denoising runtime: block-diffusion generation with counter-based noise.

`open` loads a checkpoint and returns its engine; `sampler` has the settings of denoising steps;
`batch` and `engine` generate whole answers.
"""

from quantize.runtime.batch import StepRecord, generate
from quantize.runtime.opening import open
from quantize.runtime.placement import Placement, sized
from quantize.runtime.sample import Sample
from quantize.runtime.sampler import Sampler

__all__ = ["Placement", "Sample", "Sampler", "StepRecord", "generate", "open", "sized"]
