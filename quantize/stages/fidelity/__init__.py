"""The stage fidelity: the quantized model against BF16 on the same denoising steps."""
