"""Fused dequantize-GEMM kernels for DiffusionGemma: FP8, NVFP4 and INT8, dense and grouped."""
