"""What fits a GPU is known before anything is loaded: plans within budgets, sizes as allocated."""

import gc
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from fused_dequant.gptq import gram

from quantize import cli, runtime
from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint, known_config
from quantize.checkpoints.targets import plan_targets
from quantize.errors import ResourceError
from quantize.recipe.reading import load_recipe
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.gpu.memory import (
    BEGUN_BYTES,
    CONTEXT_BYTES,
    MOST_CANVASES,
    Capability,
    Need,
    Stack,
    cache_bytes,
    layer_cache_bytes,
    least_bytes,
    packed_sizes,
    plan,
)
from quantize.runtime.gpu.placement import Placement, budget_of, sized
from quantize.runtime.model.cells import Cache, HostCells
from quantize.runtime.sampler.sampler import Sampler
from quantize.runtime.weights.load import load_packed
from quantize.schemes.hessians import tiles_of
from quantize.stages.evaluate import local_model
from quantize.stages.memory_needs import SHUTTLE_BYTES, TILE, WAITING_BYTES, needs
from quantize.stages.plan.plan import tensors_from_config

HOPPER = (9, 0)
REAL = known_config("google/diffusiongemma-26B-A4B-it") or {}


def real_needs(
    name: str, activations: str = "none", target: Capability | None = HOPPER
) -> dict[str, Need]:
    recipe, tensors = load_recipe(name), tensors_from_config(REAL)
    scored = recipe.evaluation.model_copy(update={"activations": activations})
    recipe = recipe.model_copy(update={"evaluation": scored})
    targets = plan_targets(tensors, recipe.quantization)
    found = needs(recipe, REAL, tensors, targets, target)
    return {need.stage: need for need in found}


def needs_of_gptq(config: dict[str, Any]) -> list[Need]:
    recipe, tensors = load_recipe("nvfp4_w4a4"), tensors_from_config(config)
    quantization = recipe.quantization.model_copy(update={"rounding": "gptq"})
    recipe = recipe.model_copy(update={"quantization": quantization})
    return needs(recipe, config, tensors, plan_targets(tensors, quantization), HOPPER)


def test_gptq_s_memory_follows_the_model_s_shape() -> None:
    """Hessians are those of `schemes.hessians`; a Linear that is alone too wide is still rounded."""
    text = REAL["text_config"]
    small = REAL | {"text_config": text | {"hidden_size": 1408, "num_experts": 64}}
    wide = REAL | {"text_config": text | {"hidden_size": 11264, "num_attention_heads": 32}}
    besides: list[float] = []
    for config in (small, REAL, wide):
        own = config["text_config"]
        hidden, heads = own["hidden_size"], own["num_attention_heads"] * own["global_head_dim"]
        each = own["num_experts"] * (tiles_of(hidden) + tiles_of(own["moe_intermediate_size"]))
        dense = 2 * tiles_of(hidden) + tiles_of(heads) + tiles_of(own["intermediate_size"])
        beside = needs_of_gptq(config)[1].beside
        besides.append(beside - 4 * TILE**2 * (each + dense) - WAITING_BYTES - SHUTTLE_BYTES)
    narrow = 64 * 4 * 1408 * (2 * 1408 + 7 * 1408)  # all experts' gate_up, with six copies
    out, inputs = 11264, 16384  # o_proj alone, while its Hessian is factored
    wide = 4 * inputs * (2 * inputs + 3 * out) + 16 * inputs**2
    assert besides == [narrow, 6e9, wide]
    assert TILE == gram.TILE


def test_gptq_plans_its_hessians_beside_the_model() -> None:
    """A recipe without it has no such stage; one with it fails at plan time where they do not fit."""
    assert "round" not in real_needs("nvfp4_w4a4")
    found = needs_of_gptq(REAL)
    assert [need.stage for need in found[:3]] == ["calibrate", "round", "fidelity BF16"]
    need = found[1]
    assert need.beside == pytest.approx((4 << 30) + 6e9 + SHUTTLE_BYTES, abs=1e6)
    small, large = (
        plan(need, REAL, gb) for gb in (22e9, 141e9)
    )  # two layers in turns, at any budget
    assert small.total == large.total == least_bytes(need, REAL)
    assert small.parts["cache"] == 8 * max(layer_cache_bytes(REAL, 2048 + 512))
    assert small.parts["fixed"] == found[0].stack.streaming
    with pytest.raises(ResourceError, match=r"round: there are 18\.0 GB.*a batch of 8 canvases"):
        plan(need, REAL, 18e9)


