"""Hessians of a replay beside plain hooks; rounded layers that resume, and that convert writes."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint, read_header
from quantize.checkpoints.targets import Target, plan_targets
from quantize.errors import InputError, ResourceError
from quantize.host.files import read_json, write_json
from quantize.recipe.reading import load_recipe, parse_recipe
from quantize.recipe.sections import Calibration, Recipe
from quantize.runtime import Sampler, generate
from quantize.runtime.gpu.placement import CPU
from quantize.runtime.record import recording, shuttle
from quantize.runtime.record.recording import Recorder, Recording
from quantize.runtime.record.shuttle import Shuttle
from quantize.schemes.gptq import energy
from quantize.schemes.hessians import Hessians, whole
from quantize.schemes.records import SCHEMES
from quantize.stages.convert.convert import convert
from quantize.stages.denoising import SCRATCH, Denoising
from quantize.stages.round_weights import round_weights as stage
from quantize.stages.round_weights.round_weights import round_weights, units_of
from tests.support.chats import add_chats
from tests.support.conversions import recipe_for
from tests.support.modules_oracle.engine import ModelEngine
from tests.support.quick_run import rounding_roughly
from tests.support.tiny import EXPERTS, LAYERS, tiny_model
from tests.support.two_processes import in_two

SAMPLER = Sampler(max_denoising_steps=3, eos_token_ids=(1, 50), pad_token_id=0)
LAYER = "model.decoder.layers.1"
PROMPTS = [[2, 110, 120, 130], [2, 140, 150, 160, 170, 180]]


@pytest.fixture(scope="module", autouse=True)
def roughly() -> Iterator[None]:
    """How well it rounds is test_gptq's; here that is one of many steps that may be killed."""
    with pytest.MonkeyPatch.context() as patch:
        rounding_roughly(patch, sweeps=1)
        yield


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
    torch.testing.assert_close(
        whole(hessians.sums(names[0]), hessians._inputs[names[0]])[0].double(),
        x.T @ x,
        rtol=1e-4,
        atol=1e-4,
    )
    assert hessians.tokens(names[0]).tolist() == [len(x)]
    for expert in range(EXPERTS):
        own = torch.cat([x[(ids == expert).any(-1)] for x, ids in routed])
        assert hessians.tokens(names[1])[expert] == len(own)
        found = whole(hessians.sums(names[1]), hessians._inputs[names[1]])[expert].double()
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


def flipped(path: Path, share: float = 0.02) -> None:
    """Flip a bit in this share of the bytes of one expert's codes, as a disk might."""
    name = "model.decoder.layers.1.experts.2.down_proj.weight_packed"
    place = read_header(path)[name]
    content = bytearray(path.read_bytes())
    for at in range(place.begin, place.end, round(1 / share)):
        content[at] ^= 4
    path.write_bytes(content)


def lost_digests(folder: Path) -> None:
    write_json(folder / stage.SUMMARY, {"fell_back": 0, "linears": {}})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda f: flipped(f / "layer-01.safetensors"),
            "layer-01.*not the codes that `round` wrote",
        ),
        (lambda f: (f / "layer-02.safetensors").unlink(), "layer-02.*not the codes that `round`"),
        (lambda f: shutil.copy(f / "layer-00.safetensors", f / "layer-01.safetensors"), "layer-01"),
        (lambda f: shutil.copy(f / "layer-00.safetensors", f / "layer-99.safetensors"), "layer-99"),
        (lost_digests, "rounding.json: it names no digests, as an earlier version wrote it; run"),
        (lambda f: (f / stage.SUMMARY).unlink(), "rounding.json: it names no digests"),
    ],
)
def test_codes_that_rot_before_convert_are_refused_in_one_line(
    spoil: Callable[[Path], object], said: str, source: Checkpoint, rounded: Path, tmp_path: Path
) -> None:
    codes = shutil.copytree(rounded, tmp_path / "rounding")
    spoil(codes)
    targets, recipe = targets_of(source), recipe_of(source)
    with pytest.raises(InputError, match=said) as refused:
        convert(source, targets, tmp_path / "made", recipe=recipe, rounded=codes)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "made").exists()


