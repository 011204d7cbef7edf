"""Streams a BF16 checkpoint into a compressed-tensors checkpoint, by its plan and input scales.

Every output header follows from the plan. Weights are read by byte range in pieces of 8 to 64 MB.
Several threads quantize the pieces, and others write them in source order (`checkpoints.shards`). So
memory holds a few pieces, whatever the size of the model. In the result

  - names are vLLM's: `model.decoder.*`, with `experts.E.{gate,up,down}_proj` for each expert E. The
    encoder keeps its `layer_scalar`s, but no tied text weights. There is no `lm_head`;
  - gate/up of an expert or MLP and q/k/v of a layer share their global scale (a full layer has no v);
  - all other tensors are the source's, byte for byte. NaN or infinity in one is an InputError;
  - config.json has `quantization_config` as compressed-tensors writes it; tokenizer, processor,
    chat template, generation config and licence files are the source's.

If there is a GPU, it does the arithmetic, and gives the same bytes as a CPU: both compute maxima, casts
and IEEE 754 quotients alike. Sums and powers differ, so the observer memoryless_mse runs on the CPU.
"""

import importlib.metadata
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quantize.checkpoints.layout import TensorSpec, check_layout
from quantize.checkpoints.reader import SETTINGS, Checkpoint, read_header, read_json_object
from quantize.checkpoints.scales import positive, read_scales
from quantize.checkpoints.shards import WORKERS_A_FILE, plan_shards, state_path, write_shards
from quantize.checkpoints.targets import Target, ignore_for_config
from quantize.errors import InputError
from quantize.host.files import folder_when_complete, read_json, write_json
from quantize.recipe.sections import Recipe
from quantize.runs.digests import hashed, identities, remember, xxh3_of
from quantize.runs.manifest import checksums
from quantize.schemes.records import SCHEMES
from quantize.stages.convert.shard_pieces import Look, Quantizer
from quantize.stages.device import Device

MAX_SHARD_BYTES = 5e9

CARRIED = (*SETTINGS, "LICENSE*", "NOTICE*")
# The files that `round_weights` writes, and the one that names their digests.
LAYERS, SUMMARY = "layer-*.safetensors", "rounding.json"


@dataclass(frozen=True)
class Conversion:
    """What was written: shard -> sha256; numbers of tensors and quantized Linears; bytes in and out."""

    shards: dict[str, str]
    tensors: int
    modules: int
    bytes_in: int
    bytes_out: int


def convert(
    source: Checkpoint, targets: list[Target], out: Path, *, recipe: Recipe,
    input_scales: Path | None = None, rounded: Path | None = None, device: str = "cpu",
    record: Path | None = None, look: Look = lambda *_: None,
    max_shard_bytes: float = MAX_SHARD_BYTES, overwrite: bool = False,
) -> Conversion:  # fmt: skip
    """Quantize a BF16 checkpoint as the plan `targets` says, and write the result to the folder `out`.

    `out` appears when it is complete. It must not exist unless `overwrite` is set. After an
    interrupted call, an equal call keeps finished shards and makes an uninterrupted call's bytes.

    The file `input_scales` has `<module>.input_global_scale` FP32 [1] of every NVFP4 module. The folder
    `rounded` has the codes and scales of `round_weights`; None rounds to nearest. `device` changes only
    the speed. The file `record` gets the checksums of all files, for verify. Several threads call
    `look` with each part of a tensor, after the part is encoded and before it is written.

    Raises:
        InputError: `out` exists; `source` has a wrong layout, changes meanwhile, or has a weight that
            is NaN, infinite or above 1e38; an input scale is missing, extra or not above 0; `rounded`
            is empty, or not what `round_weights` wrote; servers fuse Linears to which the plan gives
            different schemes.
        ResourceError: the disk is too small, or fails.
    """
    if out.exists() and not overwrite:
        raise InputError(f"{out}: exists already; name another folder or remove it")
    check_layout(source)
    codes = sorted(rounded.glob(LAYERS)) if rounded else []
    before = identities([*source.shards, *codes])
    scales = _read_input_scales(input_scales, targets)
    rounded_codes = read_rounded(rounded) if rounded else None
    observer = recipe.quantization.observer
    where = Device(device if observer == "memoryless_minmax" else "cpu")
    pieces = Quantizer(source, observer, scales, rounded_codes, where, look).plan(targets)
    shards = plan_shards(pieces, max_shard_bytes)
    read = {file.name: file for file in [*source.shards, *codes]}
    identity = json.dumps([hashed(read), observer, sorted(scales.items())])
    with folder_when_complete(out, keep_partial=True) as folder:
        a_file = 1 if where.pinned else WORKERS_A_FILE
        hashes = write_shards(shards, folder, identity, workers=where.makers, workers_a_file=a_file)
        remember({folder / name: digest for name, digest in hashes.items()})
        _carry_files(source.folder, folder)
        write_json(folder / "config.json", quantized_config(source.config, targets, recipe))
        if identities([*source.shards, *codes]) != before:
            raise InputError(f"{source.folder}: a shard changed while it was read; convert again")
        written = Checkpoint.open(folder)
        # Readers use the headers on disk, so they must be the planned headers.
        planned = {name: spec for piece in pieces for name, spec in piece.layout.items()}
        if {n: TensorSpec(i.dtype, i.shape) for n, i in written.tensors.items()} != planned:
            raise RuntimeError(f"{folder}: the headers on disk are not the planned ones")
        if record is not None:
            write_json(record, {"files": checksums(written, hashes)})
    state_path(folder).unlink()
    return Conversion(
        hashes,
        tensors=len(planned),
        modules=sum(len(target.modules) for target in targets),
        bytes_in=source.nbytes,
        bytes_out=sum(piece.nbytes for piece in pieces),
    )


