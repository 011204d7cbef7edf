"""Decides where the kernels run: on a GPU, and in tests where Triton interprets them.

No module that a CPU needs imports triton, which macOS and Windows lack.
"""

import torch

# Tests set it: Triton's interpreter computes bf16 wrongly without their repairs.
interpreted = False


def launches(device: torch.device) -> bool:
    """Whether operations on tensors of `device` launch kernels; elsewhere torch computes."""
    return interpreted or device.type != "cpu"
