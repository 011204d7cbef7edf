"""Computes the memory that every stage asks of a GPU.

It is known before anything is loaded: from the headers, or the config, of the BF16 model and the plan
of the quantized one. Prompts and answers count at their longest; a run that has read its prompts asks
for less. `convert` and `verify` hold a few pieces of weights, by arithmetic less than 1 GB beside the
CUDA context; fidelity, which every run has, needs more, so they are not listed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target, layout_bytes, linear_shape
from quantize.recipe.sections import AT_ONCE, Recipe
from quantize.runtime.memory import EMBEDDING, Need, Stack, repacked
from quantize.schemes.modes import ActivationMode

HELD_OUT = 16  # prompts that are recorded for the replay, and not observed
REPLAYED = 16  # trajectories that are replayed at once
HESSIAN_BYTES = 4 << 30  # GPTQ's Hessians of a layer, 2.4 GB at 26B
SHUTTLE_BYTES = 0.4e9  # rows of recorded passes on their way (`fused.shuttle`)
# GPU bytes of GPTQ beside them, by arithmetic: of 32 experts of 2,816 inputs and 1,408 rows at a time
# 2 float32 Hessians and 6.5 copies of a weight (5.3 GB), and 7 matrices in float64 (0.4 GB). A dense
# Linear of 8,192 inputs takes 4.9 GB.
ROUNDING_BYTES = 6e9
QUESTION_TOKENS = 1024  # room for a question; a longer one gets room when it comes
FRESH_TOKENS = 2048  # of a prompt that is recorded for the replay where nothing was calibrated


def needs(
    recipe: Recipe,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    targets: Sequence[Target],
    *,
    hopper: bool,
) -> list[Need]:
    """Return the needs of those of calibrate, round, fidelity and evaluate that the recipe has.

    On a Hopper GPU the experts of the mode `fp8` stay in 4 bits, elsewhere they take 8.
    """
    bf16 = bf16_stack(tensors)

    def quantized(*modes: ActivationMode) -> Stack:
        """Return the largest stack of those that the modes multiply with."""
        mode = "fp8" if "fp8" in modes else "none"
        return quantized_stack(recipe.name, targets, mode, hopper=hopper)

    canvas = config["canvas_length"]
    found: list[Need] = []
    replayed = FRESH_TOKENS + 2 * canvas
    if recipe.needs_calibration and (settings := recipe.calibration):
        replayed = settings.max_prompt_tokens + settings.canvases * canvas
        batch = settings.batch_size
        found.append(Need("calibrate", bf16, batch, replayed, fixed_batch=True))
    if recipe.quantization.rounding == "gptq" and (settings := recipe.calibration):
        length = settings.max_prompt_tokens + settings.canvases * canvas
        found.append(_rounding(bf16, settings.batch_size, length))
    vocabulary = tensors[EMBEDDING].nbytes  # of BF16, whose layers are gone when the other comes
    found.append(Need("fidelity BF16", bf16, REPLAYED, replayed, True))
    scored = recipe.evaluation.activations
    modes: set[ActivationMode] = {"none", scored, *recipe.gate.max_kl_nats}
    engines = len(modes - {"fp8"})  # that share weights; `fp8` has its own, and comes after
    name = f"fidelity {recipe.name}"
    found.append(Need(name, quantized(*modes), REPLAYED, replayed, True, engines, vocabulary))
    longest = max(map(recipe.evaluation.answer_tokens, recipe.evaluation.tasks))
    for stack in (bf16, quantized(scored)):
        name = f"evaluate {stack.name}"
        batch = recipe.evaluation.batch_size or AT_ONCE
        found.append(Need(name, stack, batch, scored_positions(config, longest)))
    return found


def bf16_stack(tensors: Mapping[str, TensorInfo]) -> Stack:
    """Return the bytes of the BF16 model on a GPU."""
    return Stack.of("BF16", {name: info.nbytes for name, info in tensors.items()}, quantized=False)


def quantized_stack(
    name: str, targets: Sequence[Target], mode: ActivationMode = "none", *, hopper: bool
) -> Stack:
    """Return the bytes of a planned model on a GPU, as an activation mode packs it."""
    sizes = {target.name: _packed(target, mode, hopper) for target in targets}
    return Stack.of(name, sizes, quantized=True)


def scored_positions(config: Mapping[str, Any], longest: int) -> int:
    """Return the positions of a question and an answer of at most `longest` tokens, whole canvases."""
    canvas = config["canvas_length"]
    room = QUESTION_TOKENS + -(-longest // canvas) * canvas
    return min(room, config["text_config"]["max_position_embeddings"])


def _rounding(bf16: Stack, batch: int, length: int) -> Need:
    """Return what GPTQ takes at any budget: two layers in turns, and one's Hessians and rounding."""
    in_turns = Stack(f"{bf16.name}, a layer at a time", bf16.streaming, (0.0,), 0.0)
    beside = HESSIAN_BYTES + ROUNDING_BYTES + SHUTTLE_BYTES
    return Need("round", in_turns, batch, length, beside=beside, fixed_batch=True, one_layer=True)


def _packed(target: Target, mode: ActivationMode, hopper: bool) -> int:
    """Return a tensor's bytes once packed, as `memory.packed_sizes` of a checkpoint that is there."""
    if target.scheme is None:
        return target.bytes_after
    layout = repacked(target.scheme, target.modules[0], mode, hopper=hopper)
    if layout is None:
        return target.bytes_after
    return len(target.modules) * layout_bytes(layout, *linear_shape(target.shape, target.modules))
