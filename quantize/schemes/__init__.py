"""Quantization schemes: their records, their arithmetic, and GPTQ, which chooses codes and scales."""