def test_what_depends_on_its_batch_keeps_it_or_is_refused() -> None:
    need = real_needs("nvfp4")["calibrate"]
    assert plan(need, REAL, 22e9).need.batch == need.batch == 8
    with pytest.raises(ResourceError, match=r"smaller `batch_size` in the recipe's calibration"):
        plan(need, REAL, least_bytes(need, REAL) - 1)
    assert plan(need, REAL, least_bytes(need, REAL)).need.batch == 8


def test_lockstep_streams_least_over_all_batches() -> None:
    """Never more lanes than that takes: each leaves less room for layers that stay."""
    need = replace(real_needs("nvfp4")["calibrate"], context=640, batches=10)
    for host in (0, 64e9):
        costs: list[float] = []
        for gb in (22, 32, 48):
            found = plan(replace(need, host=host), REAL, gb * 1e9)
            lanes, alone = found.need.lanes, plan(replace(need, batches=1), REAL, gb * 1e9)
            assert found.total <= gb * 1e9
            assert lanes == 1 or math.ceil(10 / (lanes - 1)) > math.ceil(10 / lanes)
            assert found.cost[0] < 10 * alone.streamed
            assert not (found.need.on_host and host == 0)
            costs.append(found.cost[0])
        assert costs == sorted(costs, reverse=True)


def test_canvases_in_lockstep_at_22_gb() -> None:
    """Answers of 1,536 positions: 128 canvases, so that each takes little of the link."""
    need = replace(real_needs("nvfp4")["evaluate BF16"], context=1536)
    found = plan(need, REAL, 22e9)
    canvases = found.need.batch * found.need.lanes
    assert found.need.on_host
    assert canvases == MOST_CANVASES
    assert (found.streamed + found.moved) / canvases < 0.6e9
    assert canvases * cache_bytes(REAL, 1536) <= need.host


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_dynamic"])
def test_every_plan_keeps_its_budget_and_larger_ones_stream_less(recipe: str) -> None:
    for need in real_needs(recipe).values():
        streamed: list[float] = []
        for gb in range(22, 200, 6):
            found = plan(need, REAL, gb * 1e9)
            assert found.total <= gb * 1e9
            assert 1 <= found.need.batch <= need.batch
            if found.need.batch == need.batch:
                streamed.append(found.cost[0])
        assert streamed == sorted(streamed, reverse=True)
        assert streamed[-1] == 0


def test_weights_of_the_real_model() -> None:
    """49.0 GB of products in BF16; 13.8 in NVFP4 (4.5 bits), and the embedding beside them."""
    needs = real_needs("nvfp4")
    bf16, nvfp4 = (needs[f"fidelity {name}"].stack for name in ("BF16", "nvfp4"))
    assert len(bf16.layers) == 30
    assert sum(bf16.layers) == pytest.approx(48.97e9, rel=1e-3)
    assert sum(nvfp4.layers) == pytest.approx(13.78e9, rel=1e-2)
    for stack in (bf16, nvfp4):
        assert stack.fixed == pytest.approx(1.536e9, rel=1e-2)
    assert bf16.streaming == pytest.approx(2 * 1.65e9 + 4 / 3 * 1.5225e9, rel=2e-2)


