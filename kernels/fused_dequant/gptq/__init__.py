"""GPTQ's kernels: rounding with compensation, and sums for Hessians."""
