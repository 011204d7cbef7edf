"""Activation modes: how a quantized model rounds the inputs of its matrix products, by name.

  none        activations (rows) stay BF16: only weights are quantized
  per_expert  activations are rounded as servers round. FP8, INT8 weights: to 8 bits, with one scale
              per token. NVFP4 weights: to e2m1, with one calibrated global scale per expert (W4A4)
  per_layer   as per_expert, but all experts of a layer share the scale of the widest range. vLLM does
              this on Blackwell, whose FP4 units multiply e2m1; other devices multiply rounded BF16 rows
  fp8         NVFP4 and NVFP4A16 run as W4A8: a weight is e4m3(e2m1 * block scale / 8) * 8 / global
              scale; rows are e4m3 with one scale per token. FP8, INT8: as per_expert. Not in vLLM

If no mode is given, 8-bit weights multiply 8-bit rows, and NVFP4 weights multiply BF16 rows. MXFP4A16
multiplies BF16 rows in every mode, NVFP4A16 in every mode but fp8.
"""

from typing import Literal, get_args

ActivationMode = Literal["none", "per_expert", "per_layer", "fp8"]
ACTIVATION_MODES: tuple[ActivationMode, ...] = get_args(ActivationMode)