def test_fp8_products_of_nvfp4_take_a_byte_a_weight_but_for_experts(nvfp4_artifact: Path) -> None:
    """In mode `fp8`, as planned from a recipe; from headers, experts are as the GPU keeps them."""
    dense = 30 * 3 * 2112 * 2816 + 25 * (4096 * 2 + 2048 * 2) * 2816
    dense += 5 * (8192 * 2 + 1024) * 2816
    rows = 30 * (2 * 2112 + 2816) + 25 * (4096 + 2 * 2048 + 2816) + 5 * (8192 + 1024 + 2816)
    for stage in ("evaluate nvfp4", "fidelity nvfp4"):
        none, fp8 = (real_needs("nvfp4", mode)[stage].stack for mode in ("none", "fp8"))
        assert sum(fp8.layers) - sum(none.layers) == pytest.approx(
            dense * 0.4375 + 2 * rows, rel=1e-4
        )
    recipe, plain = load_recipe("nvfp4"), tensors_from_config(REAL)
    limits = {"none": 1.0, "per_expert": 1.0, "per_layer": 1.0, "fp8": 1.0}
    gate = recipe.gate.model_copy(update={"max_kl_nats": limits})
    judged = recipe.model_copy(update={"gate": gate})
    found = needs(judged, REAL, plain, plan_targets(plain, recipe.quantization), HOPPER)
    (replayed,) = (need for need in found if need.stage == "fidelity nvfp4")
    assert replayed.caches == 3  # `fp8` is replayed alone, over its own weights
    assert replayed.stack == fp8
    opened = Checkpoint.open(nvfp4_artifact)
    tensors = opened.tensors
    kept = packed_sizes(opened, "fp8", HOPPER)
    both = packed_sizes(opened, "fp8", None)
    assert {name: size for name, size in kept.items() if ".experts." in name} == {
        name: info.nbytes for name, info in tensors.items() if ".experts." in name
    }
    assert all(
        (kept[name] == size) != (".experts." in name)
        for name, size in both.items()
        if tensors[name].dtype == "U8"
    )


def test_the_batch_is_halved_only_where_no_layer_can_stay() -> None:
    """At the batch one larger than the plan's nothing fits, streamed or not."""
    need = real_needs("nvfp4")["evaluate BF16"]
    for gb in (12, 16, 24, 48, 80):
        found = plan(need, REAL, gb * 1e9)
        assert need.batch % found.need.batch == 0
        if found.need.batch < need.batch:
            doubled = replace(need, batch=2 * found.need.batch)
            assert plan(doubled, REAL, gb * 1e9).need.batch == found.need.batch


def test_too_small_a_gpu_is_told_what_is_needed() -> None:
    need = real_needs("nvfp4")["fidelity BF16"]
    least = least_bytes(need, REAL)
    assert plan(need, REAL, least + 1).need.batch == 1
    words = rf"fidelity BF16: there are 10\.0 GB .* needs {least / 1e9:.1f} GB; use a larger"
    with pytest.raises(ResourceError, match=words):
        plan(need, REAL, 10e9)
    with pytest.raises(ResourceError):
        plan(need, REAL, least - 1)


def test_the_cache_is_what_the_engine_allocates(tiny_checkpoint: Path) -> None:
    config = Checkpoint.open(tiny_checkpoint).config
    for context in (20, 300, 2000):
        for slots in (1, 3):
            cache = Cache.allocate(model_config(config), slots, context, 1152, torch.device("cpu"))
            assert slots * cache_bytes(config, context) == sum(
                t.nbytes for t in (*cache.keys, *cache.values)
            )


def test_stacks_are_what_is_loaded(
    fp8_artifact: Path, nvfp4_artifact: Path, tiny_checkpoint: Path
) -> None:
    """All bytes but scales, which are BF16 on disk and float32 for the kernels."""
    for folder, quantized, in_fp8 in (
        (tiny_checkpoint, False, False), (fp8_artifact, True, False), (nvfp4_artifact, True, True),
    ):  # fmt: skip
        sizes = packed_sizes(Checkpoint.open(folder), "fp8" if in_fp8 else None, None)
        stack = Stack.of("tiny", sizes, quantized=quantized)
        loaded = load_packed(folder, "cpu", in_fp8=in_fp8)
        products = [sum(w.bytes for w in layer.products) for layer in loaded.layers]
        assert len(stack.layers) == len(products)
        for reckoned, found in zip(stack.layers, products, strict=True):
            assert reckoned <= found <= reckoned * (1.07 if quantized else 1)
        assert loaded.embedding.numel() * 2 <= stack.fixed <= loaded.embedding.numel() * 2 * 2


def test_a_card_that_others_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20e9, 80e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4e9)
    held: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def hold(share: float, index: object) -> None:
        shares.append(share)
        held.append(index)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", hold)
    assert budget_of(Placement("cpu")) is None
    assert budget_of(Placement("cuda:0")) == 20e9 + 4e9 + BEGUN_BYTES
    assert not shares
    with pytest.raises(ResourceError, match=r"--gpu-memory 60: cuda:0 .* 24\.0 GB are free"):
        budget_of(Placement("cuda:0", 60e9))
    assert budget_of(Placement("cuda:0", 21e9)) == 21e9
    assert budget_of(Placement("cuda", 21e9)) == 21e9
    assert held == [0, 3]
    assert shares == [pytest.approx((21e9 - CONTEXT_BYTES) / 80e9)] * 2


