"""Kernels that multiply activations by weights, dense and grouped by expert."""
