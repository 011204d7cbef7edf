"""Quantization by llm-compressor's observers and compressed-tensors' compressors: the truth."""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

from quantize.schemes.records import Scheme
from tests.support.llm_compressor_oracle import llm_compressor

PRESETS = {"INT8_DYNAMIC": "INT8"}
FORMATS = {
    "FP8_DYNAMIC": "float-quantized",
    "INT8_DYNAMIC": "int-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
}


def preset(scheme: Scheme, observer: str = "memoryless_minmax") -> QuantizationScheme:
    found = preset_name_to_scheme(PRESETS.get(scheme.name, scheme.name), ["Linear"])
    found.weights.observer = observer
    return found


def oracle(
    scheme: Scheme, weights: list[torch.Tensor], observer: str = "memoryless_minmax"
) -> list[dict[str, torch.Tensor]]:
    """Quantize Linears that share a global scale with llm-compressor's observers and compressors."""
    args = preset(scheme, observer)
    kinds = llm_compressor("observers").Observer
    observers = [
        kinds.load_from_registry(observer, base_name="weight", args=args.weights) for _ in weights
    ]
    modules = []
    for weight in weights:
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        module.weight.data = weight
        modules.append(module)
    if scheme.name.startswith("NVFP4"):
        observers[0].fusion_handler.fuse(list(zip(observers, modules, strict=True)))
    for seen, weight in zip(observers, weights, strict=True):
        seen(weight)
    results = []
    for seen, weight in zip(observers, weights, strict=True):
        found = seen.get_qparams()
        state = {"weight": weight, "weight_scale": found["scale"].to(weight.dtype)}
        if found["global_scale"] is not None:
            state["weight_global_scale"] = found["global_scale"].float()
        compressor = BaseCompressor.get_value_from_registry(
            FORMATS.get(scheme.name, "nvfp4-pack-quantized")
        )
        compressed = compressor.compress(state, args)
        compressed["decompressed"] = compressor.decompress(compressed, args)["weight"]
        results.append(compressed)
    return results


def assert_same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    theirs = theirs.detach()
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def assert_equal_quantization(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]):
    for name, tensor in mine.items():
        assert_same_bits(tensor, theirs[name])
