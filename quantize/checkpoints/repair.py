"""Writes a corrected copy of a quantized checkpoint, where there is one right correction.

  what servers misread                          what the copy has instead
  input scale 0, NaN, infinite or missing       that of a Linear that reads the same input; else the
                                                widest range of its layer's experts, which is what an
                                                expert has that calibration showed no token
  input scales that differ in one matrix        the widest range of them: nothing clips that did not
  global scales that differ in one matrix       one of them, if every block scale can be multiplied by
                                                their quotient without rounding
  a tied copy in the encoder's tree             nothing, if it is the decoder's tensor bit for bit
  total_size of the index                       the bytes of the tensors

Weights stay the same numbers. Where a checkpoint has another problem nothing is written: only a new
conversion restores weight scales that are 0 or gone, missing experts, and block scales that would have
to be rounded.
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from quantize.checkpoints.inspect import inspect
from quantize.checkpoints.reader import INDEX, Checkpoint, TensorSpec
from quantize.checkpoints.scales import LAYER_EXPERT, Scales, read_scales
from quantize.checkpoints.shards import Piece, plan_shards, state_path, write_shards
from quantize.checkpoints.targets import fused_with
from quantize.errors import InputError
from quantize.host.files import folder_when_complete
from quantize.schemes.records import GLOBAL_SCALES, INPUT_SCALES

SHARD_BYTES = 5e9
READ_BYTES = 1 << 24
TREES = ("model.encoder.language_model.", "model.decoder.")


@dataclass
class Corrections:
    """How the copy differs: new tensors by name, names left out, and one sentence for each."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    dropped: set[str] = field(default_factory=set[str])
    said: list[str] = field(default_factory=list[str])

    def set(self, name: str, tensor: torch.Tensor, why: str) -> None:
        """Replace or add the tensor `name`; `why` is the sentence for it."""
        self.tensors[name] = tensor
        self.said.append(f"{name}: {why}")


