"""A canvas' denoising state, and one step of the sampler."""
