"""Loads a checkpoint folder as a DiffusionGemma model; nothing loads unless every key fits.

transformers' own from_pretrained skips per-expert weights, fills the experts with random numbers and
only warns; it cannot load NVFP4 at all. Here names, dtypes and shapes on disk are first compared with
what config.json calls for. Then the tensors are dequantized to BF16 and stacked to fused experts, and
transformers builds the model from them. A missing or unexpected key that it reports is an error.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantize.checkpoints.from_transformers import DiffusionGemmaForBlockDiffusion, logging
from quantize.checkpoints.layout import (
    bf16_layout,
    check_layout,
    model_config,
    module_tensors,
    parameters,
    schemes_by_module,
)
from quantize.checkpoints.reader import FIX, Checkpoint
from quantize.checkpoints.targets import linear_modules
from quantize.errors import InputError, ResourceError
from quantize.host.resources import free_memory
from quantize.schemes.records import TENSOR_SCALES, Scheme
from quantize.schemes.rounding import all_finite, sound_scales


def load(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> DiffusionGemmaForBlockDiffusion:
    """Return a BF16 or quantized checkpoint as a transformers model in evaluation mode, on `device`.

    The folder has Google's BF16 layout or a quantized layout that `check_layout` knows. Quantized
    weights are dequantized to BF16; then all weights are cast to `dtype`.

    Raises:
        InputError: tensors are missing, extra, misshapen or fail `read_finite`; file and key are named.
        ResourceError: the model is larger than the free memory of `device`.
    """
    checkpoint = Checkpoint.open(folder)
    check_layout(checkpoint)
    _check_memory(checkpoint, dtype, device)
    logging.disable_progress_bar()  # it would interrupt the caller's own bar
    loaded: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(
        None,
        config=model_config(checkpoint.config),
        state_dict=lazy_weights(checkpoint),
        output_loading_info=True,
        dtype=dtype,
        device_map={"": device},
    )
    model, keys = loaded
    for kind, names in keys.items():
        if names:
            raise InputError(
                f"{folder}: transformers reports {kind}: {sorted(map(str, names))[:3]}"
            )
    model.eval()
    return model


def _check_memory(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
    """Check that the dequantized weights, the least that loading takes, fit into free memory."""
    needed = parameters(checkpoint.config) * dtype.itemsize
    free = free_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise ResourceError(
            f"{checkpoint.folder}: {needed / 1e9:.1f} GB of weights as {str(dtype)[6:]}, and {device} "
            f"has {free / 1e9:.1f} GB free; use a machine with more memory"
        )


class _Lazy:
    """A tensor that is read when transformers slices it, so that the host holds only a few tensors."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._read()


def lazy_weights(checkpoint: Checkpoint) -> dict[str, _Lazy]:
    """Return BF16 name -> lazy tensor: slicing it reads, dequantizes and fuses the stored tensors."""
    schemes = schemes_by_module(checkpoint.config)
    return {
        name: _Lazy(partial(read_weight, checkpoint, name, spec.shape, schemes))
        for name, spec in bf16_layout(checkpoint.config).items()
    }


def read_weight(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], schemes: dict[str, Scheme]
) -> torch.Tensor:
    """Return tensor `name` [*shape] of the BF16 layout; dequantize it if `schemes` has its Linears."""
    modules = [module for module in linear_modules(name, shape) if module in schemes]
    if not modules:
        return read_finite(checkpoint, name)
    parts = [read_modules(checkpoint, [module], schemes[module])[0] for module in modules]
    return torch.stack(parts).view(shape) if len(shape) == 3 else parts[0]


def read_modules(
    checkpoint: Checkpoint,
    modules: Sequence[str],
    scheme: Scheme,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return n Linears' dequantized weights, BF16 [n, out, in], on `device`; all have one shape.

    Run `check_layout` first.
    """
    tensors: dict[str, torch.Tensor] = {}
    for first in module_tensors(checkpoint, modules[0]):
        suffix = first.removeprefix(f"{modules[0]}.")
        stacked = _read_finite(checkpoint, [f"{module}.{suffix}" for module in modules])
        tensors[suffix] = (stacked[:, None, None] if stacked.dim() == 1 else stacked).to(device)
    return scheme.dequantize(tensors)


def read_finite(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return a tensor; raise InputError if a value is not finite, or if a scale is too low.

    A global or input scale must be above 0; an e4m3 block scale must not be negative.
    """
    return _read_finite(checkpoint, [name])[0]


def _read_finite(checkpoint: Checkpoint, names: Sequence[str]) -> torch.Tensor:
    """Return tensors of one kind, stacked, with the checks of `read_finite`."""
    stacked = checkpoint.read_stacked(names)
    if _fault(names[0], stacked) is not None:
        for name, tensor in zip(names, stacked, strict=True):
            if (fault := _fault(name, tensor)) is not None:
                raise InputError(f"{checkpoint.tensors[name].file}: tensor {name!r} {fault}")
    return stacked


def _fault(name: str, tensor: torch.Tensor) -> str | None:
    if not all_finite(tensor):
        return f"holds NaN or infinity; {FIX}"
    if name.endswith(".weight_scale") and not sound_scales(tensor):
        return f"has negative or NaN scales; {FIX}"
    if name.endswith(TENSOR_SCALES) and not (tensor > 0).all():
        return f"is not above 0; {FIX}"
    return None


def read_input_schemes(checkpoint: Checkpoint) -> dict[str, tuple[Scheme, float | None]]:
    """Return quantized Linear -> (scheme, input global scale); the scale is None if not calibrated."""
    return {
        module: (scheme, _input_global_scale(checkpoint, module) if scheme.calibrated else None)
        for module, scheme in schemes_by_module(checkpoint.config).items()
    }


def _input_global_scale(checkpoint: Checkpoint, module: str) -> float:
    """Read the calibrated scale of NVFP4 activations; ModelOpt stores its inverse."""
    inverse = f"{module}.input_scale"
    if inverse in checkpoint.tensors:
        return 1 / read_finite(checkpoint, inverse).item()
    return read_finite(checkpoint, f"{module}.input_global_scale").item()
