"""Beginnings of prompts that are kept encoded: the same tokens, fewer to encode, within a budget."""

from pathlib import Path

import pytest

from quantize.runtime import Sampler
from quantize.runtime.engine import encoding
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.engine.interface import Canvas
from quantize.runtime.gpu import memory
from quantize.runtime.prompt.images import place, prepare
from quantize.runtime.prompt.prefixes import PrefixCache
from quantize.runtime.weights.load import load_packed
from tests.support.pictures import picture

SAMPLER = Sampler(max_denoising_steps=3)
BLOCK = 32
SHARED = [7 + n % 400 for n in range(2 * BLOCK + 6)]  # longer than the sliding window of 32
PROMPTS = [[*SHARED, *range(20, 50)], [*SHARED, *range(60, 75)], [*SHARED[:BLOCK], *range(80, 130)]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", BLOCK)
    monkeypatch.setattr(encoding, "SHORT", BLOCK // 2)


def engine(checkpoint: Path, prefix_bytes: int) -> FusedEngine:
    packed = load_packed(checkpoint, "cpu")
    return FusedEngine(packed, capacity=1, max_context=256, prefix_bytes=prefix_bytes)


def answers(engine: FusedEngine) -> list[list[int]]:
    """Two canvases behind each prompt, one after the other in one slot."""
    found: list[list[int]] = []
    for seed, prompt in enumerate(PROMPTS):
        engine.admit(0, prompt, seed, SAMPLER)
        tokens: list[int] = []
        for _ in range(2):
            (canvas,) = engine.denoise([0])
            assert isinstance(canvas, Canvas)
            tokens += canvas.tokens
        engine.release(0)
        found.append(tokens)
    return found


def test_tokens_are_the_same_with_and_without(tiny_checkpoint: Path) -> None:
    without = answers(engine(tiny_checkpoint, 0))
    caching = engine(tiny_checkpoint, 1 << 24)
    assert caching.prefixes is not None
    cold = answers(caching)
    assert caching.prefixes.reused == 2 * BLOCK + BLOCK  # of the second and third prompt
    warm = answers(caching)
    assert caching.prefixes.reused == 3 * BLOCK + sum(len(p) // BLOCK * BLOCK for p in PROMPTS)
    assert cold == warm == without
    assert 0 < caching.prefixes.nbytes <= 1 << 24


def test_a_prompt_with_a_picture_is_not_looked_for(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CHUNK", 2 * BLOCK)  # holds the picture
    caching = engine(tiny_checkpoint, 1 << 24)
    assert caching.prefixes is not None
    images, counts = prepare([picture()], caching.model.weights.config, 70)
    config = caching.model.weights.config
    prompt = place([*SHARED, config.image_token_id], counts, config)
    for given, own in ((SHARED, None), (prompt, images)):
        caching.admit(0, given, 0, SAMPLER, own)
        caching.denoise([0])
        caching.release(0)
    assert (caching.prefixes.asked, caching.prefixes.reused) == (len(SHARED), 0)


def test_a_block_is_found_only_behind_the_blocks_it_was_kept_behind() -> None:
    cache = PrefixCache[str](30, 2)
    for prompt in ([1, 2], [1, 2, 3, 4], [5, 6]):
        cache.keep(prompt, str(prompt), 10)
    assert cache.find([5, 6, 3, 4]) == ["[5, 6]"]


def test_a_block_is_of_use_only_where_those_before_it_are() -> None:
    cache = PrefixCache[str](20, 2)
    cache.keep([1, 2, 3, 4], "b", 10)  # [1, 2] is not there
    assert (cache.find([1, 2, 3, 4]), cache.nbytes) == ([], 10)
    cache.keep([1, 2], "a", 10)
    cache.keep([1, 2], "again", 10)  # counts once
    assert (cache.find([1, 2, 3, 4]), cache.nbytes) == (["a", "b"], 20)
    cache.keep([5, 6], "as large as the budget", 20)
    assert cache.find([5, 6]) == ["as large as the budget"]


def test_a_block_refreshes_those_before_it() -> None:
    cache = PrefixCache[str](30, 2)
    for prompt in ([1, 2], [5, 6], [1, 2, 3, 4], [7, 8]):
        cache.keep(prompt, str(prompt), 10)
    assert cache.find([5, 6]) == []  # the oldest by then
    assert cache.find([1, 2, 3, 4]) == ["[1, 2]", "[1, 2, 3, 4]"]


def test_the_budget_holds_and_the_oldest_go_first() -> None:
    cache = PrefixCache[str](30, 2)
    cache.keep([1, 2], "a", 10)
    cache.keep([1, 2, 3, 4], "b", 10)
    cache.keep([5, 6], "c", 10)
    assert cache.find([1, 2, 3, 4, 9]) == ["a", "b"]
    cache.keep([7, 8], "d", 10)  # in place of c
    assert (cache.find([5, 6]), cache.find([7, 8, 1]), cache.nbytes) == ([], ["d"], 30)
    cache.keep([9, 9], "e", 31)
    assert cache.find([9, 9]) == []
    assert cache.find([1, 2, 3, 4]) == ["a", "b"]
    cache.keep([0, 0], "f", 10)
    cache.keep([0, 1], "g", 10)  # b goes before a, without which it is worth nothing
    assert cache.find([1, 2, 3, 4]) == ["a"]
    assert (cache.asked, cache.reused) == (5 + 2 + 3 + 2 + 4 + 4, 4 + 2 + 4 + 2)
