"""Weights as products read them: layouts of each scheme, and launch configurations.

`weight` has the class and `build`, which callers take from here; `layouts` names each scheme's kernel.
"""

from fused_dequant.weights.weight import (
    Weight,
    bf16,
    build,
    dequantize,
    in_fragments,
    require,
)
