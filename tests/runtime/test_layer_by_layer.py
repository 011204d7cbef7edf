"""Recorded passes through one layer after the other show what the loop showed, bit for bit."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from quantize.checkpoints.layout import model_config
from quantize.checkpoints.reader import Checkpoint
from quantize.recipe.sections import Calibration
from quantize.runtime.gpu.placement import CPU
from quantize.runtime.prompt.images import place, prepare
from quantize.runtime.record import shuttle
from quantize.runtime.record.layer_by_layer import LayerByLayer
from quantize.runtime.record.recording import Recorder
from quantize.runtime.record.trajectory import Prompt
from quantize.schemes.hessians import Hessians
from quantize.stages.denoising import Denoising
from tests.support.chats import add_chats
from tests.support.tiny import CANVAS, EXPERTS, LAYERS

KINDS = (
    "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj",
    "experts.gate_up_proj", "experts.down_proj",
)  # fmt: skip
NAMES = [f"model.decoder.layers.{i}.{kind}" for i in range(LAYERS) for kind in KINDS]


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "source"
    shutil.copytree(tiny_checkpoint, folder)
    add_chats(folder)
    return folder


def prompts_of(source: Path) -> list[Prompt]:
    """Short ones, one past the window, two with pictures; batches of two, the last of one."""
    config = model_config(Checkpoint.open(source).config)
    images, counts = prepare([Image.new("RGB", (40, 40), "red")], config, 70)
    pictured = place([2, 110, config.image_token_id, 120, 130], counts, config)
    ids: list[tuple[list[int], bool]] = [
        ([2, 110, 120], False), (list(range(100, 150)), False), (pictured, True),
        ([2, 140, 150, 160, 170], False), ([*pictured, 180], True),
    ]  # fmt: skip
    return [Prompt(tuple(own), False, images if has else None) for own, has in ids]


@pytest.fixture(scope="module")
def recorded(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Denoising, Path, Hessians]:
    """A denoising, the folder of what it recorded, and what it showed."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = Calibration(
        datasets=[str(source / "chats.jsonl")], prompts=5, canvases=2, thinking=0, batch_size=2
    )
    denoising = Denoising(source, settings, CPU)
    denoising._prompts = prompts_of(source)
    loop = Hessians(NAMES, EXPERTS)
    denoising.run(title="", observers=[loop.see], recorder=Recorder(folder))
    return denoising, folder, loop


@pytest.mark.parametrize("piece", [1, 64 << 20])
def test_layers_see_what_they_saw_in_the_loop(
    piece: int, source: Path, recorded: tuple[Denoising, Path, Hessians],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(shuttle, "PIECE_BYTES", piece)  # a pass, or a batch, travels at a time
    denoising, folder, loop = recorded
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    recording, found = denoising.recording(tmp_path), Hessians(NAMES, EXPERTS)
    passes = [own for batch in recording.batches for own in batch.passes]
    assert {own.decoded for own in passes} == {0, CANVAS, 2 * CANVAS}
    assert any(
        bool((own.visible[False][1] > own.positions).any()) for own in passes if not own.decoded
    )
    assert any(own.real is not None and len(own.real) < own.count for own in passes)
    layers = LayerByLayer(source, recording, "cpu", tmp_path)
    assert list(layers.run(lambda _: [found.see], LAYERS - 1)) == list(range(LAYERS))
    for name in NAMES:
        assert torch.equal(found.tokens(name), loop.tokens(name)), name
        assert torch.equal(found.sums(name), loop.sums(name)), name


def test_no_value_of_another_batch_meets_a_weight_of_zero(
    source: Path, recorded: tuple[Denoising, Path, Hessians], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A GPU multiplies cells that a row does not see by 0, and 0 * NaN is NaN."""
    denoising, folder, loop = recorded
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    layers = LayerByLayer(source, denoising.recording(tmp_path), "cpu", tmp_path)
    found, take = Hessians(NAMES, EXPERTS), LayerByLayer._take

    def taken(own: LayerByLayer, index: int, layer: Any, piece: Any, rows: torch.Tensor) -> None:
        if piece.rows.start == 0:
            own._cache.values[index].fill_(torch.nan)
        take(own, index, layer, piece, rows)

    def through(index: int, layer: Any, each: Any) -> None:
        assert each.cells[1].isfinite().all()
        pass_through(index, layer, each)

    pass_through = layers._model.through
    monkeypatch.setattr(layers._model, "through", through)
    monkeypatch.setattr(LayerByLayer, "_take", taken)
    assert list(layers.run(lambda _: [found.see], LAYERS - 1)) == list(range(LAYERS))
    for name in NAMES:
        assert torch.equal(found.sums(name), loop.sums(name)), name


def test_layers_that_nobody_watches_hand_on_the_same_rows(source: Path, tmp_path: Path) -> None:
    """A run that goes on behind finished layers."""
    settings = Calibration(
        datasets=[str(source / "chats.jsonl")], prompts=2, canvases=1, thinking=0, batch_size=2
    )
    recording = Denoising(source, settings, CPU).recording(tmp_path)
    last: list[torch.Tensor] = []
    for watched in (range(LAYERS), [LAYERS - 1]):
        seen = Hessians(NAMES, EXPERTS)
        layers = LayerByLayer(source, recording, "cpu", tmp_path)
        for _ in layers.run(lambda i, own=watched, s=seen: [s.see] if i in own else [], LAYERS - 1):
            pass
        last.append(seen.sums(NAMES[-1]))
    assert torch.equal(*last)


def test_a_pass_keeps_its_slots_where_a_graph_fills_them_again(tmp_path: Path) -> None:
    slots, rows = torch.tensor([0, 1], dtype=torch.int32), torch.arange(4)
    visible = dict.fromkeys((True, False), (rows, rows))
    placed = SimpleNamespace(positions=rows, visible=visible, slots=slots)
    own = SimpleNamespace(h=torch.zeros(4, 2), rows=placed, real=None, decoded=4)
    with Recorder(tmp_path).batch(0) as add:
        add(cast("Any", own))
        slots += 5
    assert load_file(tmp_path / "batch-00000.passes")["slots"].tolist() == [0, 1]