def repair(folder: Path, out: Path) -> list[str]:
    """Write a corrected copy of a checkpoint to `out`; return one sentence for every correction.

    Raises:
        InputError: `out` exists, nothing is wrong, or a problem has no certain correction.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; name another folder or remove it")
    before = inspect(folder).problems
    if not before:
        raise InputError(f"{folder}: nothing is wrong with it, so there is nothing to repair")
    checkpoint = Checkpoint.open(folder)
    found = find_corrections(checkpoint)
    pieces = list(_pieces(checkpoint, found))
    with folder_when_complete(out) as copy:
        try:
            write_shards(plan_shards(pieces, SHARD_BYTES), copy, f"repair {folder}", what="repair")
            state_path(copy).unlink()
            for file in folder.iterdir():
                if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
                    shutil.copyfile(file, copy / file.name)
            if left := inspect(copy).problems:
                raise InputError(f"{folder}: not repaired, {left[0]}; convert the BF16 model again")
        except InputError:
            shutil.rmtree(copy)
            raise
    return found.said or [before[0]]


def find_corrections(checkpoint: Checkpoint) -> Corrections:
    """Return every certain correction of a checkpoint."""
    found, scales = Corrections(), read_scales(checkpoint)
    _drop_tied_copies(checkpoint, found)
    groups: dict[str, list[str]] = defaultdict(list)
    for module in scales:
        groups[fused_with(module)].append(module)
    for modules in groups.values():
        for suffix in INPUT_SCALES:
            _mend_inputs(checkpoint, scales, modules, suffix, found)
        for suffix in GLOBAL_SCALES:
            _join_weights(checkpoint, scales, modules, suffix, found)
    return found


def _drop_tied_copies(checkpoint: Checkpoint, found: Corrections) -> None:
    for name in checkpoint.tensors:
        twin = name.replace(*TREES, 1)
        if twin != name and twin in checkpoint.tensors and not name.endswith("layer_scalar"):
            mine, theirs = (checkpoint.read(each) for each in (name, twin))
            if _same(mine, theirs):
                found.dropped.add(name)
                found.said.append(f"{name}: left out, the same bytes as {twin}")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    is_alike = a.dtype == b.dtype and a.shape == b.shape
    return is_alike and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _mend_inputs(
    checkpoint: Checkpoint, scales: Scales, modules: list[str], suffix: str, found: Corrections
) -> None:
    """Give Linears that read one input the widest range that any of them has."""
    widest = min if suffix == "input_global_scale" else max  # a large one stands for a small range
    own = {m: scales[m][suffix] for m in modules if suffix in scales[m]}
    good = [value for value in own.values() if _usable(value)]
    if not good:
        good = _of_the_layer(scales, modules[0], suffix)
    if not good:
        return
    value = widest(good)
    like = next(n for n in checkpoint.tensors if n.endswith(f".{suffix}"))
    shape = checkpoint.tensors[like].shape
    for module in modules:
        if own.get(module) != value:
            was = own.get(module, "missing")
            found.set(f"{module}.{suffix}", torch.full(shape, value), f"{was}, now {value:g}")


def _of_the_layer(scales: Scales, module: str, suffix: str) -> list[float]:
    """Return a layer's valid scales of the same projection of its experts, [] without experts."""
    match = LAYER_EXPERT.fullmatch(module)
    if match is None:
        return []
    projection = module.rpartition(".")[2]
    others = (m for m in scales if m.startswith(f"{match[1]}.") and m.endswith(f".{projection}"))
    return [v for m in others if _usable(v := scales[m].get(suffix, math.nan))]


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _join_weights(
    checkpoint: Checkpoint, scales: Scales, modules: list[str], suffix: str, found: Corrections
) -> None:
    """Give Linears of one matrix one global scale, where no block scale is rounded by that."""
    own = {m: scales[m][suffix] for m in modules if suffix in scales[m]}
    values = set(own.values())
    if len(values) < 2 or not all(map(_usable, values)):
        return
    blocks = {m: checkpoint.read(f"{m}.weight_scale") for m in own}
    for value in sorted(values, reverse=True):
        # weight = code * block / global; in ModelOpt's layout code * block * global
        factors = {
            m: value / v if suffix == "weight_global_scale" else v / value for m, v in own.items()
        }
        exact = {m: blocks[m].double() * factor for m, factor in factors.items()}
        scaled = {m: e.float().to(blocks[m].dtype) for m, e in exact.items()}
        if all(torch.equal(scaled[m].double(), exact[m]) for m in own):
            for module, was in own.items():
                if was != value:
                    name = f"{module}.{suffix}"
                    shape = checkpoint.tensors[name].shape
                    found.set(name, torch.full(shape, value), f"{was:g}, now {value:g}")
                    found.tensors[f"{module}.weight_scale"] = scaled[module]
            return


def _pieces(checkpoint: Checkpoint, found: Corrections) -> Iterator[Piece]:
    """Yield every tensor of the copy, ordered by the names in the original."""
    for name, info in checkpoint.tensors.items():
        if name not in found.dropped and name not in found.tensors:
            rows = info.shape[0] if info.shape else 1
            step = max(1, rows * READ_BYTES // max(info.nbytes, 1))
            starts = range(0, rows, step) if info.shape else [0]
            tasks = tuple(partial(_read, checkpoint, name, start, step) for start in starts)
            yield Piece({name: TensorSpec(info.dtype, info.shape)}, tasks)
    for name, tensor in found.tensors.items():
        dtype = checkpoint.tensors[name].dtype if name in checkpoint.tensors else "F32"
        data = tensor.flatten().view(torch.uint8)
        yield Piece({name: TensorSpec(dtype, tuple(tensor.shape))}, (partial(_given, data),))


def _read(checkpoint: Checkpoint, name: str, start: int, step: int) -> torch.Tensor:
    info = checkpoint.tensors[name]
    if not info.shape:
        return checkpoint.read(name).flatten().view(torch.uint8)
    return (
        checkpoint.read_rows(name, start, min(start + step, info.shape[0]))
        .flatten()
        .view(torch.uint8)
    )


def _given(data: torch.Tensor) -> torch.Tensor:
    return data
