"""The engine on the fused kernels: weights stay quantized, and steps are CUDA graphs."""
