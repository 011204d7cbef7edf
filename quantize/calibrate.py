"""Calibrate: input scales of NVFP4 modules from the BF16 model's own denoising loop.

An NVFP4 module's activations share one calibrated number, input_global_scale = 448 * 6 / amax (FP32
[1]), amax being the largest |x| that ever enters the module. What enters it depends on where in the
denoising loop it runs: the causal encoder reads clean text, the decoder reads canvases that are noise
at first, with self-conditioning after the first step. So the real loop runs here, encoder passes,
every step, every canvas, and the model's own sampler and stopping.

llm-compressor's oneshot observes, through a calibration pipeline of ours: its `basic` pipeline shows
the decoder one random canvas only, and its `sequential` one never finishes the encoder (uninitialised
scales, no error). Before that
  * the decoder's experts become one Linear each, and the encoder uses the same module objects, so an
    observer sees what vLLM's single backbone sees: prompt, committed and canvas tokens merged;
  * the encoder is moved behind the decoder in its parent, so that modules have their on-disk names
    (`model.decoder.*`) and the recipe's targets and ignore match them as they are.
Experts see only the tokens routed to them. An expert with fewer than `min_tokens_per_expert` takes
the largest amax of its layer, and is listed.

Dtype: on a CPU BF16-valued weights run in float32, and so do the scales. On a GPU the model runs in
BF16, and llm-compressor then computes 2688 / amax in BF16 before it stores it as FP32 (relative
rounding 2^-9).
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.pipelines.registry import CalibrationPipeline
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.checkpoint import Checkpoint
from quantize.errors import InputError, QuantizeError
from quantize.load import load
from quantize.prompts import load_prompts
from quantize.recipe import Quantization, Recipe
from quantize.run_dir import folder_when_complete, write_json
from quantize.runtime.model import text_config
from quantize.runtime.sampler import Sampler
from quantize.runtime.statistics import Coverage, StepStatistics
from quantize.runtime.trajectory import Trajectory, record_all, save_trajectories
from quantize.targets import plan_targets

HELD_OUT_PROMPTS = 16  # recorded for replay, not observed
SCALES = "input_scales.safetensors"
INPUT_SCALE = "input_global_scale"


def calibrate(source: Path, recipe: Recipe, out: Path, *, device: str = "cpu") -> None:
    """Run the denoising loop on the recipe's prompts; write scales, coverage and trajectories.

    Args:
        source: folder of the BF16 checkpoint.
        recipe: with a `calibration` section and NVFP4 among its schemes.
        out: folder to create, whole or not at all: input_scales.safetensors, coverage.json,
            statistics.json, trajectories.safetensors, trajectories.json. The same inputs give the
            same bytes.
        device: where the model runs.

    Raises:
        InputError, ResourceError: the recipe, the prompts or the checkpoint are wrong or missing.
        QuantizeError: a module has no usable scale; it is named.
    """
    settings = recipe.calibration
    if settings is None:
        raise InputError(f"recipe {recipe.name}: NVFP4 needs a `calibration` section")
    modules = calibrated_modules(source, recipe.quantization)
    prompts = load_prompts(source, settings, settings.prompts + HELD_OUT_PROMPTS)
    sampler = Sampler.from_checkpoint(source)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = load(source, dtype=dtype, device=device)
    config: Any = model.config
    config._name_or_path = str(source)  # oneshot looks the configuration up there
    held_out = record_all(
        model,
        prompts,
        settings,
        sampler,
        first=settings.prompts,
        title="recording held-out prompts",
    )
    share_towers(model)
    coverage, statistics = Coverage(model), StepStatistics(model)
    trajectories: list[Trajectory] = []

    def loop() -> None:
        with coverage.counting(), statistics.collecting():
            trajectories.extend(
                record_all(
                    model,
                    prompts[: settings.prompts],
                    settings,
                    sampler,
                    title="calibrating",
                    on_step=statistics.on_step,
                )
            )

    scales = observe_input_scales(model, recipe.quantization, modules, loop)
    scales, fallbacks = fall_back(scales, coverage.tokens, settings.min_tokens_per_expert)
    check_scales(scales)
    with folder_when_complete(out) as folder:
        save_file({f"{m}.{INPUT_SCALE}": s for m, s in scales.items()}, folder / SCALES)
        write_json(folder / "coverage.json", coverage.summary(settings, fallbacks))
        write_json(folder / "statistics.json", statistics.summary())
        save_trajectories(folder, [*trajectories, *held_out], sampler)


def calibrated_modules(source: Path, quantization: Quantization) -> list[str]:
    """Return the on-disk names of all modules with a calibrated input scale.

    Raises:
        InputError: the recipe gives no module of this model the scheme NVFP4.
    """
    targets = plan_targets(Checkpoint.open(source).tensors, quantization)
    modules = [module for t in targets if t.scheme == "NVFP4" for module in t.modules]
    if not modules:
        raise InputError("the recipe has no NVFP4 module: there is nothing to calibrate")
    return modules


def share_towers(model: DiffusionGemmaForBlockDiffusion) -> None:
    """Give every expert its own Linears, and the encoder the decoder's modules."""
    parent: Any = model.model
    for ours, theirs in zip(
        parent.decoder.layers, parent.encoder.language_model.layers, strict=True
    ):
        linear_experts = LinearExperts2D.get_linear_experts_cls(type(ours.experts))
        experts = linear_experts.from_experts_module(ours.experts, text_config(model))
        ours.experts = experts.to(model.dtype)
        for name in ("experts", "mlp", "router"):
            setattr(theirs, name, getattr(ours, name))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(theirs.self_attn, name, getattr(ours.self_attn, name))
    # A shared module has the name under which it is found first: the decoder's.
    parent._modules["encoder"] = parent._modules.pop("encoder")


