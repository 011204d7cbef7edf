"""Passes of the engine and of the oracle: the same inputs seen, logits within BF16's rounding.

transformers' modules in float32 are the truth and those in BF16 the yardstick: the kernels' references
round where those do, so their error may be a little more than the modules' own.
"""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_dequant.weights import weight as weights
from safetensors.torch import save_file

from quantize.bundled import CALIBRATION, CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.errors import InputError
from quantize.recipe.reading import load_recipe
from quantize.runtime import Placement, Sampler, generate, open
from quantize.runtime.engine import interface as protocol
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Engine, complete
from quantize.runtime.gpu import trust
from quantize.runtime.gpu.cores import GPU
from quantize.runtime.opening import RandomModel
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.record.ranges import Ranges
from quantize.runtime.record.trajectory import Prompt, Trajectory, record, save_trajectories
from quantize.runtime.weights.load import TextWeights, load_packed
from quantize.schemes.modes import ActivationMode
from quantize.stages.calibrate.calibrate import calibrated_modules, input_scales
from quantize.stages.calibrate.coverage import Coverage
from quantize.stages.convert.convert import convert
from quantize.stages.fidelity import fidelity
from quantize.stages.fidelity.fidelity import summarize
from quantize.stages.fidelity.replay import Compared, replay
from tests.support.modules_oracle.opening import open_modules

PROMPTS, STEPS, ROOM = 4, 3, 512
TIPPED = 0.05  # nats
SAMPLER = replace(Sampler.from_checkpoint(CHECKPOINT), max_denoising_steps=STEPS)
Seen = tuple[Ranges, Coverage]


def opened(folder: Path | RandomModel, **settings: object) -> FusedEngine:
    return open(folder, device="cpu", capacity=PROMPTS, max_context=ROOM, **settings)  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    """Word problems of different lengths."""
    tokenizer, rows = load_tokenizer(CHECKPOINT), CALIBRATION.read_text().splitlines()[:PROMPTS]
    chats = [[{"role": "user", "content": json.loads(row)["question"]}] for row in rows]
    return [encode_chat(tokenizer, chat, thinking=False) for chat in chats]


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    """What the float32 oracle reads on their way to two canvases."""
    given = [Prompt(tuple(ids), False) for ids in prompts()]
    engine = open_modules(CHECKPOINT, capacity=PROMPTS)
    return record(engine, given, range(PROMPTS), sampler=SAMPLER, canvases=2, held_out=True)


@pytest.fixture(scope="module")
def short(trajectories: list[Trajectory]) -> list[Trajectory]:
    """The same, of two steps each: the second is conditioned on the first."""
    return [replace(each, steps=[ids[:2] for ids in each.steps]) for each in trajectories]


@pytest.fixture(scope="module")
def seen(short: list[Trajectory]) -> tuple[Seen, Seen]:
    """What the engine and the oracle show of the same passes, teacher-forced along the trajectories."""
    experts = Checkpoint.open(CHECKPOINT).config["text_config"]["num_experts"]
    found: list[Seen] = []
    for engine in (opened(CHECKPOINT), open_modules(CHECKPOINT, capacity=PROMPTS)):
        ranges, coverage = Ranges(experts), Coverage(experts)
        with engine.watching(ranges.see, coverage.see):
            replay(engine, [], short, SAMPLER)
        found.append((ranges, coverage))
    return found[0], found[1]


