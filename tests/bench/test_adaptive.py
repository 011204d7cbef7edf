"""Adaptive rows of `quantize bench`, on a CPU: what they run, not how fast."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantize.bench import adaptive
from quantize.errors import InputError
from quantize.runtime import Sampler
from quantize.runtime.engine.fused_engine import FusedEngine
from quantize.runtime.weights.load import load_packed


def test_both_ways_take_the_recorded_steps(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests stop after the same numbers of steps, in turns; by step slots wait less."""
    monkeypatch.setattr(adaptive, "REQUESTS", 2)
    engine = FusedEngine(load_packed(tiny_checkpoint, "cpu"), capacity=4, max_context=200)
    file = tmp_path / "stops.json"
    file.write_text("[1, 3, 2]")
    stops = adaptive.read_stops(file)
    calls: list[int] = []
    plain = engine.denoise

    def denoise(slots: list[int]) -> object:
        calls.append(len(slots))
        return plain(slots)

    engine.denoise = denoise
    rows = adaptive.adaptive_rows(engine, [[5] * 10] * 2, Sampler(max_denoising_steps=4), stops)
    assert [(row.batch, row.slots_go_on) for row in rows] == [(2, "by step"), (2, "by canvas")]
    for row in rows:
        assert row.steps_of_canvases == (stops * 6)[: 2 * 2 * adaptive.REQUESTS]
    assert calls.count(1) > calls.count(2) / 4  # by canvas the slower one goes on alone
    assert max(calls) == 2  # of the engine's four slots as many as there are prompts
    assert engine.denoiser.stops is None
    assert not engine.sequences


@pytest.mark.parametrize("text", ["[]", "{", "[1, 0]", "[1.5]", "[true]", '{"a": 1}'])
def test_unusable_stops(text: str, tmp_path: Path) -> None:
    (tmp_path / "stops.json").write_text(text)
    with pytest.raises(InputError, match=r"stops\.json"):
        adaptive.read_stops(tmp_path / "stops.json")


def test_random_prompts_have_no_placeholder_of_a_picture() -> None:
    """At 8,192 tokens and more the 26B vocabulary had one, and `bench` ended."""
    config = SimpleNamespace(text_config=SimpleNamespace(vocab_size=64), image_token_id=20)
    weights: Any = SimpleNamespace(config=config)
    prompts = adaptive.random_prompts(weights, 2000, 3)
    assert [len(prompt) for prompt in prompts] == [2000] * 3
    assert {token for prompt in prompts for token in prompt} == set(range(8, 56)) - {20}
