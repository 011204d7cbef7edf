"""Each quantized Linear alone on BF16's inputs: what the logits' mean hides, and which module it is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.checkpoints.load import load
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.errors import GateError
from quantize.host.files import read_json
from quantize.pipeline.stages import _close_enough
from quantize.recipe.reading import load_recipe
from quantize.reports.sections import ranges_lines
from quantize.runs.folder import RunDir
from quantize.runtime import Sampler
from quantize.runtime.record.ranges import Ranges
from quantize.runtime.record.trajectory import Prompt, Trajectory, record, save_trajectories
from quantize.stages.calibrate.calibrate import input_scales
from quantize.stages.convert.convert import convert
from quantize.stages.fidelity import linear_checks
from quantize.stages.fidelity.fidelity import fidelity
from quantize.stages.fidelity.linear_checks import ENOUGH, InputRanges, check_linears
from tests.support.conversions import recipe_for, run
from tests.support.modules_oracle.engine import ModelEngine
from tests.support.two_processes import in_two

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


def test_how_many_experts_are_read_together_changes_nothing(
    model, tiny_checkpoint, artifact, trajectories, monkeypatch
):
    of_all = check_linears(model, tiny_checkpoint, artifact, trajectories)
    monkeypatch.setattr(linear_checks, "TOGETHER", 3)
    assert check_linears(model, tiny_checkpoint, artifact, trajectories) == of_all


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


EXPERTS_OF = "model.decoder.layers.0.experts."


def ranges_of(tokens: int, monkeypatch: pytest.MonkeyPatch, **limits: float) -> InputRanges:
    """Four experts: the first reaches 100, the others a tenth; the last but one sees `tokens` rows.

    `limits` replace the ranges 120, 12, 12 and 12 of their up_proj; no token reaches the last expert.
    """
    ranges = {"e0": 120.0, "e1": 12.0, "e2": 12.0, "e3": 13.0} | limits
    schemes = {
        f"{EXPERTS_OF}{name[1:]}.{kind}_proj": (None, 448 * 6 / limit)
        for name, limit in ranges.items()
        for kind in ("gate", "up")
    } | {"model.decoder.layers.0.mlp.up_proj": (None, 448 * 6 / 50.0)}
    monkeypatch.setattr(linear_checks, "read_input_schemes", lambda _: schemes)
    found = InputRanges(SimpleNamespace(config={"text_config": {"num_experts": 4}}))
    for expert, count, largest in ((0, 200, 100.0), (1, 200, 10.0), (2, tokens, 10.0)):
        rows = torch.full((count, 16), largest / 3)
        rows[0, 0] = largest
        found.see(f"{EXPERTS_OF}gate_up_proj", rows, torch.full((count, 1), expert))
    found.see("model.decoder.layers.0.mlp.up_proj", torch.full((2, 16), 40.0), None)
    return found


def named(found: InputRanges) -> list[str]:
    return [fault.split(":")[0].removeprefix(EXPERTS_OF) for fault in found.faults()]


@pytest.mark.parametrize(("tokens", "is_checked"), [(ENOUGH, True), (ENOUGH - 1, False)])
def test_a_range_sixteen_times_too_wide_is_found_where_enough_tokens_came(
    tokens: int, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 8 times the largest |x| of its layer, and far beyond that of the expert itself."""
    wide = ranges_of(tokens, monkeypatch, e2=12.0 * 16)
    assert named(wide) == (["2.gate_proj", "2.up_proj"] if is_checked else [])
    unchecked = ["3.gate_proj", "3.up_proj"]
    unchecked = unchecked if is_checked else ["2.gate_proj", "2.up_proj", *unchecked]
    assert wide.summary() == {
        "checked": 9 - len(unchecked), "unchecked": [EXPERTS_OF + name for name in unchecked],
    }  # fmt: skip
    assert named(ranges_of(tokens, monkeypatch)) == []


@pytest.mark.parametrize(
    ("limits", "faulty"),
    [
        ({"e1": 120.0}, []),  # its layer's largest, as one that saw few tokens has
        ({"e1": 119.0}, ["1.gate_proj", "1.up_proj"]),  # nobody's
        ({"e2": 801.0}, ["2.gate_proj", "2.up_proj"]),  # beyond its layer's too, with few tokens
        ({"e2": 1.0}, ["2.gate_proj", "2.up_proj"]),  # clips, whoever saw how much
        (dict.fromkeys(("e0", "e1", "e2", "e3"), 801.0), ["0", "0", "1", "1", "2", "2"]),
    ],
)
def test_what_a_range_may_be(
    limits: dict[str, float], faulty: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sorted(named(ranges_of(5, monkeypatch, **limits)))
    assert [name[: len(said)] for name, said in zip(found, faulty, strict=True)] == faulty


def test_a_report_names_what_was_not_checked() -> None:
    unchecked = [f"{EXPERTS_OF}{n}.{kind}_proj" for n in range(9) for kind in ("gate", "up")]
    said = ranges_lines({"linears": {"ranges": {"checked": 1234, "unchecked": unchecked}}})
    assert said == [
        "Input ranges: 1,234 checked, 18 not, since too few tokens of the replay reach their experts: "
        + ", ".join(f"{EXPERTS_OF}{n}" for n in range(8))
        + " ...."
    ]
    assert ranges_lines({"linears": {"ranges": {"checked": 3, "unchecked": []}}}) == []
    assert ranges_lines({"linears": None}) == ranges_lines({}) == []


@pytest.mark.parametrize(
    ("damage", "fine_tuned"),
    [(swap_two_experts, False), (swap_two_rows_of_a_router, False), (swap_two_experts, True)],
)
def test_fidelity_fails_a_run_whose_logits_hardly_moved(
    tiny_checkpoint, artifact, trajectories, tmp_path, damage, fine_tuned
):
    """Two experts of one layer in each other's place, or their rows of its router: exit code 1.

    If a fine-tuned model's weights differ on purpose, they are no fault.
    """
    folder, run_folder = tmp_path / "checkpoint", RunDir(tmp_path)
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    expected = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    run_folder.calibration.mkdir()
    save_trajectories(run_folder.calibration, trajectories, SAMPLER)
    fidelity(
        tiny_checkpoint, folder, run_folder.calibration, run_folder.fidelity_json,
        activations="none", limits={"none": 10}, fine_tuned=fine_tuned,
    )  # fmt: skip
    faults = read_json(run_folder.fidelity_json)["faults"]
    assert {fault.split(":")[0] for fault in faults} == (set() if fine_tuned else expected)
    if fine_tuned:
        return
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
