"""On a GPU: layers show what the loop showed, and batches in lockstep are what they are alone.

Six layers of the real shapes, with 16 experts. Rows travel in pieces of a pass, so that every slot and
buffer of the shuttle is used again and again.
"""

import json
from pathlib import Path

import pytest
import torch

from quantize.recipe.sections import Calibration
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.gpu.placement import Placement
from quantize.runtime.record import shuttle
from quantize.runtime.record.layer_by_layer import LayerByLayer
from quantize.runtime.record.ranges import Ranges
from quantize.runtime.record.recording import Recorder
from quantize.runtime.record.trajectory import Trajectory
from quantize.runtime.weights.load import load_packed
from quantize.schemes.hessians import Hessians
from quantize.stages.calibrate.coverage import Coverage
from quantize.stages.denoising import Denoising
from tests.support.synthetic import synthetic_config, write_synthetic

pytestmark = pytest.mark.gpu
LAYERS, EXPERTS, CONTEXT = 6, 16, 2304
KINDS = (
    "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj",
    "experts.gate_up_proj", "experts.down_proj",
)  # fmt: skip
NAMES = [f"model.decoder.layers.{i}.{kind}" for i in range(LAYERS) for kind in KINDS]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = synthetic_config(LAYERS, EXPERTS, 1, 32_768)
    folder = write_synthetic(tmp_path_factory.mktemp("layers") / "source", config)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(settings | {"max_denoising_steps": 3})
    )
    rows = [{"question": " ".join(f"{i} and {j}" for j in range(1 + 60 * i))} for i in range(5)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def denoising_of(source: Path) -> Denoising:
    settings = Calibration(
        datasets=[str(source / "chats.jsonl")], prompts=5, canvases=2, thinking=0, batch_size=2,
    )  # fmt: skip
    return Denoising(source, settings, Placement("cuda:0"))


def run(
    denoising: Denoising, source: Path, lanes: int, folder: Path
) -> tuple[Hessians, list[Trajectory]]:
    """Denoise in the loop, recording; return what Linears were shown, and the samples."""
    weights = load_packed(source, "cuda:0", resident=None if lanes == 1 else 1)
    engine = FusedEngine(weights, capacity=2, max_context=CONTEXT, lanes=lanes)
    denoising._opened = lambda: engine
    found = Hessians(NAMES, EXPERTS)
    return found, denoising.run(title="", observers=[found.see], recorder=Recorder(folder))


def test_layers_show_what_the_loop_showed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuttle, "PIECE_BYTES", 1)
    denoising = denoising_of(source)
    loop, _ = run(denoising, source, 1, tmp_path)
    found = Hessians(NAMES, EXPERTS)
    layers = LayerByLayer(source, denoising.recording(tmp_path), "cuda:0", tmp_path)
    assert list(layers.run(lambda _: [found.see], LAYERS - 1)) == list(range(LAYERS))
    for name in NAMES:
        assert torch.equal(found.tokens(name), loop.tokens(name)), name
        assert torch.equal(found.sums(name), loop.sums(name)), name


def test_replayed_steps_are_those_of_kernel_by_kernel(source: Path, tmp_path: Path) -> None:
    """Samples, what is recorded, and what observers that the graphs hold saw."""
    found: list[tuple[dict[str, list[float]], object, list[Trajectory]]] = []
    for graphs in (False, True):
        denoising, weights = denoising_of(source), load_packed(source, "cuda:0")
        engine = FusedEngine(weights, capacity=2, max_context=CONTEXT, graphs=graphs)
        denoising._opened = lambda own=engine: own
        ranges, coverage = Ranges(EXPERTS), Coverage(EXPERTS)
        observers, recorder = (ranges.see, coverage.see), Recorder(tmp_path / str(graphs))
        made = denoising.run(title="", observers=observers, recorder=recorder)
        amax = {name: own.tolist() for name, own in ranges._amax.items()}
        found.append((amax, coverage.tokens, made))
    assert found[0][:2] == found[1][:2]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(one.committed, other.committed)
        assert all(map(torch.equal, one.steps, other.steps))
    for path in sorted((tmp_path / "True").glob("batch-*")):
        assert path.read_bytes() == (tmp_path / "False" / path.name).read_bytes(), path.name


def test_batches_in_lockstep_are_what_they_are_alone(source: Path, tmp_path: Path) -> None:
    """Samples, and every byte that is recorded."""
    alone, together = (
        run(denoising_of(source), source, lanes, tmp_path / str(lanes))[1] for lanes in (1, 3)
    )
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.committed, other.committed)
        assert all(map(torch.equal, one.steps, other.steps))
    for path in sorted((tmp_path / "1").glob("batch-*")):
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes(), path.name
