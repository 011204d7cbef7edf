"""The fused runtime against transformers' modules, on a CPU with the kernels' torch references.

The yardstick is float32 on the bundled model, whose routing does not flip at every rounding as a random
model's does: the fused path rounds to bf16 where transformers' bf16 model does, so its error against
float32 may be a little more than that model's own, and not a multiple of it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoint import Checkpoint
from quantize.convert import convert
from quantize.errors import InputError
from quantize.load import load
from quantize.recipe import ActivationMode, load_recipe
from quantize.runtime import Sampler
from quantize.runtime.chat import load_tokenizer
from quantize.runtime.fused import Cache, FusedModel
from quantize.runtime.fused_engine import FusedEngine
from quantize.runtime.model import decode_canvas, encode_prompts
from quantize.runtime.packed import load_packed
from quantize.targets import plan_targets

DEVICE = torch.device("cpu")
RECIPES: dict[str, ActivationMode] = {
    "bf16": "none", "fp8_dynamic": "per_expert", "int8_dynamic": "per_expert", "nvfp4a16": "none",
}  # fmt: skip
SAMPLER = Sampler(max_denoising_steps=4, eos_token_ids=(1,))


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model in BF16 and quantized without calibration."""
    folder, source = tmp_path_factory.mktemp("artifacts"), Checkpoint.open(CHECKPOINT)
    made = {"bf16": CHECKPOINT}
    for name in RECIPES.keys() - made.keys():
        recipe = load_recipe(name)
        targets = plan_targets(source.tensors, recipe.quantization)
        made[name] = folder / name
        convert(source, targets, made[name], recipe=recipe, input_scales=None)
    return made


def fused_model(folder: Path, chunk: int = 128) -> FusedModel:
    weights = load_packed(folder, "cpu")
    return FusedModel(weights, Cache.allocate(weights.config, 3, 1024, chunk, DEVICE))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


def real_tokens(count: int) -> torch.Tensor:
    """Problems and their answers, one after the other: text the model has opinions about."""
    tokenizer = load_tokenizer(CHECKPOINT)
    problems = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:20]]
    text = "\n".join(f"{p['question']}\n{p['answer']}" for p in problems)
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)[:count]])


CONTEXTS = (40, 300, 511, 700)  # the window is 512


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits(recipe: str, artifacts: dict[str, Path]) -> None:
    """Two steps, the second self-conditioned: mean relative errors over prompts up to and past the
    window. Single canvases differ more, wherever a rounding sends a token to another expert.
    """
    folder, mode = artifacts[recipe], RECIPES[recipe]
    fused = fused_model(folder)
    exact, bf16 = (load(folder, activations=mode, dtype=t) for t in (torch.float32, torch.bfloat16))
    length = fused.weights.config.canvas_length
    errors, yardstick = torch.zeros(2), torch.zeros(2)
    for context in CONTEXTS:
        text = real_tokens(context + length)
        prompt, canvas = text[:, :context], text[:, context:]
        first, second = two_steps(exact, prompt, canvas, None)
        yardstick += relative(two_steps(bf16, prompt, canvas, first), (first, second))
        for start in range(0, context, 128):
            fused.encode(prompt[:, start : start + 128], integers(2), integers(start))
        out = torch.empty(2, length, first.shape[-1], dtype=torch.bfloat16)
        soft = fused.soft_embedding(first[0].to(torch.bfloat16), torch.full((length,), 1 / 0.7))
        for step, signal in enumerate((None, soft)):
            rows = fused.behind(integers(2), integers(context), canvas.shape[1])
            fused.decode(canvas, rows, signal, out[step])
        errors += relative(out.unsqueeze(1).unbind(), (first, second))
    assert (yardstick / len(CONTEXTS) < 0.2).all(), yardstick
    assert (errors <= 1.5 * yardstick).all(), (errors, yardstick)


def two_steps(
    model: DiffusionGemmaForBlockDiffusion,
    prompt: torch.Tensor,
    canvas: torch.Tensor,
    conditioning: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a first step and of one conditioned on its logits, or on others'."""
    prefix = encode_prompts(model, prompt.tolist())
    first = decode_canvas(model, prefix, canvas, None)
    given = first if conditioning is None else conditioning
    return first, decode_canvas(model, prefix, canvas, given / 0.7)


def relative(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    pairs = zip(actual, expected, strict=True)
    return torch.stack([(a.float() - e).norm() / e.norm() for a, e in pairs])


def test_chunks_and_slots_do_not_matter(tiny_checkpoint: Path) -> None:
    """The same canvas behind a prompt encoded whole, in pieces, in another slot, and as one of two."""
    fused = fused_model(tiny_checkpoint)
    length, vocabulary = fused.weights.config.canvas_length, len(fused.weights.embedding)
    prompt, canvas = tokens(1, 90), tokens(1, length, seed=1)
    fused.encode(prompt, integers(0), integers(0))
    for start in range(0, 90, 40):
        fused.encode(prompt[:, start : start + 40], integers(2), integers(start))
    fused.encode(prompt[:, :50], integers(1), integers(0))
    out = torch.empty(3 * length, vocabulary, dtype=torch.bfloat16)
    rows = fused.behind(integers(0, 2, 1), integers(90, 90, 50), canvas.shape[1])
    fused.decode(canvas.expand(3, -1), rows, None, out)
    whole, pieces, shorter = out.float().unflatten(0, (3, length))
    scale = whole.norm()
    assert (whole - pieces).norm() / scale < 0.05
    assert (whole - shorter).norm() / scale > 0.2


def test_engine_keeps_samples_apart(tiny_checkpoint: Path) -> None:
    """A batch of four, and the same sample with others that are elsewhere in their answers."""
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=4, max_context=256)
    prompts = tokens(4, 20).tolist()
    for slot in range(4):
        engine.admit(slot, prompts[slot][: 12 + slot], slot, SAMPLER)
    together = [engine.denoise(range(4)) for _ in range(2)]
    for slot in (0, 2, 3):
        engine.release(slot)
        engine.admit(slot, prompts[slot][: 12 + slot], slot, SAMPLER)
    later = engine.denoise([3, 1, 0, 2])  # slot 1 is at its third canvas
    for slot, canvas in zip([3, 0, 2], [later[0], *later[2:]], strict=True):
        assert canvas == together[0][slot]
    assert together[0][0] != together[0][1]
    assert all(canvas.steps == 4 for canvas in together[1])


def test_engine_refuses(tiny_checkpoint: Path) -> None:
    weights = load_packed(tiny_checkpoint, "cpu")
    engine = FusedEngine(weights, capacity=1, max_context=128)
    for prompt, word in (
        ([], "empty"),
        ([600], "vocabulary"),
        ([511], "image"),
        ([5] * 120, "fits"),
    ):
        with pytest.raises(InputError, match=word):
            engine.admit(0, prompt, 0, SAMPLER)
    engine.admit(0, [5] * 100, 0, SAMPLER)
    with pytest.raises(InputError, match="not free"):
        engine.admit(0, [5], 0, SAMPLER)
    engine.denoise([0])
    with pytest.raises(InputError, match="no canvas fits"):
        engine.denoise([0])
    with pytest.raises(InputError, match="max_context"):
        FusedEngine(weights, max_context=1 << 20)
