"""Activation modes: how a quantized model rounds the inputs of its matrix products, by name.

  none        activations stay BF16: only weights are quantized
  per_expert  as servers round: for FP8 and INT8 weights to 8 bits, with one scale per token; for NVFP4
              weights to e2m1 under calibrated global scales, one per expert (W4A4)
  per_layer   as per_expert, but all experts of a layer use the scale of their widest range. vLLM does
              this on Blackwell, whose FP4 units multiply; other devices multiply rounded rows in BF16
  fp8         NVFP4 and NVFP4A16 run as W4A8: a weight is e4m3(e2m1 * block scale / 8) * 8 / global
              scale, rows are e4m3, one scale per token. FP8, INT8: as per_expert. vLLM lacks this mode

If no mode is given, 8-bit weights multiply 8-bit rows, and NVFP4 weights multiply BF16 rows.
"""

from typing import Literal, get_args

ActivationMode = Literal["none", "per_expert", "per_layer", "fp8"]
ACTIVATION_MODES: tuple[ActivationMode, ...] = get_args(ActivationMode)
