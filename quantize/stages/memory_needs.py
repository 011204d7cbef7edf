"""Computes how much GPU memory each stage needs.

The needs follow from the BF16 model's headers (or config) and the quantized model's plan. So they are
known before anything is loaded. Prompts and answers count with their largest length. `convert` and
`verify` are left out: by arithmetic each holds under 1 GB beside the CUDA context, less than fidelity.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quantize.checkpoints.reader import TensorInfo
from quantize.checkpoints.targets import Target, fused_units, layout_bytes, linear_shape
from quantize.recipe.sections import AT_ONCE, Recipe
from quantize.runtime.gpu.memory import EMBEDDING, MANY, Capability, Need, Stack, repacked
from quantize.schemes.gptq import factored_at_once
from quantize.schemes.modes import ActivationMode

TILE = 128  # side of the tiles that Hessians are held in (`schemes.hessians`)
HELD_OUT = 16  # prompts that are recorded for the replay and not observed
LEAST_REPLAYED = 4  # of them, however few questions are asked
REPLAYED = 16  # trajectories that are replayed at once
# Rows of six inputs that wait to be added to Hessians, 256 MB each at most, and their order.
WAITING_BYTES = 1.817e9
SHUTTLE_BYTES = 0.4e9  # rows of recorded passes on their way (`record.shuttle`)
# GPU memory that GPTQ may take to round several experts at once: 32 experts of 2,816 inputs and 1,408
# rows take 5.6 GB. A single Linear may take more.
ROUNDING_BYTES = 6e9
QUESTION_TOKENS = 1024  # room for a question; a longer one gets room when it comes
FRESH_TOKENS = 2048  # of a prompt that is recorded for the replay if nothing was calibrated


def replayed_of(recipe: Recipe) -> int:
    """Return how many held-out trajectories are replayed for a recipe: HELD_OUT.

    Where every task is limited (`--limit N`), there is one for five questions, and LEAST_REPLAYED at
    least: a trial of few questions shall be short, and its verdict is uncertain anyway.
    """
    settings = recipe.evaluation
    asked = max(settings.limit.get(task, 5 * HELD_OUT) for task in settings.tasks)
    return min(HELD_OUT, max(LEAST_REPLAYED, asked // 5))


def needs(
    recipe: Recipe,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    targets: Sequence[Target],
    capability: Capability | None,
) -> list[Need]:
    """Return the `Need`s of all stages; `capability` is the GPU's, None for a CPU."""
    bf16 = bf16_stack(tensors)

    def quantized(*modes: ActivationMode) -> Stack:
        """Return the stack of the mode that takes the most memory."""
        mode = "fp8" if "fp8" in modes else "none"
        return quantized_stack(recipe.name, targets, capability, mode)

    canvas = config["canvas_length"]
    listed: list[Need] = []
    replayed = FRESH_TOKENS + 2 * canvas
    if recipe.needs_calibration and (settings := recipe.calibration):
        replayed = settings.max_prompt_tokens + settings.canvases * canvas
        batch = settings.batch_size
        batches = sum(-(-n // batch) for n in (settings.prompts, HELD_OUT))
        listed.append(Need("calibrate", bf16, batch, replayed, batches=batches, fixed_batch=True))
    if recipe.quantization.rounding == "gptq" and (settings := recipe.calibration):
        length = settings.max_prompt_tokens + settings.canvases * canvas
        listed.append(_rounding(bf16, targets, settings.batch_size, length))
    vocabulary = tensors[EMBEDDING].nbytes  # of BF16; its layers are freed before the next model
    listed.append(Need("fidelity BF16", bf16, REPLAYED, replayed, True))
    scored = recipe.evaluation.activations
    modes: set[ActivationMode] = {"none", scored, *recipe.gate.replayed}
    engines = len(modes - {"fp8"})  # that share weights; `fp8` has weights of its own, later
    name = f"fidelity {recipe.name}"
    listed.append(Need(name, quantized(*modes), REPLAYED, replayed, True, engines, vocabulary))
    longest = max(map(recipe.evaluation.answer_tokens, recipe.evaluation.tasks))
    for stack in (bf16, quantized(scored)):
        name = f"evaluate {stack.name}"
        batch = recipe.evaluation.batch_size or AT_ONCE
        listed.append(Need(name, stack, batch, scored_positions(config, longest), batches=MANY))
    return listed


def bf16_stack(tensors: Mapping[str, TensorInfo]) -> Stack:
    """Return the `Stack` of the BF16 model: the bytes that it takes on a GPU."""
    return Stack.of("BF16", {name: info.nbytes for name, info in tensors.items()}, quantized=False)


def quantized_stack(
    name: str,
    targets: Sequence[Target],
    capability: Capability | None,
    mode: ActivationMode = "none",
) -> Stack:
    """Return the `Stack` of a plan's model, packed for `mode` on a GPU of `capability`."""
    sizes = {target.name: _packed(target, mode, capability) for target in targets}
    return Stack.of(name, sizes, quantized=True)


def scored_positions(config: Mapping[str, Any], longest: int) -> int:
    """Return the positions for a question and an answer of `longest` tokens, rounded up to canvases."""
    canvas = config["canvas_length"]
    room = QUESTION_TOKENS + -(-longest // canvas) * canvas
    return min(room, config["text_config"]["max_position_embeddings"])


def _rounding(bf16: Stack, targets: Sequence[Target], batch: int, length: int) -> Need:
    """Return GPTQ's need at any budget: two layers in turns, one layer's Hessians and rounding."""
    in_turns = Stack(f"{bf16.name}, a layer at a time", bf16.streaming, (0.0,), 0.0)
    hessians: Counter[str] = Counter()  # of each layer, a byte a square of a tile's side
    rounding = 0.0
    for unit in fused_units([target for target in targets if target.scheme]):
        *experts, _, inputs = unit[0].shape
        blocks, count = -(-inputs // TILE), math.prod(experts)
        layer = unit[0].name.partition(".layers.")[2].partition(".")[0]
        hessians[layer] += 4 * TILE**2 * count * blocks * (blocks + 1) // 2
        out = sum(target.shape[-2] for target in unit)
        least, most = (rounding_bytes(n, out, inputs) for n in (1, count))
        rounding = max(rounding, least, min(ROUNDING_BYTES, most))
    beside = max(hessians.values(), default=0) + WAITING_BYTES + rounding + SHUTTLE_BYTES
    return Need("round", in_turns, batch, length, beside=beside, fixed_batch=True, one_layer=True)


def choice_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of one token's experts (int32) and their weights (float32) in all layers."""
    text = config["text_config"]
    return 8 * text["num_hidden_layers"] * text["top_k_experts"]


def rounding_bytes(experts: int, out: int, inputs: int) -> int:
    """Return the bytes that GPTQ takes for as many matrices [out, inputs] at once.

    For each it holds Hessian and factor in float32, the weight in BF16, and as much again for codes and
    scales. While Hessians are factored, it also holds two copies of each weight in float32, and two
    float64 matrices for each Hessian of those factored at once. Later it holds six copies of each
    weight in float32.
    """
    square, weight = 4 * inputs**2, 4 * inputs * out
    factoring = 2 * weight * experts + 4 * square * min(experts, factored_at_once(inputs))
    return experts * (2 * square + weight) + max(factoring, 6 * weight * experts)


def _packed(target: Target, mode: ActivationMode, capability: Capability | None) -> int:
    if target.scheme is None:
        return target.bytes_after
    layout = repacked(target.scheme, target.modules[0], mode, capability)
    if layout is None:
        return target.bytes_after
    return len(target.modules) * layout_bytes(layout, *linear_shape(target.shape, target.modules))
