"""GPUs by name, with figures that their makers state, and nobody measured here.

Where each figure was looked up: docs/gpus.md, What makers state.
"""

from typing import NamedTuple

PCIE4, PCIE5, C2C = 31.5, 63.0, 450.0  # GB/s one way, of 16 lanes; NVLink between Grace and its GPU


class Figures(NamedTuple):
    """What a GPU's maker states of it. Rates are of dense products."""

    name: str
    capability: tuple[int, int]  # compute capability
    memory: float  # GB
    copy: float  # TB/s of memory bandwidth
    bf16: float  # TFLOP/s, summed in float32
    eight: float  # TFLOP/s in FP8 and INT8
    link: float  # GB/s from the host, one way
    fp4: float = 0  # TFLOP/s in NVFP4 (W4A4); 0 if not looked up
    ran: bool = False  # whether the kernels and the runtime have run on one


KNOWN_GPUS = {
    "a100": Figures("A100", (8, 0), 80, 2.039, 312, 624, PCIE4),
    "a6000": Figures("RTX A6000", (8, 6), 48, 0.768, 154.8, 309.7, PCIE4),
    "rtx3090": Figures("RTX 3090", (8, 6), 24, 0.936, 71, 284, PCIE4),
    "l40s": Figures("L40S", (8, 9), 48, 0.864, 362, 733, PCIE4),
    "rtx4090": Figures("RTX 4090", (8, 9), 24, 1.008, 165, 330, PCIE4),
    "rtx4080": Figures("RTX 4080", (8, 9), 16, 0.717, 97, 195, PCIE4),
    "h100": Figures("H100", (9, 0), 80, 3.35, 989, 1979, PCIE5, ran=True),
    "h100pcie": Figures("H100 PCIe", (9, 0), 80, 2.0, 756, 1513, PCIE5),
    "h200": Figures("H200", (9, 0), 141, 4.8, 989, 1979, PCIE5, ran=True),
    "gh200": Figures("GH200", (9, 0), 96, 4.0, 989, 1979, C2C),
    "b200": Figures("B200", (10, 0), 180, 8.0, 2250, 4500, PCIE5, 9000),
    "b300": Figures("B300", (10, 3), 288, 8.0, 2250, 4500, PCIE5),
    "gb300": Figures("GB300", (10, 3), 288, 8.0, 2250, 4500, C2C),
    "dgxstation": Figures("DGX Station", (10, 3), 288, 8.0, 2250, 4500, C2C),
    "rtxpro6000": Figures("RTX PRO 6000", (12, 0), 96, 1.792, 504, 1007, PCIE5, 2015),
    "rtx5090": Figures("RTX 5090", (12, 0), 32, 1.792, 209, 419, PCIE5, 1676),
    "rtx5080": Figures("RTX 5080", (12, 0), 16, 0.96, 112, 225, PCIE5),
    # Its maker states 31 TFLOP/s in float32; the rates of products follow by the RTX 5090's ratio.
    # Host and GPU share their memory, so streaming reads from it and writes to it.
    "spark": Figures("DGX Spark", (12, 1), 128, 0.273, 62, 124, 136, 500),
}