def test_the_command_line_says_so_before_anything_is_made(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "outputs"
    needed = f"{least_bytes(real_needs('nvfp4')['calibrate'], REAL) / 1e9:.1f} GB"
    for words, least in (
        (["plan", "--model", "google/diffusiongemma-26B-A4B-it"], needed),
        (["run", "--model", tiny_checkpoint, "--out", out], "2."),
    ):
        monkeypatch.setattr("sys.argv", ["quantize", *map(str, words), "--gpu-memory", "0.9"])
        assert cli._exit_code() == 3
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: calibrate: there are 0.9 GB of GPU memory, and a batch of ")
        assert f"needs {least}" in line
    assert not out.exists()


def test_planning_frees_the_model_of_the_stage_before(nvfp4_artifact: Path) -> None:
    """An engine holds itself in a circle: GPTQ at 76 GB ended out of memory beside calibration's."""

    class Circle:
        def __init__(self) -> None:
            self.own = self

    gc.disable()
    try:
        left = weakref.ref(Circle())
        assert left() is not None
        sized(nvfp4_artifact, Placement())
        assert left() is None
    finally:
        gc.enable()


def test_an_engine_opens_streamed_where_memory_is_short(nvfp4_artifact: Path) -> None:
    """All slots while layers can go, fewer when none is left; on a CPU nothing enforces it."""
    checkpoint = Checkpoint.open(nvfp4_artifact)
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    stack = Stack.of("tiny", sizes, quantized=True)
    need = Need("", stack, 4, 256)
    whole = plan(need, checkpoint.config, 4e9).total
    streamed = whole - sum(stack.layers) + stack.streaming
    seen: list[tuple[bool, int]] = []
    for budget in (whole, streamed, least_bytes(need, checkpoint.config)):
        engine = runtime.open(
            nvfp4_artifact, device="cpu", capacity=4, max_context=256,
            gpu_memory=budget + 1,
        )  # fmt: skip
        assert isinstance(engine, FusedEngine)
        seen.append((engine.model.weights.streamed, engine.capacity))
    assert seen == [(False, 4), (True, 4), (True, 1)]


def test_answers_in_fp8_are_planned_with_the_weights_that_are_held(
    nvfp4_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off Hopper experts take 8 bits then: planned at 16.0 GB for the 26B model, 26.0 were held."""
    plain, fp8 = (
        real_needs("nvfp4", mode, None)["evaluate nvfp4"].stack for mode in ("none", "fp8")
    )
    assert sum(fp8.layers) + fp8.fixed == pytest.approx(26.0e9, rel=1e-2)
    assert sum(plain.layers) + plain.fixed == pytest.approx(15.3e9, rel=1e-2)
    checkpoint, held = Checkpoint.open(nvfp4_artifact), list[float]()
    for mode in (None, "fp8"):
        stack = Stack.of("", packed_sizes(checkpoint, mode, None), quantized=True)
        held.append(plan(Need("", stack, 4, 256), checkpoint.config, 4e9).total)
    assert held[0] < held[1]
    place = Placement("cpu", held[1] - 1, "fp8", max_context=256)
    for name in ("load_tokenizer", "tokenizer_digest"):  # the small model has none
        monkeypatch.setattr(local_model, name, lambda _: None)
    sampler = Sampler.from_checkpoint(nvfp4_artifact)
    answerer = local_model.Answerer(nvfp4_artifact, "", sampler, place, capacity=4)
    engine = answerer.engine(256)
    assert isinstance(engine, FusedEngine)
    assert engine.model.weights.streamed or isinstance(engine.model.cache, HostCells)


def test_every_command_that_opens_a_model_takes_a_budget() -> None:
    for name in ("serve", "generate", "bench", "search", "run", "judge", "rehearse", "fidelity"):
        command = cli.cli.get_command(click.Context(cli.cli), name)
        assert command is not None
        assert "gpu_memory" in [option.name for option in command.params], name
