"""What is known of an answer: pinned tokens are committed, initial ones begin, none else changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_dequant import CanvasState, sample

from quantize.errors import InputError
from quantize.runtime import Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Canvas, Engine
from quantize.runtime.sampler.known_tokens import FREE, Given
from quantize.runtime.weights.load import load_packed
from tests.support.tiny import CANVAS, VOCAB

SAMPLER = Sampler(max_denoising_steps=4)
PROMPT = [5, 6, 7, 8, 9]
PINNED = Given({0: 100, 3: 101, 15: 102, 17: 103})  # of two canvases


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    return FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=2, max_context=64)


def answer(
    engine: Engine, given: Given | None, sampler: Sampler = SAMPLER, beside: Given | None = None
) -> list[int]:
    """Two canvases, alone or with another sample beside them."""
    slots = [0] if beside is None else [0, 1]
    for slot, known in zip(slots, (given, beside), strict=False):
        engine.admit(slot, PROMPT, slot, sampler, given=known)
    found: list[int] = []
    while len(found) < 2 * CANVAS:
        canvas = engine.denoise(slots)[0]
        if isinstance(canvas, Canvas):
            found += canvas.tokens
    for slot in slots:
        engine.release(slot)
    return found


def test_pinned_tokens_are_committed_as_they_are(engine: Engine) -> None:
    tokens, free = answer(engine, PINNED), answer(engine, None)
    assert [tokens[position] for position in PINNED.pinned] == list(PINNED.pinned.values())
    assert [free[position] for position in PINNED.pinned] != list(PINNED.pinned.values())
    others = [n for n in range(2 * CANVAS) if n not in PINNED.pinned]
    assert [tokens[n] for n in others] != [free[n] for n in others]  # they see what is pinned


def test_nothing_known_is_nothing_changed(engine: Engine) -> None:
    free = answer(engine, None)
    assert answer(engine, Given()) == free
    assert answer(engine, None, beside=PINNED) == free  # not by a neighbour either
    assert answer(engine, PINNED, beside=Given()) == answer(engine, PINNED)


def test_initial_tokens_take_the_place_of_noise(engine: Engine) -> None:
    once = replace(SAMPLER, max_denoising_steps=1)
    first = answer(engine, Given({}, dict.fromkeys(range(CANVAS), 77)), once)
    second = answer(engine, Given({}, dict.fromkeys(range(CANVAS), 78)), once)
    assert first[:CANVAS] != second[:CANVAS]
    assert first[:CANVAS] != answer(engine, None, once)[:CANVAS]


def test_tokens_that_do_not_exist_are_refused(engine: Engine) -> None:
    for given in (Given({0: VOCAB}), Given({}, {-1: 5}), Given({3: -2})):
        with pytest.raises(InputError, match="canvas: token"):
            engine.admit(0, PROMPT, 0, SAMPLER, given=given)
    engine.admit(0, PROMPT, 0, SAMPLER)
    engine.release(0)


def test_what_is_pinned_is_certain() -> None:
    """It takes nothing from what a step may accept, and an undecided model does not go on for it."""
    known = torch.tensor([[9, FREE, FREE]])
    logits = torch.zeros(1, 3, 12)  # the pinned position would be the least certain
    logits[0, 1:, 4] = 30.0
    state = CanvasState.begin(torch.tensor([[9, 1, 2]]), torch.tensor([3]), 1)
    schedule = SAMPLER.schedule()
    for _ in (1, 2):
        SAMPLER.decide(sample(logits, state, schedule), state, schedule, known)
        assert state.accepted.all()
        assert state.canvas.tolist() == state.argmax.tolist() == [[9, 4, 4]]
    assert state.finished.item()


def test_positions_fall_into_their_canvases() -> None:
    given = Given({1: 10, 5: 11}, {0: 20, 1: 21})
    assert given.rows(0, 4, []) == [[20, 10, FREE, FREE], [FREE, 10, FREE, FREE]]
    assert given.rows(1, 4, []) == [[FREE, 11, FREE, FREE]] * 2
    assert given.rows(1, 4, [7, 8]) == [[7, 8, FREE, FREE]] * 2
    assert Given().rows(0, 2, []) == [[FREE, FREE]] * 2
