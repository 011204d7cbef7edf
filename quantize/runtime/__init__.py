"""The denoising runtime: block-diffusion generation with counter-based noise."""
