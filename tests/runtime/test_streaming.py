"""Layers from the files in every pass: the same numbers, two layers at once, each byte once a pass."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_dequant import weights as kernel_weights

from quantize.checkpoints.reader import Checkpoint, TensorInfo
from quantize.errors import InputError, ResourceError
from quantize.runtime import Sampler
from quantize.runtime.engine import encoding
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import complete
from quantize.runtime.gpu import memory
from quantize.runtime.gpu.cores import GPU
from quantize.runtime.gpu.transfer import GAP, Layout, Transfer, _ByteRun, _unregister
from quantize.runtime.model.cells import Cache
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.weights.load import TextWeights, load_packed
from quantize.runtime.weights.packing import Keep, LayerWeights, Packer
from quantize.runtime.weights.streaming import StreamedLayers, kept_bytes, spread

CPU = torch.device("cpu")
LAYERS = 6
ENTRANCES: Any = ((None, "bf16"),) * 3  # of layers whose weights nothing multiplies


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def logits(weights: TextWeights) -> torch.Tensor:
    """Two canvases behind prompts of 40 tokens, the second step conditioned: [2, 32, V]."""
    model = FusedModel(weights, Cache.allocate(weights.config, 2, 128, 64, CPU))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 500, (2, 40), generator=generator)
    model.encode(tokens, integers(0, 1), integers(0, 0))
    canvas = tokens[:, :16]
    out = torch.empty(2, 32, len(weights.embedding), dtype=torch.bfloat16)
    behind = model.behind(integers(0, 1), integers(40, 40), 16)
    model.logits(model.run([model.decoding(canvas, behind, None)])[0], out[0])
    soft = model.soft_embedding(out[0], torch.ones(32))
    model.logits(model.run([model.decoding(canvas, behind, soft)])[0], out[1])
    return out


@pytest.mark.parametrize("artifact", ["tiny_checkpoint", "fp8_artifact", "nvfp4_artifact"])
def test_streamed_and_resident_give_equal_logits(
    artifact: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(artifact)
    whole = load_packed(folder, "cpu")
    assert not whole.streamed
    expected = logits(whole)
    for resident in (0, 1, 4):
        streamed = load_packed(folder, "cpu", resident=resident)
        assert streamed.streamed
        assert torch.equal(logits(streamed), expected)


def test_two_layers_at_a_time(tiny_checkpoint: Path) -> None:
    """All streamed layers live in two places, and take no more memory than those."""
    weights = load_packed(tiny_checkpoint, "cpu", resident=0)
    assert isinstance(weights.layers, StreamedLayers)
    sizes: list[int] = []
    places = [layer.experts_down.data.data_ptr() for _ in range(3) for layer in weights.layers]
    for layer in load_packed(tiny_checkpoint, "cpu").layers:
        sizes.append(kept_bytes(layer.products))
    assert len(set(places)) == 2
    assert all(a != b for a, b in pairwise(places))
    assert weights.layers.nbytes == 2 * max(sizes)


def test_every_layer_is_read_once_a_pass(fp8_artifact: Path) -> None:
    weights = load_packed(fp8_artifact, "cpu", resident=2)
    assert isinstance(weights.layers, StreamedLayers)
    packer = transfer_of(weights.layers)
    list(weights.layers)
    settled(weights.layers)
    before = packer.bytes_read
    for _ in range(3):
        list(weights.layers)
    settled(weights.layers)
    checkpoint = Checkpoint.open(fp8_artifact)
    streamed = [f"model.decoder.layers.{i}." for i in spread(LAYERS, 4)]
    products = ("experts", "self_attn.q_p", "self_attn.k_p", "self_attn.v_p", "_attn.o_p", "mlp")
    wanted = sum(
        info.nbytes
        for name, info in checkpoint.tensors.items()
        if name.startswith(tuple(streamed)) and any(part in name for part in products)
    )
    read = packer.bytes_read - before
    assert 3 * wanted <= read <= 3 * wanted * 1.02, (read, wanted)


def transfer_of(layers: StreamedLayers) -> Transfer:
    closure = layers._pack.__closure__
    cells = [cell.cell_contents for cell in closure]
    return next(cell.transfer for cell in cells if isinstance(cell, Packer))


def settled(layers: StreamedLayers) -> None:
    """Wait until what is on its way has arrived."""
    for coming in layers._coming:
        coming.arrival.result()


def test_the_next_layer_comes_while_one_is_in_use_and_no_other(tiny_checkpoint: Path) -> None:
    whole = load_packed(tiny_checkpoint, "cpu")
    assert isinstance(whole.layers, tuple)
    begun: list[int] = []
    both, packing = threading.Event(), threading.Lock()

    def pack(index: int, keep: Keep) -> LayerWeights:
        assert packing.acquire(blocking=False)  # what reads and packs has buffers of its own
        threading.Event().wait(0.01)
        packing.release()
        begun.append(index)
        if len(begun) == 2:
            both.set()
        layer = list(whole.layers)[index]
        return LayerWeights(**vars(layer) | {"o": keep(layer.o)})

    size = kept_bytes([layer.o for layer in whole.layers][-1:])
    layers = StreamedLayers({}, whole.entrances, pack, size, CPU)
    iterator = iter(layers)
    first = next(iterator)
    assert both.wait(30)
    assert begun == [0, 1]
    assert torch.equal(first.o.data, whole.layers[0].o.data)  # the second did not overwrite it
    list(iterator)
    settled(layers)
    assert begun == [0, 1, 2, 3, 4, 5, 0, 1]  # those of the next pass come before it begins


def test_a_layer_gives_its_slot_back_when_the_iteration_goes_on(tiny_checkpoint: Path) -> None:
    """Resident layers and what follows the last one hide a copy, too; a pass that ended early is no
    exception: what is coming is taken by the next.
    """
    weights = load_packed(tiny_checkpoint, "cpu", resident=2)
    layers, begun = weights.layers, list[int]()
    assert isinstance(layers, StreamedLayers)
    pack = layers._pack
    layers._pack = lambda index, keep: begun.append(index) or pack(index, keep)
    streamed = spread(LAYERS, 4)  # 0, 1, 3, 4
    iterator = iter(layers)
    for index in range(3):
        next(iterator)
        settled(layers)
        assert begun == streamed[: (2, 3, 4)[index]]
    for _ in range(2):
        next(iterator)  # layer 4, the last streamed one, stays in use
    del iterator
    settled(layers)
    assert begun == [*streamed, 0]
    list(layers)
    settled(layers)
    assert begun == [*streamed, *streamed, 0, 1]


def test_a_pass_that_was_broken_off_begins_anew(tiny_checkpoint: Path) -> None:
    weights = load_packed(tiny_checkpoint, "cpu", resident=0)
    for taken, _ in enumerate(weights.layers):
        if taken == 2:
            break
    assert torch.equal(logits(weights), logits(load_packed(tiny_checkpoint, "cpu")))


def test_a_closed_engine_has_nothing_on_its_way(tiny_checkpoint: Path) -> None:
    """Or its slots would be there while the next model is loaded; whoever goes on gets the same."""
    weights = load_packed(tiny_checkpoint, "cpu", resident=1)
    assert isinstance(weights.layers, StreamedLayers)
    before = logits(weights)
    assert len(weights.layers._coming) == 2
    engine = FusedEngine(weights, capacity=1, max_context=96)
    engine.close()
    assert not weights.layers._coming
    assert torch.equal(logits(weights), before)


def test_a_file_that_breaks_between_passes_is_an_error_where_it_is_used(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_checkpoint, tmp_path)
    weights = load_packed(folder, "cpu", resident=0)
    whole = logits(weights)
    shard = folder / "model.safetensors"
    data = shard.read_bytes()
    with shard.open("r+b") as file:
        file.truncate(len(data) // 2)
    with pytest.raises(InputError, match=r"model\.safetensors: ends inside the"):
        logits(weights)
    with shard.open("r+b") as file:
        file.write(data)
    assert torch.equal(logits(weights), whole)
    with pytest.raises(ResourceError, match="cannot be read"):
        Transfer(CPU).fetch(Layout.of([TensorInfo("a", "U8", (4,), tmp_path / "none", 0, 4)]))


def test_an_error_of_one_pass_is_not_raised_in_the_next() -> None:
    """The last layer breaks, and the first on its way behind it: both are well when they come again."""
    weight, broken = kernel_weights.bf16(torch.ones(8, 8)), set[int]()

    def pack(index: int, keep: Keep) -> Any:
        if index in broken:
            raise InputError(f"layer {index} is broken")
        return keep(weight)

    layers = StreamedLayers({}, ENTRANCES, pack, kept_bytes([weight]), CPU)
    list(layers)
    settled(layers)
    broken |= {0, 2}
    with pytest.raises(InputError, match="layer 2 is broken"):
        list(layers)
    broken.clear()
    assert len(list(layers)) == len(ENTRANCES)


def test_a_slot_is_filled_when_what_was_launched_over_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: the copying stream waits for the event that was recorded behind its readers."""
    weight, done = kernel_weights.bf16(torch.ones(8, 8)), list[str]()
    readers = SimpleNamespace(record_event=lambda: "readers", wait_event=done.append)
    copies = SimpleNamespace(
        wait_event=done.append, record_event=lambda: done.append("filled") or "arrival"
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: readers)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    pack: Any = lambda _, keep: done.append("filling") or keep(weight)  # noqa: E731
    layers = StreamedLayers({}, ENTRANCES, pack, kept_bytes([weight]), CPU)
    layers._stream = copies  # type: ignore[assignment]
    layers._send_for(0, layers._slots[0])
    settled(layers)
    assert done == ["readers", "filling", "filled"]
    layers._take(0)
    assert done[-1] == "arrival"


