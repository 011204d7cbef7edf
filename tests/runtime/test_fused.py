"""The fused runtime's passes and engine on a CPU, with the kernels' torch references.

How near each layer is to float64 is judged in `test_fused_layers`.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import fused_dequant as fd
import pytest
import torch
from PIL import Image

from quantize.errors import InputError
from quantize.runtime import Sampler
from quantize.runtime.engine import graphs
from quantize.runtime.engine import step as step_of_canvases
from quantize.runtime.engine.encoding import Encoder
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.graphs import CAPTURED, WORTH, Steps, bucket
from quantize.runtime.engine.interface import Canvas
from quantize.runtime.gpu.cores import GPU
from quantize.runtime.model import text_stack
from quantize.runtime.model.cells import Cache
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.prompt.images import Images, place, prepare
from quantize.runtime.prompt.pieces import pictures, pieces, soft_tokens
from quantize.runtime.weights.load import load_packed

DEVICE = torch.device("cpu")
SAMPLER = Sampler(max_denoising_steps=4, eos_token_ids=(1,))


@pytest.fixture
def in_the_ways_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad, join and repeat rows as where kernels run."""
    monkeypatch.setattr(text_stack, "compute_of", lambda *_, **__: GPU)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fused_model(folder: Path, chunk: int = 128) -> FusedModel:
    weights = load_packed(folder, "cpu")
    return FusedModel(weights, Cache.allocate(weights.config, 3, 1024, chunk, DEVICE))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


def test_chunks_and_slots_do_not_matter(tiny_checkpoint: Path) -> None:
    """The same canvas behind a prompt encoded whole, in pieces, in another slot, and as one of two."""
    fused = fused_model(tiny_checkpoint)
    length, vocabulary = fused.weights.config.canvas_length, len(fused.weights.embedding)
    prompt, canvas = tokens(1, 90), tokens(1, length, seed=1)
    fused.encode(prompt, integers(0), integers(0))
    for start in range(0, 90, 40):
        fused.encode(prompt[:, start : start + 40], integers(2), integers(start))
    fused.encode(prompt[:, :50], integers(1), integers(0))
    out = torch.empty(3 * length, vocabulary, dtype=torch.bfloat16)
    rows = fused.behind(integers(0, 2, 1), integers(90, 90, 50), canvas.shape[1])
    fused.logits(fused.run([fused.decoding(canvas.expand(3, -1), rows, None)])[0], out)
    whole, pieces, shorter = out.float().unflatten(0, (3, length))
    scale = whole.norm()
    assert (whole - pieces).norm() / scale < 0.05
    assert (whole - shorter).norm() / scale > 0.2


@pytest.mark.usefixtures("in_the_ways_of_a_gpu")
def test_short_prompts_are_filled_up_and_overwritten(tiny_checkpoint: Path) -> None:
    """Below and above a canvas of 16, encoded together, and each on its own at its length."""
    weights = load_packed(tiny_checkpoint, "cpu")
    engine = FusedEngine(weights, capacity=5, max_context=128)
    prompts = [tokens(1, n, seed=n) for n in (5, 11, 30, 100)]
    for slot, prompt in enumerate(prompts):
        engine.admit(slot, prompt[0].tolist(), 0, SAMPLER)
    canvas = tokens(1, engine.canvas_length, seed=1)
    engine.encoder.encode_waiting(range(4))
    assert set(engine.encoder.commits) == {(2, 16), (2, 128)}
    joined: list[torch.Tensor] = []
    for slot, prompt in enumerate(prompts):
        joined.append(logits_behind(engine.model, canvas, slot, engine.sequences[slot].context))
        engine.model.encode(prompt, integers(4), integers(0))
        alone = logits_behind(engine.model, canvas, 4, prompt.shape[1])
        assert (joined[-1] - alone).norm() / alone.norm() < 0.05
    assert (joined[0] - joined[1]).norm() / joined[0].norm() > 0.2


