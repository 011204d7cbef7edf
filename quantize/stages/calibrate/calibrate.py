"""Calibrates the input scales of NVFP4 modules in the BF16 model's own denoising loop.

An NVFP4 module's activations share a calibrated number, FP32 [1]: input_global_scale = 448 * 6 / amax.
amax is the largest |x| that ever enters the module. The causal encoder reads clean text. The decoder
reads canvases that are noise at first, with self-conditioning after the first step. So the real loop
runs here: encoder passes, every step, every canvas, the model's own sampler and stopping rule.

Observers of an engine (`watching`) see every module's inputs. Encoder and decoder share module names,
as both are one backbone in vLLM. An expert sees only the tokens routed to it. An expert with fewer
tokens than `min_tokens_per_expert` takes the largest amax of its layer, and coverage.json lists it.

llm-compressor's oneshot, with which the tests compare, lacks this loop. Its `basic` pipeline shows the
decoder only one random canvas; its `sequential` pipeline never finishes the encoder (scales stay
uninitialised, without an error). Oneshot runs every expert as a separate Linear: 11,520 calls per
forward pass of the 26B model. If the maxima are equal, this stage and oneshot on a CPU make equal
scales, since both divide in FP32. On a GPU oneshot divides in BF16.

Under `torchrun --nproc-per-node N` the N processes share the batches, with one GPU each. Maxima are
pooled exactly, so the files equal those of one process.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.scales import positive, shared
from quantize.checkpoints.targets import plan_targets
from quantize.errors import InputError, QuantizeError
from quantize.host.files import folder_when_complete, write_json
from quantize.host.processes import joined
from quantize.recipe.sections import Quantization, Recipe
from quantize.runtime.gpu.placement import CPU, Placement, free_unused
from quantize.runtime.record.ranges import Ranges
from quantize.runtime.record.recording import Recorder
from quantize.runtime.record.trajectory import save_trajectories
from quantize.schemes.rounding import E2M1_MAX, FP8_MAX
from quantize.stages.calibrate.coverage import Coverage
from quantize.stages.denoising import SCRATCH, Denoising

SCALES = "input_scales.safetensors"
INPUT_SCALE = "input_global_scale"


def calibrate(
    source: Path, recipe: Recipe, out: Path, place: Placement = CPU, *, scratch: Path | None = None
) -> None:
    """Run the denoising loop on the recipe's prompts; write scales, coverage and trajectories.

    The folder `out` appears when complete, with input_scales.safetensors, coverage.json,
    trajectories.safetensors, trajectories.json. Equal inputs give equal bytes. If the recipe
    rounds with GPTQ, the folder `scratch` (None: one beside `out`) gets the passes that GPTQ reads.

    Raises:
        InputError, ResourceError: recipe, prompts or checkpoint are wrong or missing; a batch does
            not fit the GPU; or scratch is full.
        QuantizeError: a module has no usable scale; the message names the module.
    """
    settings = recipe.calibration
    if settings is None:
        raise InputError(f"recipe {recipe.name}: NVFP4 needs a `calibration` section")
    modules = calibrated_modules(source, recipe.quantization)
    denoising = Denoising(source, settings, place, held_out=True)
    experts: int = Checkpoint.open(source).config["text_config"]["num_experts"]
    ranges, coverage = Ranges(experts), Coverage(experts)
    with joined() as processes:
        recorder = None
        if recipe.quantization.rounding == "gptq":
            recorder = Recorder(scratch or out.with_name(SCRATCH), processes)
        trajectories = denoising.run(
            title="calibrating", observers=(ranges.see, coverage.see), recorder=recorder,
            processes=processes,
        )  # fmt: skip
        ranges.pool(processes)
        coverage.pool(processes)
    free_unused(place.device)  # the model, which the next stage would keep frozen
    scales = input_scales(ranges, modules)
    scales, fallbacks = fall_back(scales, coverage.tokens, settings.min_tokens_per_expert)
    check_scales(scales)
    if processes.rank > 0:
        return
    with folder_when_complete(out) as folder:
        save_file({f"{m}.{INPUT_SCALE}": s for m, s in scales.items()}, folder / SCALES)
        least = {"min_tokens_per_expert": settings.min_tokens_per_expert}
        covered = {"fallbacks": fallbacks, "tokens_per_expert": coverage.tokens}
        write_json(folder / "coverage.json", least | covered)
        save_trajectories(folder, trajectories, denoising.sampler)


def calibrated_modules(source: Path, quantization: Quantization) -> list[str]:
    """Return the on-disk names of all modules with a calibrated input scale.

    Raise InputError if the recipe gives no module of this model the scheme NVFP4.
    """
    targets = plan_targets(Checkpoint.open(source).tensors, quantization)
    modules = [module for t in targets if t.scheme and t.scheme.calibrated for module in t.modules]
    if not modules:
        raise InputError("the recipe has no NVFP4 module: there is nothing to calibrate")
    return modules


def input_scales(ranges: Ranges, modules: list[str]) -> dict[str, Tensor]:
    """Return module -> input_global_scale, FP32 [1]; it is infinite if nothing entered the module."""
    amax = torch.tensor([ranges.amax(module) for module in modules], dtype=torch.float32)
    scales = (FP8_MAX * E2M1_MAX) / amax
    return {module: scale.clone() for module, scale in zip(modules, scales.split(1), strict=True)}


def fall_back(
    scales: Mapping[str, Tensor], tokens: Mapping[str, list[int]], minimum: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Give experts with under `minimum` tokens the least scale (largest amax) of layer and projection.

    `scales` maps module -> scale, `tokens` maps `<layer>.experts` -> how many tokens each expert saw.
    Return all scales, and the names `<layer>.experts.<expert>` of experts whose scales were replaced.

    Raises:
        QuantizeError: no expert of a layer has seen a token.
    """
    result, fallbacks = dict(scales), []
    for layer, counts in tokens.items():
        poor = [expert for expert, count in enumerate(counts) if count < minimum]
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{layer}.{expert}.{projection}" for expert in range(len(counts))]
            if names[0] not in scales:  # the recipe leaves these experts alone
                continue
            seen = [scales[n] for n, count in zip(names, counts, strict=True) if count > 0]
            if not seen:
                raise QuantizeError(f"{layer}: no token reached any expert; use more prompts")
            for expert in poor:
                result[names[expert]] = torch.stack(seen).min(0).values
        fallbacks += [f"{layer}.{expert}" for expert in poor if f"{layer}.0.gate_proj" in scales]
    return result, fallbacks


def check_scales(scales: Mapping[str, Tensor]) -> None:
    """Check that scales are finite and above 0, and equal for modules that a server fuses.

    Raises:
        QuantizeError: a scale breaks one of these rules; the message names the module.
    """
    stated = {module: {INPUT_SCALE: scale.item()} for module, scale in scales.items()}
    for sound, fault in positive(stated):
        if not sound:
            raise QuantizeError(f"{fault}; no token reached it, or its input was not finite")
    for same, fault in shared(stated):
        if not same:
            raise QuantizeError(f"calibrated {fault}")