def test_the_engine_sees_the_oracles_inputs(
    seen: tuple[Seen, Seen], short: list[Trajectory]
) -> None:
    """The same Linears, the same tokens and no padding, magnitudes within BF16's rounding."""
    (ours, counts), (theirs, their_counts) = seen
    modules = calibrated_modules(CHECKPOINT, load_recipe("nvfp4_w4a4").quantization)
    a, b = (input_scales(each, modules) for each in (ours, theirs))
    ratios = torch.cat([a[m] / b[m] for m in modules if b[m].isfinite() and a[m].isfinite()])
    assert len(ratios) > 0.9 * len(modules)
    assert (ratios - 1).abs().median() < 2**-8
    dense = torch.cat([a[m] / b[m] for m in modules if "experts" not in m])
    assert (dense - 1).abs().max() < 2**-4
    assert len(dense) > 30
    tokens = sum(
        len(t.prompt.ids) + t.committed[:-1].numel() + sum(len(s) * s.shape[1] for s in t.steps)
        for t in short
    )
    topk = Checkpoint.open(CHECKPOINT).config["text_config"]["top_k_experts"]
    assert {sum(c) for c in counts.tokens.values()} == {tokens * topk}
    assert {sum(c) for c in their_counts.tokens.values()} == {tokens * topk}