@pytest.mark.usefixtures("in_the_ways_of_a_gpu")
@pytest.mark.parametrize(("room", "passes"), [(512, 2), (400, 1)])
def test_long_prompts_are_filled_up_where_there_is_room(
    tiny_checkpoint: Path, room: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 tokens in chunks of 256: the second is filled up to 256 where the cache holds 512."""
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=2, max_context=room)
    engine.encoder.chunk = 256
    taken: list[int] = []
    encode = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, *rows: (taken.append(1), encode(self, *rows))
    )
    prompt, canvas = tokens(1, 300), tokens(1, engine.canvas_length, seed=1)
    engine.admit(1, prompt[0].tolist(), 0, SAMPLER)
    assert len(taken) == passes
    assert engine.sequences[1].context == 300
    found = logits_behind(engine.model, canvas, 1, 300)
    for start in range(0, 300, 100):
        engine.model.encode(prompt[:, start : start + 100], integers(0), integers(start))
    exact = logits_behind(engine.model, canvas, 0, 300)
    assert (found - exact).norm() / exact.norm() < 0.05
    engine.model.encode(prompt[:, :256], integers(0), integers(0))
    assert (found - logits_behind(engine.model, canvas, 0, 256)).norm() / exact.norm() > 0.2


def logits_behind(fused: FusedModel, canvas: torch.Tensor, slot: int, context: int) -> torch.Tensor:
    """Logits [L, V] of a canvas without self-conditioning, behind what a slot holds."""
    length = canvas.shape[1]
    out = torch.empty(length, len(fused.weights.embedding), dtype=torch.bfloat16)
    behind = fused.behind(integers(slot), integers(context), length)
    fused.logits(fused.run([fused.decoding(canvas, behind, None)])[0], out)
    return out.float()


def test_pictures_and_placeholders_must_fit(tiny_checkpoint: Path) -> None:
    weights = load_packed(tiny_checkpoint, "cpu")
    engine = FusedEngine(weights, capacity=1, max_context=256)
    config = weights.config
    images, counts = prepare([Image.new("RGB", (40, 40))] * 2, config, 70)
    prompt = place([5, config.image_token_id, 6, config.image_token_id, 7], counts, config)
    for given, own, word in (
        (prompt, None, "placeholder and no image"),
        ([5, 6], images, "images and no placeholder"),
        ([*prompt[:-1], config.image_token_id], images, "do not fit"),
        (prompt, Images(images.pixels[..., :5], images.positions), "patches of 4 x 4"),
    ):
        with pytest.raises(InputError, match=word):
            engine.admit(0, given, 0, SAMPLER, own)
    engine.encoder.chunk = counts[0] - 1
    with pytest.raises(InputError, match="a picture of more than"):
        engine.admit(0, prompt, 0, SAMPLER, images)
    blind = FusedEngine(replace(weights, tower=None), capacity=1, max_context=256)
    with pytest.raises(InputError, match="no vision tower"):
        blind.admit(0, prompt, 0, SAMPLER, images)
    engine.encoder.chunk = 128
    engine.admit(0, prompt, 0, SAMPLER, images)
    assert engine.denoise([0])[0].steps == 4


def test_what_a_picture_sees_is_a_run(tiny_checkpoint: Path) -> None:
    """A picture of twice the window: its tokens see all of it, others as without it."""
    fused, picture = fused_model(tiny_checkpoint), range(20, 85)
    soft = soft_tokens((0, 100), [(20, 85)], torch.zeros(65, 64))
    assert soft is not None
    visible = fused._encoder_rows(integers(0), integers(0), 100).widened(soft).visible
    for sliding, reach in ((True, fused.window), (False, 100)):
        first, last = visible[sliding]
        for row in range(100):
            seen = [
                key
                for key in range(100)
                if row - reach < key <= row or (row in picture and key in picture)
            ]
            assert seen == list(range(int(first[row]), int(last[row]) + 1))


def test_pieces_cut_no_picture() -> None:
    prompt = [1, 9, 9, 9, 2, 9, 9, 3, 4, 5, 6]
    seen = pictures(prompt, 9)
    assert seen == [(1, 4), (5, 7)]
    assert pieces(len(prompt), 11, seen) == [(0, 11)]
    assert pieces(len(prompt), 6, seen) == [(0, 5), (5, 11)]
    assert pieces(len(prompt), 3, seen) == [(0, 1), (1, 4), (4, 7), (7, 10), (10, 11)]
    soft = soft_tokens((4, 8), seen, torch.arange(5.0)[:, None])
    assert soft is not None
    assert soft.rows.tolist() == [1, 2]
    assert soft.embeddings.flatten().tolist() == [3, 4]
    assert (soft.first.tolist(), soft.last.tolist()) == ([5, 5], [6, 6])
    assert soft_tokens((8, 11), seen, torch.zeros(5, 1)) is None


def test_a_commit_and_a_first_step_in_one_pass_are_two_passes(tiny_checkpoint: Path) -> None:
    """Two canvases are encoded while they and a third, in the middle of its own, take a step."""
    fused = fused_model(tiny_checkpoint)
    layers = (
        replace(layer, encoder_scalar=layer.encoder_scalar * 3) for layer in fused.weights.layers
    )
    fused.weights = replace(fused.weights, layers=tuple(layers))  # else both towers have the same
    length, vocabulary = fused.weights.config.canvas_length, len(fused.weights.embedding)
    prompt, committed = tokens(3, 90), tokens(2, length, seed=1)
    canvas, slots, start = tokens(3, length, seed=2), integers(0, 1, 2), integers(90, 50, 70)
    signal = torch.randn(3 * length, fused.weights.embedding.shape[1]).to(torch.bfloat16)
    signal[length:] = 0  # of the two whose canvas begins
    rows = fused.behind(integers(2, 0, 1), integers(70, 90 + length, 50 + length), length)

    def logits(h: torch.Tensor) -> torch.Tensor:
        return fused.logits(h, torch.empty(3 * length, vocabulary, dtype=torch.bfloat16)).float()

    def stored() -> list[torch.Tensor]:
        return [layer.clone() for layer in (*fused.cache.keys, *fused.cache.values)]

    fused.encode(prompt, slots, integers(0, 0, 0))
    together = logits(
        fused.run([fused.decoding(canvas, rows, signal, (committed, integers(0, 1), start[:2]))])[0]
    )
    cells = stored()
    fused.encode(prompt, slots, integers(0, 0, 0))
    fused.encode(committed, integers(0, 1), start[:2])
    apart = logits(fused.run([fused.decoding(canvas, rows, signal)])[0])
    assert (together - apart).norm() / apart.norm() < 1e-2
    for one, other in zip(cells, stored(), strict=True):
        assert (one - other).float().norm() / other.float().norm() < 1e-2
    fused.encode(prompt, slots, integers(0, 0, 0))
    fused.encode(committed.flip(0), integers(0, 1), start[:2])
    other = logits(fused.run([fused.decoding(canvas, rows, signal)])[0])
    assert (other - apart).norm() / apart.norm() > 0.1


def test_a_slot_goes_on_while_others_are_in_the_middle(tiny_checkpoint: Path) -> None:
    """Canvases of 1 to 4 steps, one slot left out at times: each sample's are those it has alone."""
    sampler = Sampler(max_denoising_steps=5, entropy_bound=5, confidence_threshold=1e-30)
    weights, wanted = load_packed(tiny_checkpoint, "cpu"), 3

    def engine() -> FusedEngine:
        own = FusedEngine(weights, capacity=4, max_context=256, batch_invariant=True)
        own.denoiser.stops = lambda seed, canvas: 1 + (3 * seed + canvas) % 4
        return own

    def admit(own: FusedEngine, slot: int, sample: int) -> None:
        own.admit(slot, [5 + sample] * (5 + sample), sample, sampler)

    own, alone = engine(), list[list[Canvas]]()
    for sample in range(5):
        admit(own, 0, sample)
        alone.append([canvas for _ in range(wanted) for canvas in own.denoise([0]) if canvas])
        own.release(0)
    own, waiting, running = engine(), [4, 3, 2, 1, 0], dict[int, int]()
    found: list[list[Canvas]] = [[] for _ in alone]
    calls = unfinished = 0
    while waiting or running:
        for slot in range(4):
            if waiting and slot not in running:
                running[slot] = waiting.pop()
                admit(own, slot, running[slot])
        calls += 1
        slots = [slot for slot in running if calls % 3 or slot != 1 or len(running) == 1]
        for slot, canvas in zip(slots, own.denoise(slots), strict=True):
            unfinished += canvas is None
            found[running[slot]] += [canvas] if canvas else []
            if len(found[running[slot]]) == wanted:
                own.release(slot)
                del running[slot]
    assert found == alone
    assert unfinished >= 4
    assert {canvas.steps for canvases in alone for canvas in canvases} == {1, 2, 3, 4}


def test_engine_keeps_samples_apart(tiny_checkpoint: Path) -> None:
    """A batch of four, and the same sample with others that are elsewhere in their answers."""
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=4, max_context=256)
    prompts = tokens(4, 20).tolist()
    for slot in range(4):
        engine.admit(slot, prompts[slot][: 12 + slot], slot, SAMPLER)
    together = [engine.denoise(range(4)) for _ in range(2)]
    for slot in (0, 2, 3):
        engine.release(slot)
        engine.admit(slot, prompts[slot][: 12 + slot], slot, SAMPLER)
    later = engine.denoise([3, 1, 0, 2])  # slot 1 is at its third canvas
    for slot, canvas in zip([3, 0, 2], [later[0], *later[2:]], strict=True):
        assert canvas == together[0][slot]
    assert together[0][0] != together[0][1]
    assert all(canvas.steps == 4 for canvas in together[1])


