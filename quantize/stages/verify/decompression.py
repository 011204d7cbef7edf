"""Compares our dequantized weights, bit for bit, with compressed-tensors' decompression.

Of a source tensor, at least 16 Linears (or all) are compared in all rows, others in ROWS rows each.
For NVFP4 on a CPU compressed-tensors takes nine times as long as `schemes.rounding`. GPU launches
cost time, so one torch call takes rows of several Linears, each row with its Linear's global scale.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantize.checkpoints.layout import ConfigSchemes
from quantize.schemes.records import INPUT_SCALES
from quantize.schemes.rounding import blocks

WHOLE_PER_TENSOR = 16  # least number of a source tensor's Linears that are compared in all rows
ROWS = 8  # how many rows of each of the tensor's other Linears are compared


class Decompressor:
    """Decompresses Linears with compressed-tensors, by a config.json in that library's format."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config["quantization_config"]
        self._schemes = ConfigSchemes(self._config)

    @cached_property
    def _library(self) -> tuple[Any, Any]:
        """Compressors and the config's groups; the import takes seconds, while other threads work."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        groups = QuantizationConfig.model_validate(self._config).config_groups
        return BaseCompressor.get_value_from_registry, groups

    def weight(self, group: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return compressed-tensors' BF16 weights [R, in] for R rows of Linears of one config group.

        `tensors` maps suffix -> stored values of the rows, [R, ...]; global scales are [R, 1, 1].
        """
        compressor, groups = self._library
        settings = groups[group]
        compressor_of = compressor(settings.format or self._config["format"])
        return compressor_of.decompress(dict(tensors), settings)["weight"]

    def alike(
        self,
        modules: Sequence[str],
        compared: Sequence[slice],
        tensors: Mapping[str, Tensor],
        dequantized: Tensor,
    ) -> Tensor:
        """Return bool [n]: whether each Linear's rows `compared`, decompressed, equal ours bit for bit.

        `tensors` maps suffix -> stored values [n, ...]; `dequantized` are ours, BF16 [n, out, in].
        """
        device = dequantized.device
        wrong = torch.zeros(len(modules), dtype=torch.int32, device=device)  # rows of each
        groups: dict[str, dict[int, slice]] = defaultdict(dict)
        for index, (module, rows) in enumerate(zip(modules, compared, strict=True)):
            groups[str(self._schemes.group_of(module))][index] = rows
        for group, chosen in groups.items():
            numbers = np.arange(dequantized.shape[1])
            places = [index * len(numbers) + numbers[rows] for index, rows in chosen.items()]
            at = torch.from_numpy(np.concatenate(places)).to(device)  # in [n * out, in]
            expected, of_row = _rows(dequantized, at), at // len(numbers)
            stored = {  # a scale of a whole matrix is repeated for each of its rows
                suffix: _rows(tensor, at) if tensor.dim() == 3 else tensor[of_row][:, :, None]
                for suffix, tensor in tensors.items()
                if suffix not in INPUT_SCALES
            }
            equal = [
                _equal_rows(
                    self.weight(group, {s: t[rows] for s, t in stored.items()}), expected[rows]
                )
                for rows in blocks(expected)
            ]
            wrong.index_add_(0, of_row, torch.cat(equal).logical_not().int())
        return wrong == 0


def compared_rows(index: int, modules: int, out: int) -> slice:
    """Return the rows of Linear `index` to compare; its tensor has `modules` Linears of `out` rows."""
    if index % max(1, modules // WHOLE_PER_TENSOR) == 0:
        return slice(0, out)
    start = index * ROWS % out
    return slice(start, start + ROWS)


def _rows(tensor: Tensor, at: Tensor) -> Tensor:
    """Return the rows `at` of [n, out, ...], numbered 0 .. n * out - 1: [R, ...]."""
    rows = tensor.view(torch.uint8).flatten(0, 1)  # not every operation takes 8-bit floats
    return (rows if len(at) == len(rows) else rows.index_select(0, at)).view(tensor.dtype)


def _equal_rows(decompressed: Tensor, dequantized: Tensor) -> Tensor:
    """Return bool [R]: whether dtype and bits of each row are the same."""
    if decompressed.dtype != dequantized.dtype or decompressed.shape != dequantized.shape:
        return torch.zeros(len(dequantized), dtype=torch.bool, device=dequantized.device)
    return (decompressed.contiguous().view(torch.int16) == dequantized.view(torch.int16)).all(1)
