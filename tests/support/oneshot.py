"""Input scales by llm-compressor's own observers: the oracle of calibration.

Its oneshot runs a calibration pipeline of ours, and each expert as a Linear of its own:
  * the decoder's experts become one Linear each, and the encoder uses the same module objects, so an
    observer sees prompt, committed and canvas tokens merged;
  * the encoder is moved behind the decoder in its parent, so that modules have their on-disk names
    (`model.decoder.*`) and the recipe's targets and ignore match them as they are.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.pipelines.registry import CalibrationPipeline
from llmcompressor.utils.helpers import DisableQuantization
from torch import Tensor, nn

from quantize.checkpoints.load import load
from quantize.recipe.sections import Quantization

INPUT_SCALE = ".input_global_scale"
NO_PROCESSOR: Any = type("NoProcessor", (), {})()  # keeps oneshot from looking for one


def oneshot_scales(
    source: Path, quantization: Quantization, loop: Callable[[nn.Module], None]
) -> dict[str, Tensor]:
    """Return module -> input_global_scale [1] FP32 of what `loop` lets flow through the model."""
    model = load(source)
    model.config._name_or_path = str(source)  # oneshot looks the configuration up there
    share_towers(model)
    DenoisePipeline.loop = loop
    oneshot(
        model=model,
        processor=NO_PROCESSOR,
        recipe=QuantizationModifier(
            scheme={"NVFP4": quantization.targets_by_scheme()["NVFP4"]},
            ignore=quantization.ignore,
            # The extremes of all batches. The default, a moving average, forgets outliers.
            input_observer="static_minmax",
        ),
        pipeline="denoise",
        moe_calibrate_all_experts=False,  # experts see the tokens routed to them
    )
    return {
        name.removesuffix(INPUT_SCALE): scale.detach().float().reshape(1)
        for name, scale in model.named_parameters()
        if name.endswith(INPUT_SCALE)
    }


def share_towers(model: Any) -> None:
    """Give every expert its own Linears, and the encoder the decoder's modules."""
    parent = model.model
    layers = zip(parent.decoder.layers, parent.encoder.language_model.layers, strict=True)
    for ours, theirs in layers:
        linear_experts = LinearExperts2D.get_linear_experts_cls(type(ours.experts))
        experts = linear_experts.from_experts_module(ours.experts, model.config.text_config)
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

    loop: ClassVar[Callable[[nn.Module], None]]

    @staticmethod
    def __call__(model: nn.Module, dataloader: Any, dataset_args: Any) -> None:
        """Run the loop with observers on and quantization off."""
        LifecycleCallbacks.calibration_start()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(DisableQuantization(model))
            DenoisePipeline.loop(model)
        LifecycleCallbacks.sequential_epoch_end(list(model.modules()))
        LifecycleCallbacks.calibration_end()
