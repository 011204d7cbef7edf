"""What tests and benchmarks share: tiny models, oracles, drivers, and the tools of `make`."""
