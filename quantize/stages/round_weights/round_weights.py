"""Rounds weights with GPTQ on Hessians of each Linear's inputs in real denoising.

    recorded passes --layer by layer--> H = mean x x^T of every Linear's inputs
    weights, H --gptq--> codes and scales, one file per layer, which `convert` writes as they are

The denoising run is calibrate's, with the same prompts and seeds. Tokens of encoder passes and of all
denoising steps have equal weight in H. The passes that calibrate recorded go through one layer after
the other (`record.layer_by_layer`). So memory holds the Hessians of one layer at a time. On a given GPU
the bytes are the same under any budget of memory.

While a layer is rounded, the next layer's weights are read and the previous layer's file is written. A
run that was killed continues after the last finished layer and makes the same bytes. rounding.json has
a digest of each file, which convert compares with what it reads. The fewer tokens reach an expert, the
nearer its Hessian is drawn to the mean of its layer (`gptq.shrunk`). An expert whose Hessian has no
Cholesky factor is rounded to nearest and counted in rounding.json.

Under `torchrun --nproc-per-node N` each of N processes rounds every N-th layer, with the bytes of one
process. The passes go through all layers in each process: to share them too, a Hessian's sum would
have to change its order.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoints.layout import TensorSpec
from quantize.checkpoints.reader import DTYPES, Checkpoint
from quantize.checkpoints.shards import Piece, write_pieces
from quantize.checkpoints.targets import Target, fused_units, linear_shape
from quantize.errors import InputError
from quantize.host.files import (
    TEMPORARY_SUFFIX,
    folder_when_complete,
    read_json,
    sync_file,
    write_json,
    write_text,
)
from quantize.host.processes import joined
from quantize.host.progress import say, track
from quantize.host.units import digits
from quantize.recipe.sections import Recipe
from quantize.runs.digests import xxh3_of
from quantize.runtime.gpu.cores import compute_of
from quantize.runtime.gpu.placement import CPU, Placement, budget_of, free_unused
from quantize.runtime.model.watching import Observer
from quantize.runtime.record.layer_by_layer import LayerByLayer
from quantize.schemes.gptq import DAMPING, SWEEPS, VERSION, Rounded, gptq
from quantize.schemes.hessians import Hessians
from quantize.schemes.records import Scheme
from quantize.schemes.rounding import E2M1_GROUPS
from quantize.stages.denoising import SCRATCH, Denoising
from quantize.stages.memory_needs import ROUNDING_BYTES, rounding_bytes

IDENTITY, SUMMARY = "identity.json", "rounding.json"
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CORE_BYTES = 1e9  # that the experts may take which one core of a CPU rounds at once


@dataclass(frozen=True)
class Unit:
    """Linears that are rounded together: they read one input, and share the global scale, if any.

    Fused experts have a global scale each, which gate and up share.
    """

    reads: str  # name of the input
    targets: tuple[Target, ...]  # fused experts, or q/k/v, gate/up, o or down of a layer
    scheme: Scheme  # scheme of all of them

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""
        return int(re.findall(r"layers\.(\d+)\.", self.reads)[0])


def units_of(targets: Sequence[Target]) -> list[Unit]:
    """Return a plan's quantized Linears as units; raise InputError if the plan quantizes none."""
    units = [
        Unit(_input_name(unit[0].name), tuple(unit), unit[0].scheme)
        for unit in fused_units(targets)
        if unit[0].scheme is not None
    ]
    if not units:
        raise InputError("the recipe quantizes no Linear: there is nothing to round")
    return units


def _input_name(tensor: str) -> str:
    """Return the observed name of the input of `tensor`: the name of the first Linear that reads it."""
    name = re.sub(r"self_attn\.[kv]_proj$", "self_attn.q_proj", tensor.removesuffix(".weight"))
    return re.sub(r"mlp\.up_proj$", "mlp.gate_proj", name)


@dataclass(frozen=True)
class Done:
    """A rounded unit: `tensors` on the host (suffix -> [E, ...]) and `facts` for rounding.json."""

    unit: Unit
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def round_units(
    units: Sequence[Unit], weights: Sequence[Sequence[Tensor]], hessians: Hessians
) -> list[Done]:
    """Return units rounded by GPTQ; `weights` are [E, out, in] or [out, in], one for each target.

    A core of a CPU rounds a batch of experts alone: threads that share each small operation wait for
    the slowest of them, which on a busy machine takes longer than the arithmetic.
    """
    compute = compute_of(hessians.sums(units[0].reads).device)
    batches = [
        (unit, [matrix[at] for matrix in stacked], at)
        for unit, stacked in zip(units, map(_stacked, weights), strict=True)
        for at in _batches(stacked, whole=compute.whole)
    ]
    rounded = compute.each(lambda batch: _round_batch(*batch, hessians), batches)
    of_units: dict[str, list[Rounded]] = {unit.reads: [] for unit in units}
    for (unit, _, _), done in zip(batches, rounded, strict=True):
        of_units[unit.reads].append(done)
    return [_joined(unit, of_units[unit.reads], hessians) for unit in units]


