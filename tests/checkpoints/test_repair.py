"""A repaired copy has the same weights and nothing wrong; what has no certain correction is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conversions import recipe_for, run
from safetensors.torch import load_file, save_file

from quantize.checkpoints.inspect import inspect
from quantize.checkpoints.load import lazy_weights, read_input_schemes
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.repair import repair
from quantize.cli import cli
from quantize.errors import InputError

LAYER = "model.decoder.layers.2."
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


@pytest.fixture(scope="module")
def good(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repair") / "good"
    run(tiny_checkpoint, folder, recipe_for("NVFP4"))
    return folder


def damaged(good: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(good, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def weights(folder: Path) -> Tensors:
    return {name: lazy[...] for name, lazy in lazy_weights(Checkpoint.open(folder)).items()}


def scale(folder: Path, module: str) -> float | None:
    return read_input_schemes(Checkpoint.open(folder))[LAYER + module][1]


def set_to(module: str, value: float) -> Change:
    return lambda t: t[f"{LAYER}{module}.input_global_scale"].fill_(value)


def without(module: str) -> Change:
    return lambda t: t.pop(f"{LAYER}{module}.input_global_scale")


def encoder_copies(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith(f"{LAYER}mlp.")]:
        tensors[name.replace("decoder", "encoder.language_model")] = tensors[name].clone()


def half_global_scale(tensors: Tensors) -> None:
    """The same weights: code * (block / 2) / (global / 2)."""
    name = f"{LAYER}self_attn.k_proj.weight"
    tensors[f"{name}_global_scale"] /= 2
    tensors[f"{name}_scale"] = (tensors[f"{name}_scale"].float() / 2).to(torch.float8_e4m3fn)


INPUTS = {
    "zero": (set_to("experts.3.up_proj", 0), "experts.3.up_proj", "experts.3.gate_proj"),
    "NaN": (
        set_to("experts.3.gate_proj", float("nan")),
        "experts.3.gate_proj",
        "experts.3.up_proj",
    ),
    "missing": (without("experts.3.up_proj"), "experts.3.up_proj", "experts.3.gate_proj"),
    "q unlike k, v": (set_to("self_attn.q_proj", 1e6), "self_attn.q_proj", "self_attn.k_proj"),
}


@pytest.mark.parametrize("case", INPUTS)
def test_an_input_scale_comes_from_a_linear_that_reads_the_same(
    good: Path, tmp_path: Path, case: str
) -> None:
    change, module, twin = INPUTS[case]
    bad = damaged(good, tmp_path / "bad", change)
    assert inspect(bad).problems
    (said,) = repair(bad, tmp_path / "out")
    assert module in said
    assert inspect(tmp_path / "out").problems == []
    assert scale(tmp_path / "out", module) == scale(good, twin)
    before, after = Checkpoint.open(good), Checkpoint.open(tmp_path / "out")
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        a, b = (c.read(name).flatten().view(torch.uint8) for c in (before, after))
        assert torch.equal(a, b), name
    assert (tmp_path / "out/config.json").read_bytes() == (good / "config.json").read_bytes()


def test_an_expert_that_no_token_reached_takes_its_layers_widest_range(
    good: Path, tmp_path: Path
) -> None:
    bad = damaged(good, tmp_path / "bad", without("experts.3.down_proj"))
    repair(bad, tmp_path / "out")
    others = [scale(good, f"experts.{e}.down_proj") for e in range(8) if e != 3]
    assert scale(tmp_path / "out", "experts.3.down_proj") == min(others)


@pytest.mark.parametrize("change", [encoder_copies, half_global_scale])
def test_weights_stay_the_same_numbers(good: Path, tmp_path: Path, change: Change) -> None:
    bad = damaged(good, tmp_path / "bad", change)
    assert inspect(bad).problems
    assert repair(bad, tmp_path / "out")
    assert inspect(tmp_path / "out").problems == []
    before, after = weights(good), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_total_size_is_counted_again(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run(tiny_checkpoint, tmp_path / "bad", recipe_for("FP8_DYNAMIC"), max_shard_bytes=200_000)
    path = tmp_path / "bad/model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    repair(tmp_path / "bad", tmp_path / "out")
    assert inspect(tmp_path / "out").problems == []


def add_to_the_global_scale(tensors: Tensors) -> None:
    tensors[f"{LAYER}self_attn.k_proj.weight_global_scale"] *= 1.1


def no_global_scale(tensors: Tensors) -> None:
    tensors[f"{LAYER}self_attn.o_proj.weight_global_scale"].zero_()


def other_encoder_copies(tensors: Tensors) -> None:
    encoder_copies(tensors)
    tensors[f"{LAYER}mlp.up_proj.weight_packed".replace("decoder", "encoder.language_model")][
        0
    ] ^= 1


@pytest.mark.parametrize("change", [add_to_the_global_scale, no_global_scale, other_encoder_copies])
def test_what_is_not_certain_is_refused(good: Path, tmp_path: Path, change: Change) -> None:
    bad = damaged(good, tmp_path / "bad", change)
    with pytest.raises(InputError, match=r"not repaired, .*convert the BF16 model again"):
        repair(bad, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_the_command(good: Path, tmp_path: Path) -> None:
    bad = damaged(good, tmp_path / "bad", INPUTS["zero"][0])
    command = ["inspect", str(bad), "--repair", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, command, standalone_mode=False)
    assert done.return_value == 0
    with pytest.raises(InputError, match="exists already"):
        repair(bad, tmp_path / "out")
    with pytest.raises(InputError, match="nothing is wrong"):
        repair(tmp_path / "out", tmp_path / "again")
