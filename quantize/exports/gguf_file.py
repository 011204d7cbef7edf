"""Writes a checkpoint as one GGUF file, streamed and restartable like the stage `convert`.

    header   magic, version 3, metadata, and name, shape, type and position of every tensor; the `gguf`
             package makes the header before the first weight is read
    tensors  in the header's order, each beginning at a multiple of 32 bytes

The file is written in stretches of about a gigabyte (`checkpoints.shards`), with a few blocks of
4 MB in memory at a time. After an interruption, the same call continues after the last finished
stretch and makes the same bytes. The file gets its final name when it is complete.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from quantize.checkpoints.layout import check_layout
from quantize.checkpoints.reader import Checkpoint, TensorSpec
from quantize.checkpoints.shards import Piece, Shard, state_path, write_shards
from quantize.errors import InputError
from quantize.exports.metadata import ARCHITECTURE, metadata
from quantize.exports.tensors import ALIGNMENT, GGUFTensor, KeptAs, plan_tensors
from quantize.exports.vocabulary import vocabulary
from quantize.host.files import TEMPORARY_SUFFIX, sync_folder
from quantize.host.locks import locked
from quantize.runs.manifest import fingerprint
from quantize.runtime.engine.llama_cpp import FINGERPRINT


@dataclass(frozen=True)
class Exported:
    """What an export wrote: number of tensors by type, and the bytes of the source and of the file."""

    types: dict[str, int]
    bytes_in: int
    bytes_out: int


def export_gguf(
    source: Checkpoint, out: Path, *, name: str, kept_as: KeptAs = "BF16", stretch: float = 1e9
) -> Exported:
    """Write a checkpoint, BF16 or with NVFP4 Linears, as the new GGUF file `out`.

    Viewers show `name`. Matrices that the checkpoint holds in BF16 become `kept_as`. An interrupted
    export resumes after the last complete stretch; a stretch has about `stretch` bytes.
    Raise InputError if `out` exists or does not end in .gguf, or if `source` changes meanwhile. Raise
    it too if GGUF or llama.cpp cannot hold the source's schemes, widths, config or tokenizer, or if a
    weight is NaN, infinite or too large for Q8_0. Raise ResourceError if the disk is too small or
    fails, or if another process writes `out`.
    """
    if out.suffix != ".gguf":
        raise InputError(f"{out}: must end in .gguf; name the file, not its folder")
    if out.exists():
        raise InputError(f"{out}: exists already; name another file or remove it")
    check_layout(source)
    tensors = plan_tensors(source, kept_as)
    before = fingerprint(source)
    types = [tensor.type for tensor in tensors]
    main = next(kind for kind in ("NVFP4", "Q8_0", "BF16") if kind in types)
    keys: dict[str, Any] = {
        "general.type": "model",
        "general.name": name,
        "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{main}"]),  # which viewers show
        "general.quantization_version": 2,
        FINGERPRINT: before,
    }
    keys |= metadata(source)
    rows = next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
    keys |= vocabulary(source.folder, rows)
    folder = out.with_name(out.name + TEMPORARY_SUFFIX)
    lock = folder.with_name(folder.name + ".lock")
    with locked(lock, str(out)):
        folder.mkdir(exist_ok=True)
        shards = _stretches(out.name, _header(keys, tensors), tensors, stretch)
        write_shards(shards, folder, json.dumps([before, kept_as]), what="export")
        if fingerprint(source) != before:
            raise InputError(f"{source.folder}: a shard changed while it was read; export again")
        (folder / out.name).rename(out)
        sync_folder(out.parent)
        folder.rmdir()
        state_path(folder).unlink()
        lock.unlink()
    return Exported(dict(sorted(Counter(types).items())), source.nbytes, out.stat().st_size)


def _header(keys: dict[str, Any], tensors: Sequence[GGUFTensor]) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "header"
        writer = gguf.GGUFWriter(path, ARCHITECTURE)
        for key, value in keys.items():
            if isinstance(value, list):
                writer.add_array(key, value)  # integers as I32
            elif type(value) is int:
                writer.add_uint32(key, value)
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for tensor in tensors:
            kind = gguf.GGMLQuantizationType[tensor.type]
            float32 = np.dtype(np.float32)  # the shape counts values, whatever their type
            writer.add_tensor_info(tensor.name, tensor.shape, float32, tensor.nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % ALIGNMENT)


def _stretches(
    name: str, header: bytes, tensors: Sequence[GGUFTensor], stretch: float
) -> list[Shard]:
    """Cut the file into stretches of whole tensors; the first one holds the header."""
    shards = [Shard(name, header, (), 0)]
    for piece in map(_piece, tensors):
        last = shards[-1]
        if sum(piece.nbytes for piece in last.pieces) >= stretch:
            shards.append(Shard(name, b"", (piece,), last.begin + last.nbytes))
        else:
            shards[-1] = replace(last, pieces=(*last.pieces, piece))
    return shards


def _piece(tensor: GGUFTensor) -> Piece:
    """Return a tensor as a piece, with zeros up to the next multiple of 32 bytes."""
    padding = -tensor.nbytes % ALIGNMENT
    zeros = (partial(torch.zeros, padding, dtype=torch.uint8),) if padding else ()
    spec = TensorSpec("U8", (tensor.nbytes + padding,))
    return Piece({tensor.name: spec}, tensor.tasks + zeros)
