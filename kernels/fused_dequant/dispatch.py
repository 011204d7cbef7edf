"""Where the kernels run: on a GPU, and in tests where Triton interprets them.

Nothing that a CPU needs imports triton: macOS and Windows have none.
"""

import torch

# Tests set it: Triton's interpreter computes bf16 wrongly without their repairs.
interpreted = False


def launches(device: torch.device) -> bool:
    """Return whether operations on tensors of `device` launch kernels; elsewhere torch computes."""
    return interpreted or device.type != "cpu"