def test_the_caller_is_free_while_the_engine_encodes(tiny_checkpoint: Path) -> None:
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=1, max_context=256)
    engine.admit(0, [5] * 20, 0, SAMPLER)
    order: list[str] = []

    def meanwhile() -> None:
        order.append(f"{engine.sequences[0].context} encoded")

    for _ in range(2):
        engine.denoise([0], lambda *_: order.append("step"), meanwhile)
    steps = ["step"] * SAMPLER.max_denoising_steps
    assert order == ["20 encoded", *steps, "36 encoded", *steps]


@pytest.mark.usefixtures("in_the_ways_of_a_gpu")
@pytest.mark.parametrize(("count", "sizes"), [(3, (1, 2, 3)), (5, (1, 2, 3, 4, 6))])
def test_batch_invariant_engine(tiny_checkpoint: Path, count: int, sizes: tuple[int, ...]) -> None:
    """Steps have the shape of a full engine; what is encoded together is as if it were alone."""
    weights = load_packed(tiny_checkpoint, "cpu")
    engine = FusedEngine(weights, capacity=count, max_context=256, batch_invariant=True)
    sampler = replace(SAMPLER, max_denoising_steps=2)
    engine.warm_up(sampler)
    prompts = tokens(count, 20).tolist()
    for slot in range(count):
        engine.admit(slot, prompts[slot], slot, sampler)
    together = [engine.denoise(range(count)) for _ in range(2)]
    for slot in (1, count - 1):
        engine.release(slot)
        engine.admit(slot, prompts[slot], slot, sampler)
        alone = [engine.denoise([slot])[0] for _ in range(2)]
        assert alone == [canvases[slot] for canvases in together]
    assert {of for of, _ in engine.denoiser.steps[0, False]._lasting} == {sizes[-1]}
    assert not engine.denoiser.steps[0, False]._captured
    # canvases, and prompts longer than one: captured by the warm-up for all that may end at once
    assert set(engine.encoder.commits) == {(n, length) for n in sizes for length in (16, 256)}


