"""Activation modes: how a quantized model rounds the inputs of its matrix products, by name.

  none        activations stay BF16: only weights are quantized
  per_expert  as servers round: with FP8 and INT8 weights to 8 bits, a scale a token; with NVFP4 to e2m1
              under calibrated global scales (W4A4), one for each expert
  per_layer   the same, but a layer's experts all use the scale of the widest range among them, as vLLM
              does on Blackwell. FP4 units multiply there; other devices multiply rounded rows in BF16
  fp8         NVFP4 and NVFP4A16 as W4A8: a weight is e4m3(e2m1 * block scale / 8) * 8 / global scale,
              rows are e4m3 with a scale a token. FP8 and INT8 as in per_expert. vLLM does not do this

Where no mode is given, 8-bit weights multiply 8-bit rows, and NVFP4 weights multiply BF16 rows.
"""

from typing import Literal, get_args

ActivationMode = Literal["none", "per_expert", "per_layer", "fp8"]
ACTIVATION_MODES: tuple[ActivationMode, ...] = get_args(ActivationMode)
