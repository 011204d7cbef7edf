"""The fused path against float64, layer by layer, from the operands that each layer was given.

See `layers` (tests/support): errors are of a few bf16 roundings and do not depend on the CPU. Limits
are about 1.4 times what was measured, and far below what a window, an eps, a softcap or a scalar that
is slightly wrong makes of them: `test_what_is_slightly_wrong_is_seen` holds that.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.reading import load_recipe
from quantize.runtime import Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.model.cells import Cache
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.prompt.chat import load_tokenizer
from quantize.runtime.prompt.images import Images, place, prepare
from quantize.runtime.prompt.pieces import pictures, pieces
from quantize.runtime.weights.load import TextWeights, load_packed
from quantize.schemes.modes import ActivationMode
from quantize.stages.convert.convert import convert
from tests.support.layers import Judge, Pass, joined, recorded, relative, telling_checkpoint
from tests.support.modules_oracle.passes import encode_prompts
from tests.support.modules_oracle.simulated import load_rounding

RECIPES: dict[str, ActivationMode] = {
    "bf16": "none", "fp8_dynamic": "per_expert", "int8_dynamic": "per_expert", "nvfp4a16": "none",
}  # fmt: skip
BF16 = {
    "hidden": 0.010, "attended": 0.008, "keys": 0.005, "values": 0.0045, "routing": 0.0035,
    "missed": 0.002, "embedded": 0.0045, "logits": 0.0035,
}  # fmt: skip
# 8-bit activations: a number that is rounded to the neighbouring code is off by a step.
EIGHT_BIT = {"hidden": 0.045, "attended": 0.032, "keys": 0.012, "values": 0.012, "routing": 0.004}
LIMITS = {"fp8_dynamic": BF16 | EIGHT_BIT, "int8_dynamic": BF16 | EIGHT_BIT}
CONTEXTS = (20, 31, 90)  # the window is 32: shorter, all but one of it, longer
SAMPLER = Sampler(max_denoising_steps=2)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


def within(found: dict[str, float], limits: dict[str, float]) -> None:
    too_far = {name: (value, limits[name]) for name, value in found.items() if value > limits[name]}
    assert not too_far, f"errors and their limits: {too_far}"


def fused_model(weights: TextWeights) -> FusedModel:
    return FusedModel(weights, Cache.allocate(weights.config, 3, 1024, 64, torch.device("cpu")))


def judged(folder: Path, mode: ActivationMode = "none") -> Judge:
    exact = load_rounding(folder, mode, dtype=torch.float64)
    return Judge(exact, fused_model(load_packed(folder, "cpu")))


def encoded(judge: Judge, prompt: Tensor, slot: int, chunk: int) -> dict[str, float]:
    starts = range(0, prompt.shape[1], chunk)
    with recorded() as passes:
        for start in starts:
            judge.fused.encode(prompt[:, start : start + chunk], integers(slot), integers(start))
    lengths = [len(made.hidden[0]) for made in passes]
    return judge.encoder(joined(passes, lengths), slot).worst()


def decoded(judge: Judge, canvas: Tensor, slot: int, context: int) -> list[dict[str, float]]:
    """Two steps, the second conditioned on the first."""
    fused, length = judge.fused, canvas.shape[1]
    found: list[dict[str, float]] = []
    soft: Tensor | None = None
    given: Tensor | None = None
    placed = fused.behind(integers(slot), integers(context), length)
    for _ in range(2):
        with recorded() as passes:
            out = fused.logits(fused.run([fused.decoding(canvas, placed, soft)])[0])
        made: Pass = passes[0]
        errors = judge.decoder(made, slot, context).worst()
        errors["embedded"] = relative(made.hidden[0], judge.embedded(canvas, given))
        errors["logits"] = relative(out, judge.logits(made))
        found.append(errors)
        given = out[None].double() / 0.7
        soft = fused.soft_embedding(out, torch.full((length,), 1 / 0.7))
    return found


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return telling_checkpoint(tmp_path_factory.mktemp("telling") / "bf16")


@pytest.fixture(scope="module")
def exact(telling: Path) -> DiffusionGemmaForBlockDiffusion:
    return load(telling, dtype=torch.float64)


@pytest.fixture
def judge(telling: Path, exact: DiffusionGemmaForBlockDiffusion) -> Judge:
    return Judge(exact, fused_model(load_packed(telling, "cpu")))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layer(recipe: str, telling: Path) -> None:
    """Encoder and decoder, below, at and past the window; the second step is self-conditioned."""
    folder = telling.parent / recipe
    if recipe != "bf16":
        source, own = Checkpoint.open(telling), load_recipe(recipe)
        targets = plan_targets(source.tensors, own.quantization)
        convert(source, targets, folder, recipe=own, input_scales=None)
    judge, limits = judged(folder, RECIPES[recipe]), LIMITS.get(recipe, BF16)
    prompt, canvas = tokens(1, max(CONTEXTS)), tokens(1, 16, seed=1)
    for slot, context in enumerate(CONTEXTS):
        found = [encoded(judge, prompt[:, :context], slot, 40)]
        found += decoded(judge, canvas, slot, context)
        for errors in found:
            print(recipe, context, {name: round(value, 5) for name, value in errors.items()})
            within(errors, limits)


def test_every_layer_of_the_bundled_model() -> None:
    """Trained weights and text, past the window of 512."""
    judge, context = judged(CHECKPOINT), 600
    tokenizer = load_tokenizer(CHECKPOINT)
    problems = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:20]]
    text = tokenizer.encode("\n".join(f"{p['question']}\n{p['answer']}" for p in problems))
    ids = torch.tensor([text])
    found = [encoded(judge, ids[:, :context], 1, 512)]
    found += decoded(judge, ids[:, context : context + 64], 1, context)
    for errors in found:
        print({name: round(value, 5) for name, value in errors.items()})
        within(errors, BF16)


def _window(fused: FusedModel) -> None:
    def behind(slots: Tensor, context: Tensor, length: int) -> object:
        placed = FusedModel.behind(fused, slots, context, length)
        first, last = placed.visible[True]
        placed.visible[True] = ((first - 1).clamp(min=0), last)
        return placed

    fused.behind = behind


def _scalar(fused: FusedModel) -> None:
    before = fused.weights.layers
    layers = (replace(w, decoder_scalar=w.encoder_scalar) for w in before)
    fused.weights = replace(fused.weights, layers=tuple(layers))


def _softcap(fused: FusedModel) -> None:
    fused.softcap *= 1.02


def _eps(fused: FusedModel) -> None:
    fused.eps *= 10


@pytest.mark.parametrize(
    ("change", "seen_in"),
    [
        (_window, {"attended", "hidden"}),
        (_scalar, {"hidden"}),
        (_softcap, {"logits"}),
        (_eps, {"attended", "hidden", "embedded"}),
    ],
)
def test_what_is_slightly_wrong_is_seen(
    judge: Judge, change: Callable[[FusedModel], None], seen_in: set[str]
) -> None:
    """The limits are not too wide: each of these passes none of the operations it touches."""
    prompt, canvas = tokens(1, 90), tokens(1, 16, seed=1)
    judge.fused.encode(prompt, integers(0), integers(0))
    change(judge.fused)
    for errors in decoded(judge, canvas, 0, 90):
        beyond = {name for name, value in errors.items() if value > 1.5 * BF16[name]}
        assert beyond >= seen_in


@pytest.mark.parametrize(
    ("sizes", "chunk", "most"),
    [
        ((30, 40), 1152, 70),  # text before, between and behind two pictures, in one pass
        ((90, 10), 96, 70),  # a pass ends before a picture that the next chunk of 96 would cut
        ((11, 10), 1152, 140),  # a picture of four windows
    ],
)
def test_pictures(judge: Judge, sizes: tuple[int, int], chunk: int, most: int) -> None:
    """Soft tokens see all of their picture, and text what it sees without one."""
    config = judge.exact.config
    engine = FusedEngine(judge.fused.weights, capacity=2, max_context=768)
    judge.fused, engine.encoder.chunk = engine.model, chunk
    drawn = [
        Image.radial_gradient("L").resize(size).convert("RGB") for size in ((320, 320), (90, 70))
    ]
    images, counts = prepare(drawn, config, most)
    before, between, behind = (tokens(n, seed=n).tolist() for n in (*sizes, 20))
    ids = [*before, config.image_token_id, *between, config.image_token_id, *behind]
    prompt = place(ids, counts, config)
    seen = pictures(prompt, config.image_token_id)
    with recorded() as passes:
        engine.admit(1, prompt, 0, SAMPLER, images)
    lengths = [end - start for start, end in pieces(len(prompt), chunk, seen)]
    assert len(lengths) == (3 if chunk < 1152 else 1)
    made = joined(passes, lengths)
    found = judge.encoder(made, 1, seen).worst()
    exact = embeddings(judge, prompt, images)
    places = torch.tensor(prompt) == config.image_token_id
    found["embedded"] = relative(made.hidden[0][~places], exact[~places])
    print({name: round(value, 5) for name, value in found.items()})
    within(found, BF16)
    soft = relative(made.hidden[0][places], exact[places])
    assert soft < 0.02, soft  # the tower: one layer in bf16 throughout
    placed = judge.encoder(made, 1).worst()  # as if pictures saw no more than text does
    assert placed["attended"] > 10 * BF16["attended"]
    for errors in decoded(judge, tokens(1, 16, seed=1), 1, len(prompt)):
        within(errors, BF16)


def embeddings(judge: Judge, prompt: list[int], images: Images) -> Tensor:
    """What transformers' encoder embeds: [n, H]."""
    given: list[Tensor] = []
    hook = judge.exact.model.encoder.language_model.register_forward_pre_hook(
        lambda _, args, options: given.append(options["inputs_embeds"][0]), with_kwargs=True
    )
    encode_prompts(judge.exact, [prompt], [images])
    hook.remove()
    return given[0]