def _stacked(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight if weight.dim() == 3 else weight[None] for weight in weights]


def _batches(stacked: Sequence[Tensor], *, whole: bool) -> list[slice]:
    """Return which experts of matrices [E, out, in] are rounded at once, by a GPU or by one core."""
    experts, _, inputs = stacked[0].shape
    out = sum(weight.shape[1] for weight in stacked)
    step = experts_at_once(experts, out, inputs, ROUNDING_BYTES if whole else CORE_BYTES)
    return [slice(start, start + step) for start in range(0, experts, step)]


def _round_batch(unit: Unit, weights: Sequence[Tensor], at: slice, hessians: Hessians) -> Rounded:
    hessian = hessians.mean(unit.reads, at)
    weight = torch.cat([matrix.to(hessian.device) for matrix in weights], 1)
    rounded = gptq(unit.scheme, weight, hessian)
    return replace(rounded, tensors={k: _sent(tensor) for k, tensor in rounded.tensors.items()})


def _joined(unit: Unit, rounded: Sequence[Rounded], hessians: Hessians) -> Done:
    facts = _facts(unit, rounded, hessians)  # which waits until all tensors are sent
    names = rounded[0].tensors
    return Done(unit, {k: torch.cat([batch.tensors[k] for batch in rounded]) for k in names}, facts)


