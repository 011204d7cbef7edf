"""What convert writes, checked with the format's own libraries rather than with our loader."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from fused_dequant import formats
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantize.checkpoints.config_form import google_form
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets, sum_bytes
from quantize.errors import InputError, ResourceError
from quantize.host.files import read_json
from quantize.pipeline import stages as stage_module
from quantize.recipe.reading import load_recipe, shipped_recipes
from quantize.recipe.sections import Recipe
from quantize.runs.folder import RunDir
from quantize.schemes import rounding
from quantize.schemes.records import SCHEMES, Scheme
from quantize.stages import device as device_module
from quantize.stages.convert import convert as convert_module
from quantize.stages.convert.convert import convert
from quantize.stages.convert.shard_pieces import Quantizer
from quantize.stages.device import Device
from quantize.stages.verify import witness as witness_module
from tests.support.conversions import DENSE, MIXED, note_codes, recipe_for, run, write_input_scales
from tests.support.modules_oracle.simulated import load_rounding
from tests.support.oracle import assert_equal_quantization, assert_same_bits, oracle
from tests.support.tiny import EXPERTS, LAYERS


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor with the safetensors library, through the index if there is one."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else []
    tensors: dict[str, torch.Tensor] = {}
    for name in names or ["model.safetensors"]:
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def linears_of(source: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return groups of Linears, by on-disk module name, that must share a global scale."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in source.items():
        if match := re.fullmatch(r"(.*)\.experts\.(gate_up|down)_proj", name):
            for e, expert in enumerate(tensor):
                base = f"{match[1]}.experts.{e}"
                if match[2] == "down":
                    groups[f"{base}.down"] = {f"{base}.down_proj": expert}
                else:
                    gate, up = expert.chunk(2)
                    groups[base] = {f"{base}.gate_proj": gate, f"{base}.up_proj": up}
        elif match := re.fullmatch(
            r"(.*decoder.layers\.\d+\.(?:self_attn|mlp))\.(\w+)_proj\.weight", name
        ):
            fused = match[2] in ("q", "k", "v", "gate", "up")
            key = match[1] if fused else f"{match[1]}.{match[2]}"
            groups.setdefault(key, {})[name.removesuffix(".weight")] = tensor
    return list(groups.values())


def scheme_of(module: str, recipe: Recipe) -> Scheme:
    for name, patterns in recipe.quantization.targets_by_scheme().items():
        if any(p == "Linear" or re.match(p[3:], module) for p in patterns):
            return SCHEMES[name]
    raise AssertionError(f"{module} has no scheme")


CASES = [
    ("FP8_DYNAMIC", "memoryless_minmax"),
    ("INT8_DYNAMIC", "memoryless_minmax"),
    ("NVFP4A16", "memoryless_minmax"),
    ("NVFP4", "memoryless_minmax"),
    ("NVFP4", "memoryless_mse"),
    (MIXED, "memoryless_minmax"),
]


@pytest.mark.parametrize(("scheme", "observer"), CASES)
def test_artifact_equals_compressed_tensors_module_by_module(
    tiny_checkpoint: Path, tmp_path: Path, scheme, observer
):
    recipe = recipe_for(scheme, observer)
    conversion, targets = run(tiny_checkpoint, tmp_path / "out", recipe)
    written, source = read_all(tmp_path / "out"), read_all(tiny_checkpoint)
    config = read_json(tmp_path / "out/config.json")["quantization_config"]
    parsed = QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "version"})

    checked = 0
    groups = linears_of(source)
    if observer == "memoryless_mse":  # whose oracle is slow: of a layer of each kind
        ends = tuple(f"model.decoder.layers.{index}." for index in (0, LAYERS - 1))
        groups = [group for group in groups if next(iter(group)).startswith(ends)]
    for group in groups:
        kind = scheme_of(next(iter(group)), recipe)
        theirs = oracle(kind, list(group.values()), observer)
        args = next(g for g in parsed.config_groups.values() if group_matches(g, group))
        for module, expected in zip(group, theirs, strict=True):
            mine = {
                n.removeprefix(f"{module}."): t
                for n, t in written.items()
                if n.startswith(f"{module}.")
            }
            if kind.name == "NVFP4":
                assert mine.pop("input_global_scale").shape == (1,)
            assert_equal_quantization(mine, expected)
            compressor = BaseCompressor.get_value_from_registry(args.format)
            assert_same_bits(compressor.decompress(mine, args)["weight"], expected["decompressed"])
            checked += 1
    assert checked == sum(map(len, groups)) >= 2 * EXPERTS * 3 + 13
    assert conversion.modules == LAYERS * EXPERTS * 3 + DENSE == sum(map(len, linears_of(source)))
    assert sum(name.endswith("weight_scale") for name in written) == conversion.modules
    assert conversion.bytes_out == sum_bytes(targets)[1] == sum(t.nbytes for t in written.values())
    assert config["format"] == ("mixed-precision" if scheme == MIXED else args.format)


def group_matches(group, linears: dict[str, torch.Tensor]) -> bool:
    module = next(iter(linears))
    return any(t == "Linear" or re.match(t[3:], module) for t in group.targets)


def test_kept_tensors_names_and_files(tiny_checkpoint: Path, tmp_path: Path):
    source_folder = tmp_path / "bf16"
    shutil.copytree(tiny_checkpoint, source_folder)
    for name in ("tokenizer.json", "chat_template.jinja", "processor_config.json", "LICENSE"):
        (source_folder / name).write_text(json.dumps({"the": name}))
    (source_folder / "training.log").write_text("not carried over")
    run(source_folder, tmp_path / "out", recipe_for("NVFP4"))
    out = tmp_path / "out"
    written, source = read_all(out), read_all(source_folder)

    kept = [n for n in written if n in source]
    assert len(kept) == len(written) - 4 * (LAYERS * EXPERTS * 3 + DENSE)
    for name in kept:
        assert_same_bits(written[name], source[name])
    for forbidden in ("router.proj", "self_conditioning", "vision", "embed_tokens", "norm"):
        names = [n for n in written if forbidden in n]
        assert names
        assert all(n in source for n in names)
    assert not any(
        n.startswith("model.encoder.language_model.") and "layer_scalar" not in n for n in written
    )
    assert "lm_head.weight" not in written
    merged = [
        n.replace("model.encoder.language_model.", "model.").replace("model.decoder.", "model.")
        for n in written
        if "layer_scalar" not in n
    ]
    assert len(merged) == len(set(merged))
    assert (out / "generation_config.json").read_bytes() == (
        source_folder / "generation_config.json"
    ).read_bytes()
    for name in ("tokenizer.json", "chat_template.jinja", "processor_config.json", "LICENSE"):
        assert json.loads((out / name).read_text()) == {"the": name}
    assert not (out / "training.log").exists()
    plain = read_json(out / "config.json")
    quantization = plain.pop("quantization_config")
    assert plain == google_form(read_json(source_folder / "config.json"))
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["quantization_status"] == "compressed"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bf16",
        "input_scales.safetensors",
        "out",
    ]


def test_every_linear_left_in_bf16_is_ignored_by_name(tiny_checkpoint: Path, tmp_path: Path):
    recipe = recipe_for({"FP8_DYNAMIC": ["re:.*experts.*"]})
    run(tiny_checkpoint, tmp_path / "out", recipe)
    written = read_all(tmp_path / "out")
    ignore = read_json(tmp_path / "out/config.json")["quantization_config"]["ignore"]
    for name, tensor in written.items():
        if name.endswith(".weight") and tensor.dim() == 2 and f"{name}_scale" not in written:
            module = name.removesuffix(".weight")
            assert any(
                re.match(p[3:], module) if p.startswith("re:") else p == module for p in ignore
            ), module


# Blocks of 32 do not divide the small model's 48 inputs: test_every_recipe loads the bundled one.
@pytest.mark.parametrize("name", sorted(shipped_recipes().keys() - {"mxfp4a16"}))
def test_every_shipped_recipe_loads_without_a_missing_key(
    tiny_checkpoint: Path, tmp_path: Path, name: str
):
    recipe = load_recipe(name)
    _, targets = run(tiny_checkpoint, tmp_path / "out", recipe)
    model = load_rounding(tmp_path / "out", "per_layer")
    source = read_all(tiny_checkpoint)
    errors = {}
    for target in targets:
        if target.scheme:
            mine = model.get_parameter(target.name)
            name = target.scheme.name
            errors[name] = ((source[target.name] - mine).norm() / source[target.name].norm()).item()
            assert 0 < errors[name] < recipe.verification.max_relative_error[name]
    assert set(errors) == set(recipe.quantization.targets_by_scheme())


def test_input_scales_arrive_at_their_modules(tiny_checkpoint: Path, tmp_path: Path):
    _, targets = run(tiny_checkpoint, tmp_path / "out", recipe_for("NVFP4"))
    expected = write_input_scales(tmp_path / "again.safetensors", targets)
    written = read_all(tmp_path / "out")
    found = {
        n.removesuffix(".input_global_scale"): t.item()
        for n, t in written.items()
        if n.endswith("input_global_scale")
    }
    assert found == expected


def test_shards_are_numbered_indexed_and_hold_the_same_tensors(
    tiny_checkpoint: Path, tmp_path: Path
):
    recipe = recipe_for("FP8_DYNAMIC")
    one, _ = run(tiny_checkpoint, tmp_path / "one", recipe)
    many, _ = run(tiny_checkpoint, tmp_path / "many", recipe, max_shard_bytes=200_000)
    assert list(one.shards) == ["model.safetensors"]
    count = len(many.shards)
    assert count > 3
    assert list(many.shards) == [
        f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)
    ]
    index = read_json(tmp_path / "many/model.safetensors.index.json")
    a, b = read_all(tmp_path / "one"), read_all(tmp_path / "many")
    assert a.keys() == b.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in b.values()) == many.bytes_out
    for name in a:
        assert_same_bits(a[name], b[name])
    assert max((tmp_path / "many" / s).stat().st_size for s in many.shards) < 300_000


def test_fp32_scales_are_aligned(tiny_checkpoint: Path, tmp_path: Path):
    run(tiny_checkpoint, tmp_path / "out", recipe_for("NVFP4"))
    infos = Checkpoint.open(tmp_path / "out").tensors.values()
    scales = [i for i in infos if i.dtype == "F32"]
    assert scales
    assert all(i.begin % 4 == 0 for i in scales)


def test_an_existing_output_is_refused_unless_told(tiny_checkpoint: Path, tmp_path: Path):
    recipe = recipe_for("FP8_DYNAMIC")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        run(tiny_checkpoint, out, recipe)
    assert (out / "mine.txt").exists()
    run(tiny_checkpoint, out, recipe, overwrite=True)
    assert not (out / "mine.txt").exists()
    assert Checkpoint.open(out).is_quantized


def test_input_scales_must_be_complete_and_right(tiny_checkpoint: Path, tmp_path: Path):
    recipe = recipe_for("NVFP4")
    source = Checkpoint.open(tiny_checkpoint)
    targets = plan_targets(source.tensors, recipe.quantization)
    path = tmp_path / "s.safetensors"
    good = {
        f"{m}.input_global_scale": torch.tensor([9.0])
        for t in targets
        if t.scheme
        for m in t.modules
    }
    victim = "model.decoder.layers.3.experts.5.up_proj.input_global_scale"
    cases = {
        "missing": {k: v for k, v in good.items() if k != victim},
        "belongs to no": {**good, victim.replace("5.up", "9.up"): torch.ones(1)},
        "is nan": {**good, victim: torch.tensor([float("nan")])},
        "is 0.0": {**good, victim: torch.tensor([0.0])},
        r"is F32 \[2\]": {**good, victim: torch.ones(2)},
        r"is BF16": {**good, victim: torch.ones(1).bfloat16()},
    }
    for message, tensors in cases.items():
        save_file(tensors, path)
        with pytest.raises(InputError, match=message) as caught:
            convert(source, targets, tmp_path / "out", recipe=recipe, input_scales=path)
        assert str(path) in str(caught.value)
    with pytest.raises(InputError, match="run calibrate first"):
        convert(source, targets, tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


def test_fused_linears_must_share_a_scheme(tiny_checkpoint: Path, tmp_path: Path):
    recipe = recipe_for({"FP8_DYNAMIC": ["re:.*self_attn.q_proj"], "NVFP4A16": ["re:.*k_proj"]})
    named = r"one scheme: \S+k_proj.weight NVFP4A16, \S+q_proj.weight FP8_DYNAMIC, \S+weight BF16$"
    with pytest.raises(InputError, match=named):
        run(tiny_checkpoint, tmp_path / "out", recipe)


def test_every_row_of_every_tensor_is_shown_once(tiny_checkpoint: Path) -> None:
    source, shown = Checkpoint.open(tiny_checkpoint), dict[str, int]()
    targets = plan_targets(
        source.tensors, recipe_for({"FP8_DYNAMIC": MIXED["FP8_DYNAMIC"]}).quantization
    )

    def look(target: Any, start: int, stop: int, part: torch.Tensor) -> None:
        shown[target.name] = shown.get(target.name, 0) + stop - start
        assert part.dtype == torch.uint8

    for piece in Quantizer(source, "memoryless_minmax", {}, look=look).plan(targets):
        for task in piece.tasks:
            task()
    assert shown == {target.name: target.shape[0] for target in targets}


def change(folder: Path, name: str, edit) -> Path:
    """Rewrite one tensor of a one-file checkpoint."""
    tensors = read_all(folder)
    edit(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("observer", ["memoryless_minmax", "memoryless_mse"])
@pytest.mark.parametrize(
    ("name", "index", "where"),
    [
        ("model.decoder.layers.2.experts.gate_up_proj", (5, 3, 7), "in expert 5"),
        ("model.decoder.layers.1.self_attn.k_proj.weight", (4, 9), "in row 4"),
        ("model.decoder.embed_tokens.weight", (11, 0), "in rows 0 to"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nan_and_infinite_weights_are_named(
    tiny_checkpoint: Path, tmp_path: Path, name, index, where, bad, observer
):
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    change(folder, name, lambda tensor: tensor.__setitem__(index, bad))
    with pytest.raises(InputError, match=f"{re.escape(name)}' holds NaN or infinity {where}"):
        run(folder, tmp_path / "out", recipe_for("NVFP4A16", observer))
    assert not (tmp_path / "out").exists()


def test_too_little_disk_is_refused_before_the_start(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ResourceError, match=r"[\d,]+ bytes needed and 1,000 free") as caught:
        run(tiny_checkpoint, tmp_path / "out", recipe_for("FP8_DYNAMIC"))
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_meanwhile_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import quantize.stages.convert.convert as module

    counter = iter(range(10))
    monkeypatch.setattr(module, "identities", lambda files: [str(next(counter))])
    with pytest.raises(InputError, match="changed while it was read"):
        run(tiny_checkpoint, tmp_path / "out", recipe_for("FP8_DYNAMIC"))
    assert not (tmp_path / "out").exists()


def test_config_is_plain_json(tiny_checkpoint: Path, tmp_path: Path):
    run(tiny_checkpoint, tmp_path / "out", recipe_for(MIXED))
    text = (tmp_path / "out/config.json").read_text()
    config = json.loads(text)["quantization_config"]
    assert set(config["config_groups"]) == {"group_0", "group_1"}
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == ["nvfp4-pack-quantized", "float-quantized"]


READ = """
import sys
import compressed_tensors, pytest
assert compressed_tensors.__version__ == sys.argv[1], compressed_tensors.__version__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.17.0", "0.18.0", "0.19.0", "0.20.0"])
def test_other_versions_of_compressed_tensors_read_what_is_written(
    tmp_path: Path, version: str
) -> None:
    """Each from a folder of its own; vLLM 0.33 pins 0.17.0. `make test-versions` has the ends too."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, f"compressed-tensors=={version}"], check=True, capture_output=True)
    tests = ["tests/checkpoints/test_load.py", "-k", "equals_compressed_tensors"]
    done = subprocess.run(
        [sys.executable, "-c", READ, version, *tests],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "5 passed" in done.stdout


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC", "NVFP4A16"])
def test_a_weight_that_would_round_to_infinity_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, scheme: str
):
    folder = tmp_path / "bf16"
    shutil.copytree(tiny_checkpoint, folder)
    name = "model.decoder.layers.2.mlp.up_proj.weight"
    change(folder, name, lambda weight: weight[3].fill_(3.3895e38))
    with pytest.raises(InputError, match=f"{name}' holds a weight above 1e\\+38 in row 3"):
        run(folder, tmp_path / "out", recipe_for(scheme))
    assert not (tmp_path / "out").exists()


def test_headers_on_disk_are_compared_with_the_plan(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A tensor renamed on its way: same bytes, same size, and the layout is another one."""
    real = convert_module.write_shards

    def renaming(shards, folder, identity, **workers):
        hashes = real(shards, folder, identity, **workers)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b"layers.5.mlp.up_", b"layers.5.mlp.uq_", 1))
        return hashes

    monkeypatch.setattr(convert_module, "write_shards", renaming)
    with pytest.raises(RuntimeError, match="not the planned ones"):
        run(tiny_checkpoint, tmp_path / "out", recipe_for("FP8_DYNAMIC"))
    assert not (tmp_path / "out").exists()