@pytest.fixture(scope="module")
def quantized(seen: tuple[Seen, Seen], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model in NVFP4, with scales of these passes, and in FP8."""
    folder, source = tmp_path_factory.mktemp("passes"), Checkpoint.open(CHECKPOINT)
    made: dict[str, Path] = {}
    for name in ("nvfp4_w4a4", "fp8_dynamic"):
        recipe = load_recipe(name)
        targets, scales = plan_targets(source.tensors, recipe.quantization), None
        if name == "nvfp4_w4a4":
            modules = calibrated_modules(CHECKPOINT, recipe.quantization)
            found = input_scales(seen[1][0], modules)
            finite = {m: s if s.isfinite() else torch.full((1,), 100.0) for m, s in found.items()}
            scales = folder / "input_scales.safetensors"
            save_file({f"{m}.input_global_scale": s for m, s in finite.items()}, scales)
        made[name] = folder / name
        convert(source, targets, made[name], recipe=recipe, input_scales=scales)
    return made


CASES: list[tuple[str, ActivationMode]] = [
    ("nvfp4_w4a4", "none"), ("nvfp4_w4a4", "per_expert"), ("fp8_dynamic", "per_layer"),
    ("nvfp4_w4a4", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_kernels_are_as_far_from_float32_as_the_modules_in_bf16(
    name: str, mode: ActivationMode, quantized: dict[str, Path], trajectories: list[Trajectory]
) -> None:
    """Replay KL from the same checkpoint in float32, all rounding the same inputs.

    A position counts at most TIPPED: where a rounding tips one over to other experts it may be 12 nats
    off, and which one that is depends on the CPU. A fault is no matter of one position.
    """
    exact, bf16 = (
        open_modules(quantized[name], mode, capacity=PROMPTS, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    fused = opened(quantized[name], activations=mode)
    yardstick, ours = (
        torch.cat([step.kl for step in each]).clamp(max=TIPPED).mean().item()
        for each in replay(exact, [Compared(bf16), Compared(fused)], trajectories[:2], SAMPLER)
    )
    assert yardstick > 0
    # Where nothing is rounded both are noise of BF16 logits, a tenth of what NVFP4's weights cost.
    assert ours < max(1.5 * yardstick, 1e-3), (ours, yardstick)


def test_modes_differ_as_they_should(quantized: dict[str, Path], short: list[Trajectory]) -> None:
    """Against BF16 on the same engine: rounded activations cost more than none, and differ."""
    reference = opened(CHECKPOINT)
    modes: list[ActivationMode] = ["none", "per_expert", "per_layer"]
    first = opened(quantized["nvfp4_w4a4"], activations="none")
    compared = [Compared(reference), Compared(first)]
    for mode in modes[1:]:
        beside = opened(quantized["nvfp4_w4a4"], activations=mode, beside=first)
        compared.append(Compared(beside))
    compared.append(Compared(compared[-1].engine, own_conditioning=True))
    same, none, per_expert, per_layer, own = (
        summarize(each) for each in replay(reference, compared, short[:1], SAMPLER)
    )
    assert same["kl_nats"]["max"] == 0
    assert min(same["routing_overlap"]) == 1
    assert 0 < none["kl_nats"]["mean"] < per_expert["kl_nats"]["mean"]
    assert per_layer["kl_nats"]["mean"] != per_expert["kl_nats"]["mean"]
    assert own["kl_nats"]["mean"] != per_layer["kl_nats"]["mean"]
    first_steps = [d for d in own["by_step"] if d["step"] == 1]
    assert first_steps == [d for d in per_layer["by_step"] if d["step"] == 1]


def test_fidelity_without_bf16_beside_the_quantized_model(
    quantized: dict[str, Path],
    short: list[Trajectory],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """BF16 runs first, and its layers are gone when the other is opened; it comes again at the end."""
    (tmp_path / "calibration").mkdir()
    save_trajectories(tmp_path / "calibration", short[:1], SAMPLER)
    made: list[weakref.ref[TextWeights]] = []
    there: list[int] = []  # weights, when a model is opened
    vocabularies: list[weakref.ref[torch.Tensor]] = []
    kept: list[bool] = []  # whether BF16's first vocabulary is there, when a model is opened

    def opening(folder: Path, place: Placement, **settings: Any) -> Engine:
        gc.collect()
        there.append(sum(weights() is not None for weights in made))
        kept.extend(vocabulary() is not None for vocabulary in vocabularies[:1])
        engine = open(folder, place, **settings)
        made.append(weakref.ref(engine.model.weights))
        vocabularies.append(weakref.ref(engine.model.weights.embedding))
        return engine

    monkeypatch.setattr(fidelity, "open", opening)
    out = tmp_path / "fidelity.json"
    fidelity.fidelity(
        CHECKPOINT, quantized["nvfp4_w4a4"], tmp_path / "calibration", out,
        activations="per_layer", limits={"none": 1.0, "per_expert": 1.0}, more=("fp8",),
    )  # fmt: skip
    # Weights at once: BF16's, those that modes share, those of the mode that does not, BF16's.
    assert there == [0, 0, 1, 2, 0, 0]
    assert kept == [True, True, True, True, False]
    content = json.loads(out.read_text())
    assert list(content["activations"]) == ["none", "per_layer", "per_expert", "fp8"]
    kl = {mode: each["kl_nats"]["mean"] for mode, each in content["activations"].items()}
    assert len(set(kl.values())) == 4
    assert content["own_conditioning"]["activations"] == "per_layer"
    cost = content["routing_cost"]
    assert cost["as_it_is"]["mean"] == kl["per_layer"]
    assert 0 < cost["with_bf16_choices"]["mean"] != kl["per_layer"]
    assert cost["bf16_with_its_choices"]["mean"] > 0


def test_pieces_change_nothing_and_both_ways_to_generate_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits looked at canvas by canvas, and all at once."""
    engine = opened(CHECKPOINT)
    few = replace(SAMPLER, max_denoising_steps=2, confidence_threshold=1e-9)
    asked = {"max_new_tokens": 64, "sampler": few}
    whole = [complete(engine, prompts(), range(PROMPTS), **asked)]
    whole.append(generate(engine, prompts(), range(PROMPTS), **asked))
    assert whole[0] == whole[1]  # the kernels' sampler, and torch's over the passes: one arithmetic
    monkeypatch.setattr(GPU, "canvases_at_once", 1)
    monkeypatch.setattr(protocol, "PIECE", 1)
    engine = opened(CHECKPOINT)
    assert complete(engine, prompts(), range(PROMPTS), **asked) == whole[0]
    assert generate(engine, prompts(), range(PROMPTS), **asked) == whole[1]


def test_an_engine_beside_another_shares_its_weights() -> None:
    """A checkpoint's, and random ones, which would be made, and held, once more."""
    config = Checkpoint.open(CHECKPOINT).config
    random = RandomModel(config, dict.fromkeys(("experts", "attention", "mlp"), "bf16"))
    for model in (CHECKPOINT, random):
        first = opened(model)
        second = opened(model, beside=first)
        assert second.model.weights is first.model.weights


def test_the_mode_fp8_has_weights_of_its_own(quantized: dict[str, Path]) -> None:
    """What was packed for BF16 rows is not multiplied with FP8 ones, nor the other way round."""
    config = Checkpoint.open(CHECKPOINT).config
    random = RandomModel(config, {"experts": "nvfp4", "attention": "fp8", "mlp": "bf16"})
    for model in (quantized["nvfp4_w4a4"], random):
        first, second = opened(model), opened(model, activations="fp8")
        third = opened(model, activations="fp8", beside=second)
        fourth = opened(model, beside=second)
        packed: list[TextWeights] = []
        for engine in (first, second, third, fourth):
            packed.append(engine.model.weights)
        assert packed[2] is packed[1]
        assert packed[3] is not packed[1]
        dense, experts = (
            [next(iter(w.layers)).down.scheme for w in packed],
            [next(iter(w.layers)).experts_down.scheme for w in packed],
        )
        assert experts == ["nvfp4", "fp8", "fp8", "nvfp4"]
        assert dense == (["bf16"] * 4 if model is random else experts)


def test_experts_as_hopper_keeps_them_give_the_same_logits(
    quantized: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 4 bits, in fragments: on a CPU the products are torch's, so nothing else may differ."""
    found: list[torch.Tensor] = []
    for hopper in (False, True):
        target = (9, 0) if hopper else None
        monkeypatch.setattr(weights, "target_of", lambda _, target=target: target)
        engine = opened(quantized["nvfp4_w4a4"], activations="fp8")
        products = [weight for layer in engine.model.weights.layers for weight in layer.products]
        schemes = {weight.scheme for weight in products if weight.shape[0] > 1}
        assert schemes == {"nvfp4_e4m3" if hopper else "fp8"}
        assert {weight.scheme for weight in products if weight.shape[0] == 1} == {"fp8"}
        passes = engine.passes(prompts())
        decoded = passes.decode([0, 2], torch.arange(2 * 64).view(2, 64) + 200, None)
        found.append(torch.cat([decoded.logits(piece) for piece in decoded.pieces()]))
    assert torch.equal(*found)


def test_weights_for_fp4_units_give_the_logits_of_the_simulation(
    quantized: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU both are products in torch of the same numbers: the same bits, streamed or not."""
    found: list[torch.Tensor] = []
    for units, resident in ((False, None), (True, None), (True, 1)):
        monkeypatch.setattr(trust, "trust", lambda *_, units=units: units)
        engine = opened(quantized["nvfp4_w4a4"], activations="per_layer", resident=resident)
        assert isinstance(engine, FusedEngine)
        products = [weight for layer in engine.model.weights.layers for weight in layer.products]
        assert {weight.scheme for weight in products} == {"nvfp4_e2m1" if units else "nvfp4"}
        assert (engine.model.inputs is None) == units
        passes = engine.passes(prompts())
        decoded = passes.decode([0, 2], torch.arange(2 * 64).view(2, 64) + 200, None)
        found.append(torch.cat([decoded.logits(piece) for piece in decoded.pieces()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_streamed_layers_are_packed_for_fp8_too(quantized: dict[str, Path]) -> None:
    whole, streamed = (
        load_packed(quantized["nvfp4_w4a4"], "cpu", resident=n, in_fp8=True) for n in (None, 1)
    )
    for ours, theirs in zip(streamed.layers, whole.layers, strict=True):
        assert {weight.scheme for weight in ours.products} == {"fp8"}
        for mine, other in zip(ours.products, theirs.products, strict=True):
            assert torch.equal(mine.data.view(torch.uint8), other.data.view(torch.uint8))


def test_what_passes_refuse() -> None:
    engine = opened(CHECKPOINT)
    with pytest.raises(InputError, match="5 prompts for 4 slots"):
        engine.passes([[5]] * 5)
    engine.admit(1, [5], 0, SAMPLER)
    with pytest.raises(InputError, match="must be free"):
        engine.passes([[5]])


def test_quantized_weights_are_not_watched(quantized: dict[str, Path]) -> None:
    engine = opened(quantized["fp8_dynamic"])
    with pytest.raises(InputError, match="BF16 model"), engine.watching(lambda *_: None):
        engine.passes([[5, 6]])
