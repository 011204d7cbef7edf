"""Compares our dequantized weights, bit for bit, with compressed-tensors' decompression.

16 Linears of a source tensor are compared as a whole and some rows of every other, since
compressed-tensors takes a CPU nine times as long for NVFP4 as `schemes.rounding`. Each call of
torch costs a GPU time, so one call gets rows of several Linears, each with its Linear's global scale.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoints.layout import ConfigSchemes
from quantize.schemes.records import INPUT_SCALES
from quantize.schemes.rounding import blocks

WHOLE_PER_TENSOR = 16  # Linears of a source tensor that are compared as a whole, spread over it
ROWS = 8  # rows that are compared of every other


class Decompressor:
    """Decompresses Linears with compressed-tensors, by a config.json in that library's format."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config["quantization_config"]
        self._schemes = ConfigSchemes(self._config)

    @cached_property
    def _library(self) -> tuple[Any, Any]:
        """Compressors, and the config's groups; the import takes seconds, while others work."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        groups = QuantizationConfig.model_validate(self._config).config_groups
        return BaseCompressor.get_value_from_registry, groups

    def weight(self, group: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return BF16 weights [R, in] of a config group's Linears as compressed-tensors reads them.

        `tensors` is what the rows have on disk, by suffix: [R, ...], global scales [R, 1, 1].
        """
        compressor, groups = self._library
        settings = groups[group]
        found = compressor(settings.format or self._config["format"])
        return found.decompress(dict(tensors), settings)["weight"]

    def alike(
        self,
        modules: Sequence[str],
        compared: Sequence[slice],
        tensors: Mapping[str, Tensor],
        mine: Tensor,
    ) -> Tensor:
        """Return for each Linear whether its `compared` rows have the same bits as ours: bool [n].

        `tensors` is what Linears have on disk, by suffix: [n, ...]; `mine` is BF16 [n, out, in].
        """
        found = torch.zeros(len(modules), dtype=torch.bool, device=mine.device)
        groups: dict[str, dict[int, slice]] = defaultdict(dict)
        for index, (module, rows) in enumerate(zip(modules, compared, strict=True)):
            groups[str(self._schemes.group_of(module))][index] = rows
        for group, chosen in groups.items():
            own = _rows(mine, chosen)
            counts = [len(range(*rows.indices(mine.shape[1]))) for rows in chosen.values()]
            of_row = torch.tensor(list(chosen)).repeat_interleave(torch.tensor(counts))
            of_row = of_row.to(own.device)
            stored = {  # a scale of a whole matrix is repeated for each of its rows
                suffix: _rows(tensor, chosen) if tensor.dim() == 3 else tensor[of_row][:, :, None]
                for suffix, tensor in tensors.items()
                if suffix not in INPUT_SCALES
            }
            equal = [
                _equal_rows(self.weight(group, {s: t[rows] for s, t in stored.items()}), own[rows])
                for rows in blocks(own)
            ]
            for index, rows in zip(chosen, torch.cat(equal).split(counts), strict=True):
                found[index] = rows.all()
        return found


def compared_rows(index: int, modules: int, out: int) -> slice:
    """Return the rows to compare of Linear `index` among a tensor's `modules`, each with `out` rows."""
    if index % max(1, modules // WHOLE_PER_TENSOR) == 0:
        return slice(0, out)
    start = index * ROWS % out
    return slice(start, start + ROWS)


def _rows(tensor: Tensor, chosen: Mapping[int, slice]) -> Tensor:
    parts = [tensor[index, rows] for index, rows in chosen.items()]
    if len(parts) == 1:
        return parts[0]
    if tensor.element_size() == 1:  # as bytes, since not every operation takes 8-bit floats
        return torch.cat([part.view(torch.uint8) for part in parts]).view(tensor.dtype)
    return torch.cat(parts)


def _equal_rows(theirs: Tensor, mine: Tensor) -> Tensor:
    """Return for each row whether dtype and bits are the same: bool [R]."""
    if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
        return torch.zeros(len(mine), dtype=torch.bool, device=mine.device)
    return (theirs.contiguous().view(torch.int16) == mine.view(torch.int16)).all(1)