def test_a_layer_that_rots_before_the_run_goes_on_is_rounded_again(
    source: Checkpoint, few: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe, expected), out = few, tmp_path / "rounded"
    with monkeypatch.context() as killed:
        killing(killed, stage, "write_pieces", 3)
        with pytest.raises(Killed):
            round_weights(source, plan_of(source, recipe), recipe, out)
    file = tmp_path / "rounded.partial" / "layer-00.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    round_weights(source, plan_of(source, recipe), recipe, out)
    assert contents(out) == contents(expected)


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
    hessian = whole(other.sums(name), other._inputs[name])
    losses = [energy(weight - scheme.dequantize(each).float(), hessian) for each in (gptq, plain)]
    assert losses[0] < losses[1]


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


def killing(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: int) -> None:
    """Let something be called so often, and kill what calls it once more."""
    work, left = getattr(owner, name), iter(range(calls))

    def counted(*args: object, **options: object) -> object:
        if next(left, None) is None:
            raise Killed
        return work(*args, **options)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (recording._BatchFile, "add", 2),  # while passes are recorded
        (recording, "write_json", 0),  # before the recording is whole
        (Recording, "find", 1),
        (Shuttle, "run", 0),
        (Shuttle, "run", 3),  # layers 0 and 1 are rounded, and the fourth has the rows of the third
        (stage, "round_units", 2),
        (stage, "write_pieces", 3),
        (stage, "sync_file", 4),  # a layer's file is not renamed yet
        (Path, "unlink", 3),  # of the layers' facts, which the summary has already
        (shutil, "rmtree", 1),  # of the recording; the first call is that of `Recorder`
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    owner: object, name: str, calls: int, source: Checkpoint, few: tuple[Recipe, Path],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (recipe, expected), out = few, tmp_path / "rounded"
    targets = plan_of(source, recipe)
    with monkeypatch.context() as killed:
        killing(killed, owner, name, calls)
        with pytest.raises(Killed):
            round_weights(source, targets, recipe, out)
    assert out.exists() == (name == "rmtree")
    before = len(list(tmp_path.glob("rounded.partial/layer-*.safetensors")))
    written: list[int] = []
    write = stage.write_layer
    monkeypatch.setattr(
        stage, "write_layer",
        lambda folder, units, done: written.append(units[0].layer) or write(folder, units, done),
    )  # fmt: skip
    round_weights(source, targets, recipe, out)
    assert before + len(written) == LAYERS  # no layer twice
    assert contents(out) == contents(expected)
    assert not (tmp_path / SCRATCH).exists()


def test_two_processes_share_the_layers_and_write_the_bytes_of_one(
    source: Checkpoint, few: tuple[Recipe, Path], tmp_path: Path
) -> None:
    (recipe, expected), out = few, tmp_path / "rounded"
    targets, write = plan_of(source, recipe), stage.write_layer

    def work(rank: int) -> None:
        def noted(folder: Path, units: Any, done: Any) -> None:
            (tmp_path / f"{units[0].layer} by {rank}").touch()
            write(folder, units, done)

        with patch.object(stage, "write_layer", noted):
            round_weights(source, targets, recipe, out)

    in_two(work)
    assert contents(out) == contents(expected)
    by_layer = {path.name for path in tmp_path.glob("* by *")}
    assert by_layer == {f"{layer} by {layer % 2}" for layer in range(LAYERS)}
    assert not (tmp_path / SCRATCH).exists()


@pytest.fixture(scope="module")
def loop(source: Checkpoint) -> tuple[Hessians, Path]:
    """Hessians that were summed while the loop ran, and what it recorded."""
    recorded = source.folder.parent / "loop"
    return hessians_in_the_loop(source, Recorder(recorded))[1], recorded