@pytest.mark.usefixtures("in_the_ways_of_a_gpu")
@pytest.mark.parametrize("canvases_a_piece", [8, 1])
def test_what_lm_head_leaves_is_read(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, canvases_a_piece: int
) -> None:
    """Where lm_head leaves probabilities, they make the soft embedding: the same tokens."""
    monkeypatch.setattr(GPU, "canvases_at_once", canvases_a_piece)
    weights, prompts = load_packed(tiny_checkpoint, "cpu"), tokens(4, 20).tolist()
    read: list[int] = []

    def look(h, embedding, cap, state, schedule, logits, left):
        """Stand for the kernel: leave the logits and 1 / T in place of p and its sums."""
        fd.lm_head(h, embedding, cap, logits)
        inverse = 1 / schedule[state.step.clamp(max=len(schedule)).long() - 1]
        left.p.copy_(logits)
        left.total.copy_(inverse.repeat_interleave(state.canvas.shape[1]))
        return fd.sample(logits.view(*state.canvas.shape, -1), state, schedule)

    def soft_embedding_of(left, embedding, out):
        read.append(len(left.p))
        return fd.soft_embedding(left.p, embedding, left.total, out)

    def denoised() -> list[Any]:
        engine = FusedEngine(weights, capacity=4, max_context=256)
        for slot in range(4):
            engine.admit(slot, prompts[slot], slot, SAMPLER)
        return [engine.denoise(range(4)) for _ in range(2)]

    expected = denoised()
    monkeypatch.setattr(text_stack, "LOOKING", True)
    monkeypatch.setattr(step_of_canvases, "look", look)
    monkeypatch.setattr(fd, "soft_embedding_of", soft_embedding_of)
    monkeypatch.setattr(fd, "look_runs", lambda device, cap, coldest: (cap, coldest) == (30, 0.4))
    assert denoised() == expected
    rows = weights.config.canvas_length * min(4, canvases_a_piece)
    assert set(read) == {rows}