def _sent(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, which is complete once the device has done what was launched."""
    room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return room.copy_(tensor, non_blocking=True)


def experts_at_once(experts: int, out: int, inputs: int, room: float = ROUNDING_BYTES) -> int:
    """Return how many of `experts` matrices [out, inputs] GPTQ rounds at once in `room` bytes.

    The matrices are split into as few batches as fit, of sizes as equal as possible.
    """
    # The same on any GPU or CPU: a product's sums may depend on how many are batched.
    fits = (n for n in range(experts, 1, -1) if rounding_bytes(n, out, inputs) <= room)
    most = next(fits, 1)
    return math.ceil(experts / math.ceil(experts / most))


def _pieces(unit: Unit, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return a piece of a file for each suffix; each module gets a copy of the shared global scale."""
    modules = [module for target in unit.targets for module in target.modules]
    rows = [linear_shape(t.shape, t.modules)[0] for t in unit.targets for _ in t.modules]
    pieces: list[Piece] = []
    for suffix, stacked in tensors.items():
        heights = rows
        if suffix == "weight_global_scale":
            stacked = stacked.repeat_interleave(len(modules) // len(stacked), 0)
            heights = [1] * len(modules)
        specs = [TensorSpec(NAMES[stacked.dtype], (n, *stacked.shape[2:])) for n in heights]
        layout = {f"{m}.{suffix}": spec for m, spec in zip(modules, specs, strict=True)}
        data = stacked.contiguous().view(torch.uint8).view(-1)
        pieces.append(Piece(layout, (lambda bound=data: bound,)))
    return pieces


def _facts(unit: Unit, done: Sequence[Rounded], hessians: Hessians) -> dict[str, Any]:
    loss, nearest = (torch.cat([getattr(d, k) for d in done]) for k in ("loss", "nearest"))
    return {
        "scheme": unit.scheme.name,
        "tokens": hessians.tokens(unit.reads).tolist(),
        "layer_loss": digits(loss.mean().item()),
        "layer_loss_of_nearest": digits(nearest.mean().item()),
        "fell_back": torch.cat([d.fell_back for d in done]).nonzero().flatten().tolist(),
    }


def round_weights(
    source: Checkpoint,
    targets: Sequence[Target],
    recipe: Recipe,
    out: Path,
    place: Placement = CPU,
    *,
    scratch: Path | None = None,
) -> None:
    """Write the codes and scales of every quantized Linear, one file per layer, to the folder `out`.

    `targets` is the plan of the BF16 checkpoint. `out` appears when complete, with layer-NN.safetensors
    and rounding.json. `scratch` (None: beside `out`) holds calibrate's recording; it is removed last.

    Raises:
        InputError: there is nothing to round, or the recipe has no calibration section.
        QuantizeError: a Linear saw no token, or an input that was not finite.
        ResourceError: the GPU has too little memory, or scratch is full.
    """
    if recipe.calibration is None:
        raise InputError(f"recipe {recipe.name}: gptq needs a `calibration` section")
    units, scratch = units_of(targets), scratch or out.with_name(SCRATCH)
    denoising = Denoising(source.folder, recipe.calibration, place)
    with joined() as processes:
        first = processes.rank == 0
        partial = out.with_name(out.name + TEMPORARY_SUFFIX)
        complete = folder_when_complete(out, keep_partial=True)  # the first process puts it there
        with complete if first else nullcontext(partial) as folder:
            if first:
                schemes = [(unit.reads, unit.scheme.name) for unit in units]
                constants = [DAMPING, E2M1_GROUPS.neighbours, SWEEPS, VERSION]
                facts = [denoising.identity, schemes, *constants]
                _start(folder, hashlib.sha256(json.dumps(facts).encode()).hexdigest())
            whole = processes.of_first(_whole(folder) if first else set[str]())
            missing = [unit for unit in units if _file(unit.layer) not in whole]
            recording = denoising.recording(scratch) if missing and first else None
            processes.wait()
            layers = processes.mine(sorted({unit.layer for unit in missing}))
            if missing := [unit for unit in missing if unit.layer in layers]:
                recording = recording or denoising.recording(scratch)
                free_unused(place.device)  # the model that recorded
                budget_of(place)
                passes = LayerByLayer(source.folder, recording, place.device, scratch)
                round_layers(folder, missing, source, _hessians(passes, missing))
            processes.wait()
            if first:
                _summarize(folder)
        if first:
            shutil.rmtree(scratch, ignore_errors=True)


def _hessians(layers: LayerByLayer, units: Sequence[Unit]) -> Iterator[Hessians]:
    """Yield the Hessians of each layer that has units, from the first such layer on."""
    names: dict[int, list[str]] = {}
    for unit in units:
        names.setdefault(unit.layer, []).append(unit.reads)
    by_layer: dict[int, Hessians] = {}

    def observers(layer: int) -> list[Observer]:
        if layer not in names:
            return []
        by_layer[layer] = Hessians(names[layer], layers.experts)
        return [by_layer[layer].see]

    for layer in layers.run(observers, max(names)):
        if layer in by_layer:
            yield by_layer.pop(layer)


def _file(layer: int) -> str:
    return f"layer-{layer:02}.safetensors"


def round_layers(
    folder: Path, units: Sequence[Unit], source: Checkpoint, hessians: Iterable[Hessians]
) -> None:
    """Round the layers of `units` in order, each with the next of `hessians`; write them to `folder`.

    Raises:
        QuantizeError: an input saw no token, or a token that was not finite.
    """
    layers = [[u for u in units if u.layer == n] for n in sorted({u.layer for u in units})]
    of_layers = iter(hessians)
    with ThreadPoolExecutor(2) as beside:
        reading, writing = beside.submit(_read, layers[0], source), None
        for index, layer in enumerate(track(layers, "rounding", unit="layers")):
            seen = next(of_layers)
            weights = reading.result()
            if index + 1 < len(layers):
                reading = beside.submit(_read, layers[index + 1], source)
            done = round_units(layer, weights, seen)
            del seen  # or memory would also hold the next layer's
            if writing is not None:
                writing.result()
            writing = beside.submit(write_layer, folder, layer, done)
        if writing is not None:
            writing.result()


def _read(units: Sequence[Unit], source: Checkpoint) -> list[list[Tensor]]:
    pinned = torch.cuda.is_available()
    return [[source.read(t.name, pinned=pinned) for t in unit.targets] for unit in units]


def write_layer(folder: Path, units: Sequence[Unit], done: Sequence[Done]) -> None:
    """Write a layer's codes and scales (`done`) and, to another file, their rounding.json entries."""
    pieces = [piece for rounded in done for piece in _pieces(rounded.unit, rounded.tensors)]
    name = _file(units[0].layer)
    facts = {rounded.unit.reads: rounded.facts for rounded in done}
    temporary = folder / f"{name}.partial"
    digest = write_pieces(temporary, pieces)
    sync_file(temporary)
    about = {"linears": facts, "files": {name: digest}}
    write_json(folder / name.replace(".safetensors", ".json"), about)
    temporary.replace(folder / name)


def _start(folder: Path, identity: str) -> None:
    """Keep layers of an interrupted try with the same inputs; remove layers of any other try."""
    path = folder / IDENTITY
    if not path.exists() or path.read_text("utf-8") != identity:
        for file in folder.iterdir():
            file.unlink()
        write_text(path, identity)


def _whole(folder: Path) -> set[str]:
    """Return the names of layers that an interrupted try wrote, and that still have their digests."""
    files = _noted(folder)["files"]
    there = [name for name in files if (folder / name).exists()]
    return {name for name in there if xxh3_of(folder / name) == files[name]}


def _noted(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what is noted of the `linears` and `files` so far, by the summary or layer by layer."""
    noted: dict[str, dict[str, Any]] = {"linears": {}, "files": {}}
    for path in (folder / SUMMARY, *sorted(folder.glob("layer-*.json"))):
        about = read_json(path) if path.exists() else {}
        for key, entries in noted.items():
            entries |= about.get(key, {})
    return noted


def _summarize(folder: Path) -> None:
    """Join the facts of all layers; a summary that an interrupted try wrote may hold some already."""
    noted = _noted(folder)
    fell_back = sum(len(linear["fell_back"]) for linear in noted["linears"].values())
    write_json(folder / SUMMARY, {"fell_back": fell_back, **noted})
    for path in folder.glob("layer-*.json"):
        path.unlink()
    say(f"rounding: {len(noted['linears'])} inputs, {fell_back} Hessians without a factor")