def test_a_carried_file_that_is_no_json_is_refused(tiny_checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "bf16"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json: not readable as JSON"):
        run(folder, tmp_path / "out", recipe_for("FP8_DYNAMIC"))
    assert not (tmp_path / "out").exists()


def test_the_record_holds_the_checksum_of_every_file(tiny_checkpoint: Path, tmp_path: Path):
    record = tmp_path / "conversion.json"
    conversion, _ = run(
        tiny_checkpoint, tmp_path / "out", recipe_for("FP8_DYNAMIC"), record=record,
        max_shard_bytes=200_000,
    )  # fmt: skip
    files = list((tmp_path / "out").iterdir())
    expected = {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
    assert read_json(record) == {"files": expected}
    assert conversion.shards.items() <= expected.items()
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= expected.keys()


def test_shards_of_other_settings_are_not_taken_up_again(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, dtypes and shapes are equal whatever observer, input scales or codes made the bytes."""
    source = Checkpoint.open(tiny_checkpoint)
    targets = plan_targets(source.tensors, recipe_for("NVFP4").quantization)
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    write_input_scales(first, targets)
    save_file({name: 2 * scale for name, scale in load_file(first).items()}, second)

    def converted(out: Path, **changes: Any) -> bytes:
        settings = {"observer": "memoryless_minmax", "input_scales": first, **changes}
        recipe = recipe_for("NVFP4", observer=settings.pop("observer"))
        convert(source, targets, out, recipe=recipe, **settings)
        return (out / "model.safetensors").read_bytes()

    plain = converted(tmp_path / "plain")
    codes = tmp_path / "codes"
    codes.mkdir()
    quantized = load_file(tmp_path / "plain" / "model.safetensors").items()
    layer = {n: t for n, t in quantized if ".weight_" in n}
    layer |= {n: torch.zeros_like(t) for n, t in layer.items() if n.endswith("_packed")}
    save_file(layer, codes / "layer-00.safetensors")
    note_codes(codes)
    for after in ({"observer": "memoryless_mse"}, {"input_scales": second}, {"rounded": codes}):
        out = tmp_path / "-".join(after)
        with monkeypatch.context() as patch:  # every shard is finished, and the folder is not
            patch.setattr(convert_module, "_carry_files", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                converted(out)
        resumed = converted(out, **after)
        assert resumed != plain
        assert resumed == converted(tmp_path / f"{out.name}-alone", **after)


@pytest.mark.parametrize("scheme", ["NVFP4", MIXED])
def test_bytes_do_not_depend_on_how_much_is_worked_on_at_a_time(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Any
) -> None:
    run(tiny_checkpoint, tmp_path / "whole", recipe_for(scheme))
    tensors = Checkpoint.open(tiny_checkpoint).tensors
    experts = tensors["model.decoder.layers.2.experts.down_proj"].nbytes
    for size, values in ((experts // EXPERTS, 100), (experts // 3, 5000)):
        assert size < device_module.PIECE_BYTES["cpu"]
        monkeypatch.setitem(device_module.PIECE_BYTES, "cpu", size)
        monkeypatch.setattr(formats, "BLOCK_VALUES", values)  # rows of a Linear, or some Linears
        run(tiny_checkpoint, tmp_path / str(size), recipe_for(scheme))
        monkeypatch.undo()
        for file in (tmp_path / "whole").iterdir():
            assert (tmp_path / str(size) / file.name).read_bytes() == file.read_bytes()


def test_a_gpu_gets_what_it_computes_exactly(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima, quotients, casts and the copying of codes; not an observer's sums."""
    asked: list[str] = []

    def device(name: str) -> Device:
        asked.append(name)
        return Device()

    monkeypatch.setattr(convert_module, "Device", device)
    run(tiny_checkpoint, tmp_path / "a", recipe_for("NVFP4A16"), device="cuda:0")
    run(tiny_checkpoint, tmp_path / "b", recipe_for("NVFP4A16", "memoryless_mse"), device="cuda:0")
    (tmp_path / "codes").mkdir()
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "codes" / "layer-00.safetensors")
    note_codes(tmp_path / "codes")
    settings = {"device": "cuda:0", "rounded": tmp_path / "codes"}
    run(tiny_checkpoint, tmp_path / "c", recipe_for("NVFP4A16"), **settings)
    run(tiny_checkpoint, tmp_path / "d", recipe_for("NVFP4A16"))
    assert asked == ["cuda:0", "cpu", "cuda:0", "cpu"]


def test_a_gpu_s_memory_is_held_by_few_threads(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All reading is done before a thread has its turn, all computing within it."""
    turn, free = Lock(), {"read": set[bool](), "observe": set[bool]()}
    device = Device()
    device.turn, device.makers = turn, 1

    def noting(what: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*given: Any, **named: Any) -> torch.Tensor:
            free[what].add(not turn.locked())
            return function(*given, **named)

        return noted

    monkeypatch.setattr(rounding, "observe", noting("observe", rounding.observe))
    for name in ("read", "read_rows"):
        monkeypatch.setattr(Checkpoint, name, noting("read", getattr(Checkpoint, name)))
    monkeypatch.setattr(convert_module, "Device", lambda _: device)
    run(tiny_checkpoint, tmp_path / "out", recipe_for("NVFP4A16"))
    assert free == {"read": {True}, "observe": {False}}


def test_the_stage_names_the_device(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for module in (convert_module, witness_module):
        monkeypatch.setattr(module, "Device", lambda name: asked.append(name) or Device())
    monkeypatch.setattr(stage_module, "best_device", lambda: "cuda:7")
    recipe, source = load_recipe("fp8_dynamic"), Checkpoint.open(tiny_checkpoint)
    folder, targets = RunDir(tmp_path), plan_targets(source.tensors, recipe.quantization)
    stage_module._convert(stage_module.Run(folder, recipe, source, targets, True))
    assert asked == ["cuda:7", "cuda:7"]
    assert read_all(folder.checkpoint)
    assert folder.witness_json.is_file()
