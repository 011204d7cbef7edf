"""Static verification passes what convert wrote, and names each kind of damage."""

import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.errors import InputError
from quantize.host.files import read_json, write_json
from quantize.pipeline import stages as stage_module
from quantize.recipe.reading import load_recipe
from quantize.runs.folder import RunDir
from quantize.runs.manifest import checksums
from quantize.stages.device import PIECE_BYTES, Device
from quantize.stages.verify import decompression, verify_weights
from quantize.stages.verify import verify as verify_module
from quantize.stages.verify.verify import VerificationResult, verify

LAYER = "model.decoder.layers.2."
PLANNED = 6 * 8 * 3 + 6 * 3 + 6 * 4 - 1
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check is as strict wherever it is made."""
    monkeypatch.setattr(verify_module, "Device", lambda _: Device(request.param))


@pytest.fixture(params=["fp8", "nvfp4"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def artifact(request: pytest.FixtureRequest, scheme: str) -> Path:
    return request.getfixturevalue(f"{scheme}_artifact")


def run_verify(
    artifact: Path, source: Path, scheme: str, out: Path, *, as_written: bool = True
) -> VerificationResult:
    """Verify as in a run folder `out`; `as_written` records the artifact as convert's own."""
    run = RunDir(out)
    if as_written:
        files = checksums(Checkpoint.open(artifact))
        write_json(run.conversion_json, {"files": files})
    run.calibration.mkdir(exist_ok=True)
    if (scales := source.parent / "input_scales.safetensors").exists():
        shutil.copy(scales, run.calibration)
    recipe = load_recipe({"fp8": "fp8_dynamic", "nvfp4": "nvfp4_w4a4"}[scheme])
    bf16 = Checkpoint.open(source)
    targets = plan_targets(bf16.tensors, recipe.quantization)
    return verify(Checkpoint.open(artifact), bf16, targets, recipe, run)


