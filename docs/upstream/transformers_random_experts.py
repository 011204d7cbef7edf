"""A quantized DiffusionGemma loads in transformers without an error, and its experts are random.

    pip install -e . && python docs/upstream/transformers_random_experts.py

The program writes the bundled model in FP8 and in NVFP4 as llm-compressor would, with Linears for each
expert. It loads each folder by the Auto class, twice, and compares tensors with the dequantized file.
Then it does so again after `import quantize.hf`. It also prints the global scales of NVFP4's experts,
by whose factor experts are wrong where they are dequantized without (transformers' issue 48371).
"""

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

import quantize
from quantize.checkpoints.reader import Checkpoint


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model that the Auto class makes of a folder, in float32."""
    auto: Any = transformers.AutoModelForMultimodalLM
    return auto.from_pretrained(folder, dtype=torch.float32).state_dict()


def compare(folder: Path, right: dict[str, torch.Tensor]) -> None:
    """Print how far the first layer's experts are from the file, or what transformers raised."""
    try:
        one, two = load(folder), load(folder)
    except AttributeError as error:
        print(f"  {type(error).__name__}: {error}")
        return
    for name in (name for name in right if "decoder.layers.0.experts" in name):
        far = ((one[name] - right[name]).norm() / right[name].norm()).item()
        same = torch.equal(one[name], two[name])
        print(f"  {name}: {far:.3f} of its norm away from the file; two loads equal: {same}")
    kept = {name: one[name].float() for name in right if name in one}
    equal = sum(torch.equal(kept[name], right[name]) for name in kept)
    print(f"  {equal} of {len(right)} tensors are those of the file")


print(f"transformers {transformers.__version__}, torch {torch.__version__}")
with tempfile.TemporaryDirectory() as scratch:
    folders = {recipe: Path(scratch, recipe) for recipe in ("fp8_dynamic", "nvfp4a16")}
    for recipe, folder in folders.items():
        quantize.convert(None, folder, recipe)
    stored = Checkpoint.open(folders["nvfp4a16"])
    scales = [
        stored.read(name).item() for name in stored.tensors
        if "experts" in name and name.endswith("weight_global_scale")
    ]  # fmt: skip
    print(f"global scales of the experts in NVFP4: {min(scales):,.0f} to {max(scales):,.0f}")
    tensors = {
        recipe: quantize.load(folder, dtype=torch.float32).state_dict()
        for recipe, folder in folders.items()
    }
    for title in ("alone", "with quantize.hf"):
        for recipe, folder in folders.items():
            print(f"{recipe}, transformers {title}:")
            compare(folder, tensors[recipe])
        import_module("quantize.hf")
