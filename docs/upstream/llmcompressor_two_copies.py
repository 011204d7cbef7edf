"""llm-compressor quantizes DiffusionGemma's tied encoder and decoder separately, and saves both.

    pip install -e . && python docs/upstream/llmcompressor_two_copies.py

transformers ties the encoder's text layers to the decoder's: two modules of the model share a tensor of
the file. The program quantizes the bundled model without data (FP8_DYNAMIC) and saves it. In the result
it counts the first layer's tensors in encoder and decoder, and compares one of each with the source.
"""

import tempfile
from collections import ChainMap
from pathlib import Path

import llmcompressor
import torch
import transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file

from quantize.bundled import CHECKPOINT


def error(right: torch.Tensor, name: str) -> str:
    """Return |saved weight - source| / |source| as text; rounding to FP8 alone gives 0.03."""
    if f"{name}.weight" not in after:
        return "not in the file"
    found = after[f"{name}.weight"].float() * after[f"{name}.weight_scale"].float()
    return f"{((found - right.float()).norm() / right.float().norm()).item():.3f}"


with tempfile.TemporaryDirectory() as scratch:
    out = Path(scratch, "out")
    model = transformers.AutoModelForMultimodalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    recipe = QuantizationModifier(
        targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*router.*", "re:.*vision.*"]
    )
    oneshot(model=model, recipe=recipe, output_dir=str(out))
    before, after = (
        ChainMap(*map(load_file, folder.glob("*.safetensors"))) for folder in (CHECKPOINT, out)
    )

print(f"llmcompressor {llmcompressor.__version__}, transformers {transformers.__version__}")
DECODER, ENCODER = "model.decoder.layers.0", "model.encoder.language_model.layers.0"
for title, found in (("source", before), ("saved", after)):
    counts = [sum(name.startswith(f"{place}.") for name in found) for place in (DECODER, ENCODER)]
    print(f"{title}, layer 0: {counts[0]} tensors of the decoder, {counts[1]} of the encoder")
q = before[f"{DECODER}.self_attn.q_proj.weight"]
fused = before[f"{DECODER}.experts.gate_up_proj"][0]
gate = fused[: len(fused) // 2]
for place in (DECODER, ENCODER):
    print(f"{place}.self_attn.q_proj: {error(q, f'{place}.self_attn.q_proj')} of its norm away")
    print(f"{place}.experts.0.gate_proj: {error(gate, f'{place}.experts.0.gate_proj')}")
