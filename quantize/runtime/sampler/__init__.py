"""The sampler: its settings, the sample that it makes, and tokens that are known beforehand."""
