"""Activation modes: what a quantized model's products read, by name.

  none        weights alone: activations stay BF16
  per_expert  as servers multiply: FP8 and INT8 with a scale a token, NVFP4's inputs in e2m1 under their
              calibrated global scales (W4A4), each expert's own
  per_layer   the same, with the widest of a layer's experts for all of them, as vLLM does on Blackwell;
              FP4 units multiply on Blackwell; elsewhere rows are rounded so and multiplied in BF16
  fp8         NVFP4 and NVFP4A16 as W4A8: a weight is e4m3(e2m1 * block scale / 8) * 8 / global scale,
              rows are e4m3 with a scale a token; FP8 and INT8 as always. vLLM does not do so

Without a mode the kernels multiply 8-bit rows where the weights have 8 bits, BF16 rows with NVFP4.
"""

from typing import Literal, get_args

ActivationMode = Literal["none", "per_expert", "per_layer", "fp8"]
ACTIVATION_MODES: tuple[ActivationMode, ...] = get_args(ActivationMode)
