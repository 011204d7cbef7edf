"""The search: exact choices, a model quantized in place as convert would, and a recipe that says it."""

import itertools
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import quantize
from quantize.bundled import CHECKPOINT
from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets, sum_bytes
from quantize.errors import InputError
from quantize.host.files import read_json
from quantize.pipeline import search as module
from quantize.pipeline.knapsack import Knapsack
from quantize.pipeline.search import (
    ANCHORS,
    BF16,
    KlLine,
    Option,
    partly_quantized,
    recipe_of,
    search,
)
from quantize.recipe.reading import load_recipe
from quantize.recipe.sections import Calibration
from quantize.runtime import open as open_engine
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.gpu.gpus import GPUS
from quantize.runtime.gpu.placement import CPU
from quantize.runtime.record.trajectory import Prompt, Trajectory
from quantize.schemes import records as schemes
from quantize.schemes.modes import ActivationMode
from quantize.stages import denoising
from quantize.stages.convert.convert import convert
from quantize.stages.plan.gpu_support import floor
from tests.support.chats import add_chats
from tests.support.conversions import recipe_for, write_input_scales
from tests.support.quick_run import in_few_steps

SCHEMES = ("NVFP4", "NVFP4A16", "FP8_DYNAMIC")


def exhaustive(groups: list[list[tuple[int, float]]], budget: int) -> float:
    return min(
        sum(damage for _, damage in each)
        for each in itertools.product(*groups)
        if sum(nbytes for nbytes, _ in each) <= budget
    )


def test_the_knapsack_finds_what_trying_everything_finds() -> None:
    draw = random.Random(0)
    groups = [[(draw.randrange(1, 40), draw.random()) for _ in range(3)] for _ in range(6)]
    sack = Knapsack(groups)
    most = sum(max(nbytes for nbytes, _ in options) for options in groups)
    for budget in range(sack.least, most + 5, 3):
        picked = [options[at] for options, at in zip(groups, sack.best(budget), strict=True)]
        assert sum(nbytes for nbytes, _ in picked) <= budget
        assert sum(damage for _, damage in picked) == pytest.approx(exhaustive(groups, budget))
        found = sum(damage for _, damage in picked)
        cheap = [options[at] for options, at in zip(groups, sack.cheapest(found), strict=True)]
        assert sum(damage for _, damage in cheap) <= found + 1e-12
        assert sum(nbytes for nbytes, _ in cheap) <= budget
    with pytest.raises(InputError, match="no choice is so small"):
        sack.best(sack.least - 1)
    with pytest.raises(InputError, match="no choice does so little damage"):
        sack.cheapest(-1.0)
    damages = [damage for _, damage in sack.frontier(10)]
    assert damages == sorted(damages, reverse=True)


def test_large_bytes_never_exceed_the_budget() -> None:
    draw = random.Random(1)
    groups = [[(draw.randrange(10**8, 10**9), draw.random()) for _ in range(4)] for _ in range(20)]
    sack = Knapsack(groups)
    for share in (0.0, 0.1, 0.5, 0.9):
        budget = int(sack.least + share * 10**10)
        picked = sack.best(budget)
        assert sum(o[at][0] for o, at in zip(groups, picked, strict=True)) <= budget


