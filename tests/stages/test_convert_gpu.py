"""A GPU writes the CPU's bytes, in little memory, and takes up what the CPU began."""

import filecmp
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize.errors import InputError
from quantize.recipe.reading import load_recipe, shipped_recipes
from quantize.schemes.records import SCHEMES, Scheme
from quantize.schemes.rounding import global_scale
from quantize.stages.convert import convert as convert_module
from quantize.stages.convert.shard_pieces import LARGEST
from tests.support.conversions import note_codes, recipe_for, run
from tests.support.synthetic import synthetic_config, write_synthetic

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


def assert_same_files(one: Path, other: Path) -> None:
    names = sorted(file.name for file in one.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    assert any(name.endswith(".safetensors") for name in names)
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("name", sorted(shipped_recipes().keys() - {"mxfp4a16"}))
def test_every_shipped_recipe(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Of the tiny model, whose experts are narrower than MXFP4's blocks: see `test_all_numbers`."""
    recipe = load_recipe(name)
    run(tiny_checkpoint, tmp_path / "cpu", recipe)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run(tiny_checkpoint, tmp_path / "gpu", recipe, device=GPU)
    assert torch.cuda.max_memory_allocated() > held  # it was quantized there
    assert_same_files(tmp_path / "cpu", tmp_path / "gpu")


def test_an_observer_that_sums(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = recipe_for("NVFP4", "memoryless_mse")
    run(tiny_checkpoint, tmp_path / "cpu", recipe)
    run(tiny_checkpoint, tmp_path / "gpu", recipe, device=GPU)
    assert_same_files(tmp_path / "cpu", tmp_path / "gpu")


def test_codes_that_were_rounded_before(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run(tiny_checkpoint, tmp_path / "nearest", recipe_for("NVFP4"))
    layer = load_file(tmp_path / "nearest" / "model.safetensors")
    codes = {n: ~t if n.endswith("_packed") else t for n, t in layer.items() if ".weight_" in n}
    (tmp_path / "codes").mkdir()
    save_file(codes, tmp_path / "codes" / "layer-00.safetensors")
    note_codes(tmp_path / "codes")
    for name, device in (("cpu", "cpu"), ("gpu", GPU)):
        run(tiny_checkpoint, tmp_path / name, recipe_for("NVFP4"), device=device,
            rounded=tmp_path / "codes")  # fmt: skip
    assert_same_files(tmp_path / "cpu", tmp_path / "gpu")
    written = load_file(tmp_path / "gpu" / "model.safetensors")
    assert codes
    assert all(torch.equal(written[name], tensor) for name, tensor in codes.items())


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
@pytest.mark.parametrize("spread", [0, 40])
def test_all_numbers(scheme: Scheme, spread: int) -> None:
    """Of all BF16 numbers that convert takes, signed zeros and denormals too, and of weights whose
    rows go from 2^-spread to 2^spread.
    """
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    every = every[every.abs() <= LARGEST]
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(len(every), (64, 2816), generator=generator)
    alike = torch.randn(192, 2816, generator=generator)
    scale = torch.linspace(-spread, spread, 192)[:, None].exp2()
    some = (alike * scale).bfloat16()
    some[5:9] = 0
    some[9, ::2] = -0.0
    some[10:30] = (some[10:30] * 4).round() / 4  # ties
    weight = torch.stack([some, torch.cat([some[:128], every[order]])])
    on_gpu = weight.to(GPU)
    ranges, theirs = (scheme.observe(w, "memoryless_minmax") for w in (weight, on_gpu))
    assert torch.equal(ranges, theirs.cpu())
    shared = global_scale([ranges]) if scheme.shares_global_scale else None
    if shared is not None:
        assert torch.equal(shared, global_scale([theirs]).cpu())
    mine = scheme.quantize(weight, ranges, shared, None)
    other = scheme.quantize(on_gpu, theirs, None if shared is None else shared.to(GPU), None)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].cpu().view(torch.uint8)), name
    back = {name: tensor.to(GPU) for name, tensor in mine.items()}
    both = scheme.dequantize(mine), scheme.dequantize(back).cpu()
    assert torch.equal(*(weight.view(torch.int16) for weight in both))


def test_real_shapes_take_little_memory(tmp_path: Path) -> None:
    """A sliding and a full layer of 16 experts; by arithmetic 0.5 GB on the GPU at once."""
    config = synthetic_config(layers=2, experts=16, vision_layers=1, vocabulary=4096)
    source = write_synthetic(tmp_path / "bf16", config)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved()
    for name in ("nvfp4_w4a4", "fp8_dynamic"):
        run(source, tmp_path / f"{name}-gpu", load_recipe(name), device=GPU)
        run(source, tmp_path / f"{name}-cpu", load_recipe(name))
        assert_same_files(tmp_path / f"{name}-cpu", tmp_path / f"{name}-gpu")
    taken = torch.cuda.max_memory_reserved() - held
    print(f"convert: {taken / 1e9:.2f} GB of the GPU")
    assert 0 < taken < 1e9


@pytest.mark.parametrize(("first", "then"), [("cpu", GPU), (GPU, "cpu"), (GPU, GPU)])
def test_resume(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, then: str
) -> None:
    """Shards that one device finished stand beside those that the other writes."""
    recipe = load_recipe("nvfp4_w4a4")
    run(tiny_checkpoint, tmp_path / "whole", recipe, max_shard_bytes=200_000)
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_carry_files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tiny_checkpoint, tmp_path / "out", recipe, max_shard_bytes=200_000, device=first)
    partial = next(path for path in tmp_path.iterdir() if path.is_dir() and "out" in path.name)
    lost = sorted(partial.glob("model-*.safetensors"))[1::2]
    assert lost
    for file in lost:
        file.unlink()
    run(tiny_checkpoint, tmp_path / "out", recipe, max_shard_bytes=200_000, device=then)
    assert_same_files(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3.0e38])
def test_what_cannot_be_quantized_is_named(
    tiny_checkpoint: Path, tmp_path: Path, bad: float
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.2.experts.gate_up_proj"][5, 3, 7] = bad
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said: list[str] = []
    for device in ("cpu", GPU):
        with pytest.raises(InputError, match="in expert 5") as caught:
            run(folder, tmp_path / "out", recipe_for("NVFP4A16"), device=device)
        said.append(str(caught.value))
    assert said[0] == said[1]
