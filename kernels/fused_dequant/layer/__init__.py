"""Kernels between a layer's products: norms, residual sums and the router."""
