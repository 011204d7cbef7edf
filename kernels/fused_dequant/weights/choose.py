"""Chooses the layout of a weight, and with it the kernel that multiplies: here and nowhere else.

The choice depends on the scheme on disk, the activation mode, the GPU, and which kernels failed their
test (`dispatch.distrusted`). `PREFERRED` has the layouts of each scheme and mode, the fastest first:
the first that fits is taken. A scheme or mode without an entry keeps the layout that it has on disk.
Activation modes are those of `quantize`: in `fp8`, NVFP4 weights multiply FP8 rows; in `per_layer`,
they multiply rows of NVFP4 on FP4 units, and bf16 rows that `simulated` rounds so where there are none.
"""

from collections.abc import Collection

import torch

from fused_dequant.launch import dispatch
from fused_dequant.launch.targets import Capability, capability
from fused_dequant.weights.layouts import KERNELS

PREFERRED: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("nvfp4", None): ("nvfp4_fragments", "nvfp4"),
    ("nvfp4", "per_layer"): ("nvfp4_e2m1", "nvfp4_fragments", "nvfp4"),
    ("nvfp4", "fp8"): ("nvfp4_e4m3", "fp8"),
}
STORED = ("bf16", "fp8", "int8", "nvfp4", "mxfp4")  # schemes on disk; weights of any may be built


def layout_for(
    scheme: str,
    mode: str | None,
    target: Capability | None,
    distrusted: Collection[str] | None = None,
    *,
    dense: bool = False,
    whole: bool = True,
) -> str:
    """Return the layout, a key of KERNELS, of weights of `scheme` that are multiplied in `mode`.

    Args:
        scheme: as on disk, one of STORED; another key of KERNELS is returned as it is.
        mode: an activation mode; None if rows stay as they are.
        target: the GPU's capability; None for a CPU, where torch multiplies.
        distrusted: layouts that are not to be used; None means those that failed in this process.
        dense: whether the weight is of one Linear; else of experts.
        whole: whether N and K are multiples of 64, as tensor cores' fragments need.
    """
    failed = dispatch.distrusted if distrusted is None else distrusted
    *faster, plainest = preferred(scheme, mode)
    for layout in faster:
        kernel = KERNELS[layout]
        runs = target is not None and kernel.runs_on(target) and layout not in failed
        if runs and (whole or not kernel.in_fragments) and not (dense and kernel.experts_only):
            return layout
    return plainest


def preferred(scheme: str, mode: str | None) -> tuple[str, ...]:
    """Return the layouts that `layout_for` tries, the fastest first; the last fits everywhere."""
    return PREFERRED.get((scheme, mode)) or PREFERRED.get((scheme, None)) or (scheme,)


def made_of(layout: str) -> tuple[str, str | None]:
    """Return the scheme on disk and the mode for which weights get `layout`; KeyError if unknown."""
    if layout in STORED:
        return layout, None
    return next(asked for asked, layouts in PREFERRED.items() if layout in layouts)


def plainer(layout: str) -> bool:
    """Return whether another layout takes the place of `layout` if its kernel is distrusted."""
    return layout not in STORED


def target_of(device: torch.device) -> Capability | None:
    """Return the capability whose kernels run on a device, for `layout_for`; None for a CPU."""
    return None if device.type == "cpu" else capability(device)
