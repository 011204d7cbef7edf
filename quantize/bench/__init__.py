"""Measures speed: of canvases, of one token at a time, and of kernels' launch configurations."""