def test_a_last_step_conditions_none(tiny_checkpoint: Path) -> None:
    """Two steps by the sampler, or by a canvas' own limit, make one soft embedding a canvas."""
    for most, of in ((2, 2), (3, 2)):
        engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=1, max_context=256)
        engine.denoiser.stops = lambda seed, canvas, of=of: of
        engine.admit(0, [5], 0, replace(SAMPLER, max_denoising_steps=most))
        with patch.object(FusedModel, "soft_embedding", autospec=True) as made:
            engine.denoise([0])
        assert made.call_count == 1


@pytest.mark.usefixtures("in_the_ways_of_a_gpu")
@pytest.mark.parametrize("room", [17, 30, 700])
def test_warm_up_fits_the_context(tiny_checkpoint: Path, room: int) -> None:
    """A canvas is 16: room for a prompt of 1, of less than a canvas, and for chunks of 512."""
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=1, max_context=room)
    engine.warm_up(replace(SAMPLER, max_denoising_steps=1))
    assert ((1, 512) in engine.encoder.commits) == (room == 700)
    assert engine.encoder.commits
    engine.admit(0, [5], 0, SAMPLER)


@pytest.mark.usefixtures("in_the_ways_of_a_gpu")
def test_a_warm_up_takes_one_step_a_canvas(tiny_checkpoint: Path) -> None:
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=2, max_context=256)
    denoise, taken = engine.denoise, list[int]()

    def counting(slots: Sequence[int]) -> list[Any]:
        canvases = denoise(slots)
        taken.extend(canvas.steps for canvas in canvases if canvas)
        return canvases

    engine.denoise = counting
    engine.warm_up(SAMPLER)
    assert taken == [1] * 6  # two canvases of one slot, and of two
    engine.admit(0, [5], 0, SAMPLER)
    counting([0])
    assert taken[-1] == SAMPLER.max_denoising_steps


