"""The engine: samples that join late, leave early and differ in settings are what they are alone."""

import json
from dataclasses import replace
from functools import cache

import pytest

from quantize.bundled import CHECKPOINT, HELDOUT
from quantize.errors import InputError
from quantize.runtime import Sample, Sampler, generate
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Canvas, complete, each_completed
from quantize.runtime.model.text_stack import FusedModel
from quantize.runtime.prompt.chat import encode_chat, load_tokenizer
from quantize.runtime.weights.load import TextWeights, load_packed

SAMPLER = Sampler.from_checkpoint(CHECKPOINT)
CAREFUL = replace(SAMPLER, max_denoising_steps=8, entropy_bound=0.02)


@cache
def weights() -> TextWeights:
    return load_packed(CHECKPOINT, "cpu")


def engine_of(capacity: int) -> FusedEngine:
    return FusedEngine(weights(), capacity=capacity, max_context=640)


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths, all with thinking: answers of several canvases."""
    tokenizer = load_tokenizer(CHECKPOINT)
    rows = [json.loads(line) for line in HELDOUT.read_text("utf-8").splitlines()[:count]]
    return [
        encode_chat(tokenizer, [{"role": "user", "content": row["question"]}], thinking=True)
        for row in rows
    ]


def test_samples_that_join_late_are_those_of_generate() -> None:
    asked = prompts(4)
    samplers = [SAMPLER, SAMPLER, CAREFUL, SAMPLER]
    alone = [
        generate(engine_of(1), [prompt], [seed], max_new_tokens=128, sampler=sampler)[0]
        for seed, (prompt, sampler) in enumerate(zip(asked, samplers, strict=True))
    ]
    assert max(sample.canvases for sample in alone) > 1  # the cache grew
    engine = engine_of(3)
    waiting, running, together = list(range(4)), dict[int, int](), [Sample() for _ in asked]
    mixed = False
    while waiting or running:
        free = next((slot for slot in range(3) if slot not in running), None)
        if waiting and free is not None:  # one a canvas: all join at different ages
            index = running[free] = waiting.pop(0)
            engine.admit(free, asked[index], index, samplers[index])
        slots = sorted(running, reverse=True)
        mixed |= len({together[running[slot]].canvases for slot in slots}) > 1
        for slot, canvas in zip(slots, engine.denoise(slots), strict=True):
            if canvas is None:
                continue
            sample = together[running[slot]]
            sample.commit(canvas.tokens, canvas.steps, samplers[running[slot]])
            if sample.finish == "eos" or sample.canvases == 2:
                engine.release(slot)
                del running[slot]
    assert mixed
    assert together == alone


def test_drafts_are_shown_for_every_step_and_change_nothing() -> None:
    engine = engine_of(2)
    seen: dict[int, list[tuple[int, list[int], list[bool]]]] = {0: [], 1: []}
    asked = prompts(2)

    def note(slot: int, step: int, tokens: list[int], accepted: list[bool]) -> None:
        seen[slot].append((step, tokens, accepted))

    for slot in (0, 1):
        engine.admit(slot, asked[slot], 5, SAMPLER)
    canvases: dict[int, Canvas] = {}
    while left := [slot for slot in (1, 0) if slot not in canvases]:
        found = zip(left, engine.denoise(left, note), strict=True)
        canvases |= {slot: canvas for slot, canvas in found if canvas}
    for slot, canvas in canvases.items():
        assert [step for step, _, _ in seen[slot]] == list(range(1, canvas.steps + 1))
        assert seen[slot][-1][1] == canvas.tokens
        assert any(seen[slot][0][2])
        assert not all(seen[slot][0][2])


def test_the_caller_is_free_while_the_engine_works() -> None:
    engine, order = engine_of(2), list[str]()
    for slot, prompt in enumerate(prompts(2)):
        engine.admit(slot, prompt, 1, SAMPLER)

    def meanwhile() -> None:
        order.append("meanwhile")

    engine.denoise([0, 1], lambda *_: order.append("step"), meanwhile)
    assert order.count("meanwhile") == 1
    assert order[-1] == "step"


def test_a_canvas_in_the_middle_can_be_given_up() -> None:
    """Nothing of it is left for who gets its slot."""
    engine = engine_of(2)
    first, second = prompts(2)
    for seed in range(20):  # until one canvas takes longer than the other
        engine.admit(0, first, seed, SAMPLER)
        engine.admit(1, second, seed, SAMPLER)
        found = list(engine.denoise([0, 1]))
        engine.release(0)
        engine.release(1)
        if None in found:
            break
    middle = found.index(None)
    asked = (first, second)[1 - middle]
    engine.admit(middle, asked, seed, SAMPLER)
    assert engine.denoise([middle]) == [found[1 - middle]]


def test_a_failure_is_raised_and_the_engine_can_be_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    engine = engine_of(2)
    first, second = prompts(2)
    for fault in (True, False):
        engine.admit(0, first, 1, SAMPLER)
        engine.admit(1, second, 2, SAMPLER)
        with monkeypatch.context() as patch:
            if fault:
                patch.setattr(FusedModel, "decoding", fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    engine.denoise([0, 1])
                engine.release(0)
                engine.release(1)
    assert any(engine.denoise([0, 1]))


def test_slots_are_free_after_an_error_and_when_the_caller_has_enough() -> None:
    engine = engine_of(2)
    settings = {"max_new_tokens": 64, "sampler": replace(SAMPLER, max_denoising_steps=2)}
    (asked,) = prompts(1)
    with pytest.raises(InputError, match="prompt"):
        complete(engine, [asked, [5, 100_000]], [0, 1], **settings)
    some = each_completed(engine, [asked] * 3, [0, 1, 2], **settings)
    index, sample = next(some)
    some.close()
    assert complete(engine, [asked], [index], **settings) == [sample]


def test_a_slot_is_used_again_once_it_is_released() -> None:
    engine = engine_of(1)
    (asked,) = prompts(1)
    engine.admit(0, asked, 1, SAMPLER)
    first = engine.denoise([0])
    with pytest.raises(InputError, match="slot 0 of 1 is not free"):
        engine.admit(0, asked, 1, SAMPLER)
    engine.release(0)
    engine.release(0)
    engine.admit(0, asked, 1, SAMPLER)
    assert engine.denoise([0]) == first
    with pytest.raises(InputError, match="slot 1 of 1 is not free"):
        engine.admit(1, asked, 1, SAMPLER)


@pytest.mark.parametrize("prompt", [[], [5, 100_000], [2, 1023]])
def test_a_prompt_that_the_model_cannot_take(prompt: list[int]) -> None:
    engine = engine_of(1)
    with pytest.raises(InputError, match="prompt"):
        engine.admit(0, prompt, 1, SAMPLER)
    engine.admit(0, [2, 105], 1, SAMPLER)  # the slot is still free
