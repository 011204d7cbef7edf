"""Weights as products read them: layouts of each scheme, and launch configurations.

`layout_for` decides on a layout, `layouts` names its kernel, and `weight` has the class and `build`.
"""

from fused_dequant.weights.choose import layout_for, target_of
from fused_dequant.weights.weight import (
    Weight,
    bf16,
    build,
    dequantize,
    require,
)
