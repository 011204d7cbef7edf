"""The weights on their device, still quantized: read, packed for the kernels, and streamed."""
