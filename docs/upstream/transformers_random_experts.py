"""A quantized DiffusionGemma loads in transformers without an error, and its experts are random.

    pip install -e . && python docs/upstream/transformers_random_experts.py

The program writes the bundled model in FP8 as llm-compressor would, with Linears for each expert. It
loads the folder by the Auto class, and compares each tensor with the dequantized file.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
import transformers

import quantize

with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch, "fp8")
    quantize.convert(None, folder, "fp8_dynamic")
    right = quantize.load(folder, dtype=torch.float32).state_dict()
    load = partial(transformers.AutoModelForMultimodalLM.from_pretrained, dtype=torch.float32)
    runs = [load(folder).state_dict() for _ in range(2)]

print(f"transformers {transformers.__version__}, torch {torch.__version__}")
for name in (name for name in right if ".layers.0." in name and "experts" in name):
    if not all(name in run for run in runs):
        print(f"{name}: not among what transformers loaded")
        continue
    one, two = (run[name].float() for run in runs)
    far = ((one - right[name]).norm() / right[name].norm()).item()
    print(
        f"{name}: {far:.3f} of its norm away from the file; two loads equal: {torch.equal(one, two)}"
    )
