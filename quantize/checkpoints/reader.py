"""Finds a checkpoint, reads its safetensors headers strictly, and reads tensors by byte range.

A safetensors file is an 8-byte little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets: [begin, end]}}` and the bytes of all tensors, contiguous, in any
order (format: https://huggingface.co/docs/safetensors). A checkpoint is one such file, or several
with `model.safetensors.index.json`, which maps each tensor to its file. Neither pickles nor code
are read. If index, headers and file sizes disagree, an error is raised before any weight is read.
`layout` checks tensors against config.json.
"""

import importlib.resources
import math
import os
import re
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quantize.bundled import CHECKPOINT
from quantize.checkpoints.config_form import FIX as FIX
from quantize.checkpoints.config_form import google_form
from quantize.errors import InputError, ResourceError
from quantize.host.files import parse_json, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
RESAVE = "convert the weights to safetensors with the tool that wrote them"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
FETCHED = ("json", "jinja", "safetensors")  # files that a clone without Git LFS holds as pointers
POINTER = b"version https://git-lfs.github.com/spec/"
CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"  # where older ModelOpt exports say what is quantized
MODEL_TYPE = "diffusion_gemma"
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "chat_template*",
)  # fmt: skip
# Files that can change an answer, besides config.json and weights.
GENERATION = "generation_config.json"
SETTINGS = (GENERATION, *TOKENIZER_FILES, "*processor*.json")
BLOCK = 1 << 22  # values that are compared at once
CARD_FILES = ("README.md", "LICENSE*", "NOTICE*")  # say under which terms a model may be used

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is stored: bytes `begin` to `end` of `file`; `dtype` is its safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class TensorSpec:
    """The dtype, by its safetensors name, and the shape that one tensor must have."""

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return name -> `TensorInfo` of every tensor of a safetensors file, in the order of their bytes.

    The library safetensors checks names and shapes, and that offsets cover the file without gaps. Raise
    InputError if the file is missing, truncated or not safetensors, names a tensor twice, or has an
    unsupported dtype.
    """
    try:
        # "pt" would map the file privately, which a machine with less memory than the file refuses.
        with safe_open(path, "np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = parse_json(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(
            f"{path}: truncated or overlong, or not a safetensors file ({error}); {FIX}"
        ) from error
    header.pop("__metadata__", None)
    infos = [_tensor_info(path, name, entry, 8 + length) for name, entry in header.items()]
    return {info.name: info for info in sorted(infos, key=lambda info: (info.begin, info.end))}


def _tensor_info(path: Path, name: str, entry: dict[str, Any], start: int) -> TensorInfo:
    dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise InputError(f"{path}: tensor {name!r} has the unsupported dtype {dtype!r}; {FIX}")
    return TensorInfo(name, dtype, tuple(entry["shape"]), path, start + begin, start + end)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose index, headers and file sizes agree."""

    folder: Path
    config: dict[str, Any]  # config.json in Google's form (`config_form`)
    tensors: dict[str, TensorInfo]  # every tensor's name -> its place, in shard and file order

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Return a folder's checkpoint; raise InputError if it is damaged or no DiffusionGemma."""
        folder = Path(folder)
        return cls(folder, read_config(folder), _read_tensors(folder))

    @property
    def shards(self) -> list[Path]:
        """The safetensors files, in name order."""
        return sorted({info.file for info in self.tensors.values()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def is_quantized(self) -> bool:
        """Whether config.json carries a quantization_config."""
        return "quantization_config" in self.config

    def read(self, name: str, *, pinned: bool = False) -> torch.Tensor:
        """Return one whole tensor in new host memory, which is page-locked for a GPU if `pinned`."""
        return self.read_stacked([name], pinned=pinned)[0]

    def read_rows(self, name: str, start: int, stop: int, *, pinned: bool = False) -> torch.Tensor:
        """Return rows `start:stop` of dimension 0; raise IndexError if the tensor lacks any of them."""
        info = self._info(name)
        rows = info.shape[0]
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"rows {start}:{stop} of {name!r}, which has {rows}")
        part = math.prod(info.shape[1:])
        values = _values(info, start * part, (stop - start) * part, pinned=pinned)
        return values.view(stop - start, *info.shape[1:])

    def holds_the_same(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same shape, and bytes, or values if dtypes differ."""
        one, two = self._info(name), self._info(other)
        if one.shape != two.shape:
            return False
        count = math.prod(one.shape)
        for start in range(0, count, BLOCK):
            blocks = [_values(info, start, min(BLOCK, count - start)) for info in (one, two)]
            alike = one.dtype == two.dtype
            if not torch.equal(*(b.view(torch.uint8) if alike else b.double() for b in blocks)):
                return False
        return True

    def read_stacked(self, names: Sequence[str], *, pinned: bool = False) -> torch.Tensor:
        """Return tensors stacked: [len(names), *shape]; raise InputError if dtypes or shapes differ."""
        infos = [self._info(name) for name in names]
        for info in infos:
            if (info.dtype, info.shape) != (infos[0].dtype, infos[0].shape):
                raise InputError(
                    f"{info.file}: tensor {info.name!r} is {info.dtype} {list(info.shape)}, and "
                    f"{names[0]!r} is {infos[0].dtype} {list(infos[0].shape)}; {FIX}"
                )
        data = self.read_bytes(names, pinned=pinned)
        return data.view(DTYPES[infos[0].dtype]).view(len(infos), *infos[0].shape)

    def read_bytes(self, names: Sequence[str], *, pinned: bool = False) -> torch.Tensor:
        """Return the bytes of tensors, one tensor after the other: uint8 [n]."""
        infos, runs = [self._info(name) for name in names], list[list[TensorInfo]]()
        for info in infos:
            if runs and runs[-1][-1].file is info.file and runs[-1][-1].end == info.begin:
                runs[-1].append(info)  # neighbours are read at once
            else:
                runs.append([info])
        data = torch.empty(sum(i.nbytes for i in infos), dtype=torch.uint8, pin_memory=pinned)
        room = bytes_of(data)
        for file, same in groupby(runs, lambda run: run[0].file):
            room = _fill(room, file, list(same))
        return data

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise InputError(f"{self.folder}: tensor {name!r} is missing; {FIX}")
        return self.tensors[name]


def _values(info: TensorInfo, start: int, count: int, *, pinned: bool = False) -> torch.Tensor:
    """Return `count` values of a flattened tensor from `start` on: [count]."""
    dtype = DTYPES[info.dtype]
    block = torch.empty(count * dtype.itemsize, dtype=torch.uint8, pin_memory=pinned)
    begin = info.begin + start * dtype.itemsize
    part = replace(info, begin=begin, end=begin + len(block))
    _fill(bytes_of(block), info.file, [[part]])
    return block.view(dtype)


def _fill(room: memoryview, file: Path, runs: Sequence[Sequence[TensorInfo]]) -> memoryview:
    """Fill `room` with `runs` of neighbouring tensors in `file`; return the rest of `room`."""
    run, begin = runs[0], runs[0][0].begin

    def name() -> str:
        return next((info.name for info in run if begin < info.end), run[0].name)

    try:
        with file.open("rb", buffering=0) as opened:
            for run in runs:
                begin, end = run[0].begin, run[-1].end
                while begin < end:  # one call reads at most 2 GiB
                    count = os.preadv(opened.fileno(), [room[: end - begin]], begin)
                    if not count:
                        raise InputError(f"{file}: ends inside tensor {name()!r}; {FIX}")
                    begin, room = begin + count, room[count:]
    except OSError as error:
        raise ResourceError(
            f"{file}: reading tensor {name()!r} failed ({error.strerror}); check the disk"
        ) from error
    return room


def bytes_of(data: torch.Tensor) -> memoryview:
    """Return a writable view of the memory of a contiguous uint8 tensor [n]."""
    array: Any = data.numpy()  # numpy's stubs do not declare the buffer protocol
    return memoryview(array)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json in Google's form; hf_quant_config.json may supply its quantization_config.

    Raise InputError if config.json is missing or another model's, if a key that decides something is
    missing or wrong, or if either file is damaged.
    """
    path = folder / CONFIG
    _check_fetched(folder)
    if not path.is_file():
        raise InputError(
            f"{folder}: no config.json there; name the folder of a DiffusionGemma model"
        )
    config = config_from(path)
    apart = folder / MODELOPT
    if "quantization_config" not in config and apart.is_file():
        stated = read_json_object(apart).get("quantization")
        if not isinstance(stated, dict):
            raise InputError(f"{apart}: it does not say under 'quantization' what is; {FIX}")
        config["quantization_config"] = {"quant_method": "modelopt", **stated}
    return config


def _check_fetched(folder: Path) -> None:
    for path in sorted(file for suffix in FETCHED for file in folder.glob(f"*.{suffix}")):
        with suppress(OSError):  # told where the file is read
            if (
                path.is_file()
                and path.stat().st_size < 1024
                and path.read_bytes().startswith(POINTER)
            ):
                raise InputError(
                    f"{path}: a pointer of Git LFS, not the file itself; run `git lfs pull` there"
                )


def config_from(path: Path) -> dict[str, Any]:
    """Return one config.json in Google's form; InputError: another model's, or as `google_form`."""
    config = read_json_object(path)
    if config.get("model_type") != MODEL_TYPE:
        raise InputError(
            f"{path}: model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}: this tool "
            f"quantizes DiffusionGemma only, and the whole model"
        )
    return google_form(config, str(path))


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    if adapters := sorted(path.name for path in folder.glob("adapter_*")):
        raise InputError(
            f"{folder}: {adapters[0]} is there: transformers would load this adapter on top of the "
            f"weights, and nothing else here would; merge it into the weights, or move it away"
        )
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            way = FIX
            for pickled in sorted(folder.glob("pytorch_model*.bin"))[:1]:
                way = f"pickles as {pickled.name} are not read: {RESAVE}"
            raise InputError(f"{folder}: neither {SINGLE} nor {INDEX} is there; {way}")
        return read_header(_shard_path(folder, SINGLE))
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: no weight_map in it; {FIX}")
    tensors: dict[str, TensorInfo] = {}
    names = sorted({str(name) for name in weight_map.values()})
    if names != [SINGLE] and (folder / SINGLE).is_file():
        raise InputError(
            f"{folder}: two sets of weights, {SINGLE} and the shards of {INDEX}; transformers reads "
            f"the former, other tools the latter: move one of them away"
        )
    for path in [_shard_path(folder, name) for name in names]:
        header = read_header(path)
        _check_listed(
            path, header.keys(), {n for n, file in weight_map.items() if file == path.name}
        )
        tensors |= header
    return tensors


def _check_listed(shard: Path, there: Set[str], listed: Set[str]) -> None:
    for names, what in (
        (listed - there, f"listed in {INDEX} and missing in the shard"),
        (there - listed, f"not listed for this shard in {INDEX}"),
    ):
        if names:
            first = f"tensor {min(names)!r} ({len(names)} in all)"
            raise InputError(f"{shard}: {first} is {what}; {FIX}")


def _shard_path(folder: Path, name: str) -> Path:
    """Join a shard name from an index to its folder; refuse one that leads elsewhere."""
    if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
        raise InputError(
            f"{folder / INDEX}: {name!r} is not a plain *.safetensors file name; {FIX}"
        )
    path = folder / name
    if not path.is_file():
        raise InputError(f"{path}: this shard is missing; {FIX}")
    root = folder.resolve()
    # The Hub's cache keeps snapshots/<commit>/ as links into blobs/ two folders up.
    allowed = {root, root.parent.parent / "blobs"} if root.parent.name == "snapshots" else {root}
    if path.resolve().parent not in allowed:
        raise InputError(
            f"{path}: a link that leads out of the checkpoint folder, to {path.resolve().parent}; "
            f"only links of the Hub's cache are followed: name that folder, or copy the file here"
        )
    return path


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; raise InputError if it holds none or is unreadable."""
    try:
        return read_json(path, remedy=FIX)
    except OSError as error:
        raise InputError(f"{path}: not readable as JSON ({error}); {FIX}") from error


def check_tokenizer(folder: Path) -> None:
    """Raise InputError if tokenizer or chat template is missing, or a tokenizer's file is not JSON."""
    if not (folder / TOKENIZER).is_file():
        raise InputError(f"{folder / TOKENIZER}: is missing, so no text can become tokens; {FIX}")
    files = (folder / TOKENIZER, *folder.glob("tokenizer_config.json"))
    stated = [read_json_object(file) for file in files]
    if not (folder / TEMPLATE).is_file() and not stated[-1].get("chat_template"):
        raise InputError(f"{folder / TEMPLATE}: is missing, so no chat can become tokens; {FIX}")


def check_total_size(checkpoint: Checkpoint) -> None:
    """Raise InputError if the index states a total_size that is not the bytes of all tensors."""
    path = checkpoint.folder / INDEX
    metadata = read_json_object(path).get("metadata", {}) if path.is_file() else {}
    if not isinstance(metadata, dict):
        raise InputError(f"{path}: metadata is not an object; {FIX}")
    total = metadata.get("total_size", checkpoint.nbytes)
    if total != checkpoint.nbytes:
        kind = "" if isinstance(total, (int, float)) else ", which is no number"
        raise InputError(
            f"{path}: total_size is {total!r}{kind}, and the tensors, which are all there, have "
            f"{checkpoint.nbytes} bytes; write this number there, or remove total_size"
        )


def known_config(model: str) -> dict[str, Any] | None:
    """Return the config.json that ships with quantize for a published model; None if none ships."""
    name = model.replace("/", "--") + ".json"
    path = importlib.resources.files("quantize.checkpoints").joinpath("known_models", name)
    return config_from(Path(str(path))) if path.is_file() else None


def resolve(model: str | None, revision: str | None = None) -> Path:
    """Return the checkpoint folder of `model`; a model of the Hub is downloaded to the Hub's cache.

    `model` is a checkpoint folder, a run's folder or a Hub id. None and "bundled" mean the bundled
    model. A Hub id may carry its revision (`ORG/NAME@revision`). If HF_HUB_OFFLINE is set, only the
    cache is searched. Raise InputError if folder, model or revision does not exist, or if two revisions
    are given; ResourceError if a model is gated, or not cached while the Hub cannot be reached.
    """
    if model in (None, "bundled"):
        return CHECKPOINT
    if (folder := Path(model)).is_dir():
        if not (folder / CONFIG).is_file() and (folder / "checkpoint" / CONFIG).is_file():
            return folder / "checkpoint"
        read_config(folder)  # else an error of the tokenizer would hide that there is no model
        return folder
    if folder.is_file():
        raise InputError(f"{model}: a file; name the folder that holds it and its config.json")
    name, at, own_revision = model.partition("@")
    if (
        not re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        or name.startswith(".")
        or (at and not own_revision)
    ):
        raise InputError(
            f"{model}: no such folder, and not a Hub id (ORG/NAME or ORG/NAME@revision); "
            f"name a checkpoint folder, or `bundled` for the bundled model"
        )
    if own_revision and revision not in (None, own_revision):
        raise InputError(f"{model}: --revision names another revision, {revision!r}; give one")
    return _download(name, own_revision or revision)


def hub_commit(folder: Path) -> str | None:
    """Return the commit (40 hex digits) of a folder in the Hub's cache, None for any other folder."""
    is_commit = folder.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", folder.name)
    return folder.name if is_commit else None


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import httpx

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", *CARD_FILES]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ResourceError(
            f"{model}: gated on the Hub; accept its terms there and set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise InputError(
            f"{model}: the Hub has no such model or revision {revision!r}, or HF_TOKEN lacks access"
        ) from error
    except (httpx.HTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise ResourceError(
            f"{model}: not in the local cache and the Hub cannot be reached "
            f"({type(error).__name__}); give a local folder instead"
        ) from error