def test_what_convert_wrote_passes(
    artifact: Path,
    tiny_checkpoint: Path,
    scheme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(artifact.with_suffix(".json"), RunDir(tmp_path).conversion_json)
    found = run_verify(artifact, tiny_checkpoint, scheme, tmp_path, as_written=False)
    assert found.passed, found.checks
    assert re.search(r"verify: (\d+) parts of tensors done in", capsys.readouterr().err)
    assert all(check.looked_at > 0 for check in found.checks.values())
    assert len(found.relative_error) == 6 * 2 + 6 * 3 + 6 * 4 - 1
    assert {"shared", "calibrated"} <= found.checks.keys() or scheme == "fp8"
    written = read_json(tmp_path / "verification.json")
    assert written["passed"] is True
    files = [file for file in artifact.iterdir() if file.is_file()]
    assert written["sha256"] == {f.name: sha256(f.read_bytes()).hexdigest() for f in files}
    assert "model.safetensors" in written["sha256"]


def exchange_experts(tensors: Tensors) -> str:
    """Swap two experts of one layer, whole and consistently: names, dtypes, scales all fit."""
    for name in [n for n in tensors if n.startswith(f"{LAYER}experts.1.")]:
        other = name.replace("experts.1.", "experts.4.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return "error"


def silence_an_expert(tensors: Tensors) -> str:
    for name in [n for n in tensors if n.startswith(f"{LAYER}experts.1.")]:
        if name.endswith((".weight", ".weight_packed")):
            tensors[name] = torch.zeros_like(tensors[name])
    return "experts"


def change_a_kept_weight(tensors: Tensors) -> str:
    tensors[f"{LAYER}router.proj.weight"][0, 0] += 1
    return "kept"


def negate_a_scale(tensors: Tensors) -> str:
    name = f"{LAYER}mlp.up_proj.weight_scale"
    tensors[name] = (-tensors[name].float()).to(tensors[name].dtype)
    return "scales"


def poison_a_scale(tensors: Tensors) -> str:
    tensors[f"{LAYER}mlp.up_proj.weight_scale"][0, 0] = float("nan")
    return "scales"


def keep_an_encoder_copy(tensors: Tensors) -> str:
    name = f"{LAYER}mlp.up_proj.weight_scale"
    copy = name.replace("model.decoder.", "model.encoder.language_model.")
    tensors[copy] = tensors[name].clone()
    return "one owner"


def quantize_the_router(tensors: Tensors) -> str:
    tensors[f"{LAYER}router.proj.weight_scale"] = torch.ones(8, 1).bfloat16()
    return "counts"


def add_a_tensor(tensors: Tensors) -> str:
    tensors[f"{LAYER}mlp.up_proj.bias"] = torch.ones(8).bfloat16()
    return "layout"


@pytest.mark.parametrize(
    "damage",
    [
        exchange_experts,
        silence_an_expert,
        change_a_kept_weight,
        negate_a_scale,
        poison_a_scale,
        keep_an_encoder_copy,
        quantize_the_router,
        add_a_tensor,
    ],
)
def test_damage_is_found_by_its_check(
    artifact: Path,
    tiny_checkpoint: Path,
    scheme: str,
    tmp_path: Path,
    damage: Callable[[Tensors], str],
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    check = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = run_verify(folder, tiny_checkpoint, scheme, tmp_path)
    assert not found.passed
    assert found.checks[check].faults, found.checks
    assert all(fault and "\n" not in fault for fault in found.checks[check].faults)


def test_a_scale_of_zero_is_of_a_block_of_zeros_alone(
    artifact: Path, tiny_checkpoint: Path, scheme: str, tmp_path: Path
) -> None:
    """A writer of NVFP4 may give such a block the scale 0; a row of FP8 has no such thing."""
    folder = tmp_path / "damaged"
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    name = f"{LAYER}mlp.up_proj.weight_scale"
    tensors[name][0, 0] = 0
    save_file(tensors, folder / "model.safetensors")
    faults = run_verify(folder, tiny_checkpoint, scheme, tmp_path).checks["scales"].faults
    assert faults == ([f"{name} is not above 0 throughout"] if scheme == "fp8" else [])


def scale_of_an_input(factor: float) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        tensors[f"{LAYER}experts.3.down_proj.input_global_scale"] *= factor
        return "calibrated"

    return change


def global_scale_of_k(tensors: Tensors) -> str:
    tensors[f"{LAYER}self_attn.k_proj.weight_global_scale"] *= 1.001
    return "shared"


def global_scale_of_an_experts_up(tensors: Tensors) -> str:
    tensors[f"{LAYER}experts.3.up_proj.weight_global_scale"] *= 1.001
    return "shared"


def input_scale_of_v(tensors: Tensors) -> str:
    tensors[f"{LAYER}self_attn.v_proj.input_global_scale"] *= 2
    return "shared"


def input_scale_of(value: float) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        tensors[f"{LAYER}experts.3.down_proj.input_global_scale"][0] = value
        return "scales"

    return change


@pytest.mark.parametrize(
    "damage",
    [
        scale_of_an_input(1e6),
        scale_of_an_input(1e-6),
        scale_of_an_input(1 + 2**-22),
        global_scale_of_k,
        global_scale_of_an_experts_up,
        input_scale_of_v,
        input_scale_of(0.0),
        input_scale_of(float("nan")),
        input_scale_of(float("inf")),
    ],
)
def test_wrong_scales_of_nvfp4_are_found(
    nvfp4_artifact: Path, tiny_checkpoint: Path, tmp_path: Path, damage: Callable[[Tensors], str]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(nvfp4_artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    check = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = run_verify(folder, tiny_checkpoint, "nvfp4", tmp_path)
    assert not found.passed
    assert found.checks[check].faults, found.checks
    assert read_json(tmp_path / "verification.json")["passed"] is False


def flip_a_byte(share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[int(len(data) * share)] ^= 1
        path.write_bytes(data)

    return change


def route_to_one_expert(folder: Path) -> None:
    config = read_json(folder / "config.json")
    config["text_config"]["top_k_experts"] = 1
    write_json(folder / "config.json", config)


def change_generation(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"max_denoising_steps": 3})


def leave_a_file(folder: Path) -> None:
    (folder / ".env").write_text("TOKEN=1")


def lose_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


EDITS = [
    flip_a_byte(0.3), flip_a_byte(0.6), route_to_one_expert, change_generation, leave_a_file,
    lose_the_tokenizer,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_what_convert_did_not_write_is_not_blessed(
    nvfp4_artifact: Path, tiny_checkpoint: Path, tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(nvfp4_artifact, folder)
    shutil.copy(nvfp4_artifact.with_suffix(".json"), RunDir(tmp_path).conversion_json)
    edit(folder)
    found = run_verify(folder, tiny_checkpoint, "nvfp4", tmp_path, as_written=False)
    assert "convert" in found.checks["unchanged"].faults[0]
    assert read_json(tmp_path / "verification.json")["passed"] is False


def test_without_convert_s_record_nothing_is_verified(
    fp8_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    found = run_verify(fp8_artifact, tiny_checkpoint, "fp8", tmp_path, as_written=False)
    assert "conversion.json is missing" in found.checks["unchanged"].faults[0]


def test_config_and_tokenizer_are_checked_by_themselves(
    fp8_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Even where the record was made anew for the edited files."""
    folder = tmp_path / "edited"
    shutil.copytree(fp8_artifact, folder)
    route_to_one_expert(folder)
    (folder / "tokenizer.json").write_text("no JSON")
    config = read_json(folder / "config.json")
    config["quantization_config"]["ignore"].append("re:.*layers.4.mlp.*")
    write_json(folder / "config.json", config)
    found = run_verify(folder, tiny_checkpoint, "fp8", tmp_path)
    faults = found.checks["config"].faults
    assert any("text_config differs" in fault for fault in faults)
    assert any("layers.4.mlp.gate_proj is BF16; the plan has FP8" in fault for fault in faults)
    assert "not readable as JSON" in found.checks["tokenizer"].faults[0]


@pytest.mark.parametrize("whole", [16, 1])
def test_every_module_is_decompressed_at_least_in_part(
    nvfp4_artifact: Path,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: int,
) -> None:
    """Our loader and compressed-tensors disagree by a sign of zero: no error sees that."""
    monkeypatch.setattr(decompression, "WHOLE_PER_TENSOR", whole)
    monkeypatch.setattr(verify_weights, "FAULTS_KEPT", 10_000)
    decompressed = decompression.Decompressor.weight

    def otherwise(*given: Any) -> torch.Tensor:
        weight = decompressed(*given)
        return torch.where(weight == 0, -weight, weight)

    monkeypatch.setattr(decompression.Decompressor, "weight", otherwise)
    found = run_verify(nvfp4_artifact, tiny_checkpoint, "nvfp4", tmp_path)
    check = found.checks["decompression"]
    assert len(check.faults) == check.looked_at == PLANNED
    told = {fault.partition(":") for fault in check.faults}
    assert {what for _, _, what in told} == {" compressed-tensors decompresses other weights"}
    assert f"{LAYER}mlp.up_proj" in {module for module, _, _ in told}
    assert [c.name for c in found.checks.values() if not c.passed] == ["decompression"]


def test_weights_too_large_for_float32_squares(
    fp8_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """An infinite error is no number in JSON, and fails."""
    folder = tmp_path / "damaged"
    shutil.copytree(fp8_artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    name = f"{LAYER}mlp.up_proj"
    tensors[f"{name}.weight_scale"][:] = 3e38
    save_file(tensors, folder / "model.safetensors")
    found = run_verify(folder, tiny_checkpoint, "fp8", tmp_path)
    assert any(name in fault for fault in found.checks["error"].faults)
    assert read_json(tmp_path / "verification.json")["relative_error"][f"{name}.weight"] is None


def test_the_parts_of_a_tensor_add_up(
    nvfp4_artifact: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert, or some rows, at a time: the same errors as of whole tensors."""
    whole = run_verify(nvfp4_artifact, tiny_checkpoint, "nvfp4", tmp_path)
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(PIECE_BYTES, device, 1)
    parts = run_verify(nvfp4_artifact, tiny_checkpoint, "nvfp4", tmp_path)
    assert parts.passed, parts.checks
    assert parts.relative_error == pytest.approx(whole.relative_error)
    assert parts.checks["kept"].looked_at > 2 * whole.checks["kept"].looked_at
    assert parts.checks["experts"].looked_at == whole.checks["experts"].looked_at


def test_nothing_lost_of_nothing_is_no_error() -> None:
    assert verify_weights.ratio(0.0, 0.0) == 0
    assert verify_weights.ratio(1.0, 0.0) == float("inf")
    assert verify_weights.ratio(4.0, 16.0) == 0.5
    wide = torch.tensor([[[2.0**100] * 3], [[1.0] * 3]]).bfloat16()  # beyond float32 when squared
    norm, distance = verify_weights._sums_of_squares(wide, wide / 2).tolist()
    assert norm == pytest.approx([3 * 2.0**200, 3])
    assert distance == pytest.approx([0.75 * 2.0**200, 0.75])


def test_what_is_wrong_with_calibration_is_named(
    nvfp4_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A scale too many or too few in either file, and a file that is not there."""
    path = tmp_path / "calibration" / "input_scales.safetensors"
    run_verify(nvfp4_artifact, tiny_checkpoint, "nvfp4", tmp_path)
    scales = load_file(path)
    names = sorted(scales)
    known = {"model.x": 1.0, names[1].removesuffix(".input_global_scale"): scales[names[1]].item()}
    check = verify_weights.Check("calibrated")
    save_file({name: scales[name] for name in names[:2]}, path)
    verify_module._check_calibrated(known, path, check)
    assert len(check.faults) == 2
    assert (
        f"{names[0]} is None and calibration found [{scales[names[0]].item()}]" in check.faults[0]
    )
    assert "model.x.input_global_scale is [1.0] and calibration found None" in check.faults[1]
    save_file({}, path)
    none = verify_weights.Check("calibrated")
    verify_module._check_calibrated(known, path, none)
    assert "calibration found None" in none.faults[0]
    path.unlink()
    gone = verify_weights.Check("calibrated")
    verify_module._check_calibrated(known, path, gone)
    assert str(path) in gone.faults[0]


def test_wider_scales_than_the_plan_s(
    fp8_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Other libraries write a row's scales in FP32: as a layout they pass, as ours they do not."""
    folder = tmp_path / "wider"
    shutil.copytree(fp8_artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    wider = {
        name: t.float() if name.endswith(".weight_scale") else t for name, t in tensors.items()
    }
    save_file(wider, folder / "model.safetensors")
    found = run_verify(folder, tiny_checkpoint, "fp8", tmp_path)
    assert found.checks["layout"].faults == []
    assert "bytes; the plan has" in found.checks["counts"].faults[0]
    assert not found.passed


def test_verification_json_tells_every_check(
    fp8_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(fp8_artifact, folder)
    config = read_json(folder / "config.json")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 5
    write_json(folder / "config.json", config)
    tensors = load_file(folder / "model.safetensors")
    quantize_the_router(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = run_verify(folder, tiny_checkpoint, "fp8", tmp_path)
    told = {check["name"]: check for check in read_json(tmp_path / "verification.json")["checks"]}
    assert told.keys() == found.checks.keys()
    assert all(told[name]["passed"] == check.passed for name, check in found.checks.items())
    assert "which no known scheme has" in told["config"]["faults"][0]
    assert told["counts"]["faults"][0] == f"{PLANNED + 1} modules quantized; the plan has {PLANNED}"


def test_another_source_is_found(
    artifact: Path, tiny_checkpoint: Path, scheme: str, tmp_path: Path
) -> None:
    from tests.support.tiny import tiny_model

    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    found = run_verify(artifact, tmp_path / "other", scheme, tmp_path)
    assert not found.checks["error"].passed
    assert not found.checks["kept"].passed


def test_scales_of_two_kinds_are_refused(tiny_checkpoint: Path, fp8_artifact: Path) -> None:
    """Tensors that are checked together are of one dtype and shape."""
    artifact, source = Checkpoint.open(fp8_artifact), Checkpoint.open(tiny_checkpoint)
    names = [f"{LAYER}mlp.{kind}_proj.weight_scale" for kind in ("gate", "up")]
    stacked = artifact.read_stacked(names)
    assert torch.equal(stacked, torch.stack([artifact.read(name) for name in names]))
    with pytest.raises(InputError, match=r"norm\.weight' is BF16 .* and 'model.* is BF16 "):
        source.read_stacked([f"{LAYER}mlp.up_proj.weight", "model.decoder.norm.weight"])


def test_the_stage_names_the_device(
    fp8_artifact: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(verify_module, "Device", lambda name: asked.append(name) or Device())
    monkeypatch.setattr(stage_module, "best_device", lambda: "cuda:7")
    run_verify(fp8_artifact, tiny_checkpoint, "fp8", tmp_path)
    recipe, source = load_recipe("fp8_dynamic"), Checkpoint.open(tiny_checkpoint)
    targets = plan_targets(source.tensors, recipe.quantization)
    folder = RunDir(tmp_path)
    shutil.copytree(fp8_artifact, folder.checkpoint)
    stage_module._verify(stage_module.Run(folder, recipe, source, targets, True))
    assert asked == ["cpu", "cuda:7"]
    assert read_json(folder.verification_json)["passed"]
