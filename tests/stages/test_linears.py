"""Each quantized Linear alone on BF16's inputs: what the logits' mean hides, and which module it is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conversions import recipe_for, run
from modules_oracle.engine import ModelEngine
from safetensors.torch import load_file, save_file
from two_processes import in_two

from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.errors import GateError
from quantize.host.files import read_json
from quantize.pipeline.stages import _close_enough
from quantize.recipe.sections import load_recipe
from quantize.runs.folder import RunDir
from quantize.runtime import Sampler
from quantize.runtime.record.ranges import Ranges
from quantize.runtime.record.trajectory import Prompt, Trajectory, record, save_trajectories
from quantize.stages.calibrate.calibrate import input_scales
from quantize.stages.convert.convert import convert
from quantize.stages.fidelity.fidelity import fidelity
from quantize.stages.fidelity.linear_checks import check_linears

SAMPLER = Sampler(max_denoising_steps=3, eos_token_ids=(1, 50), pad_token_id=0)
LAYER = "model.decoder.layers.3."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> ModelEngine:
    return ModelEngine(load(tiny_checkpoint), capacity=16)


def recorded(model: ModelEngine, seed: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        Prompt(tuple(torch.randint(110, 480, (n,), generator=generator).tolist()), False)
        for n in (30, 30, 23, 34, 41, 41)
    ]
    return record(model, prompts, range(seed, seed + 6), sampler=SAMPLER, canvases=1, held_out=True)


@pytest.fixture(scope="module")
def trajectories(model: ModelEngine) -> list[Trajectory]:
    return recorded(model, 10)


@pytest.fixture(scope="module")
def artifact(
    model: ModelEngine,
    tiny_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """NVFP4 with input scales of other prompts than those that are replayed."""
    folder, recipe = tmp_path_factory.mktemp("linears"), load_recipe("nvfp4_w4a4")
    ranges = Ranges(8)
    with model.watching(ranges.see):
        recorded(model, 20)
    source = Checkpoint.open(tiny_checkpoint)
    targets = plan_targets(source.tensors, recipe.quantization)
    scales = input_scales(ranges, [module for target in targets for module in target.modules])
    path = folder / "scales.safetensors"
    save_file({f"{m}.input_global_scale": s for m, s in scales.items()}, path)
    convert(source, targets, folder / "out", recipe=recipe, input_scales=path)
    return folder / "out"


def faults_of(model, source, artifact, trajectories) -> list[str]:
    return check_linears(model, source, artifact, trajectories)[1]


def test_a_sound_checkpoint_has_no_fault(model, tiny_checkpoint, artifact, trajectories):
    assert faults_of(model, tiny_checkpoint, artifact, trajectories) == []


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC", "NVFP4A16"])
def test_rounded_weights_have_no_fault(model, tiny_checkpoint, trajectories, tmp_path, scheme):
    run(tiny_checkpoint, tmp_path / "out", recipe_for(scheme))
    found, faults = check_linears(model, tiny_checkpoint, tmp_path / "out", trajectories)
    assert faults == []
    assert len(found["error"]) == 6 * 3 + 6 * 3 + 6 * 4 - 1  # experts by kind, MLP, attention
    assert 0.001 < min(found["error"].values()) < max(found["error"].values()) < 0.2


def swap_two_experts(tensors: Tensors) -> set[str]:
    for name in [n for n in tensors if n.startswith(f"{LAYER}experts.1.")]:
        other = name.replace("experts.1.", "experts.4.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return {f"{LAYER}experts.{e}.{p}_proj" for e in (1, 4) for p in ("gate", "up", "down")}


def swap_two_rows_of_a_router(tensors: Tensors) -> set[str]:
    name = f"{LAYER}router.proj.weight"
    tensors[name][[1, 4]] = tensors[name][[4, 1]]
    return {name}


def input_scale(module: str, factor: float) -> Callable[[Tensors], set[str]]:
    def change(tensors: Tensors) -> set[str]:
        tensors[f"{LAYER}{module}.input_global_scale"] *= factor
        return {f"{LAYER}{module}"}

    return change


DAMAGE = [swap_two_experts, swap_two_rows_of_a_router] + [
    input_scale(module, factor)
    for module in ("self_attn.o_proj", "experts.2.gate_proj", "experts.2.down_proj")
    for factor in (16, 1 / 16)
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_is_named_and_nothing_else(
    model, tiny_checkpoint, artifact, trajectories, tmp_path, damage
):
    """An input scale 16 times too large or small would agree with a calibration that is as wrong."""
    folder = tmp_path / "damaged"
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    expected = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    faults = faults_of(model, tiny_checkpoint, folder, trajectories)
    assert {fault.split(":")[0] for fault in faults} == expected


@pytest.mark.parametrize("damage", [swap_two_experts, swap_two_rows_of_a_router])
def test_fidelity_fails_a_run_whose_logits_hardly_moved(
    tiny_checkpoint, artifact, trajectories, tmp_path, damage
):
    """Two experts of one layer in each other's place, or their rows of its router: exit code 1."""
    folder, run_folder = tmp_path / "checkpoint", RunDir(tmp_path)
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    expected = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    run_folder.calibration.mkdir()
    save_trajectories(run_folder.calibration, trajectories, SAMPLER)
    fidelity(
        tiny_checkpoint, folder, run_folder.calibration, run_folder.fidelity_json,
        activations="none", limits={"none": 10},
    )  # fmt: skip
    faults = read_json(run_folder.fidelity_json)["faults"]
    assert {fault.split(":")[0] for fault in faults} == expected
    with pytest.raises(GateError, match=r"fidelity\.json: model\.decoder\.layers\.3"):
        _close_enough(SimpleNamespace(folder=run_folder))


def test_two_processes_write_the_file_of_one(
    tiny_checkpoint, artifact, trajectories, tmp_path, monkeypatch
) -> None:
    """Each batch is what one process would make of it; the single Linears are the first one's."""
    calibration = tmp_path / "calibration"
    calibration.mkdir()
    save_trajectories(calibration, trajectories, SAMPLER)
    given = (tiny_checkpoint, artifact, calibration)
    monkeypatch.setattr("quantize.stages.fidelity.fidelity.REPLAYED", 2)  # three batches
    in_two(lambda _: fidelity(*given, tmp_path / "two.json", activations="none", limits={}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fidelity(*given, tmp_path / "one.json", activations="none", limits={})
    finally:
        torch.set_num_threads(threads)
    written = read_json(tmp_path / "one.json")
    assert written["trajectories"] == len(trajectories)
    assert written["faults"] == []
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
