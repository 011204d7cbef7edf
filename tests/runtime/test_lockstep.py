"""Batches side by side over streamed layers: what each makes, shows and records alone, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_dequant import CanvasState, Draw
from fused_dequant.sampler import canvas

from quantize.runtime import Sampler
from quantize.runtime.engine.batch import FusedPasses
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import BatchEngine, Decoded
from quantize.runtime.record.recording import Recorder
from quantize.runtime.record.trajectory import Prompt, Trajectory, record
from quantize.runtime.weights.load import load_packed

SAMPLER = Sampler(max_denoising_steps=3, eos_token_ids=(1, 50), pad_token_id=0)
CANVAS, ROWS = 16, 2
LENGTHS = (4, 7, 40, 5, 9)  # the third is past the sliding window


def work(number: int, folder: Path, shown: dict[int, list[Any]]) -> Callable[[BatchEngine], Any]:
    """Return the denoising of one batch; odd ones are not watched, and the last has one prompt."""
    generator = torch.Generator().manual_seed(number)
    rows = 1 if number == len(LENGTHS) - 1 else ROWS
    ids = torch.randint(3, 500, (rows, LENGTHS[number]), generator=generator).tolist()
    prompts = [Prompt(tuple(own[: len(own) - row]), False) for row, own in enumerate(ids)]

    def denoise(engine: BatchEngine) -> list[Trajectory]:
        seeds = [10 * number + row for row in range(rows)]
        how: Any = {"sampler": SAMPLER, "canvases": 1 + number % 2, "held_out": False}
        if number % 2:
            return record(engine, prompts, seeds, **how)
        own = shown.setdefault(number, [])
        with (
            Recorder(folder / str(number)).batch(0) as add,
            engine.watching(
                lambda name, x, _: own.append((name, x.shape, x.double().sum().item())),
                on_pass=add,
            ),
        ):  # fmt: skip
            return record(engine, prompts, seeds, **how, on_step=lambda s: own.append(s.step))

    return denoise


Made = tuple[list[Any], dict[int, Any], list[bytes]]  # tokens, what was shown, files


def made(lanes: int, checkpoint: Path, folder: Path) -> Made:
    weights = load_packed(checkpoint, "cpu", resident=None if lanes == 1 else 1)
    engine = FusedEngine(weights, capacity=ROWS, max_context=96, lanes=lanes)
    shown: dict[int, list[Any]] = {}
    found = engine.each([work(number, folder, shown) for number in range(len(LENGTHS))])
    tokens = [
        [(t.seed, t.committed.tolist(), [s.tolist() for s in t.steps]) for t in b] for b in found
    ]
    engine.close()
    return tokens, shown, [path.read_bytes() for path in sorted(folder.rglob("batch-*"))]


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(1, tiny_checkpoint, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("lanes", [2, 5])
def test_a_batch_is_what_it_is_alone(
    lanes: int, alone: Made, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    assert made(lanes, tiny_checkpoint, tmp_path / "together") == alone
    assert len(alone[2]) == 6  # rows and places of three watched batches


def test_canvases_drawn_together_are_those_of_torch_one_by_one(
    alone: Made, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def one_by_one(
        own: FusedPasses, decoded: Decoded, state: CanvasState, schedule: torch.Tensor
    ) -> tuple[Draw, torch.Tensor]:
        draws: list[Draw] = []
        signals: list[torch.Tensor] = []
        for i in range(len(state.seeds)):
            row = slice(i, i + 1)
            logits = decoded.logits(row)
            draws.append(canvas.sample(logits, state.part(row), schedule))
            signals.append(own.condition(logits, schedule[state.step[i].long() - 1]))
        drawn.append(len(draws))
        return Draw.join(draws), torch.cat(signals)

    monkeypatch.setattr(FusedPasses, "draw", one_by_one)
    assert made(1, tiny_checkpoint, tmp_path) == alone
    assert max(drawn) > 1


def test_layers_are_streamed_once_for_all_lanes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    taken: list[int] = []
    weights = load_packed(tiny_checkpoint, "cpu", resident=1)
    engine = FusedEngine(weights, capacity=ROWS, max_context=96, lanes=3)
    run = engine.model.run
    engine.model.run = lambda passes: taken.append(len(passes)) or run(passes)
    engine.each([work(number, tmp_path, {}) for number in (1, 3, 1)])
    engine.close()
    assert max(taken) == 3
    assert len(taken) == 1 + 3 + 1 + 3  # prompts, steps, the committed canvas, steps


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_error_in_one_batch_ends_all_and_leaves_the_engine_usable(
    lanes: int, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    engine = FusedEngine(
        load_packed(tiny_checkpoint, "cpu", resident=1), capacity=ROWS, max_context=96, lanes=lanes
    )
    own = engine.model.inputs

    def fails(given: BatchEngine) -> None:
        work(1, tmp_path, {})(given)
        raise KeyError("of one batch")

    works = [work(0, tmp_path, {}), fails, work(3, tmp_path, {})]
    with pytest.raises(KeyError, match="of one batch"):
        engine.each(works)
    assert engine.model.inputs is own
    assert len(engine.each([work(3, tmp_path, {})])[0]) == ROWS
    engine.close()