def test_settings_of_requests_capture_a_bounded_number_of_graphs() -> None:
    def sampler(setting: int) -> Sampler:
        return replace(SAMPLER, entropy_bound=1 + setting / 1e6)

    def worth(rows: int, setting: int) -> bool:
        return steps.get(rows, sampler(setting), 1)[1]

    steps = Steps(lambda rows, settings: cast(Any, (rows, settings)))
    assert worth(1, 0)
    assert worth(4, 0)
    steps.hold()  # what a warm-up captured
    assert sum(worth(1, setting) for setting in range(1, 1000)) == CAPTURED
    assert len(steps._captured) == len(steps._tried) == CAPTURED
    assert [worth(1, 1000) for _ in range(WORTH + 2)] == [False] * WORTH + [True] * 2
    assert steps.get(1, sampler(1000), 0)[0] == (1, sampler(1000))
    assert sum(worth(1, setting) for setting in range(2000, 3000)) == 0  # it takes the place of one
    assert worth(1, 1000)
    assert worth(4, 0)
    assert worth(1, 0)
    assert not worth(2, 0)
    assert len(steps._captured) == len(steps._tried) == CAPTURED


class Capture:
    """A graph that only notes that it was captured, and then runs kernel by kernel."""

    begun = 0  # captured pairs of rows and settings: each begins its canvases by a graph of its own

    def __init__(self, work: Callable[[], None], _: object) -> None:
        self._work, self._captured = work, False

    def __call__(self) -> None:
        if not self._captured and getattr(self._work, "__name__", "") == "_set_state":
            Capture.begun += 1
        self._captured = True
        self._work()


def test_canvases_of_many_settings_at_once_cause_as_many_captures_as_promised(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canvas goes through many calls of `denoise`: others finish before it."""
    monkeypatch.setattr(step_of_canvases, "Replayed", Capture)
    monkeypatch.setattr(graphs, "CAPTURED", 3)
    monkeypatch.setattr(graphs, "WORTH", 4)
    monkeypatch.setattr(Capture, "begun", 0)
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=6, max_context=512)
    engine.denoiser.graphs = True
    for slot in range(6):  # canvases of 4 to 9 steps, one setting a slot
        settings = replace(SAMPLER, max_denoising_steps=4 + slot, confidence_threshold=1e-30)
        engine.admit(slot, [5], slot, settings)
    canvases = 0
    while canvases < 30:
        canvases += sum(canvas is not None for canvas in engine.denoise(range(6)))
    assert 3 < Capture.begun <= 3 + (canvases + 5) / 4  # five may be under way


def test_engine_refuses(tiny_checkpoint: Path) -> None:
    weights = load_packed(tiny_checkpoint, "cpu")
    engine = FusedEngine(weights, capacity=1, max_context=128)
    for prompt, word in (
        ([], "empty"),
        ([600], "vocabulary"),
        ([511], "image"),
        ([5] * 120, "fits"),
    ):
        with pytest.raises(InputError, match=word):
            engine.admit(0, prompt, 0, SAMPLER)
    engine.admit(0, [5] * 100, 0, SAMPLER)
    with pytest.raises(InputError, match="not free"):
        engine.admit(0, [5], 0, SAMPLER)
    engine.denoise([0])
    with pytest.raises(InputError, match="no canvas fits"):
        engine.denoise([0])
    with pytest.raises(InputError, match="max_context"):
        FusedEngine(weights, max_context=1 << 20)


def test_buckets_of_sequences() -> None:
    found = [bucket(count) for count in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17)]
    assert found == [1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 32]


def test_no_garbage_is_collected_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that the collector freed then would invalidate the capture."""
    collects = list[bool]()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    graphs.Replayed(lambda: collects.append(gc.isenabled()), None)()
    assert collects == [True, False]
    assert gc.isenabled()
