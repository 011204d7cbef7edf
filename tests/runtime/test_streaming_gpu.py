"""Streamed weights on a GPU: the same bits as resident ones, and no more memory than was said."""

import gc
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_dequant import linear
from fused_dequant import weights as kernel_weights
from fused_dequant.tune import cases

from quantize.checkpoints.reader import Checkpoint
from quantize.checkpoints.targets import plan_targets
from quantize.recipe.reading import load_recipe
from quantize.runtime import Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import complete
from quantize.runtime.gpu.transfer import Layout, Transfer, in_memory
from quantize.runtime.model.cells import Cache
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.weights.load import TextWeights, load_packed
from quantize.runtime.weights.packing import Keep
from quantize.runtime.weights.streaming import StreamedLayers, _Slot, kept_bytes
from quantize.stages.convert.convert import convert
from tests.support.synthetic import synthetic_config, write_synthetic

pytestmark = pytest.mark.gpu
MEMORY = Path(f"/dev/shm/quantize-streaming-test-{os.getpid()}")  # one a test process
LAYERS, VOCABULARY = 6, 4096


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """Six layers of the real shapes in memory-backed storage, 10 GB."""
    if not in_memory(MEMORY.parent):
        pytest.skip("/dev/shm is not in memory here")
    shutil.rmtree(MEMORY, ignore_errors=True)
    config = synthetic_config(layers=LAYERS, vision_layers=1, vocabulary=VOCABULARY)
    MEMORY.mkdir()
    yield write_synthetic(MEMORY / "bf16", config)
    shutil.rmtree(MEMORY)


@pytest.fixture(scope="module", params=["bf16", "fp8_dynamic", "nvfp4a16"])
def folder(request: pytest.FixtureRequest, source: Path) -> Path:
    if request.param == "bf16":
        return source
    recipe, checkpoint, out = (
        load_recipe(request.param),
        Checkpoint.open(source),
        MEMORY / "quantized",
    )
    shutil.rmtree(out, ignore_errors=True)
    targets = plan_targets(checkpoint.tensors, recipe.quantization)
    convert(checkpoint, targets, out, recipe=recipe, input_scales=None)
    return out


