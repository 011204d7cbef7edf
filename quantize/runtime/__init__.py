"""The denoising runtime: block-diffusion generation with counter-based noise.

`open` loads a checkpoint and returns its engine. Below it, `engine` denoises, `record` stores what a
run read, `model` is the text stack, and `weights` are on their device. `gpu`, `sampler` and `prompt`
import none of these.
"""

from quantize.runtime.engine.generate import StepRecord, generate
from quantize.runtime.gpu.placement import Placement, sized
from quantize.runtime.opening import open
from quantize.runtime.sampler.sample import Sample
from quantize.runtime.sampler.sampler import Sampler

__all__ = ["Placement", "Sample", "Sampler", "StepRecord", "generate", "open", "sized"]
