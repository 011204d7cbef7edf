"""The model as transformers computes it, driven by our sampler: what tests compare the engine with."""
