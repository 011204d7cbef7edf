"""A guide sees every finished canvas with its last logits, and decides it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantize.runtime import Sampler, StepRecord, generate
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Canvas, Engine
from quantize.runtime.sampler.known_tokens import Given, GuideVerdict
from quantize.runtime.weights.load import load_packed
from tests.support.tiny import CANVAS

SAMPLER = Sampler(max_denoising_steps=3, stability_threshold=0)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    return FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=2, max_context=64)


class Watching:
    """Commits what was denoised, and keeps what it was shown."""

    def __init__(
        self, begins: Sequence[int] = (), again: int = 0, writes: int | None = None
    ) -> None:
        self.begins, self.again, self.writes = begins, again, writes
        self.seen: list[tuple[Tensor, list[int]]] = []

    def lead(self) -> Sequence[int]:
        return self.begins

    def settle(self, logits: Tensor, tokens: list[int]) -> GuideVerdict:
        self.seen.append((logits.float().clone(), tokens))
        if self.again:
            self.again -= 1
            return GuideVerdict([*[33] * 4, *tokens[4:]], 4)
        return GuideVerdict(tokens if self.writes is None else [self.writes] * len(tokens))


def answer(
    engine: Engine, *guides: Watching | None, canvases: int = 2, sampler: Sampler = SAMPLER
) -> list[list[Canvas]]:
    for slot, guide in enumerate(guides):
        engine.admit(slot, PROMPT, slot, sampler, given=guide and Given(guide=guide))
    found: dict[int, list[Canvas]] = {slot: [] for slot in range(len(guides))}
    while slots := [slot for slot in found if len(found[slot]) < canvases]:
        for slot, canvas in zip(slots, engine.denoise(slots), strict=True):
            found[slot] += [canvas] if canvas else []
    for slot in found:
        engine.release(slot)
    return list(found.values())


def one_stops_first(engine: Engine) -> Sampler:
    """Settings under which the surer of two canvases takes one step, and the other one more."""
    steps: list[StepRecord] = []
    generate(
        engine, [PROMPT] * 2, [0, 1], max_new_tokens=CANVAS, sampler=SAMPLER, on_step=steps.append
    )
    return replace(SAMPLER, confidence_threshold=float(steps[0].entropy.mean()))


@pytest.mark.parametrize("together", [True, False])
def test_a_guide_that_only_looks_changes_nothing(engine: Engine, together: bool) -> None:
    sampler = SAMPLER if together else one_stops_first(engine)
    free = answer(engine, None, None, sampler=sampler)
    guides = Watching(), Watching()
    assert answer(engine, *guides, sampler=sampler) == free
    for guide, canvases in zip(guides, free, strict=True):
        assert [tokens for _, tokens in guide.seen] == [canvas.tokens for canvas in canvases]
        for logits, tokens in guide.seen:  # of the very step at which each row stopped
            chosen = logits[torch.arange(CANVAS), torch.tensor(tokens)]
            assert (chosen >= logits.max(-1).values - 0.02).all()
    assert len({sample[0].steps for sample in free}) == (1 if together else 2)


def test_what_a_guide_writes_is_what_the_next_canvas_stands_behind(engine: Engine) -> None:
    ((first, second),) = answer(engine, Watching(writes=40))
    ((_, other),) = answer(engine, Watching(writes=41))
    assert first.tokens == [40] * CANVAS == second.tokens
    assert other.tokens == [41] * CANVAS
    seen = [Watching(writes=40), Watching(writes=41)]
    for guide in seen:
        answer(engine, guide)
    assert torch.equal(seen[0].seen[0][0], seen[1].seen[0][0])
    assert not torch.equal(seen[0].seen[1][0], seen[1].seen[1][0])


def test_a_lead_is_pinned_from_the_first_step(engine: Engine) -> None:
    ((canvas,),) = answer(engine, Watching(begins=[70, 71]), canvases=1)
    assert canvas.tokens[:2] == [70, 71]


def test_a_canvas_is_denoised_again_behind_what_stands(engine: Engine) -> None:
    (alone,) = answer(engine, None)
    guide = Watching(again=2)
    (guided, beside) = answer(engine, guide, None)
    assert guided[0].tokens[:4] == [33] * 4
    assert guided[0].tokens[4:] != guide.seen[0][1][4:]  # they were denoised behind it
    assert guided[0].steps > alone[0].steps  # of all rounds
    assert len(guide.seen) == 4  # two more than canvases
    assert [canvas.tokens for canvas in beside] == [
        canvas.tokens for canvas in answer(engine, None, None)[1]
    ]


def test_between_two_tries_another_may_come(engine: Engine) -> None:
    """Else whoever waits for a slot would wait for up to nine canvases of another's form."""
    ((alone,),) = answer(engine, Watching(again=2), canvases=1)
    engine.admit(0, PROMPT, 0, SAMPLER, given=Given(guide=Watching(again=2)))
    assert engine.denoise([0]) == [None]
    engine.admit(1, PROMPT, 1, SAMPLER)
    tries = [engine.denoise([0, 1]) for _ in range(2)]
    assert [first for first, _ in tries] == [None, alone]
    for slot in (0, 1):
        engine.release(slot)
    assert tries[0][1] == answer(engine, None, None, canvases=1)[1][0]