@CalibrationPipeline.register("denoise")
class DenoisePipeline(CalibrationPipeline):
    """llm-compressor's hook for a calibration of one's own: observes while `loop` runs."""

    loop: ClassVar[Callable[[], None]]

    @staticmethod
    def __call__(model: nn.Module, dataloader: Any, dataset_args: Any) -> None:
        """Run the loop with observers on and quantization off."""
        LifecycleCallbacks.calibration_start()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(DisableQuantization(model))
            DenoisePipeline.loop()
        LifecycleCallbacks.sequential_epoch_end(list(model.modules()))
        LifecycleCallbacks.calibration_end()


def observe_input_scales(
    model: DiffusionGemmaForBlockDiffusion,
    quantization: Quantization,
    modules: list[str],
    loop: Callable[[], None],
) -> dict[str, Tensor]:
    """Run `loop` under llm-compressor's observers; return module -> input_global_scale [1] FP32.

    Args:
        model: as `share_towers` leaves it. Its Linears quantize their inputs afterwards.
        quantization: the recipe's section; its NVFP4 part is used.
        modules: the modules that must be observed, no more and no less.
        loop: runs the model.

    Raises:
        QuantizeError: llm-compressor's choice of modules is not `modules`.
    """
    modifier = QuantizationModifier(
        scheme={"NVFP4": quantization.targets_by_scheme()["NVFP4"]},
        ignore=quantization.ignore,
        # Inputs: the extremes of all batches. Its default, a moving average, forgets outliers.
        input_observer="static_minmax",
        weight_observer="memoryless_minmax",  # unused: convert quantizes the weights
    )
    DenoisePipeline.loop = loop
    with _quiet():
        oneshot(
            model=model,
            processor=_NO_PROCESSOR,
            recipe=modifier,
            pipeline="denoise",
            moe_calibrate_all_experts=False,  # experts see the tokens routed to them
        )
    found = {
        name.removesuffix(f".{INPUT_SCALE}"): scale.detach().float().reshape(1).clone()
        for name, scale in model.named_parameters()
        if name.endswith(f".{INPUT_SCALE}")
    }
    if found.keys() != set(modules):
        odd = sorted(found.keys() ^ set(modules))
        raise QuantizeError(
            f"calibration observed {len(found)} modules and the plan has {len(modules)}; the first "
            f"difference is {odd[0]}"
        )
    return {module: found[module] for module in modules}


class _NoProcessor:
    """Keeps oneshot from looking for a processor: prompts are tokenized here."""


_NO_PROCESSOR: Any = _NoProcessor()


@contextmanager
def _quiet() -> Generator[None]:
    """Silence llm-compressor's log: what it warns of (a module without statistics) is checked here."""
    for library in ("llmcompressor", "compressed_tensors"):
        logger.disable(library)
    try:
        yield
    finally:
        for library in ("llmcompressor", "compressed_tensors"):
            logger.enable(library)


def fall_back(
    scales: Mapping[str, Tensor], tokens: Mapping[str, list[int]], minimum: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Give under-covered experts their layer's largest amax, that is its smallest scale.

    Args:
        scales: module -> input_global_scale.
        tokens: `<layer>.experts` -> tokens routed to each of its experts.
        minimum: an expert with fewer tokens falls back.

    Returns:
        The scales, and the names `<layer>.experts.<expert>` that fell back.

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
    """Check that every scale is finite and above 0, and that inputs shared by modules share a scale.

    Raises:
        QuantizeError: names the module.
    """
    for module, scale in scales.items():
        if not (scale.isfinite() & (scale > 0)).all():
            raise QuantizeError(
                f"{module}: calibrated input_global_scale is {scale.tolist()}; no token reached it, or "
                f"its input was not finite"
            )
        for first, others in (("gate_proj", ("up_proj",)), ("q_proj", ("k_proj", "v_proj"))):
            if not module.endswith(first):
                continue
            for other in others:
                twin = scales.get(module.removesuffix(first) + other, scale)
                if not torch.equal(twin, scale):
                    raise QuantizeError(
                        f"{module} and its {other} read the same input and have the scales "
                        f"{scale.item()} and {twin.item()}"
                    )
