"""Inspect tells four formats apart, counts what is in them, and finds what is wrong."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

from quantize.checkpoints.inspect import inspect, inspection_table
from quantize.cli import cli
from quantize.errors import InputError
from tests.support.conversions import DENSE, IGNORE, MIXED, recipe_for, run
from tests.support.tiny import EXPERTS, LAYERS

EXPERT_LINEARS = LAYERS * EXPERTS * 3
GATE = "model.decoder.layers.0.experts.3.gate_proj"
Tensors = dict[str, torch.Tensor]


def summary(folder: Path) -> dict[tuple[str, str], int]:
    return {(row.kind, row.scheme): row.count for row in inspect(folder).rows}


def edited(folder: Path, to: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy a one-file checkpoint with its tensors changed."""
    shutil.copytree(folder, to)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, to / "model.safetensors")
    return to


def config(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "config.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_bf16_with_fused_experts(tiny_checkpoint: Path):
    found = inspect(tiny_checkpoint)
    assert found.format == "not quantized, fused experts"
    assert found.problems == []
    assert found.quantized_modules == 0
    assert summary(tiny_checkpoint)["experts", "BF16"] == EXPERT_LINEARS
    assert summary(tiny_checkpoint)["attention", "BF16"] == LAYERS * 4 - 1
    assert summary(tiny_checkpoint)["layer_scalar", "BF16"] == 2 * LAYERS  # decoder's and encoder's
    assert not {"unknown", "tied copy"} & {kind for kind, _ in summary(tiny_checkpoint)}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_weights_in_another_plain_dtype(tiny_checkpoint: Path, tmp_path: Path, dtype: str):
    """Its name is shown; nothing is called incomplete."""

    def wider(tensors: Tensors) -> Tensors:
        return {name: data.to(getattr(torch, dtype)) for name, data in tensors.items()}

    found = summary(edited(tiny_checkpoint, tmp_path / "wider", wider))
    assert {scheme for _, scheme in found} == {f"F{dtype.removeprefix('float')}"}


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC", "NVFP4", "NVFP4A16"])
def test_ours(tiny_checkpoint: Path, tmp_path: Path, scheme):
    conversion, _ = run(tiny_checkpoint, tmp_path / "out", recipe_for(scheme))
    found = inspect(tmp_path / "out")
    assert re.match(r"compressed-tensors [\d.]+, (float|int|nvfp4-pack)-quantized", found.format)
    assert found.problems == []
    assert found.quantized_modules == EXPERT_LINEARS + DENSE
    assert (found.tensors, found.nbytes) == (conversion.tensors, conversion.bytes_out)
    counts = summary(tmp_path / "out")
    assert counts["experts", scheme] == EXPERT_LINEARS
    assert counts["router", "BF16"] == 3 * LAYERS  # proj, scale, per-expert scale


def test_ours_mixed_and_sharded(tiny_checkpoint: Path, tmp_path: Path):
    run(tiny_checkpoint, tmp_path / "out", recipe_for(MIXED), max_shard_bytes=200_000)
    found = inspect(tmp_path / "out")
    assert found.format.endswith("mixed-precision")
    assert found.problems == []
    assert found.shards > 3
    counts = summary(tmp_path / "out")
    assert counts["experts", "NVFP4"] == EXPERT_LINEARS
    assert counts["attention", "FP8_DYNAMIC"] == LAYERS * 4 - 1


def test_llm_compressors_config_with_its_own_patterns(tiny_checkpoint: Path, tmp_path: Path):
    """As RedHatAI's card states it: the same layout, other ignore patterns, an older version."""
    run(tiny_checkpoint, tmp_path / "out", recipe_for("FP8_DYNAMIC"))

    def as_published(value: dict) -> None:
        value["quantization_config"]["version"] = "0.15.0"
        value["quantization_config"]["ignore"] = [
            "lm_head",
            "re:.*embed.*",
            "re:.*router",
            "re:.*vision_tower.*",
            "re:.*self_conditioning.*",
        ]

    config(tmp_path / "out", as_published)
    found = inspect(tmp_path / "out")
    assert found.format == "compressed-tensors 0.15.0, float-quantized"
    assert found.problems == []


def as_modelopt(tensors: Tensors) -> Tensors:
    """Rename to ModelOpt's suffixes; its second scale is the inverse of a global scale."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            result[name.replace("weight_packed", "weight")] = tensor
        elif name.endswith("weight_global_scale"):
            result[name.replace("weight_global_scale", "weight_scale_2")] = 1 / tensor[0]
        elif name.endswith("input_global_scale"):
            result[name.replace("input_global_scale", "input_scale")] = 1 / tensor[0]
        else:
            result[name] = tensor
    return result


def test_modelopt(tiny_checkpoint: Path, tmp_path: Path):
    run(tiny_checkpoint, tmp_path / "ours", recipe_for({"NVFP4": ["re:.*experts.*"]}))
    folder = edited(tmp_path / "ours", tmp_path / "theirs", as_modelopt)
    kept = ["*.self_attn*", "*.mlp*", "*router*", "*self_conditioning*", "*vision*"]
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": kept}
    config(folder, lambda value: value.update(quantization_config=stated))
    found = inspect(folder)
    assert found.format == "modelopt NVFP4"
    assert found.problems == []
    assert found.quantized_modules == EXPERT_LINEARS
    assert summary(folder)["experts", "NVFP4"] == EXPERT_LINEARS
    assert summary(folder)["attention", "BF16"] == LAYERS * 4 - 1


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


def without(*endings: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(endings)}


def with_encoder_copies(tensors: Tensors) -> Tensors:
    copies = {
        n.replace("model.decoder.", "model.encoder.language_model."): t
        for n, t in tensors.items()
        if ".mlp." in n
    }
    return tensors | copies


def with_quantized_router(tensors: Tensors) -> Tensors:
    name = "model.decoder.layers.1.router.proj.weight"
    scale = torch.ones(tensors[name].shape[0], 1).bfloat16()
    return tensors | {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": scale}


def with_one_int8_expert(tensors: Tensors) -> Tensors:
    name = f"{GATE}.weight"
    return tensors | {name: tensors[name].float().to(torch.int8)}


PROBLEMS = {
    "router quantized": (with_quantized_router, r"router\.proj: quantized, but servers read it"),
    "encoder copies": (with_encoder_copies, r"mlp.*: has two tensors once servers merge.*35 more"),
    "scale missing": (
        without("layers.2.mlp.up_proj.weight_scale"),
        r"layers\.2\.mlp\.up_proj: lacks tensors",
    ),
    "expert missing": (
        without(f"{GATE}.weight", f"{GATE}.weight_scale"),
        r"layers\.0\.experts\.3\.gate_proj is missing \(1 in this layer\)",
    ),
    "expert numbers with a gap": (
        renamed(".experts.7.", ".experts.9."),
        r"experts\.7\.down_proj is missing \(3 in this layer\)",
    ),
    "schemes mixed in a layer": (
        with_one_int8_expert,
        r"layers\.0\.experts: several schemes in one layer \(FP8_DYNAMIC, INT8_DYNAMIC\)",
    ),
    "other names": (renamed("model.decoder.", "model."), "unexpected tensor|is missing"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems_are_found(tiny_checkpoint: Path, tmp_path: Path, case: str):
    change, pattern = PROBLEMS[case]
    run(tiny_checkpoint, tmp_path / "good", recipe_for("FP8_DYNAMIC"))
    folder = edited(tmp_path / "good", tmp_path / "bad", change)
    problems = inspect(folder).problems
    assert any(re.search(pattern, problem) for problem in problems), problems


def test_config_and_tensors_that_disagree(tiny_checkpoint: Path, tmp_path: Path):
    run(tiny_checkpoint, tmp_path / "out", recipe_for("FP8_DYNAMIC"), max_shard_bytes=400_000)
    config(tmp_path / "out", lambda value: value.pop("quantization_config"))
    path = tmp_path / "out/model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    problems = inspect(tmp_path / "out").problems
    assert f"config.json says nothing, {EXPERT_LINEARS + DENSE} modules are" in problems
    assert any("total_size" in problem for problem in problems)


def test_the_table_shows_counts_and_bytes(tiny_checkpoint: Path):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(inspection_table(inspect(tiny_checkpoint)))
    text = console.export_text()
    assert "fused" in text
    assert f"{EXPERT_LINEARS:,}" in text
    assert " kB " in text


def test_another_model_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="llama"):
        inspect(tmp_path)


def test_ignore_of_the_recipes_is_what_these_tests_assume():
    assert recipe_for("NVFP4").quantization.ignore == IGNORE


def test_the_command_exits_1_when_something_is_wrong(tiny_checkpoint: Path, tmp_path: Path):
    shipped = CliRunner().invoke(cli, ["inspect", "bundled"], standalone_mode=False)
    assert shipped.return_value == 0
    assert "14.7 MB" in shipped.output
    good = CliRunner().invoke(cli, ["inspect", str(tiny_checkpoint)], standalone_mode=False)
    assert good.return_value == 0
    assert "not quantized" in " ".join(good.output.split())
    folder = edited(tiny_checkpoint, tmp_path / "bad", without("layers.2.mlp.up_proj.weight"))
    bad = CliRunner().invoke(cli, ["inspect", str(folder)], standalone_mode=False)
    assert bad.return_value == 1
