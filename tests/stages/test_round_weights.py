"""Hessians of a replay beside plain hooks; rounded layers that resume, and that convert writes."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from chats import add_chats
from conversions import recipe_for
from safetensors.torch import load_file
from tiny import EXPERTS, LAYERS, tiny_model
from torch import Tensor, nn

from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import Target, plan_targets
from quantize.errors import InputError
from quantize.host.files import read_json
from quantize.recipe.sections import Calibration, Recipe, load_recipe, parse_recipe
from quantize.runtime import Sampler, generate
from quantize.runtime.memory import Plan, plan
from quantize.runtime.modules.engine import ModelEngine
from quantize.schemes.gptq import layer_loss
from quantize.schemes.hessians import Hessians
from quantize.schemes.records import SCHEMES
from quantize.stages.convert.convert import convert
from quantize.stages.round_weights import round_weights as stage
from quantize.stages.round_weights.round_weights import groups_of, round_weights, units_of

SAMPLER = Sampler(max_denoising_steps=3, eos_token_ids=(1, 50), pad_token_id=0)
LAYER = "model.decoder.layers.1"
PROMPTS = [[2, 110, 120, 130], [2, 140, 150, 160, 170, 180]]


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("rounding") / "source"
    shutil.copytree(tiny_checkpoint, folder)
    add_chats(folder)
    return Checkpoint.open(folder)


def recipe_of(source: Checkpoint, prompts: int = 6) -> Recipe:
    settings = Calibration(
        datasets=[str(source.folder / "chats.jsonl")], prompts=prompts, canvases=1, thinking=0.5,
        batch_size=4,
    )  # fmt: skip
    return recipe_for("NVFP4A16").model_copy(update={"calibration": settings})


def targets_of(source: Checkpoint) -> list[Target]:
    return plan_targets(source.tensors, recipe_of(source).quantization)


@pytest.fixture(scope="module")
def rounded(source: Checkpoint) -> Path:
    out = source.folder.parent / "rounded"
    round_weights(source, targets_of(source), recipe_of(source), out)
    return out


def test_hessians_are_sums_over_what_enters_the_linears() -> None:
    """A dense Linear's by a plain hook; the experts' from the router's choices, token by token."""
    model = tiny_model().float()
    names = [f"{LAYER}.self_attn.o_proj", f"{LAYER}.experts.gate_up_proj"]
    hessians = Hessians(names, EXPERTS)
    dense: list[Tensor] = []
    routed: list[tuple[Tensor, Tensor]] = []

    def note_dense(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        dense.append(args[0].flatten(0, -2).double())

    def note_routed(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        routed.append((args[0].double(), args[1]))

    handles = []
    for tower in (model.model.decoder, model.model.encoder.language_model):
        layer = tower.layers[1]
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(note_dense))
        handles.append(layer.experts.register_forward_pre_hook(note_routed))
    engine = ModelEngine(model, 2)
    with engine.watching(hessians.see):
        generate(engine, PROMPTS, [0, 1], max_new_tokens=16, sampler=SAMPLER)
    for handle in handles:
        handle.remove()
    x = torch.cat(dense)
    torch.testing.assert_close(hessians.sum(names[0])[0].double(), x.T @ x, rtol=1e-4, atol=1e-4)
    assert hessians.tokens[names[0]].tolist() == [len(x)]
    for expert in range(EXPERTS):
        own = torch.cat([x[(ids == expert).any(-1)] for x, ids in routed])
        assert hessians.tokens[names[1]][expert] == len(own)
        found = hessians.sum(names[1])[expert].double()
        torch.testing.assert_close(found, own.T @ own, rtol=1e-4, atol=1e-4)


def test_every_linear_is_rounded_and_none_worse_than_nearest(rounded: Path) -> None:
    summary = read_json(rounded / stage.SUMMARY)
    assert len(summary["linears"]) == LAYERS * 6  # qkv, o, gate/up, down, experts' two
    assert summary["fell_back"] == 0
    assert torch.get_float32_matmul_precision() == "highest"  # no TF32: nothing has enabled it
    for name, facts in summary["linears"].items():
        assert facts["layer_loss"] < facts["layer_loss_of_nearest"], name


def test_convert_writes_the_rounded_codes(
    source: Checkpoint, rounded: Path, tmp_path: Path
) -> None:
    """The artifact loads, holds the codes bit for bit, and differs from rounding to nearest."""
    targets, recipe = targets_of(source), recipe_of(source)
    for name, folder in (("gptq", rounded), ("nearest", None)):
        convert(source, targets, tmp_path / name, recipe=recipe, rounded=folder)
    written = load_file(tmp_path / "gptq" / "model.safetensors")
    nearest = load_file(tmp_path / "nearest" / "model.safetensors")
    layers = [load_file(path) for path in sorted(rounded.glob("layer-*.safetensors"))]
    expected = {name: tensor for layer in layers for name, tensor in layer.items()}
    assert len(layers) == LAYERS
    assert all(name in written for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    changed = [n for n in expected if not torch.equal(written[n].float(), nearest[n].float())]
    assert any(name.endswith("weight_packed") for name in changed)
    assert not any(name.endswith("weight_global_scale") for name in changed)
    load(tmp_path / "gptq")


def test_the_output_of_a_layer_is_nearer_on_inputs_not_seen(
    source: Checkpoint, rounded: Path
) -> None:
    """The layer's loss on the Hessian of other prompts falls too, with the weights of the files."""
    model = load(source.folder)
    name = f"{LAYER}.mlp.down_proj"
    other = Hessians([name], EXPERTS)
    engine = ModelEngine(model, 2)
    with engine.watching(other.see):
        generate(engine, PROMPTS, [7, 8], max_new_tokens=16, sampler=SAMPLER)
    tensors = load_file(rounded / "layer-01.safetensors")
    weight = model.get_submodule(name).weight.detach()[None]
    suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
    gptq = {suffix: tensors[f"{name}.{suffix}"][None] for suffix in suffixes}
    scheme = SCHEMES["NVFP4A16"]
    ranges = scheme.observe(weight.bfloat16(), "memoryless_minmax")
    plain = scheme.quantize(weight.bfloat16(), ranges, None, None)
    losses = [
        layer_loss(weight, scheme.dequantize(each).float(), other.sum(name)).item()
        for each in (gptq, plain)
    ]
    assert losses[0] < losses[1]


def test_budget_and_interruption_change_no_byte(
    source: Checkpoint, rounded: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One layer of Hessians at a time, stopped in the fourth layer, then finished by another call."""
    targets, recipe = targets_of(source), recipe_of(source)
    out, write, written = tmp_path / "rounded", stage.write_layer, []

    def noting(folder: Path, units: list[stage.Unit], *rest: object) -> None:
        written.append(units[0].layer)
        write(folder, units, *rest)  # type: ignore[arg-type]

    def breaking(*args: object) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        noting(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "write_layer", breaking)
    with pytest.raises(KeyboardInterrupt):
        round_weights(source, targets, recipe, out, budget=1)
    assert not out.exists()
    monkeypatch.setattr(stage, "write_layer", noting)
    round_weights(source, targets, recipe, out, budget=1)
    assert written == list(range(LAYERS))  # no layer twice
    for path in sorted(rounded.iterdir()):
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name


def test_layers_of_another_calibration_are_not_kept(source: Checkpoint, tmp_path: Path) -> None:
    partial = tmp_path / "rounded.partial"
    partial.mkdir()
    (partial / stage.IDENTITY).write_text('"of other trajectories"')
    (partial / "layer-00.safetensors").write_bytes(b"stale")
    round_weights(source, targets_of(source), recipe_of(source), tmp_path / "rounded")
    assert load_file(tmp_path / "rounded" / "layer-00.safetensors")


def test_groups_hold_whole_layers_within_the_budget(source: Checkpoint) -> None:
    units = units_of(targets_of(source))
    each = sum(unit.hessian_bytes for unit in units if unit.layer == 0)
    sizes = [len({u.layer for u in g}) for g in groups_of(units, 2 * each + each // 2)]
    assert sizes == [2, 2, 2]
    assert [len({u.layer for u in g}) for g in groups_of(units, 1)] == [1] * LAYERS


@pytest.mark.parametrize(
    ("shape", "rounds"), [((128, 1408, 2816), 4), ((128, 2816, 704), 2), ((1, 2816, 8192), 1)]
)
def test_as_many_experts_at_once_as_memory_holds(shape: tuple[int, int, int], rounds: int) -> None:
    """The experts of the 26B model, and its widest Linear, in even rounds."""
    experts, out, inputs = shape
    count = stage.experts_at_once(*shape)
    assert -(-experts // count) == rounds
    assert count * 4 * inputs * (2 * inputs + 6.5 * out) + 56 * inputs**2 < stage.ROUNDING_BYTES


def test_a_file_that_cannot_be_written_ends_the_stage(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written beside the rounding; the error comes up all the same, and no folder appears."""

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(stage, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        round_weights(source, targets_of(source), recipe_of(source), tmp_path / "rounded")
    assert not (tmp_path / "rounded").exists()


def test_gptq_without_prompts_is_refused_when_the_recipe_is_read() -> None:
    recipe = load_recipe("fp8_dynamic").model_dump(mode="json")
    recipe["quantization"]["rounding"], recipe["calibration"] = "gptq", None
    with pytest.raises(InputError, match="gptq needs a `calibration` section"):
        parse_recipe(yaml.safe_dump(recipe), "mine.yaml")


def test_hessians_take_what_the_plan_leaves_of_a_gpu(
    source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a pass' tensors, which are not there yet when the model is: they count from the plan."""
    settings = recipe_of(source).calibration
    assert settings is not None
    loop = stage._Loop(source, settings, "cpu", None)
    assert loop.room() == stage.HESSIAN_BYTES
    monkeypatch.setattr("quantize.runtime.opening.budget_of", lambda device, asked: asked)
    plans: list[Plan] = []
    monkeypatch.setattr(
        "quantize.runtime.opening.plan", lambda *asked: plans.append(plan(*asked)) or plans[-1]
    )
    for budget in (24e9, 141e9):
        loop = stage._Loop(source, settings, "cuda", budget)
        left = loop.room() - stage.HESSIAN_BYTES
        parts = plans[-1].parts
        assert parts["beside"] == stage.HESSIAN_BYTES + stage.ROUNDING_BYTES
        assert min(parts[name] for name in ("activations", "vocabulary", "cache", "CUDA")) > 0
        assert left == pytest.approx(budget - sum(parts.values()))
        assert left > 0