@pytest.mark.parametrize(
    "name",
    ["nvfp4_fp8", *(pytest.param(own, marks=pytest.mark.slow) for own in (
        "nvfp4", "nvfp4a16", "nvfp4_w4a4", "fp8_dynamic", "int8_dynamic"
    ))],
)  # fmt: skip
def test_codes_are_those_of_the_loop(
    name: str, source: Checkpoint, loop: tuple[Hessians, Path], tmp_path: Path
) -> None:
    """The last layer of every recipe, whose rows went through all others."""
    shipped, (hessians, recorded) = load_recipe(name), loop
    quantization = shipped.quantization.model_copy(update={"rounding": "gptq"})
    recipe = recipe_of(source).model_copy(update={"quantization": quantization})
    targets = [t for t in plan_of(source, recipe) if f"layers.{LAYERS - 1}." in t.name]
    shutil.copytree(recorded, tmp_path / SCRATCH)
    round_weights(source, targets, recipe, tmp_path / "rounded")
    units = units_of(targets)
    weights = [[source.read(target.name) for target in unit.targets] for unit in units]
    done = stage.round_units(units, weights, hessians)
    (tmp_path / "expected").mkdir()
    stage.write_layer(tmp_path / "expected", units, done)
    file = f"layer-{LAYERS - 1:02}.safetensors"
    assert (tmp_path / "rounded" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()


@pytest.fixture(scope="module")
def few(source: Checkpoint) -> tuple[Recipe, Path]:
    """A recipe of one small Linear a layer and three prompts in two batches, and what it leads to."""
    scheme = {"NVFP4A16": [r"re:.*self_attn\.o_proj"]}
    whole = recipe_of(source, prompts=3)
    assert whole.calibration is not None
    recipe = whole.model_copy(
        update={
            "quantization": whole.quantization.model_copy(update={"scheme": scheme}),
            "calibration": whole.calibration.model_copy(update={"batch_size": 2}),
        }
    )
    out = source.folder.parent / "few"
    round_weights(source, plan_of(source, recipe), recipe, out)
    return recipe, out


def plan_of(source: Checkpoint, recipe: Recipe) -> list[Target]:
    return plan_targets(source.tensors, recipe.quantization)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_layers_of_another_calibration_are_not_kept(source: Checkpoint, tmp_path: Path) -> None:
    partial = tmp_path / "rounded.partial"
    partial.mkdir()
    (partial / stage.IDENTITY).write_text('"of other trajectories"')
    (partial / "layer-00.safetensors").write_bytes(b"stale")
    round_weights(source, targets_of(source), recipe_of(source), tmp_path / "rounded")
    assert load_file(tmp_path / "rounded" / "layer-00.safetensors")


@pytest.mark.parametrize(
    ("shape", "rounds"), [((128, 1408, 2816), 4), ((128, 2816, 704), 2), ((1, 2816, 8192), 1)]
)
def test_as_many_experts_at_once_as_memory_holds(shape: tuple[int, int, int], rounds: int) -> None:
    """The experts of the 26B model, and its widest Linear, in even rounds."""
    experts, out, inputs = shape
    count = stage.experts_at_once(*shape)
    assert -(-experts // count) == rounds
    assert count * 4 * inputs * (2 * inputs + 7 * out) < stage.ROUNDING_BYTES
    # where Hessians are factored: 2^30 bytes of them in float64 (or a single one), twice
    factored = min(count, max(1, 2**30 // (8 * inputs**2))) * 8 * inputs**2
    assert count * 4 * inputs * (2 * inputs + 3 * out) + 2 * factored < stage.ROUNDING_BYTES


def test_a_file_that_cannot_be_written_ends_the_stage(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written beside the rounding; the error comes up all the same, and no folder appears."""

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(stage, "write_pieces", full)
    with pytest.raises(OSError, match="no space left"):
        round_weights(source, targets_of(source), recipe_of(source), tmp_path / "rounded")
    assert not (tmp_path / "rounded").exists()


def test_where_nothing_is_quantized_there_is_nothing_to_round(source: Checkpoint) -> None:
    kept = [replace(target, scheme=None) for target in targets_of(source)]
    with pytest.raises(InputError, match="the recipe quantizes no Linear: there is nothing to"):
        units_of(kept)


def test_gptq_without_prompts_is_refused_when_the_recipe_is_read() -> None:
    recipe = load_recipe("fp8_dynamic").model_dump(mode="json")
    recipe["quantization"]["rounding"], recipe["calibration"] = "gptq", None
    with pytest.raises(InputError, match="gptq needs a `calibration` section"):
        parse_recipe(yaml.safe_dump(recipe), "mine.yaml")


def hessians_in_the_loop(source: Checkpoint, recorder: Recorder) -> tuple[Denoising, Hessians]:
    """Denoise as `calibrate` does, and sum what enters all Linears."""
    settings = recipe_of(source).calibration
    assert settings is not None
    denoising = Denoising(source.folder, settings, CPU)
    loop = Hessians([unit.reads for unit in units_of(targets_of(source))], EXPERTS)

    denoising.run(title="", observers=[loop.see], recorder=recorder)
    return denoising, loop


def test_rows_that_host_memory_cannot_hold_lie_on_scratch(
    source: Checkpoint, few: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, expected = few
    monkeypatch.setattr(shuttle, "LEFT_BYTES", 1 << 60)
    round_weights(source, plan_of(source, recipe), recipe, tmp_path / "rounded")
    assert contents(tmp_path / "rounded") == contents(expected)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    path.write_text(path.read_text().replace('"identity": "', '"identity": "0'))


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("batch-00004.rows", cut, "batch-00004.rows has not the"),
        ("batch-00000.rows", flip, "batch-00000.rows was changed or damaged"),
        ("batch-00000.passes", flip, "batch-00000.passes was changed or damaged"),
        ("batch-00000.passes", Path.unlink, "No such file"),
        ("recording.json", cut, "not readable as JSON"),
        ("recording.json", foreign, "it is of another run"),
    ],
)
def test_a_damaged_recording_is_made_again(
    name: str, damage: Callable[[Path], None], why: str, recorded: Path, source: Checkpoint,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "recording"
    shutil.copytree(recorded, folder)
    settings = recipe_of(source).calibration
    assert settings is not None
    denoising = Denoising(source.folder, settings, CPU)
    damage(folder / name)
    denoising.recording(folder)
    shown = " ".join(capsys.readouterr().err.split())
    assert why in shown
    assert "it is made again" in shown
    assert contents(folder) == contents(recorded)


@pytest.fixture(scope="module")
def recorded(source: Checkpoint) -> Path:
    folder = source.folder.parent / "recorded"
    hessians_in_the_loop(source, Recorder(folder))
    return folder


def test_a_sound_recording_is_not_made_again(
    recorded: Path, source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe_of(source).calibration
    assert settings is not None
    denoising = Denoising(source.folder, settings, CPU)
    monkeypatch.setattr(denoising, "run", None)
    assert len(denoising.recording(recorded).batches) == 2


def test_a_recording_elsewhere_is_used_and_removed(
    recorded: Path, source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Path(shutil.copytree(recorded, tmp_path / "elsewhere"))
    monkeypatch.setattr(Denoising, "run", None)
    monkeypatch.setattr(stage, "round_layers", lambda *_: None)
    out = tmp_path / "rounding"
    round_weights(source, targets_of(source), recipe_of(source), out, scratch=scratch)
    assert (out.exists(), scratch.exists()) == (True, False)


def test_each_batch_of_experts_has_its_own_hessians(
    source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time, as 32 at a time at 26B: the same codes as all at once."""
    unit = next(u for u in units_of(targets_of(source)) if u.reads.endswith("experts.down_proj"))
    weights = [source.read(target.name) for target in unit.targets]
    hessians, inputs = Hessians([unit.reads], EXPERTS), weights[0].shape[-1]
    generator = torch.Generator().manual_seed(0)
    for expert in range(EXPERTS):
        mix = torch.randn(inputs, inputs, generator=generator)
        rows = (torch.randn(4 * inputs, inputs, generator=generator) @ mix).bfloat16()
        hessians.see(unit.reads, rows, torch.full((len(rows), 1), expert))
    (together,) = stage.round_units([unit], [weights], hessians)
    monkeypatch.setattr(stage, "experts_at_once", lambda *_: 2)
    (parts,) = stage.round_units([unit], [weights], hessians)
    for name, tensor in together.tensors.items():
        assert torch.equal(parts.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_an_expert_of_few_tokens_is_drawn_to_its_layer_by_its_inputs() -> None:
    """It keeps n / (n + in); 200 inputs are two tiles of 128."""
    hessians, generator = Hessians(["x"], 2), torch.Generator().manual_seed(0)
    rows = torch.randn(300, 200, generator=generator).bfloat16()
    hessians.see("x", rows, (torch.arange(300) < 60).long()[:, None])
    sums = whole(hessians.sums("x"), hessians._inputs["x"])
    for expert, n in enumerate((240, 60)):
        keep = n / (n + 200)
        expected = keep * sums[expert] / n + (1 - keep) * sums.sum(0) / 300
        torch.testing.assert_close(hessians.mean("x")[expert], expected)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 2}, {"canvases": 2}, {"prompts": 5}]
)
def test_recordings_of_other_settings_are_others(
    source: Checkpoint, change: dict[str, Any]
) -> None:
    settings = recipe_of(source).calibration
    assert settings is not None
    own = Denoising(source.folder, settings, CPU).identity
    assert Denoising(source.folder, settings, CPU).identity == own
    assert Denoising(source.folder, settings.model_copy(update=change), CPU).identity != own


@pytest.mark.parametrize(
    ("fact", "other"),
    [("launches_of", ["cpu", "tuned by the user"]), ("package_versions", {"torch": "1.0"})],
)
def test_recordings_of_other_kernels_and_versions_are_others(
    fact: str, other: object, source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe_of(source).calibration
    assert settings is not None
    own = Denoising(source.folder, settings, CPU).identity
    monkeypatch.setattr(f"quantize.stages.denoising.{fact}", lambda *_: other)
    assert Denoising(source.folder, settings, CPU).identity != own


@pytest.mark.parametrize("name", ["chats.jsonl", "config.json", "model.safetensors"])
def test_recordings_of_other_prompts_and_models_are_others(
    name: str, source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe_of(source).calibration
    assert settings is not None
    monkeypatch.chdir(source.folder)
    settings = settings.model_copy(update={"datasets": ["chats.jsonl"]})
    own = Denoising(source.folder, settings, CPU).identity
    shutil.copytree(source.folder, tmp_path / "other")
    monkeypatch.chdir(tmp_path / "other")
    changed = tmp_path / "other" / name
    data = changed.read_bytes()
    changes = {"chats.jsonl": data.replace(b'"w1', b'"w2'), "config.json": data + b" "}
    changed.write_bytes(changes.get(name, data[:-1] + b"\n"))
    other = Denoising(tmp_path / "other", settings, CPU)
    assert other.identity != own


def test_scratch_that_is_full_or_gone_is_one_line_and_the_same_command_goes_on(
    source: Checkpoint, few: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe, expected), targets = few, plan_of(source, few[0])
    out, write, left = tmp_path / "rounded", os.write, iter(range(5))

    def full(file: int, data: bytes) -> int:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    finish = Recorder.finish

    def gone(own: Recorder, *rest: Any) -> None:
        shutil.rmtree(own.folder)
        finish(own, *rest)

    breaks: list[tuple[object, str, object]] = [(os, "write", full), (Recorder, "finish", gone)]
    for owner, name, breaking in breaks:
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, breaking)
            with pytest.raises(
                ResourceError, match=r"another disk with --scratch; the same command"
            ):
                round_weights(source, targets, recipe, out)
    round_weights(source, targets, recipe, out)
    assert contents(out) == contents(expected)
