"""Quantize DiffusionGemma to FP8 or NVFP4, and prove that it still thinks.

The pipeline reads top to bottom as `quantize --help` lists it: plan, calibrate, convert, verify,
fidelity, evaluate, report, push. docs/structure.md names each module in one sentence.
"""

__version__ = "0.1.0"