def copy_of(checkpoint: Path, folder: Path) -> Path:
    own = folder / "copy"
    own.mkdir()
    for file in checkpoint.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    return own


def test_not_a_number_is_found_before_the_first_pass(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint, tmp_path)
    info = Checkpoint.open(folder).tensors["model.decoder.layers.3.self_attn.o_proj.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.begin)
        file.write(b"\xc0\x7f")
    with pytest.raises(InputError, match=r"layers\.3\.self_attn\.o_proj.*NaN"):
        load_packed(folder, "cpu", resident=0)


def test_a_negative_block_scale_is_refused(nvfp4_artifact: Path, tmp_path: Path) -> None:
    """Fragments have no sign for it."""
    folder = copy_of(nvfp4_artifact, tmp_path)
    name = "model.decoder.layers.3.experts.2.up_proj.weight_scale"
    info = Checkpoint.open(folder).tensors[name]
    with info.file.open("r+b") as file:
        file.seek(info.begin + 5)
        file.write(b"\x81")
    with pytest.raises(InputError, match=r"up_proj\.weight_scale.*not above 0"):
        load_packed(folder, "cpu")


def test_an_engine_over_streamed_weights(fp8_artifact: Path) -> None:
    sampler = Sampler(max_denoising_steps=2, eos_token_ids=(1,))
    prompts = [[5, 6, 7], [9, 8], [11] * 30]
    found = [
        complete(
            FusedEngine(weights, capacity=2, max_context=96),
            prompts, [0, 1, 2], max_new_tokens=32, sampler=sampler,
        )
        for weights in (load_packed(fp8_artifact, "cpu", resident=n) for n in (None, 0))
    ]  # fmt: skip
    assert found[0] == found[1]


def test_canvases_of_lanes_are_those_of_one(
    fp8_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of all lengths, past the window too, come and go in three lanes of two slots."""
    for module, name in (
        (memory, "CHUNK"),
        (encoding, "SHORT"),
    ):  # so that sliding layers hold a ring
        monkeypatch.setattr(module, name, 64)
    sampler = Sampler(max_denoising_steps=2, eos_token_ids=(1,), confidence_threshold=1e-30)
    lengths = (3, 30, 9, 150, 16, 64, 1, 40, 33)  # the fourth takes three passes, as it is admitted
    prompts = [[5 + i] * n for i, n in enumerate(lengths)]
    how: Any = {"max_new_tokens": 32, "sampler": sampler}
    seeds = list(range(len(prompts)))

    def answers(stay: int | None, **lanes: Any) -> Any:
        weights = load_packed(fp8_artifact, "cpu", resident=stay)
        engine = FusedEngine(weights, capacity=2, max_context=300, batch_invariant=True, **lanes)
        return complete(engine, prompts, seeds, **how)

    alone = answers(None)
    runs: list[int] = []
    run = FusedModel.run
    monkeypatch.setattr(FusedModel, "run", lambda own, p: (runs.append(len(p)), run(own, p))[1])
    for resident, on_host in ((None, True), (1, False), (1, True)):
        runs.clear()
        assert answers(resident, lanes=3, on_host=on_host) == alone
        if resident is not None:  # else passes of the encoder are not held back for the steps
            assert len(runs) == 3 + 2 * 2 * 2  # the long prompt, and two waves of two canvases


@pytest.mark.parametrize("on_gpu", [False, True])
def test_prompts_that_wait_have_no_more_rows_than_memory_is_planned_for(
    fp8_artifact: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    for module, name in ((memory, "CHUNK"), (encoding, "SHORT")):
        monkeypatch.setattr(module, name, 1)
    weights = load_packed(fp8_artifact, "cpu", resident=1)
    engine = FusedEngine(weights, capacity=3, max_context=300, lanes=2)
    if on_gpu:
        engine.model.compute = GPU  # prompts of a length share a pass, as on a GPU
    short = engine.canvas_length
    passes: list[list[int]] = []
    monkeypatch.setattr(FusedModel, "run", lambda own, p: passes.append([len(one.h) for one in p]))
    for slot in range(6):
        engine.admit(slot, [5] * 2 * short, slot, Sampler())
    assert sum(map(sum, passes)) == 3 * 2 * short
    engine.encoder.encode_waiting(range(6))
    assert sum(map(sum, passes)) == 6 * 2 * short
    assert max(map(sum, passes)) <= 6 * short
    assert max(map(max, passes)) <= (3 if on_gpu else 6) * short


def test_passes_of_one_shape_share_what_is_streamed(
    fp8_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch-invariant, two prompts are encoded alone, in one pass over the files with a step."""
    read: list[int] = []
    monkeypatch.setattr(
        StreamedLayers,
        "_take",
        lambda self, i, take=StreamedLayers._take: read.append(i) or take(self, i),
    )
    weights = load_packed(fp8_artifact, "cpu", resident=0)
    engine = FusedEngine(weights, capacity=2, max_context=96, batch_invariant=True)
    sampler = Sampler(max_denoising_steps=1, eos_token_ids=(1,))
    for slot, prompt in enumerate(([5, 6, 7], [9, 8])):
        engine.admit(slot, prompt, slot, sampler)
    read.clear()
    engine.denoise([0, 1])
    assert read == [*range(LAYERS)]


def in_file(path: Path, sizes: Sequence[tuple[int, int]]) -> list[TensorInfo]:
    """Tensors uint8 [n] with a gap before each; the file holds the low byte of each position."""
    infos: list[TensorInfo] = []
    position = 0
    for number, (gap, size) in enumerate(sizes):
        begin = position + gap
        position = begin + size
        infos.append(TensorInfo(f"t{number}", "U8", (size,), path, begin, position))
    path.write_bytes(bytes(i % 251 for i in range(position)))
    return infos


def expected(info: TensorInfo) -> list[int]:
    return [i % 251 for i in range(info.begin, info.end)]


def test_neighbours_travel_together(tmp_path: Path) -> None:
    infos = in_file(tmp_path / "a", [(3, 100), (0, 7), (5, 40), (GAP + 1, 2_500_000)])
    layout = Layout.of(infos[::-1])
    assert [(run.begin, run.end) for run in layout.runs] == [
        (3, 155),
        (infos[3].begin, infos[3].end),
    ]
    assert all(run.at % 256 == 0 for run in layout.runs)
    transfer = Transfer(CPU)
    fetched = transfer.fetch(layout)
    for info in infos:
        assert fetched.tensor(info.name).tolist() == expected(info)
        assert fetched.tensor(info.name).data_ptr() % 16 == 0
    assert transfer.bytes_read == 152 + 2_500_000


STACKED = [(0, 0, 0), (0, 9, 9), (0, 9, 5), (1, 0, 0), (2, 2, 2), (4, 0, 0), (0, 4, 4)]


@pytest.mark.parametrize("gaps", STACKED)
def test_stacked(gaps: tuple[int, int, int], tmp_path: Path) -> None:
    """Words of 8, 4, 2 and 1 byte."""
    infos = in_file(tmp_path / "a", [(4, 16), *((gap, 16) for gap in gaps)])
    fetched = Transfer(CPU).fetch(Layout.of(infos))
    for order in ([1, 2, 3], [3, 1, 2], [3, 2, 1]):
        stacked = fetched.stacked([infos[i].name for i in order])
        assert stacked.tolist() == [expected(infos[i]) for i in order]
        assert stacked.is_contiguous()


def test_misaligned_tensors_of_wide_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    in_file(path, [(0, 64)])
    infos = [TensorInfo("a", "U8", (3,), path, 0, 3), TensorInfo("b", "F32", (5,), path, 3, 23)]
    fetched = Transfer(CPU).fetch(Layout.of(infos))
    wanted = torch.tensor([i % 251 for i in range(3, 23)], dtype=torch.uint8).view(torch.float32)
    assert torch.equal(fetched.tensor("b"), wanted)


def test_slots_hold_every_tensor_of_a_weight() -> None:
    """A weight of three tensors of odd sizes fits exactly where `kept_bytes` says that it does."""
    packed = torch.arange(2 * 6 * 24, dtype=torch.uint8).view(2, 6, 24)
    scale = torch.ones(2, 6, 3).to(torch.float8_e4m3fn)
    weight = kernel_weights.build("nvfp4", packed, scale, 128 / torch.tensor([3.0, 5.0]))
    from quantize.runtime.weights.streaming import _Slot

    slot = _Slot(kept_bytes([weight]), CPU)
    kept = slot.keep(weight)
    packed.zero_()
    assert (weight.streamed, kept.streamed) == (False, True)
    assert slot.used == len(slot.memory)
    assert kept.data.flatten().tolist() == list(range(256)) + list(range(32))
    for own, other in ((kept.scale, weight.scale), (kept.factor, weight.factor)):
        assert own is not None
        assert other is not None
        assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))


