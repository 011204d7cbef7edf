"""The engine over the fused kernels: weights stay quantized, steps are CUDA graphs."""
