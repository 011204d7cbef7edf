"""The device: what its kernels can run, how fast it is, and what fits into its memory."""