def _read_input_scales(path: Path | None, targets: list[Target]) -> dict[str, float]:
    """Return module -> input global scale of every NVFP4 module."""
    wanted = [
        f"{module}.input_global_scale"
        for target in targets
        if target.scheme and target.scheme.calibrated
        for module in target.modules
    ]
    if not wanted:
        return {}
    if path is None:
        raise InputError(f"{wanted[0]}: NVFP4 needs calibrated input scales; run calibrate first")
    header = read_header(path)
    if missing := sorted(set(wanted) - header.keys()):
        raise InputError(
            f"{path}: {missing[0]!r} is missing ({len(missing)} in all); run calibrate again"
        )
    if extra := sorted(header.keys() - set(wanted)):
        raise InputError(
            f"{path}: {extra[0]!r} belongs to no NVFP4 module of the plan ({len(extra)} in all); "
            f"run calibrate again"
        )
    for name, info in header.items():
        if (info.dtype, info.shape) != ("F32", (1,)):
            raise InputError(f"{path}: {name!r} is {info.dtype} {list(info.shape)}, not F32 [1]")
    scales = read_scales(Checkpoint(path.parent, {}, header))
    if faults := [fault for ok, fault in positive(scales) if not ok]:
        raise InputError(f"{path}: {faults[0]}; run calibrate again")
    return {module: stated["input_global_scale"] for module, stated in scales.items()}


def read_rounded(folder: Path) -> Checkpoint:
    """Return the codes and scales that `round_weights` wrote.

    Raises:
        InputError: the folder has none, or rounding.json names no digests, or others.
    """
    again = "run `quantize round RUN`"
    files = {path.name: path for path in sorted(folder.glob(LAYERS))}
    if not files:
        raise InputError(f"{folder}: no rounded weights there; {again}")
    path = folder / SUMMARY
    noted: dict[str, str] | None = read_json(path).get("files") if path.exists() else None
    if noted is None:
        raise InputError(f"{path}: it names no digests, as an earlier version wrote it; {again}")
    with ThreadPoolExecutor() as pool:
        read = dict(zip(files, pool.map(xxh3_of, files.values()), strict=True))
    if changed := sorted(name for name in read | noted if read.get(name) != noted.get(name)):
        raise InputError(f"{folder / changed[0]}: not the codes that `round` wrote; {again}")
    headers = [read_header(path) for path in files.values()]
    return Checkpoint(folder, {}, {name: at for header in headers for name, at in header.items()})


def _carry_files(source: Path, folder: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in CARRIED):
            if file.suffix == ".json":
                read_json_object(file)  # a damaged file is refused here, not first by a server
            shutil.copyfile(file, folder / file.name)


def quantized_config(
    config: dict[str, Any], targets: list[Target], recipe: Recipe
) -> dict[str, Any]:
    """Return config.json of the artifact: the source's, plus one config group for each scheme."""
    quantization = recipe.quantization
    groups = [
        SCHEMES[name].config_group(patterns, quantization.observer)
        for name, patterns in quantization.targets_by_scheme().items()
    ]
    formats = {group["format"] for group in groups}
    fields = {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": formats.pop()
        if len(formats) == 1
        else "mixed-precision",  # by the library's rule
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignore_for_config(targets),
        "version": importlib.metadata.version("compressed-tensors"),
    }
    return {**config, "tie_word_embeddings": True, "quantization_config": fields}