@torch.no_grad()
def logits(weights: TextWeights, passes: int) -> torch.Tensor:
    """Of two canvases, denoised `passes` times without a wait in between."""
    device = weights.device
    model = FusedModel(weights, Cache.allocate(weights.config, 2, 1024, 512, device))
    tokens = torch.randint(3, VOCABULARY, (2, 300), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    model.encode(tokens, slots, torch.zeros_like(slots))
    rows = model.behind(slots, torch.full_like(slots, 300), 256)
    out = torch.empty(passes, 512, VOCABULARY, dtype=torch.bfloat16, device=device)
    for each in range(passes):
        soft = None
        if each:
            soft = model.soft_embedding(out[each - 1], torch.ones(512, device=device))
        model.logits(model.run([model.decoding(tokens[:, :256], rows, soft)])[0], out[each])
    return out.cpu()


@pytest.mark.parametrize("resident", [0, 3])
def test_the_same_bits(folder: Path, resident: int) -> None:
    """Eight passes: a layer that is overwritten too early, or used too early, changes some of them."""
    whole = logits(load_packed(folder, "cuda"), 8)
    assert whole.isfinite().all()
    for _ in range(3):
        assert torch.equal(logits(load_packed(folder, "cuda", resident=resident), 8), whole)


def test_a_slot_waits_for_its_slowest_reader() -> None:
    """A layer is read 50 ms late, and still before the one that follows it in its slot."""
    device, entrances = torch.device("cuda"), ((None, "bf16"),) * 4
    weights = [kernel_weights.bf16(torch.full((8, 8), float(i), device=device)) for i in range(4)]

    def pack(index: int, keep: Keep) -> Any:
        return keep(weights[index])

    layers: Any = StreamedLayers({}, entrances, pack, kept_bytes(weights[:1]), device)
    found: list[torch.Tensor] = []
    for _ in range(2):
        for weight in layers:
            torch.cuda._sleep(10**8)
            found.append(weight.data.clone())
    assert [each.flatten()[0].item() for each in found] == [0, 1, 2, 3] * 2


def test_memory(folder: Path) -> None:
    """Two slots, and what the largest module needs on its way."""
    gc.collect()
    torch.cuda.empty_cache()
    weights = load_packed(folder, "cuda", resident=0)
    assert isinstance(weights.layers, StreamedLayers)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for layer in weights.layers:
        torch.cuda.synchronize()
        largest = max(weight.bytes for weight in layer.products)
    on_the_way = torch.cuda.max_memory_allocated() - before
    print(
        f"{folder.name}: slots {weights.layers.nbytes / 1e9:.2f} GB, {on_the_way / 1e9:.2f} beside"
    )
    assert on_the_way <= 4.5 * largest


def test_an_engine(folder: Path) -> None:
    """Also in lockstep, keys and values on the GPU or on the host: the tokens of one batch alone."""
    sampler = Sampler(max_denoising_steps=4, confidence_threshold=1e-30)
    prompts = [list(range(20, 20 + n)) for n in (3, 380, 256, 1, 1500, 257, 90)]
    alone, *others = (
        complete(
            FusedEngine(
                load_packed(folder, "cuda", resident=resident), capacity=2, max_context=2560,
                batch_invariant=True, graphs=False, lanes=lanes, on_host=on_host,
            ),
            prompts, list(range(len(prompts))), max_new_tokens=512, sampler=sampler,
        )
        for resident, lanes, on_host in (
            (None, 1, False), (1, 1, False), (1, 3, False), (1, 3, True), (None, 2, True),
        )
    )  # fmt: skip
    assert others == [alone] * 4


@pytest.mark.parametrize("register", [False, True])
def test_bytes_arrive(source: Path, register: bool) -> None:
    """More than two pinned buffers take, by both ways."""
    checkpoint = Checkpoint.open(source)
    name = "model.decoder.layers.2.experts.gate_up_proj"
    transfer = Transfer(torch.device("cuda"), register=register)
    layout = Layout.of([checkpoint.tensors[name]])
    for _ in range(2):
        found = transfer.fetch(layout).tensor(name)
        assert torch.equal(found.cpu().view(torch.int16), checkpoint.read(name).view(torch.int16))
    assert bool(transfer._maps) == register
    assert all(mapped is not None for mapped in transfer._maps.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("register", [False, True])
def test_bytes_arrive_on_a_second_gpu_that_is_late(source: Path, register: bool) -> None:
    """The first GPU is the current one, and has long done what it was asked."""
    checkpoint, device = Checkpoint.open(source), torch.device("cuda", 1)
    name = "model.decoder.layers.2.experts.gate_up_proj"
    layout = Layout.of([checkpoint.tensors[name]])
    transfer = Transfer(device, register=register)
    transfer.fetch(layout)
    with torch.cuda.device(device):
        torch.cuda._sleep(2_000_000_000)  # about a second
    late = transfer.fetch(layout).tensor(name)
    del transfer
    assert torch.equal(late.cpu().view(torch.int16), checkpoint.read(name).view(torch.int16))


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "nvfp4"])
def test_a_product_waits_for_weights_whose_copy_is_late(scheme: str) -> None:
    """The slot holds other weights until long after the product was launched, behind a chained one."""
    shape = (1, 2816, 2816)
    first, late = (cases.random_weight(scheme, *shape, "cuda", seed=seed) for seed in (0, 1))
    x = torch.randn(256, shape[2], device="cuda", dtype=torch.bfloat16)
    expected = linear(linear(x, first), late)
    slot, copies = _Slot(kept_bytes([late]), torch.device("cuda")), torch.cuda.Stream()
    wrong = []
    for chained in (False, True):
        for _ in range(20):
            slot.memory.zero_()
            slot.used = 0
            copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                torch.cuda._sleep(20_000_000)  # about 10 ms
                streamed = slot.keep(late)
                arrived = copies.record_event()
            rows = linear(x, first)
            torch.cuda.current_stream().wait_event(arrived)
            found = linear(rows, replace(streamed, streamed=not chained))
            wrong += [chained] * (not torch.equal(found, expected))
    print(f"{scheme}: {wrong.count(True)} of 20 wrong where the chain is kept")
    assert wrong.count(False) == 0