def test_progress_of_loading_knows_how_many_layers_there_are(fp8_artifact: Path) -> None:
    seen: list[int] = []

    def on_layer(layers: Sequence[int]) -> Iterator[int]:
        seen.append(len(layers))
        return iter(layers)

    load_packed(fp8_artifact, "cpu", on_layer=on_layer)
    assert seen == [6]


def test_spread() -> None:
    assert spread(30, 0) == []
    assert spread(30, 2) == [0, 15]
    assert spread(6, 4) == [0, 1, 3, 4]
    assert spread(30, 30) == list(range(30))


def test_a_second_gpu_is_waited_for_and_not_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned buffer is refilled, and pages are given back, once THAT GPU has read them."""
    file, second, done = tmp_path / "file", torch.device("cuda", 1), list[object]()
    file.write_bytes(bytes(range(8)))
    event = SimpleNamespace(
        synchronize=lambda: None, record=lambda stream=None: done.append(stream)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append(device))
    transfer = Transfer(second)
    transfer._pinned = [(torch.empty(8, dtype=torch.uint8), event) for _ in range(2)]
    out = torch.empty(8, dtype=torch.uint8)
    transfer._through_pinned(_ByteRun(file, 0, 8, 0), out)
    assert out.tolist() == list(range(8))
    _unregister(lambda _: 0, ctypes.c_void_p(), out, second)
    assert done == [second, second]
