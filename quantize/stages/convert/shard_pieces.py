"""Makes the pieces of a quantized checkpoint: turns source bytes into output bytes.

Tensors become pieces in the order of the source; only Linears that servers fuse are put together:

  kept in BF16     one piece per tensor, copied some rows at a time
  fused experts    pieces of as many experts as suit the device, one Linear after the other. Gate and up
                   of an expert are adjacent in the source and share one global scale
  other Linears    one piece per Linear, or per matrix into which servers fuse Linears (q/k/v, gate/up):
                   fused Linears share a global scale. A full-attention layer has no v

The tensors of one Linear are adjacent in its piece: codes, scale, global scales.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from quantize.checkpoints.reader import DTYPES, FIX, Checkpoint, TensorInfo, TensorSpec
from quantize.checkpoints.shards import Piece
from quantize.checkpoints.targets import Target, fused_units, linear_shape, specs
from quantize.errors import InputError
from quantize.schemes.records import Scheme
from quantize.schemes.rounding import Observer, all_finite, global_scale
from quantize.stages.device import Device

# Limit on a weight to quantize: larger weights, rounded up, exceed BF16's largest number, 3.39e38.
LARGEST = 1e38
Layout = dict[str, TensorSpec]
# Called with a target, start and stop of a part's rows (experts), and the part's bytes, uint8 [n].
Look = Callable[[Target, int, int, torch.Tensor], object]


@dataclass(frozen=True)
class Quantizer:
    """Makes the pieces of one conversion."""

    source: Checkpoint  # the BF16 checkpoint
    observer: Observer  # name of the observer that finds the ranges of weights
    input_scales: Mapping[str, float]  # module -> input global scale, for NVFP4
    # Codes and scales from `round_weights`; None for rounding to nearest.
    rounded: Checkpoint | None = None
    # Where weights are quantized; every device makes the same bytes (see `convert`).
    device: Device = field(default_factory=Device)
    look: Look = lambda *_: None  # called by many threads, with each part once it is encoded

    def plan(self, targets: Sequence[Target]) -> list[Piece]:
        """Return the pieces of a plan, in the order of `targets`, without reading any weights.

        Raises:
            InputError: Linears that servers fuse have different schemes.
        """
        return [piece for unit in fused_units(targets) for piece in self._pieces(unit)]

    def _pieces(self, unit: list[Target]) -> Iterator[Piece]:
        scheme = _one_scheme(unit)
        if scheme is None:
            yield from (self._kept(target) for target in unit)
        elif len(unit[0].shape) == 3:
            yield from self._experts(unit[0], scheme)
        else:
            layout: Layout = {}
            for target in unit:
                layout |= _layout(target, scheme)
            yield Piece(layout, (partial(self._quantize_linears, unit, scheme),))

    def _kept(self, target: Target) -> Piece:
        info = self.source.tensors[target.name]
        runs = self.device.runs(info.shape[0], info.nbytes)
        tasks = tuple(partial(self._copy, target, start, stop) for start, stop in runs)
        return Piece({info.name: TensorSpec(info.dtype, info.shape)}, tasks)

    def _experts(self, target: Target, scheme: Scheme) -> Iterator[Piece]:
        # The Linears of an expert: gate and up, or down.
        per_expert = len(target.modules) // target.shape[0]
        for start, stop in self.device.runs(target.shape[0], target.bytes_before):
            layout = _layout(target, scheme, start * per_expert, stop * per_expert)
            yield Piece(layout, (partial(self._quantize_experts, target, scheme, start, stop),))

    def _copy(self, target: Target, start: int, stop: int) -> torch.Tensor:
        rows = self.source.read_rows(target.name, start, stop)
        if not all_finite(rows):
            raise _refused(self.source.tensors[target.name], f"in rows {start} to {stop - 1}")
        encoded = rows.flatten().view(torch.uint8)
        self.look(target, start, stop, encoded)
        return encoded

    def _quantize_experts(
        self, target: Target, scheme: Scheme, start: int, stop: int
    ) -> torch.Tensor:
        per_expert = len(target.modules) // target.shape[0]
        modules = target.modules[start * per_expert : stop * per_expert]
        read = self.source.read_rows(target.name, start, stop, pinned=self.device.pinned)
        rounded = self._read_rounded(target, scheme, modules)
        with self.device.turn:
            weight = self.device.take(read).unflatten(1, (per_expert, -1))  # [e, each, out, in]
            ranges = scheme.observe(weight, self.observer)
            if bad := _bad(ranges):
                info, where = self.source.tensors[target.name], f"in expert {start + bad[0]}"
                raise _refused(info, where, _unusable(ranges))
            shared = None
            if scheme.shares_global_scale:
                shared = global_scale([ranges.flatten(1, 2)]).repeat_interleave(per_expert, 0)
            one = weight.flatten(0, 1), ranges.flatten(0, 1)  # [e * each, out, in or groups]
            encoded = self.device.give(self._records(modules, scheme, *one, shared, rounded))
        self.look(target, start, stop, encoded)
        return encoded

    def _quantize_linears(self, unit: list[Target], scheme: Scheme) -> torch.Tensor:
        read = [self.source.read(target.name, pinned=self.device.pinned) for target in unit]
        rounded = [self._read_rounded(target, scheme, target.modules) for target in unit]
        with self.device.turn:
            weights = [self.device.take(weight)[None] for weight in read]  # [1, out, in] each
            ranges = [scheme.observe(weight, self.observer) for weight in weights]
            for target, observed in zip(unit, ranges, strict=True):
                if bad := _bad(observed[0]):
                    info = self.source.tensors[target.name]
                    raise _refused(info, f"in row {bad[0]}", _unusable(observed))
            shared = global_scale(ranges) if scheme.shares_global_scale else None
            records = [
                self._records(target.modules, scheme, weight, observed, shared, codes)
                for target, weight, observed, codes in zip(
                    unit, weights, ranges, rounded, strict=True
                )
            ]
            encoded = self.device.give(torch.cat(records))
        parts = encoded.split([target.bytes_after for target in unit])
        for target, part in zip(unit, parts, strict=True):
            self.look(target, 0, target.shape[0], part)
        return encoded

    def _read_rounded(
        self, target: Target, scheme: Scheme, modules: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return suffix -> codes or scales of `rounded`, [len(modules), ...]; {} if it is None."""
        if self.rounded is None:
            return {}
        shape, pinned = linear_shape(target.shape, target.modules), self.device.pinned
        return {
            suffix: self.rounded.read_stacked([f"{m}.{suffix}" for m in modules], pinned=pinned)
            for suffix in specs(scheme.compressed, *shape)
            if suffix != "input_global_scale"
        }

    def _records(
        self,
        modules: Sequence[str],
        scheme: Scheme,
        weight: torch.Tensor,
        ranges: torch.Tensor,
        shared: torch.Tensor | None,
        rounded: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the bytes of quantized weights [modules, out, in], module by module: uint8 [n]."""
        layout = specs(scheme.compressed, *weight.shape[1:])
        sizes = [spec.nbytes for spec in layout.values()]
        records = torch.empty((len(modules), sum(sizes)), dtype=torch.uint8, device=weight.device)
        columns = dict(zip(layout, records.split(sizes, dim=1), strict=True))
        tensors = {suffix: self.device.take(tensor) for suffix, tensor in rounded.items()}
        if not tensors:
            first, spec = next(iter(layout.items()))
            codes = columns.pop(first).view(DTYPES[spec.dtype]).unflatten(1, spec.shape)
            tensors = scheme.quantize(weight, ranges, shared, codes)  # which writes codes in place
        if scheme.calibrated:
            values = [[self.input_scales[module]] for module in modules]
            tensors["input_global_scale"] = ranges.new_tensor(values, dtype=torch.float32)
        for suffix, column in columns.items():
            column.copy_(tensors[suffix].flatten(1).view(torch.uint8))
        return records.flatten()


def _one_scheme(unit: list[Target]) -> Scheme | None:
    schemes: set[Scheme | None] = {target.scheme for target in unit}
    if len(schemes) > 1:
        names = ", ".join(f"{target.name} {target.scheme or 'BF16'}" for target in unit)
        raise InputError(f"servers fuse these into one matrix, so they need one scheme: {names}")
    return schemes.pop()


def _layout(target: Target, scheme: Scheme, first: int = 0, end: int | None = None) -> Layout:
    tensors = specs(scheme.compressed, *linear_shape(target.shape, target.modules))
    modules = target.modules[first:end]
    return {f"{module}.{suffix}": tensors[suffix] for module in modules for suffix in tensors}


def _bad(ranges: torch.Tensor) -> list[int]:
    """Return the indices in dimension 0 under which a range is NaN, infinite or too large."""
    bad = (~(ranges <= LARGEST)).flatten(1).any(1).tolist()  # a GPU is waited for once
    return [index for index, is_bad in enumerate(bad) if is_bad]


def _refused(info: TensorInfo, where: str, what: str = "NaN or infinity") -> InputError:
    return InputError(f"{info.file}: tensor {info.name!r} holds {what} {where}; {FIX}")


def _unusable(ranges: torch.Tensor) -> str:
    return f"a weight above {LARGEST:g}" if ranges.isfinite().all() else "NaN or infinity"