@pytest.mark.parametrize(
    ("scheme", "mode"), [*((scheme, "per_layer") for scheme in SCHEMES), ("NVFP4", "fp8")]
)
def test_a_part_quantized_is_what_a_conversion_opens_as(
    scheme: str, mode: ActivationMode, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All groups, and some of them: the same logits to the last bit, by kernels tested in that mode."""
    tested: list[tuple[list[str], str]] = []
    monkeypatch.setattr(module, "trust", lambda names, mode, _: tested.append(([*names], mode)))
    source, recipe = Checkpoint.open(tiny_checkpoint), recipe_for(scheme)
    recipe = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"activations": mode})}
    )
    targets = plan_targets(source.tensors, recipe.quantization)
    path = tmp_path / "input_scales.safetensors"
    scales = write_input_scales(path, targets)
    convert(source, targets, tmp_path / "q", recipe=recipe, input_scales=path if scales else None)
    whole = open_engine(tmp_path / "q", device="cpu", activations=mode, max_context=256)
    searched = object.__new__(module._Search)
    searched.source, searched.recipe, searched._scales = source, recipe, scales
    searched._place, searched._plans, searched._codes = CPU, {scheme: {}}, {}
    searched._trajectories = [
        Trajectory(Prompt((2, 5, 6, 7), False), 0, True, (), torch.zeros(1, 16))
    ]
    chosen = [target for target in targets if target.scheme]

    def logits(engine: FusedEngine) -> torch.Tensor:
        decoded = engine.passes([[2, 5, 6, 7]]).decode([0], torch.full((1, 16), 9), None)
        return torch.cat([decoded.logits(piece) for piece in decoded.pieces()])

    assert torch.equal(logits(searched._quantized(chosen, tmp_path / "all")), logits(whole))
    some = [target for target in chosen if ".layers.1." in target.name]
    part = searched._quantized([t for t in some if "experts" in t.name], tmp_path / "some")
    assert not torch.equal(logits(part), logits(whole))
    ours = zip(part.model.weights.layers, whole.model.weights.layers, strict=True)
    mixed = [
        (mine.experts_down.scheme == theirs.experts_down.scheme, mine.down.scheme)
        for mine, theirs in ours
    ]
    assert mixed == [(index == 1, "bf16") for index in range(len(mixed))]
    assert tested == [([schemes.SCHEMES[scheme].kernel], mode)]


def test_damage_is_measured_on_held_out_trajectories_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calibration").mkdir()
    scales = tmp_path / "calibration" / "input_scales.safetensors"
    save_file({"layer.input_global_scale": torch.tensor([2.0])}, scales)
    seen, held_out = SimpleNamespace(held_out=False), SimpleNamespace(held_out=True)
    monkeypatch.setattr(module, "load_trajectories", lambda _: ([seen, held_out], "sampler"))
    searched = object.__new__(module._Search)
    searched.folder = tmp_path
    assert searched._calibrated() == ({"layer": 2.0}, [held_out], "sampler")


def test_more_parts_do_more_damage(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrated as NVFP4 whatever the recipe's scheme, once, and replayed on what was held out."""
    in_few_steps(monkeypatch)
    monkeypatch.setattr(denoising, "HELD_OUT", 2)
    add_chats(source := Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16")))
    chats = Calibration(
        datasets=[str(source / "chats.jsonl")], prompts=2, canvases=1, batch_size=2, thinking=0.5,
        min_tokens_per_expert=1,
    )  # fmt: skip
    searched = object.__new__(module._Search)
    searched.source, searched.folder, searched._place = Checkpoint.open(source), tmp_path, CPU
    searched._codes, recipe = {}, load_recipe("fp8_dynamic")
    own = {"ignore": [*recipe.quantization.ignore, r"re:.*layers\.0\.mlp\..*"]}
    quantization = recipe.quantization.model_copy(update=own)
    searched.recipe = recipe.model_copy(update={"calibration": chats, "quantization": quantization})
    groups = searched._plan("NVFP4")
    assert groups.keys() == {(n, kind) for n in range(6) for kind in module.PATHS} - {(0, "mlp")}
    searched._plans = {"NVFP4": groups}
    searched._scales, searched._trajectories, searched._sampler = searched._calibrated()
    targets = [target for own in groups.values() for target in own]
    assert searched._scales.keys() == {module for target in targets for module in target.modules}
    one, everything = searched.measure(groups[1, "mlp"]), searched.measure(targets)
    assert len(one) == len(everything) == 2
    assert 0 < fmean(one) < fmean(everything)
    assert {path.name for path in tmp_path.iterdir()} == {"bf16", "calibration"}
    monkeypatch.setattr(module, "calibrate", None)
    assert searched._calibrated()[0] == searched._scales


def test_weights_are_rounded_as_the_recipe_says(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ's codes and scales, made once for schemes of one kernel, are what a part then holds."""
    in_few_steps(monkeypatch)
    add_chats(source := Path(shutil.copytree(tiny_checkpoint, tmp_path / "bf16")))
    chats = Calibration(
        datasets=[str(source / "chats.jsonl")], prompts=2, canvases=1, batch_size=2,
        thinking=0.5, min_tokens_per_expert=1,
    )  # fmt: skip
    searched = object.__new__(module._Search)
    searched.source, searched.folder, searched._place = Checkpoint.open(source), tmp_path, CPU
    nearest, gptq = (
        load_recipe(name).model_copy(update={"calibration": chats})
        for name in ("nvfp4_w4a4", "nvfp4")
    )
    searched.recipe = nearest
    searched._plans = {name: searched._plan(name) for name in SCHEMES}
    assert searched._rounded() == {}
    searched.recipe = gptq
    codes = searched._rounded()
    assert codes.keys() == {"nvfp4", "fp8"}
    assert not (tmp_path / "scratch").exists()
    for scheme in ("NVFP4A16", "FP8_DYNAMIC"):
        targets = searched._plans[scheme][1, "experts"]
        made = [
            partly_quantized(searched.source, targets, {}, gptq, tmp_path / f"{scheme}{i}", own)
            for i, own in enumerate((codes, {}))
        ]
        rounded = codes[schemes.SCHEMES[scheme].kernel]
        modules = {module for target in targets for module in target.modules}
        names = [name for name in rounded.tensors if name.rpartition(".")[0] in modules]
        own, plain, theirs = (
            torch.cat([each.read(name).flatten().view(torch.uint8) for name in names])
            for each in (*made, rounded)
        )
        assert torch.equal(own, theirs)
        assert not torch.equal(own, plain)
    monkeypatch.setattr(module, "round_weights", None)
    assert searched._rounded().keys() == codes.keys()


def test_the_line_holds_what_is_measured_as_often_as_it_says() -> None:
    draw, inside = np.random.default_rng(0), 0
    exact = KlLine([1.0, 2.0, 4.0, 8.0], [3.0 * s**0.7 for s in (1, 2, 4, 8)])
    assert exact.predict(5.0) == pytest.approx(3 * [3 * 5**0.7])
    assert exact.damage(exact.predict(5.0)[0]) == pytest.approx(5.0)
    assert exact.predict(0.0) == (0.0, 0.0, 0.0)
    assert exact.damage(0.0) < 1e-12
    for _ in range(2000):
        sums = draw.uniform(0.5, 8, 7)
        wholes = np.exp(0.2 + 0.7 * np.log(sums) + 0.1 * draw.normal(size=7))
        _, least, most = KlLine(sums[1:].tolist(), wholes[1:].tolist()).predict(sums[0])
        inside += bool(least <= wholes[0] <= most)
    assert 0.935 < inside / 2000 < 0.965  # 0.95, and three of its standard errors
    falling = KlLine([1.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    assert falling.predict(1.0)[0] < falling.predict(2.0)[0]


def test_a_choice_becomes_a_recipe_that_plans_it() -> None:
    source = Checkpoint.open(CHECKPOINT)
    chosen = {
        (layer, kind): Option(
            "FP8_DYNAMIC" if kind == "attention" else BF16 if (layer, kind) == (2, "mlp")
            else "NVFP4" if layer < 3 else "NVFP4A16", 1, 0.0,
        )
        for layer in range(6)
        for kind in ("attention", "mlp", "experts")
    }  # fmt: skip
    recipe = recipe_of(load_recipe("nvfp4"), chosen, "searched")
    limits = recipe.verification.max_relative_error
    assert (
        limits["FP8_DYNAMIC"] > schemes.SCHEMES["FP8_DYNAMIC"].max_relative_error
    )  # GPTQ rounds it
    schemes_stated = recipe.quantization.scheme
    assert isinstance(schemes_stated, dict)
    assert schemes_stated["FP8_DYNAMIC"] == [r"re:.*\.self_attn\..*"]  # no layer is an exception
    for target in plan_targets(source.tensors, recipe.quantization):
        if target.module_class in ("attention", "mlp", "experts"):
            layer = int(target.name.split("layers.")[1].split(".")[0])
            found = target.scheme.name if target.scheme else BF16
            assert found == chosen[layer, target.module_class].scheme, target.name
    only = {group: Option(BF16, 1, 0.0) for group in chosen}
    with pytest.raises(InputError, match="nothing to quantize"):
        recipe_of(load_recipe("nvfp4"), only, "searched")


def test_a_search_from_end_to_end(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Damage is made up; the choice keeps the bytes, is measured, and a second search measures none."""
    damage = {"attention": 3.0, "mlp": 1.0, "experts": 2.0}
    measured: list[int] = []

    def made_up(self: object, targets: list) -> list[float]:
        measured.append(len(targets))
        return [
            damage[t.module_class] / (4 if t.scheme.name == "FP8_DYNAMIC" else 1) for t in targets
        ]

    monkeypatch.setattr(module._Search, "measure", made_up)
    monkeypatch.setattr(
        module._Search, "_calibrated", lambda self: ({}, [SimpleNamespace(held_out=True)], None)
    )
    monkeypatch.setattr(module._Search, "_rounded", lambda self: {})
    whole = sum_bytes(plan_targets(Checkpoint.open(tiny_checkpoint).tensors, load_recipe(
        "fp8_dynamic").quantization))  # fmt: skip
    bound: dict = {"kl": None, "schemes": ("NVFP4", "FP8_DYNAMIC"), "gpu": "b200"}
    path = search("nvfp4", str(tiny_checkpoint), tmp_path, nbytes=whole[1], **bound)
    assert path.exists()
    assert len(measured) == 2 * 18 + ANCHORS + 1
    facts = read_json(path.with_suffix(".json"))
    assert facts["bytes"] <= whole[1]
    assert facts["of_bf16"] == facts["bytes"] / whole[0]
    assert facts["estimated_ms"] > 0
    recipe = load_recipe(str(path))
    planned = plan_targets(Checkpoint.open(tiny_checkpoint).tensors, recipe.quantization)
    assert sum_bytes(planned)[1] == facts["bytes"]
    with monkeypatch.context() as patch:  # a GPU whose rates nobody knows
        patch.setattr(module, "gpu_of", lambda _: replace(GPUS["b200"], rates=None))
        smaller = quantize.search(
            "nvfp4", str(tiny_checkpoint), tmp_path, nbytes=0.95 * whole[1], **bound
        )
    assert smaller["estimated_ms"] is None
    assert len(measured) == 2 * 18 + ANCHORS + 2
    assert load_recipe(str(smaller["recipe"])).name == smaller["recipe"].stem
    percents = [percent for percent, _ in smaller["frontier"]]
    assert percents == sorted(percents)
    assert 0 < percents[0] < percents[-1] < 101  # sizes are counted in bins
    assert smaller["bytes"] <= 0.95 * whole[1]
    assert smaller["kl_nats"]["predicted"] >= facts["kl_nats"]["predicted"]
    capsys.readouterr()
    bound["kl"] = smaller["kl_nats"]["predicted"]
    bounded = read_json(
        search("nvfp4", str(tiny_checkpoint), tmp_path, **bound).with_suffix(".json")
    )
    kl = bounded["kl_nats"]
    assert kl["predicted"] == pytest.approx(bound["kl"])
    assert kl["predicted_interval"][0] <= kl["predicted"] <= kl["predicted_interval"][1]
    assert bounded["bytes"] <= smaller["bytes"]
    shown = capsys.readouterr().err
    rows = [re.split(" *│ *", line)[1:5] for line in shown.splitlines() if line[:1] == "│"]
    assert {
        f"{layer}.{kind}": cell
        for layer, *cells in rows
        for kind, cell in zip(("attention", "mlp", "experts"), cells, strict=True)
    } == bounded["schemes"]
    assert "│ 0.00, 250.00, 500.00 " in shown  # of BF16, FP8, FP8: KL x 1000
    said = " ".join(shown.split())
    assert f"at least {bounded['estimated_ms']:.2f} ms a forward of one canvas on" in said
    assert f"{kl['predicted']:.4g} nats [" in said
    assert f"predicted, {kl['measured']:.4g} [" in said


def test_what_is_shown_of_a_choice_is_the_choice() -> None:
    source, gpu = Checkpoint.open(CHECKPOINT), GPUS["b200"]
    targets = plan_targets(source.tensors, load_recipe("nvfp4").quantization)
    assert gpu.rates is not None
    least = floor(source.config, targets, gpu.rates, 1, 0)
    shown = module._milliseconds(source.config, targets, gpu)
    assert shown == pytest.approx(1000 * (least["experts"] + least["dense"]), rel=1e-9)
    assert module._milliseconds(source.config, targets, None) is None
    some = {(0, "mlp"): Option("NVFP4", 1, 0.25), (2, "experts"): Option(BF16, 1, 0.0)}
    table = module._table(some, "a title")
    assert [list(column.cells) for column in table.columns] == [
        ["0", "2"], ["BF16", "BF16"], ["NVFP4", "BF16"], ["BF16", "BF16"], ["250.00", "0.00"],
    ]  # fmt: skip
    assert table.title == "a title"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nbytes": None}, "name one bound"),
        ({"kl": 0.1}, "name one bound"),
        ({"schemes": ("FP9",)}, "no scheme named 'FP9'"),
    ],
)
def test_wrong_bounds_are_refused(changes: dict, said: str, tmp_path: Path) -> None:
    arguments: dict = {"nbytes": 1e9, "kl": None, "schemes": SCHEMES} | changes
    with pytest.raises(InputError, match=said):
        search("nvfp4", None, tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", [None, "folder"])
def test_the_bundled_model_has_its_own_tasks(
    model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolving(name: str, *, bundled: bool) -> None:
        raise InputError(f"{name} {bundled}")

    monkeypatch.setattr(module, "resolved", resolving)
    with pytest.raises(InputError, match=f"nvfp4 {model is None}"):
        search("nvfp4", model, tmp_path, nbytes=1e9)
